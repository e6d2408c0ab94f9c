"""Kinds of blocks: blocks with the same program are one kind, and share what is compiled.

Scalars in which otherwise equal programs differ (the number of a layer that is folded into its random key, a rate that
grows with depth) become arguments, and so do arrays that the loss closes over: the *constants* of a block.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from resilient_jax.blocks.block_traces import BlockTrace
from resilient_jax.blocks.derivatives import BlockDerivative, BlockFunction, Values, differentiate
from resilient_jax.blocks.equation_slices import Value, describe_var
from resilient_jax.program_analysis.program_digest import describe_program
from resilient_jax.sharding.jaxprs import bind_equation, iterate_equations, walk

Constants = tuple[Any, ...]
"""Arrays, in host memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """Blocks with the same program.

    Attributes:
        blocks: numbers of the blocks.
        constants: constants of each block, in the order of `blocks`.
    """

    derivative: BlockDerivative
    blocks: tuple[int, ...]
    constants: tuple[Constants, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardKind:
    """Blocks with the same program, of which no derivative is made.

    Attributes:
        blocks: numbers of the blocks.
        constants: constants of each block, in the order of `blocks`.
    """

    function: BlockFunction
    blocks: tuple[int, ...]
    constants: tuple[Constants, ...]


def find_kinds(traces: Sequence[BlockTrace], *, remat: bool) -> tuple[BlockKind, ...]:
    """Return the kinds of blocks, in the order of their first blocks."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, trace in enumerate(traces):
        groups.setdefault(_describe(trace, remat=remat), []).append(number)
    return tuple(_make_kind(traces, blocks, remat=remat) for blocks in groups.values())


def find_forward_kinds(traces: Sequence[BlockTrace]) -> tuple[ForwardKind, ...]:
    """Return the kinds of blocks that are only run forward, in the order of their first blocks."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, trace in enumerate(traces):
        function = _make_general_function(trace)
        shapes = function.weights, function.x, function.data, function.constants
        description = _describe_programs(trace, [jax.make_jaxpr(function.run)(*shapes)])
        groups.setdefault(description, []).append(number)
    kinds = []
    for blocks in groups.values():
        function, constants = _share_function(traces, blocks)
        kinds.append(ForwardKind(function=function, blocks=tuple(blocks), constants=constants))
    return tuple(kinds)


def _describe(trace: BlockTrace, *, remat: bool) -> tuple[Any, ...]:
    """Return what is equal for blocks of one kind."""
    derivative = differentiate(_make_general_function(trace), remat=remat)
    return _describe_programs(trace, [derivative.forward_jaxpr, derivative.backward_jaxpr])


def _make_general_function(trace: BlockTrace) -> BlockFunction:
    """Return the function of a block with all of its literals as arguments."""
    literals = list(_list_literals(trace.closed.jaxpr))
    return _make_function(trace, range(len(literals)), ())


def _describe_programs(trace: BlockTrace, programs: Sequence[core.ClosedJaxpr]) -> tuple[Any, ...]:
    return (
        trace.num_inputs,
        trace.num_outputs,
        len(trace.result_names),
        tuple(weight.is_trained for weight in trace.weights),
        # The digest of a program leaves out its shardings, and unused arguments.
        *(str(var.aval) for var in trace.closed.jaxpr.invars),
        *(describe_program(program).digest for program in programs),
        *(text for program in programs for text in _list_shardings(program)),
    )


def _list_shardings(program: core.ClosedJaxpr) -> Iterator[str]:
    for equation in iterate_equations(program):
        for value in equation.params.values():
            if isinstance(value, jax.sharding.Sharding):
                yield str(value)


def _make_kind(traces: Sequence[BlockTrace], blocks: Sequence[int], *, remat: bool) -> BlockKind:
    function, constants = _share_function(traces, blocks)
    return BlockKind(
        derivative=differentiate(function, remat=remat), blocks=tuple(blocks), constants=constants
    )


def _share_function(
    traces: Sequence[BlockTrace], blocks: Sequence[int]
) -> tuple[BlockFunction, tuple[Constants, ...]]:
    """Return the function of blocks with the same program, and the constants of each of them."""
    literals = [list(_list_literals(traces[number].closed.jaxpr)) for number in blocks]
    varying = [
        place
        for place, values in enumerate(zip(*literals, strict=True))
        if any(value.tobytes() != values[0].tobytes() for value in values)
    ]
    function = _make_function(traces[blocks[0]], varying, literals[0])
    constants = (
        (*(found[place] for place in varying), *map(_to_host, traces[number].closed.consts))
        for number, found in zip(blocks, literals, strict=True)
    )
    return function, tuple(constants)


def _list_literals(jaxpr: core.Jaxpr) -> Iterator[np.ndarray]:
    """Yield the scalars in a program, in the order in which `walk` reads them."""
    for atoms in (*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars):
        for atom in atoms:
            if isinstance(atom, core.Literal):
                yield np.asarray(atom.val, atom.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue] - of an array


def _make_function(
    trace: BlockTrace, varying: Sequence[int], literals: Sequence[np.ndarray]
) -> BlockFunction:
    """Return the function of a block with some of its literals, and all of its constants, as arguments.

    Args:
        varying: indices of the literals that are arguments.
        literals: all literals of the trace; read only where a literal is no argument.
    """
    jaxpr, place_of = trace.closed.jaxpr, {place: index for index, place in enumerate(varying)}
    num_weights, num_literals = len(trace.weights), len(varying)

    def run(
        weights: Values, x: Values, data: Values, constants: Values
    ) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        arrays, places = iter(constants[num_literals:]), itertools.count()

        def read_literal(*_: object) -> Value:
            place = next(places)
            return constants[place_of[place]] if place in place_of else literals[place][()]

        found = walk(
            jaxpr,
            [*weights, *x, *data],
            bind_equation,
            read_constant=lambda *_: next(arrays),
            read_literal=read_literal,
        )
        return tuple(found[: trace.num_outputs]), tuple(found[trace.num_outputs :])

    shapes = list(map(describe_var, jaxpr.invars))
    values = list(_list_literals(jaxpr))
    end = num_weights + trace.num_inputs
    return BlockFunction(
        run=run,
        weights=tuple(shapes[:num_weights]),
        x=tuple(shapes[num_weights:end]),
        data=tuple(shapes[end:]),
        constants=(
            *(jax.ShapeDtypeStruct((), values[place].dtype) for place in varying),
            *map(describe_var, jaxpr.constvars),
        ),
        is_trained=tuple(weight.is_trained for weight in trace.weights),
    )


def _to_host(constant: Any) -> Any:  # noqa: ANN401 - an array
    """Return a constant in host memory, where it outlives the devices; a random key as it is."""
    is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return constant if is_key else np.asarray(constant)
