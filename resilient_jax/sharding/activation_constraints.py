"""Keeps activations cut by examples where FSDP cuts the same examples' parameters.

Left to itself XLA may cut the dims of activations as those of the parameters they meet, and then every device has every
example: seen with a loop over layers, whose carry takes the cut of its first operand (a decoder with fsdp 8 needed six
times the memory, and exchanged activations instead of parameters). So a program is followed from the batch's first dim
on, and every result of a matrix product or a lookup that still has that dim is held to it. What is computed does not
change, whatever is found: a sharding constraint is a wish about places.

Only `jax.extend.core` and what JAX documents for interpreters of its own is used
(https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html); tested on jax 0.10.2.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resilient_jax.sharding.logical_axes import Tree
from resilient_jax.sharding.partition_specs import BATCH_AXES

CONSTRAINED_PRIMITIVES: Final = frozenset({"dot_general", "conv_general_dilated", "gather"})
"""Whose results are held; what lies between takes after them."""
ENTERED_PRIMITIVES: Final = frozenset({"jit", "pjit", "scan", "checkpoint", "remat", "remat2"})
"""Operations of which a copy of the body is held too; others stay as they are."""

BatchDims = tuple[int | None, ...]
"""Of each of several values the dim of the examples, None: it has none, or none that is known."""


def constrain_activations(function: Callable[[Tree, Tree], Any], mesh: Mesh) -> Callable[[Tree, Tree], Any]:
    """Gives the same function of a state and a batch, its activations held to the cut of the batch.

    Args:
        function: the first dim of each array of its batch is the examples'.
        mesh: of the plan.
    """

    def held(state: Tree, batch: Tree) -> Any:  # noqa: ANN401 - whatever the function gives
        closed, shape = jax.make_jaxpr(function, return_shape=True)(state, batch)
        rows = jax.tree.leaves(batch)
        arguments = [*jax.tree.leaves(state), *rows]
        dims: BatchDims = (
            *(None,) * (len(arguments) - len(rows)),
            *(0 if row.shape else None for row in rows),
        )
        found = _evaluate(closed.jaxpr, closed.consts, arguments, dims, mesh)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return held


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], dims: BatchDims, mesh: Mesh
) -> list[Any]:
    known = propagate_batch_dims(jaxpr, dims)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:  # noqa: ANN401 - a value while tracing
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        params = _hold_body(equation, _dims_of(equation.invars, known), mesh)
        given = equation.primitive.get_bind_params(params)
        # A dict on jax 0.10; before, and after, a pair of functions and a dict.
        functions, params = given if isinstance(given, tuple) else ((), given)
        with equation.ctx.manager:  # what the function had set around it, such as how random bits are made
            found = equation.primitive.bind(*functions, *map(read, equation.invars), **params)
        results = found if equation.primitive.multiple_results else [found]
        if equation.primitive.name in CONSTRAINED_PRIMITIVES:
            results = [
                _hold(result, known.get(var), mesh)
                for var, result in zip(equation.outvars, results, strict=True)
            ]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _hold(value: Any, dim: int | None, mesh: Mesh) -> Any:  # noqa: ANN401 - a value while tracing
    if dim is None:
        return value
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
    spec[dim] = BATCH_AXES
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*spec)))


def _hold_body(equation: core.JaxprEqn, dims: BatchDims, mesh: Mesh) -> dict[str, Any]:
    """An operation's parameters, its body replaced by one whose activations are held from its first line on."""
    if equation.primitive.name not in ENTERED_PRIMITIVES or all(dim is None for dim in dims):
        return equation.params
    key, body, consts = _body_of(equation)
    inner = _dims_inside(equation, body, dims)

    def held(*arguments: Any) -> list[Any]:  # noqa: ANN401 - values while tracing
        given = [_hold(value, dim, mesh) for value, dim in zip(arguments, inner, strict=True)]
        return _evaluate(body, consts, given, inner, mesh)

    shapes = [_shape_of(var) for var in body.invars]
    traced = jax.make_jaxpr(held)(*shapes)
    is_closed = isinstance(equation.params[key], core.ClosedJaxpr)
    if not is_closed and traced.consts:
        return equation.params
    return {**equation.params, key: traced if is_closed else traced.jaxpr}


def _body_of(equation: core.JaxprEqn) -> tuple[str, core.Jaxpr, Sequence[Any]]:
    key = "jaxpr" if "jaxpr" in equation.params else "call_jaxpr"
    body = equation.params[key]
    return (key, body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (key, body, ())


def _dims_inside(equation: core.JaxprEqn, body: core.Jaxpr, dims: BatchDims) -> BatchDims:
    """Of a body's arguments: in a loop's turn a stack has one dim less, and a carry may get examples."""
    if equation.primitive.name != "scan":
        return dims
    consts, carries = _count_arguments(equation.params)
    head, stacks = dims[: consts + carries], dims[consts + carries :]
    inner = (*head, *(None if dim in (None, 0) else dim - 1 for dim in stacks))
    known = propagate_batch_dims(body, inner)
    ends = _dims_of(body.outvars[:carries], known)
    carried = tuple(
        first if first is not None else last for first, last in zip(inner[consts:], ends, strict=False)
    )
    return (*inner[:consts], *carried, *inner[consts + carries :])


def _count_arguments(params: Mapping[str, Any]) -> tuple[int, int]:
    """A loop's constants and carries: in jax 0.10 two numbers, in 0.12 the first two of three flat trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)


def _shape_of(atom: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - a variable or a literal
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _dims_of(atoms: Sequence[Any], known: Mapping[Any, int]) -> BatchDims:
    return tuple(None if isinstance(atom, core.Literal) else known.get(atom) for atom in atoms)


def propagate_batch_dims(jaxpr: core.Jaxpr, dims: BatchDims) -> dict[Any, int]:
    """Gives the dim of the examples in every variable that has one.

    Args:
        jaxpr: of a program, or of a body in it.
        dims: of its arguments.
    """
    known = {var: dim for var, dim in zip(jaxpr.invars, dims, strict=True) if dim is not None}
    for equation in jaxpr.eqns:
        inputs = _dims_of(equation.invars, known)
        if any(dim is not None for dim in inputs):
            found = _dims_after(equation, inputs)
            known.update(
                (var, dim) for var, dim in zip(equation.outvars, found, strict=True) if dim is not None
            )
    return known


def _dims_after(equation: core.JaxprEqn, dims: BatchDims) -> BatchDims:
    shapes = [_shape_of(atom).shape for atom in equation.invars]
    after = [_shape_of(var).shape for var in equation.outvars]
    params = equation.params
    match equation.primitive.name:
        case "dot_general":
            return (_after_product(params["dimension_numbers"], dims, [len(shape) for shape in shapes]),)
        case "transpose":
            return (params["permutation"].index(dims[0]),)
        case "broadcast_in_dim":
            return (params["broadcast_dimensions"][dims[0]] if dims[0] is not None else None,)
        case name if name.startswith("reduce_") or name in ("argmax", "argmin"):
            axes = params.get("axes", ())
            return tuple(
                None if dim is None or dim in axes else dim - sum(a < dim for a in axes) for dim in dims
            )[: len(after)]
        case "reshape":
            return (_after_reshape(shapes[0], after[0], dims[0]),)
        case "squeeze":
            return (None if dims[0] is None else dims[0] - sum(d < dims[0] for d in params["dimensions"]),)
        case name if name.startswith("scatter"):
            return (dims[0],)
        case "gather":
            return (_after_gather(params["dimension_numbers"], dims),)
        case "scan":
            _, body, _ = _body_of(equation)
            known = propagate_batch_dims(body, _dims_inside(equation, body, dims))
            ends = _dims_of(body.outvars, known)
            _, carries = _count_arguments(params)
            return (*ends[:carries], *(None if dim is None else dim + 1 for dim in ends[carries:]))
        case name if name in ENTERED_PRIMITIVES:
            _, body, _ = _body_of(equation)
            return _dims_of(body.outvars, propagate_batch_dims(body, dims))
        case _:
            return tuple(_after_alike(shapes, dims, shape) for shape in after)


def _after_product(numbers: Any, dims: BatchDims, ranks: Sequence[int]) -> int | None:  # noqa: ANN401 - JAX's tuples
    """In a product come first the dims that both have, then the left one's, then the right one's."""
    contracted, batched = numbers
    before = len(batched[0])
    for side in (0, 1):
        dim = dims[side]
        if dim is not None and dim in batched[side]:
            return list(batched[side]).index(dim)
        free = [d for d in range(ranks[side]) if d not in contracted[side] and d not in batched[side]]
        if dim in free:
            return before + free.index(dim)
        before += len(free)
    return None


def _after_gather(numbers: Any, dims: BatchDims) -> int | None:  # noqa: ANN401 - JAX's record
    """Examples of the indices stand in the result among the dims that are no offsets."""
    if len(dims) < 2 or dims[1] is None:
        return None
    rank = dims[1] + 1 + len(numbers.offset_dims)
    others = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    return others[dims[1]]


def _after_reshape(before: Sequence[int], after: Sequence[int], dim: int | None) -> int | None:
    """It is still there if as much stands left of it, and it has the same size."""
    if dim is None:
        return None
    left = _product(before[:dim])
    for place, size in enumerate(after):
        if size == before[dim] and _product(after[:place]) == left:
            return place
    return None


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _after_alike(shapes: Sequence[Sequence[int]], dims: BatchDims, after: Sequence[int]) -> int | None:
    """Of operations that work number by number, or on other dims only: slices, sorts, concatenations."""
    for shape, dim in zip(shapes, dims, strict=True):
        if dim is not None and len(shape) == len(after) and shape[dim] == after[dim]:
            return dim
    return None
