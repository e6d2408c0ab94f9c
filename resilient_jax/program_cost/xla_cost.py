"""What XLA says of a program: FLOPs, bytes moved, memory.

XLA counts the body of a loop once, however often it is done. So each body is measured by itself as well, and added for
the turns that are missing; only a `while` of unknown turns stays counted once.

`cost_analysis` gives a dict on jax 0.10.2 and 0.12.0, and gave a list of one before; both are understood.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import jax
from jax.extend import core

from resilient_jax.errors import OperatorError
from resilient_jax.program_cost.operations import find_scans, unwrap_jaxpr


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaCost:
    """What XLA counts in a program.

    Attributes:
        flops: operations; a transcendental function is none.
        bytes_moved: read and written by what is not fused; 0 where nothing was compiled.
    """

    flops: float
    bytes_moved: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(flops=self.flops + other.flops, bytes_moved=self.bytes_moved + other.bytes_moved)

    def scaled(self, count: int) -> Self:
        """Done so often."""
        return type(self)(flops=self.flops * count, bytes_moved=self.bytes_moved * count)


ZERO_COST = XlaCost(flops=0.0)
ANALYSIS_OPTIONS: Final[dict[str, str | bool]] = {"xla_backend_optimization_level": "0"}
"""To compile what is never run: XLA counts operations and memory before LLVM sees the program, which takes a third of
the time."""


def count_flops(function: Callable[..., Any], *arguments: Any) -> float:  # noqa: ANN401 - pytrees
    """Gives the operations of a program before XLA has changed it; compiles nothing, the same for every accelerator."""

    def lower(function: Callable[..., Any], arguments: tuple[Any, ...]) -> XlaCost:
        return _read(jax.jit(function).lower(*arguments))

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return (lower(function, arguments) + _cost_of_turns(jaxpr, lower)).flops


def _cost_of_turns(
    jaxpr: core.Jaxpr, measure: Callable[[Callable[..., Any], tuple[Any, ...]], XlaCost]
) -> XlaCost:
    """What all loops do in turns that XLA does not count."""
    total = ZERO_COST
    for body, turns, counted in find_scans(jaxpr):
        inner = unwrap_jaxpr(body)
        arguments = tuple(_shape_of(var.aval) for var in inner.invars)
        below = _cost_of_turns(inner, measure)
        once = measure(core.jaxpr_as_fun(body), arguments) + below
        total = total + below.scaled(counted) + once.scaled(turns - counted)
    return total


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - of a variable
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _read(program: Any) -> XlaCost:  # noqa: ANN401 - a lowered or a compiled program
    found = program.cost_analysis()
    figures = found[0] if isinstance(found, list | tuple) else found
    if not figures or "flops" not in figures:
        raise OperatorError(
            f"found no cost analysis on {jax.default_backend()}, expected one from XLA. Take the profile on CPU"
        )
    return XlaCost(flops=figures["flops"], bytes_moved=figures.get("bytes accessed", 0.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """What XLA says of a program that it has compiled.

    Attributes:
        cost: with all turns of loops.
        temporary_bytes: memory beyond arguments: of results, which hold other things before they hold these, and what
            is needed for a time.
    """

    cost: XlaCost
    temporary_bytes: int


class ShardedArguments(NamedTuple):
    """The same program for several devices: what all of them get together, and where it lies.

    Attributes:
        arguments: of all devices.
        shardings: of each argument: one, or a tree of them.
        result: the same of what it gives.
    """

    arguments: tuple[Any, ...]
    in_shardings: tuple[Any, ...]
    out_shardings: Any

    def compile(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401 - a compiled program
        """One program for all devices."""
        jitted = jax.jit(function, in_shardings=self.in_shardings, out_shardings=self.out_shardings)
        return jitted.lower(*self.arguments).compile(ANALYSIS_OPTIONS)


def compile_and_analyze(
    function: Callable[..., Any],
    *arguments: Any,  # noqa: ANN401 - pytrees
    sharded_arguments: ShardedArguments | None = None,
) -> CompiledProgram:
    """Compiles a program, and gives what XLA says of it; of one device.

    Args:
        function: the program.
        arguments: of one device.
        spread: compile it for several devices; None: for the default device.
    """

    def compile_(function: Callable[..., Any], arguments: tuple[Any, ...]) -> XlaCost:
        return _read(jax.jit(function).lower(*arguments).compile(ANALYSIS_OPTIONS))

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    compiled = (
        jax.jit(function).lower(*arguments).compile(ANALYSIS_OPTIONS)
        if sharded_arguments is None
        else sharded_arguments.compile(function)
    )
    memory = compiled.memory_analysis()
    if memory is None:
        raise OperatorError(
            f"found no memory analysis on {jax.default_backend()}, expected one from XLA. Take the profile on CPU"
        )
    return CompiledProgram(
        cost=_read(compiled) + _cost_of_turns(jaxpr, compile_),
        temporary_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )
