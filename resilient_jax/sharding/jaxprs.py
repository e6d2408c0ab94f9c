"""The one walk over jaxprs: `walk` carries a value per variable through the equations, `iterate_equations` lists them.

Every analysis of a traced program (`program_cost.operations`, `program_cost.xla_cost`, `activation_constraints`) is a
rule for one equation that is given to one of the two. `inline_calls` lists the equations of a program as if it had no
calls, for who takes them in another order.

Only public parts of JAX are used (`jax.extend.core`, and what JAX documents for custom interpreters:
https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html); tested on jax 0.10.2 and 0.12.0.1.
What differs between the versions is handled here: the jaxpr of a call may be closed or not, and the arity of a scan.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
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
    jaxpr: core.Jaxpr,
    inputs: Sequence[ValueT],
    apply: Callable[[core.JaxprEqn, tuple[ValueT, ...]], Sequence[ValueT]],
    *,
    read_constant: Callable[[Any], ValueT],
    read_literal: Callable[[core.Literal], ValueT],
) -> list[ValueT]:
    """Interpret a jaxpr: give every variable a value, equation by equation, and return the values of the outputs.

    Args:
        inputs: one value for each argument of the jaxpr.
        apply: returns the values of an equation's results from those of its operands. `apply` decides whether to enter
            the jaxprs inside the equation, by calling `walk` again.
        read_constant: returns the value of a constant variable of the jaxpr.
        read_literal: returns the value of a literal operand.
    """
    values: dict[Any, ValueT] = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= {var: read_constant(var) for var in jaxpr.constvars}

    def read(atom: Any) -> ValueT:  # noqa: ANN401 - a variable or a literal
        return read_literal(atom) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = apply(equation, tuple(map(read, equation.invars)))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


@dataclasses.dataclass(frozen=True, slots=True)
class InlinedEquation:
    """An equation of a program whose calls are inlined.

    Attributes:
        operands: literals, or names of values.
        results: names of values.
    """

    equation: core.JaxprEqn
    operands: tuple[Any, ...]
    results: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class InlinedProgram:
    """A program whose calls are inlined.

    Attributes:
        equations: in an order in which each value is computed before it is used.
        constants: values by name.
        inputs: names of the program's arguments.
        outputs: literals, or names of values.
    """

    equations: list[InlinedEquation]
    constants: dict[Hashable, Any]
    inputs: tuple[Hashable, ...]
    outputs: tuple[Any, ...]


def inline_calls(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> InlinedProgram:
    """Return the program without its calls."""
    inputs = tuple((0, var) for var in jaxpr.invars)
    program = InlinedProgram([], {}, inputs, ())
    # A jaxpr may be called twice: its variables have the number of the call in their names.
    outputs = _inline(jaxpr, consts, inputs, program, itertools.count())
    return dataclasses.replace(program, outputs=tuple(outputs))


def _inline(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    operands: Sequence[Any],
    program: InlinedProgram,
    numbers: Iterator[int],
) -> list[Any]:
    number = next(numbers)
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    names |= {var: (number, var) for var in jaxpr.constvars}
    program.constants.update({names[var]: value for var, value in zip(jaxpr.constvars, consts, strict=True)})

    def read(atom: Any) -> Any:  # noqa: ANN401 - a variable or a literal
        return atom if isinstance(atom, core.Literal) else names[atom]

    for equation in jaxpr.eqns:
        given = tuple(map(read, equation.invars))
        if equation.primitive.name in CALLS:
            body = get_body(equation)
            results = _inline(body.jaxpr, body.consts, given, program, numbers)
        else:
            results = [(number, var) for var in equation.outvars]
            program.equations.append(InlinedEquation(equation, given, tuple(results)))
        names.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


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


class Body(NamedTuple):
    """The jaxpr that a call or a scan applies.

    Attributes:
        parameter: name of the equation's parameter that holds the jaxpr.
        jaxpr: jaxpr without its constants.
        is_closed: whether JAX holds the jaxpr together with its constants.
    """

    parameter: str
    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    is_closed: bool


def get_body(equation: core.JaxprEqn) -> Body:
    """Return the body of a call or a scan."""
    parameter = "jaxpr" if "jaxpr" in equation.params else "call_jaxpr"
    found = equation.params[parameter]
    is_closed = isinstance(found, core.ClosedJaxpr)
    return Body(parameter, unwrap_jaxpr(found), found.consts if is_closed else (), is_closed)


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
