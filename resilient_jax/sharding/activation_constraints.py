"""Keep activations sharded by examples where FSDP shards parameters over the devices that have these examples.

Left to itself XLA may shard activations along the dims of the parameters that they meet, and then every device computes
every example: seen with a loop over layers, whose carry takes the sharding of its first operand (a decoder with fsdp 8
needed six times the memory, and exchanged activations instead of parameters). So the batch dim is propagated from the
program's inputs through its equations, and every result of a matrix product or a lookup that still has that dim gets a
sharding constraint. A wrong propagation cannot change results: a constraint moves values, but does not change them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resilient_jax.sharding.dim_propagation import (
    BATCH,
    make_unnamed,
    propagate_into_body,
    propagate_through_equation,
)
from resilient_jax.sharding.jaxprs import bind_equation, find_body_parameter, get_body, walk
from resilient_jax.sharding.logical_axes import LogicalNames, Tree
from resilient_jax.sharding.partition_specs import BATCH_AXES

CONSTRAINED_PRIMITIVES: Final = frozenset({"dot_general", "conv_general_dilated", "gather"})
"""Primitives whose results are constrained; XLA gives what follows from them the same sharding."""
ENTERED_PRIMITIVES: Final = frozenset({"jit", "pjit", "scan", "checkpoint", "remat", "remat2"})
"""Primitives whose body is replaced by a constrained copy. Others, such as calls with custom derivatives, stay as they
are: their parameters also hold functions that a copy would have to match."""


class _TracedValue(NamedTuple):
    """A value while tracing, and the names of its dims, of which `BATCH` counts."""

    value: Any
    names: LogicalNames


def constrain_activations(function: Callable[[Tree, Tree], Any], mesh: Mesh) -> Callable[[Tree, Tree], Any]:
    """Return the same function of a state and a batch, its activations constrained to the sharding of the batch.

    Args:
        function: the first dim of each array of the function's batch is the batch dim.
    """

    def constrained(state: Tree, batch: Tree) -> Any:  # noqa: ANN401 - whatever the function gives
        closed, shape = jax.make_jaxpr(function, return_shape=True)(state, batch)
        inputs = [_TracedValue(leaf, make_unnamed(leaf)) for leaf in jax.tree.leaves(state)]
        inputs += [
            _TracedValue(leaf, (BATCH, *make_unnamed(leaf)[1:]) if leaf.shape else ())
            for leaf in jax.tree.leaves(batch)
        ]
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(closed, inputs, mesh))

    return constrained


def _evaluate(jaxpr: Any, inputs: Sequence[_TracedValue], mesh: Mesh) -> list[Any]:  # noqa: ANN401 - closed or not
    """Trace the jaxpr again with constraints, and return its outputs."""

    def apply(equation: core.JaxprEqn, operands: tuple[_TracedValue, ...]) -> list[_TracedValue]:
        names = [operand.names for operand in operands]
        params = _constrain_body(equation, names, mesh)
        results = bind_equation(equation, [operand.value for operand in operands], params)
        found = list(map(_TracedValue, results, propagate_through_equation(equation, names)))
        if equation.primitive.name in CONSTRAINED_PRIMITIVES:
            return [_constrain(each, mesh) for each in found]
        return found

    outputs = walk(
        jaxpr, inputs, apply, read_constant=lambda aval, content: _TracedValue(content, make_unnamed(aval))
    )
    return [output.value for output in outputs]


def _constrain(traced: _TracedValue, mesh: Mesh) -> _TracedValue:
    if BATCH not in traced.names:
        return traced
    # Only the batch dim is constrained; the compiler chooses the sharding of the other dims.
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * len(traced.names)
    spec[traced.names.index(BATCH)] = BATCH_AXES
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return traced._replace(value=jax.lax.with_sharding_constraint(traced.value, sharding))


def _constrain_body(equation: core.JaxprEqn, names: Sequence[LogicalNames], mesh: Mesh) -> dict[str, Any]:
    """Return an equation's parameters, its body replaced by one whose inputs and activations are constrained."""
    if equation.primitive.name not in ENTERED_PRIMITIVES or not any(map(any, names)):
        return equation.params
    body, body_names = get_body(equation), propagate_into_body(equation, names)

    def constrained(*arguments: Any) -> list[Any]:  # noqa: ANN401 - values while tracing
        inputs = [_constrain(each, mesh) for each in map(_TracedValue, arguments, body_names)]
        return _evaluate(body, inputs, mesh)

    is_closed = isinstance(body, core.ClosedJaxpr)
    avals = body.in_avals if is_closed else [var.aval for var in body.invars]
    traced = jax.make_jaxpr(constrained)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
    # An open jaxpr has no place for the constants of a copy, so such a body stays as it is.
    if not is_closed and traced.consts:
        return equation.params
    return {**equation.params, find_body_parameter(equation): traced if is_closed else traced.jaxpr}
