"""Slices of a traced program: the equations that some of its values need, and their evaluation.

Calls are inlined first (`inline_calls`), so that a slice need not take all of a jitted function.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import jax
from jax.extend import core

from resilient_jax.sharding.jaxprs import bind_equation, walk

Value = Any
"""An array, or what stands for one in a trace."""
INLINED: Final = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
"""Calls that may be left out: XLA inlines them too."""
REMATERIALIZED: Final = frozenset({"checkpoint", "remat", "remat2"})
"""Calls that may be left out of a backward program: the forward values that it computes again are not in it."""


def inline_calls(closed: core.ClosedJaxpr, names: frozenset[str] = INLINED) -> core.ClosedJaxpr:
    """Return a program with the equations of its calls, of primitives of these names, in place of the calls."""

    def inlined(*inputs: Value) -> list[Value]:
        return walk(closed, inputs, bind_equation, read_constant=lambda _, content: content, enters=names)

    return jax.make_jaxpr(inlined)(*map(describe_var, closed.jaxpr.invars))


def describe_var(var: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - a variable or a literal
    """Return the shape and dtype of a variable."""
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def list_vars(atoms: Iterable[Any]) -> list[Any]:
    """Return the variables among variables and literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def select_equations(equations: Sequence[core.JaxprEqn], wanted: Iterable[Any]) -> list[core.JaxprEqn]:
    """Return which of the equations some variables need, in their order; all others are given."""
    needed, selected = set(list_vars(wanted)), []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            selected.append(equation)
            needed.update(list_vars(equation.invars))
    return selected[::-1]


def list_inputs(equations: Sequence[core.JaxprEqn], outputs: Iterable[Any]) -> list[Any]:
    """Return the variables that equations, and outputs after them, read and no equation makes; in order, each once."""
    made = {var for equation in equations for var in equation.outvars}
    read = [*(atom for equation in equations for atom in equation.invars), *outputs]
    return list(dict.fromkeys(var for var in list_vars(read) if var not in made))


def evaluate_slice(
    equations: Iterable[core.JaxprEqn],
    inputs: Mapping[Any, Value],
    outputs: Iterable[Any],
) -> list[Value]:
    """Evaluate equations and return the values of the outputs.

    Args:
        equations: equations in an order in which each can be evaluated.
        inputs: values of all variables that the equations do not make.
        outputs: variables and literals.
    """
    values = dict(inputs)

    def read(atom: Any) -> Value:  # noqa: ANN401 - a variable or a literal
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in equations:
        values.update(
            zip(equation.outvars, bind_equation(equation, list(map(read, equation.invars))), strict=True)
        )
    return list(map(read, outputs))


def propagate_flags(jaxpr: core.Jaxpr, input_flags: Sequence[int]) -> dict[Any, int]:
    """Return for each variable the union of the flags (a bit mask) of all inputs that it depends on."""
    flags = dict(zip(jaxpr.invars, input_flags, strict=True)) | dict.fromkeys(jaxpr.constvars, 0)
    for equation in jaxpr.eqns:
        found = 0
        for var in list_vars(equation.invars):
            found |= flags[var]
        flags |= dict.fromkeys(equation.outvars, found)
    return flags
