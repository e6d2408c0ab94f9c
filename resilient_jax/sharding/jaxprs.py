"""The one walk over jaxprs: `walk` carries a value per variable through the equations, `iterate_equations` lists them.

Every analysis of a traced program (`program_analysis.operations`, `program_analysis.xla_cost`, `dim_propagation`) is a
rule for one equation that is given to one of the two. `inline_calls` lists the equations of a program as if it had no
calls, for who takes them in another order.

Only public parts of JAX are used (`jax.extend.core`, and what JAX documents for custom interpreters:
https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html); tested on jax 0.10.2 and 0.12.0.1.
What differs between the versions is handled here: the jaxpr of a call may be closed or not, and the arity of a scan.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from jax.extend import core

ValueT = TypeVar("ValueT")

CALLS: Final = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "core_closed_call",
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    }
)
"""Primitives that apply one jaxpr to their own operands. Others have jaxprs, too: a scatter's adds two elements."""


def walk(
    jaxpr: Any,  # noqa: ANN401 - closed or not
    inputs: Sequence[ValueT],
    apply: Callable[[core.JaxprEqn, tuple[ValueT, ...]], Sequence[ValueT]],
    *,
    read_constant: Callable[[Any, Any], ValueT],
    read_literal: Callable[[Any, Any], ValueT] | None = None,
    enters: frozenset[str] = frozenset(),
) -> list[ValueT]:
    """Interpret a jaxpr: give every variable a value, equation by equation, and return the values of the outputs.

    Args:
        jaxpr: a jaxpr, closed or not.
        inputs: one value for each argument of the jaxpr.
        apply: returns the values of an equation's results from those of its operands. `apply` decides whether to enter
            other jaxprs inside the equation, by calling `walk` again.
        read_constant: returns the value of a constant from its abstract value and its content, which is None where the
            jaxpr is not closed.
        read_literal: the same of a literal operand; None: as `read_constant`.
        enters: names of calls whose equations are applied in place of the call, such as `CALLS`.
    """
    inside, consts = unwrap_jaxpr(jaxpr), getattr(jaxpr, "consts", ())
    values: dict[Any, ValueT] = dict(zip(inside.invars, inputs, strict=True))
    for var, content in itertools.zip_longest(inside.constvars, consts):
        values[var] = read_constant(var.aval, content)
    read_content = read_literal or read_constant

    def read(atom: Any) -> ValueT:  # noqa: ANN401 - a variable or a literal
        return read_content(atom.aval, atom.val) if isinstance(atom, core.Literal) else values[atom]

    for equation in inside.eqns:
        operands = tuple(map(read, equation.invars))
        if equation.primitive.name in enters and _takes_operands(equation):
            results: Sequence[ValueT] = walk(
                get_body(equation),
                operands,
                apply,
                read_constant=read_constant,
                read_literal=read_literal,
                enters=enters,
            )
        else:
            results = apply(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in inside.outvars]


def _takes_operands(equation: core.JaxprEqn) -> bool:
    return any(len(unwrap_jaxpr(body).invars) == len(equation.invars) for body in inner_jaxprs(equation)[:1])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ValueName:
    """Names a value that a program computes, or an argument. Two are the same only if they are the same object."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A constant or a literal of a program."""

    content: Any


@dataclasses.dataclass(frozen=True, slots=True)
class InlinedEquation:
    """An equation of a program whose calls are inlined, with its operands and its results."""

    equation: core.JaxprEqn
    operands: tuple[ValueName | Constant, ...]
    results: tuple[ValueName, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class InlinedProgram:
    """A program whose calls are inlined.

    Attributes:
        equations: in an order in which each value is computed before it is used.
        inputs: names of the program's arguments.
    """

    equations: list[InlinedEquation]
    inputs: tuple[ValueName, ...]
    outputs: tuple[ValueName | Constant, ...]


def inline_calls(jaxpr: Any) -> InlinedProgram:  # noqa: ANN401 - closed or not
    """Return the program without its calls."""
    equations: list[InlinedEquation] = []

    def apply(equation: core.JaxprEqn, operands: tuple[ValueName | Constant, ...]) -> tuple[ValueName, ...]:
        results = tuple(ValueName() for _ in equation.outvars)
        equations.append(InlinedEquation(equation, operands, results))
        return results

    inputs = tuple(ValueName() for _ in unwrap_jaxpr(jaxpr).invars)
    outputs = walk(jaxpr, inputs, apply, read_constant=lambda _, content: Constant(content), enters=CALLS)
    return InlinedProgram(equations, inputs, tuple(outputs))


def bind_equation(
    equation: core.JaxprEqn, operands: Sequence[Any], params: dict[str, Any] | None = None
) -> Sequence[Any]:
    """Apply an equation to these operands and return its results; `params` in place of its own parameters."""
    given: Any = equation.primitive.get_bind_params(equation.params if params is None else params)
    # A dict on jax 0.10; before, and after, a pair of functions and a dict.
    functions, given = given if isinstance(given, tuple) else ((), given)
    # What the function had set around the equation, such as how random bits are generated.
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *operands, **given)
    return results if equation.primitive.multiple_results else [results]


def iterate_equations(jaxpr: Any, *, skip_inside: frozenset[str] = frozenset()) -> Iterator[core.JaxprEqn]:  # noqa: ANN401 - closed or not
    """Yield every equation of a jaxpr and of the jaxprs inside its equations, outer before inner.

    Args:
        jaxpr: a jaxpr, closed or not.
        skip_inside: names of primitives that are yielded without the equations inside of them.
    """
    for equation in unwrap_jaxpr(jaxpr).eqns:
        yield equation
        if equation.primitive.name not in skip_inside:
            for inner in inner_jaxprs(equation):
                yield from iterate_equations(inner, skip_inside=skip_inside)


def unwrap_jaxpr(jaxpr: Any) -> core.Jaxpr:  # noqa: ANN401 - closed or not, by JAX's version
    """Return a jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxprs(equation: core.JaxprEqn) -> list[Any]:
    """Return the jaxprs among an equation's parameters, closed or not."""
    return [
        item
        for parameter in equation.params.values()
        for item in (parameter if isinstance(parameter, tuple | list) else (parameter,))
        if isinstance(item, core.Jaxpr | core.ClosedJaxpr)
    ]


def find_body_parameter(equation: core.JaxprEqn) -> str:
    """Return the name of the parameter that holds the body of a call or a scan."""
    return "jaxpr" if "jaxpr" in equation.params else "call_jaxpr"


def get_body(equation: core.JaxprEqn) -> Any:  # noqa: ANN401 - closed or not, by JAX's version
    """Return the jaxpr that a call or a scan applies."""
    return equation.params[find_body_parameter(equation)]


class ScanArity(NamedTuple):
    """How many operands of a scan are constants and how many are carries; the others are scanned over."""

    consts: int
    carries: int


def get_scan_arity(equation: core.JaxprEqn) -> ScanArity:
    """Return the arity of a scan: two parameters in jax 0.10, the first two of three flat trees in 0.12."""
    if "num_consts" in equation.params:
        return ScanArity(equation.params["num_consts"], equation.params["num_carry"])
    consts, carries, _ = equation.params["ft_in"].unpack()
    return ScanArity(len(consts), len(carries))
