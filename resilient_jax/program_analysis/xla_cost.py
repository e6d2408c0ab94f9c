"""XLA's count of a program's cost: FLOPs, bytes moved, memory.

XLA counts the body of a loop once, however often it runs. So each body is measured by itself as well, and added for the
iterations that are missing; only a `while` of unknown length stays counted once.

`cost_analysis` gives a dict on jax 0.10.2 and 0.12.0, and gave a list of one before; both are understood.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Self

import jax
from jax.extend import core

from resilient_jax.errors import OperatorError
from resilient_jax.sharding.jaxprs import iterate_equations, unwrap_jaxpr


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaCost:
    """What XLA counts in a program.

    Attributes:
        flops: multiplications and additions; a transcendental function counts as none.
        bytes_moved: bytes that operations read and write which are not fused; 0 where nothing was compiled.
    """

    flops: float
    bytes_moved: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(flops=self.flops + other.flops, bytes_moved=self.bytes_moved + other.bytes_moved)

    def scaled(self, count: int) -> Self:
        """Return the cost of running `count` times."""
        return type(self)(flops=self.flops * count, bytes_moved=self.bytes_moved * count)


ZERO_COST: Final = XlaCost(flops=0.0)
ANALYSIS_OPTIONS: Final[dict[str, str | bool]] = {"xla_backend_optimization_level": "0"}
"""To compile what never runs: XLA counts operations and memory before LLVM sees the program, which takes a third of the
time."""


def count_flops(function: Callable[..., Any], *arguments: Any) -> float:  # noqa: ANN401 - pytrees
    """Return the FLOPs of a program before XLA optimizes it; nothing is compiled, and all devices have the same."""

    def lower(function: Callable[..., Any], arguments: tuple[Any, ...]) -> XlaCost:
        return _read_cost(jax.jit(function).lower(*arguments))

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return (lower(function, arguments) + _cost_of_uncounted_iterations(jaxpr, lower)).flops


class _Scan(NamedTuple):
    """A loop of known length: its body, its iterations, and how many of them XLA counts."""

    body: Any
    length: int
    counted: int


def _find_scans(jaxpr: core.Jaxpr) -> Iterator[_Scan]:
    """Yield each outermost loop of known length. XLA sees as many copies of its body as it is unrolled into."""
    for equation in iterate_equations(jaxpr, skip_inside=frozenset({"scan"})):
        if equation.primitive.name == "scan":
            # The loop's body has `unroll` copies, and the length % unroll
            # iterations that are left over come after the loop.
            length, unroll = equation.params["length"], max(int(equation.params["unroll"]), 1)
            yield _Scan(equation.params["jaxpr"], length, min(length, unroll + length % unroll))


def _cost_of_uncounted_iterations(
    jaxpr: core.Jaxpr, measure: Callable[[Callable[..., Any], tuple[Any, ...]], XlaCost]
) -> XlaCost:
    """Return what all loops do in the iterations that XLA does not count."""
    # XLA counts `counted` of n iterations: total = sum over loops of counted nested + (n - counted) (body + nested),
    # nested being the uncounted iterations of the loops inside the body.
    total = ZERO_COST
    for scan in _find_scans(jaxpr):
        inner = unwrap_jaxpr(scan.body)
        arguments = tuple(_shape_of(var.aval) for var in inner.invars)
        nested = _cost_of_uncounted_iterations(inner, measure)
        iteration = measure(core.jaxpr_as_fun(scan.body), arguments) + nested
        total = total + nested.scaled(scan.counted) + iteration.scaled(scan.length - scan.counted)
    return total


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - of a variable
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _read_cost(program: Any) -> XlaCost:  # noqa: ANN401 - a lowered or a compiled program
    found = program.cost_analysis()
    figures = found[0] if isinstance(found, list | tuple) else found
    if not figures or "flops" not in figures:
        raise OperatorError(
            f"found no cost analysis on {jax.default_backend()}, expected one from XLA. Analyze the program on CPU"
        )
    return XlaCost(flops=figures["flops"], bytes_moved=figures.get("bytes accessed", 0.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """What XLA reports about a program that it has compiled.

    Attributes:
        cost: cost with all iterations of loops.
        temporary_bytes: memory beyond arguments: bytes of results, whose buffers hold other values first, and of
            temporary buffers.
    """

    cost: XlaCost
    temporary_bytes: int


class ShardedArguments(NamedTuple):
    """The arguments of the same program on several devices.

    Attributes:
        arguments: global arrays, of all devices together.
        in_shardings: a sharding, or a tree of shardings, for each argument.
    """

    arguments: tuple[Any, ...]
    in_shardings: tuple[Any, ...]
    out_shardings: Any

    def compile(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401 - a compiled program
        """Return one program for all devices."""
        jitted = jax.jit(function, in_shardings=self.in_shardings, out_shardings=self.out_shardings)
        return jitted.lower(*self.arguments).compile(ANALYSIS_OPTIONS)


def compile_and_analyze(
    function: Callable[..., Any],
    *arguments: Any,  # noqa: ANN401 - pytrees
    sharded_arguments: ShardedArguments | None = None,
) -> CompiledProgram:
    """Compile a program, and return what XLA reports about it, for one device.

    Args:
        arguments: arguments for one device.
        sharded_arguments: arguments to compile for several devices; None: for the default device.
    """

    def compile_body(function: Callable[..., Any], arguments: tuple[Any, ...]) -> XlaCost:
        return _read_cost(jax.jit(function).lower(*arguments).compile(ANALYSIS_OPTIONS))

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    compiled = (
        jax.jit(function).lower(*arguments).compile(ANALYSIS_OPTIONS)
        if sharded_arguments is None
        else sharded_arguments.compile(function)
    )
    memory = compiled.memory_analysis()
    if memory is None:
        raise OperatorError(
            f"found no memory analysis on {jax.default_backend()}, expected one from XLA. Analyze the program on CPU"
        )
    return CompiledProgram(
        cost=_read_cost(compiled) + _cost_of_uncounted_iterations(jaxpr, compile_body),
        # A result that aliases an argument takes no memory of its own.
        temporary_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    )
