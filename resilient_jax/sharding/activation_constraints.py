"""Keep activations sharded by examples where FSDP shards parameters over the devices that have these examples.

Left to itself XLA may shard activations along the dims of the parameters that they meet, and then every device computes
every example: seen with a loop over layers, whose carry takes the sharding of its first operand (a decoder with fsdp 8
needed six times the memory, and exchanged activations instead of parameters). So the batch dim is propagated from the
program's inputs through its equations, and every result of a matrix product or a lookup that still has that dim gets a
sharding constraint. A wrong propagation cannot change results: a constraint moves values, but does not change them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resilient_jax.sharding.jaxprs import bind_equation, get_body, get_scan_arity, walk
from resilient_jax.sharding.logical_axes import Tree
from resilient_jax.sharding.partition_specs import BATCH_AXES

CONSTRAINED_PRIMITIVES: Final = frozenset({"dot_general", "conv_general_dilated", "gather"})
"""Primitives whose results are constrained; XLA gives what follows from them the same sharding."""
ENTERED_PRIMITIVES: Final = frozenset({"jit", "pjit", "scan", "checkpoint", "remat", "remat2"})
"""Primitives whose body is replaced by a constrained copy. Others, such as calls with custom derivatives, stay as they
are: their parameters also hold functions that a copy would have to match."""

BatchDims = tuple[int | None, ...]
"""The batch dim of each of several values; None: a value has none, or none that is known."""


class _TracedValue(NamedTuple):
    """A value while tracing, and its batch dim."""

    value: Any
    batch_dim: int | None


def constrain_activations(function: Callable[[Tree, Tree], Any], mesh: Mesh) -> Callable[[Tree, Tree], Any]:
    """Return the same function of a state and a batch, its activations constrained to the sharding of the batch.

    Args:
        function: the first dim of each array of the function's batch is the batch dim.
    """

    def constrained(state: Tree, batch: Tree) -> Any:  # noqa: ANN401 - whatever the function gives
        closed, shape = jax.make_jaxpr(function, return_shape=True)(state, batch)
        inputs = [_TracedValue(leaf, None) for leaf in jax.tree.leaves(state)]
        inputs += [_TracedValue(leaf, 0 if leaf.shape else None) for leaf in jax.tree.leaves(batch)]
        outputs = _evaluate(closed.jaxpr, closed.consts, inputs, mesh)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return constrained


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[_TracedValue], mesh: Mesh
) -> list[Any]:
    """Trace the jaxpr again with constraints, and return its outputs."""
    constants = dict(zip(jaxpr.constvars, consts, strict=True))

    def apply(equation: core.JaxprEqn, operands: tuple[_TracedValue, ...]) -> list[_TracedValue]:
        dims = tuple(operand.batch_dim for operand in operands)
        results = bind_equation(
            equation, [operand.value for operand in operands], _constrain_body(equation, dims, mesh)
        )
        result_dims = _propagate(equation, dims)
        if equation.primitive.name in CONSTRAINED_PRIMITIVES:
            results = [_constrain(value, dim, mesh) for value, dim in zip(results, result_dims, strict=True)]
        return [_TracedValue(value, dim) for value, dim in zip(results, result_dims, strict=True)]

    outputs = walk(
        jaxpr,
        inputs,
        apply,
        read_constant=lambda var: _TracedValue(constants[var], None),
        read_literal=lambda literal: _TracedValue(literal.val, None),
    )
    return [output.value for output in outputs]


def _constrain(value: Any, batch_dim: int | None, mesh: Mesh) -> Any:  # noqa: ANN401 - a value while tracing
    if batch_dim is None:
        return value
    # Only the batch dim is constrained; the compiler chooses the sharding of the other dims.
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
    spec[batch_dim] = BATCH_AXES
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*spec)))


def _constrain_body(equation: core.JaxprEqn, dims: BatchDims, mesh: Mesh) -> dict[str, Any]:
    """Return an equation's parameters, its body replaced by one whose inputs and activations are constrained."""
    if equation.primitive.name not in ENTERED_PRIMITIVES or all(dim is None for dim in dims):
        return equation.params
    body = get_body(equation)
    body_dims = _propagate_into_body(equation, dims)

    def constrained(*arguments: Any) -> list[Any]:  # noqa: ANN401 - values while tracing
        inputs = [
            _TracedValue(_constrain(value, dim, mesh), dim)
            for value, dim in zip(arguments, body_dims, strict=True)
        ]
        return _evaluate(body.jaxpr, body.consts, inputs, mesh)

    shapes = [jax.ShapeDtypeStruct(_shape(var), var.aval.dtype) for var in body.jaxpr.invars]  # pyright: ignore[reportAttributeAccessIssue] - of an array
    traced = jax.make_jaxpr(constrained)(*shapes)
    # An open jaxpr has no place for the constants of a copy, so such a body stays as it is.
    if not body.is_closed and traced.consts:
        return equation.params
    return {**equation.params, body.parameter: traced if body.is_closed else traced.jaxpr}


# Propagation of the batch dim.


def propagate_batch_dims(jaxpr: core.Jaxpr, dims: BatchDims) -> BatchDims:
    """Return the batch dim of each output of a jaxpr.

    Args:
        jaxpr: jaxpr of a program, or of a body in a program.
    """
    return tuple(walk(jaxpr, dims, _propagate, read_constant=lambda _: None, read_literal=lambda _: None))


def _propagate(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    """Return the batch dims of an equation's results from those of its operands."""
    if all(dim is None for dim in dims):
        return (None,) * len(equation.outvars)
    name = equation.primitive.name
    if name.startswith("reduce_"):
        return _propagate_reduction(equation, dims)
    if name.startswith("scatter"):
        return (dims[0],)
    return _RULES.get(name, _propagate_elementwise)(equation, dims)


def _propagate_scan(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    ends = propagate_batch_dims(get_body(equation).jaxpr, _propagate_into_body(equation, dims))
    carries = get_scan_arity(equation).carries
    # Carries keep their dims; stacked results have the iterations as a new first dim.
    return (*ends[:carries], *(None if dim is None else dim + 1 for dim in ends[carries:]))


def _propagate_call(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    return propagate_batch_dims(get_body(equation).jaxpr, dims)


def _propagate_into_body(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    """Return the batch dims of a body's arguments from those of the equation's operands.

    What a scan runs over loses its first dim in the body. A carry that starts without a batch dim, such as zeros, takes
    the one that it has at the end of the body.
    """
    if equation.primitive.name != "scan":
        return dims
    consts, carries = get_scan_arity(equation)
    first_scanned = consts + carries
    scanned = tuple(None if dim in (None, 0) else dim - 1 for dim in dims[first_scanned:])
    starts = dims[consts:first_scanned]
    ends = propagate_batch_dims(get_body(equation).jaxpr, (*dims[:first_scanned], *scanned))[:carries]
    carried = (end if start is None else start for start, end in zip(starts, ends, strict=True))
    return (*dims[:consts], *carried, *scanned)


def _propagate_product(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    """Return the batch dim of a matrix product."""
    # The result has the batched dims first, then the free dims of the left operand, then those of the right.
    contracted, batched = equation.params["dimension_numbers"]
    before = len(batched[0])
    for side in (0, 1):
        dim = dims[side]
        if dim is not None and dim in batched[side]:
            return (list(batched[side]).index(dim),)
        rank = len(_shape(equation.invars[side]))
        free = [d for d in range(rank) if d not in contracted[side] and d not in batched[side]]
        if dim in free:
            return (before + free.index(dim),)
        before += len(free)
    return (None,)


def _propagate_transpose(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    return (equation.params["permutation"].index(dims[0]),)


def _propagate_broadcast(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    return (None if dims[0] is None else equation.params["broadcast_dimensions"][dims[0]],)


def _propagate_reduction(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    axes = equation.params.get("axes", ())
    return tuple(_remove_dims(dim, axes) for dim in dims)[: len(equation.outvars)]


def _propagate_squeeze(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    return (_remove_dims(dims[0], equation.params["dimensions"]),)


def _propagate_reshape(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    """Return the dim of the same size with as many elements to its left as the batch dim had; None if there is none."""
    if (dim := dims[0]) is None:
        return (None,)
    before, after = _shape(equation.invars[0]), _shape(equation.outvars[0])
    left = math.prod(before[:dim])
    places = (
        place for place, size in enumerate(after) if size == before[dim] and math.prod(after[:place]) == left
    )
    return (next(places, None),)


def _propagate_gather(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    """Return the batch dim of the indices, which is among the dims of the result that are no offsets."""
    if len(dims) < 2 or dims[1] is None:
        return (None,)
    offsets = equation.params["dimension_numbers"].offset_dims
    others = [dim for dim in range(dims[1] + 1 + len(offsets)) if dim not in offsets]
    return (others[dims[1]],)


def _propagate_elementwise(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    """Return the batch dims of any other primitive: elementwise, or on other dims (slices, sorts, concatenations)."""

    def find_dim(result_shape: tuple[int, ...]) -> int | None:
        for atom, dim in zip(equation.invars, dims, strict=True):
            shape = _shape(atom)
            if dim is not None and len(shape) == len(result_shape) and shape[dim] == result_shape[dim]:
                return dim
        return None

    return tuple(find_dim(_shape(var)) for var in equation.outvars)


def _shape(atom: Any) -> tuple[int, ...]:  # noqa: ANN401 - a variable or a literal
    return atom.aval.shape


def _remove_dims(dim: int | None, removed: Sequence[int]) -> int | None:
    return None if dim is None or dim in removed else dim - sum(other < dim for other in removed)


_RULES: Final[dict[str, Callable[[core.JaxprEqn, BatchDims], BatchDims]]] = {
    **dict.fromkeys(ENTERED_PRIMITIVES, _propagate_call),
    "scan": _propagate_scan,
    "dot_general": _propagate_product,
    "transpose": _propagate_transpose,
    "broadcast_in_dim": _propagate_broadcast,
    "argmax": _propagate_reduction,
    "argmin": _propagate_reduction,
    "squeeze": _propagate_squeeze,
    "reshape": _propagate_reshape,
    "gather": _propagate_gather,
}
"""How primitives move the batch dim; `_propagate_elementwise` is for all others."""
