"""A program as a flat list of operations: calls are opened, a loop's body stands once with the number of its turns.

Only public parts of JAX are used (`jax.make_jaxpr`, `jax.extend.core`); tested on jax 0.10.2 and 0.12.0. What changed
between them is that the jaxpr of a call may be closed or not, and that a scan no longer says how many carries it has.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
from jax.extend import core

INLINED_CALLS: Final = frozenset(
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
"""Calls of one jaxpr with their own operands. Others have jaxprs too: a scatter's says how to add two numbers."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Value:
    """What an operation reads or writes. Two are the same only if they are the same object.

    Attributes:
        shape: of the array.
        bytes: of the array.
        stack_of: a loop writes this one in each turn, and they become one array; None: no loop's.
    """

    shape: tuple[int, ...]
    bytes: int
    stack_of: "Value | None" = None

    @property
    def size(self) -> int:
        """Numbers in the array."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation.

    Attributes:
        name: of the JAX primitive.
        params: of the primitive.
        inputs: None for a number that stands in the program.
        outputs: what it writes.
        turns: how often it is done.
    """

    name: str
    params: Mapping[str, Any]
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    iterations: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationTrace:
    """A program.

    Attributes:
        inputs: flat, in the order of the function's arguments.
        outputs: flat; None for a number that stands in the program.
        steps: in order.
        slices: of values that a loop reads one after another, by what it reads in a turn.
        carried: what a loop hands from turn to turn, with its turns.
        stacks: what a loop has written in all turns, with the last step of its body.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    operations: tuple[Operation, ...]
    slices: Mapping[Value, Value]
    carries: Mapping[Value, int]
    stacks: Mapping[Value, int]


def trace_operations(function: Callable[..., Any], *arguments: Any) -> OperationTrace:  # noqa: ANN401 - pytrees
    """Gives the operations of `function(*arguments)`, traced with their shapes alone."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    opener = _Opener()
    inputs = tuple(_value_of(var) for var in jaxpr.invars)
    outputs = opener.open(jaxpr, inputs, 1)
    return OperationTrace(
        inputs=inputs,
        outputs=tuple(outputs),
        operations=tuple(opener.steps),
        slices=opener.slices,
        carries=opener.carried,
        stacks=opener.stacks,
    )


def find_scans(jaxpr: core.Jaxpr) -> Iterator[tuple[Any, int, int]]:
    """Yields the body of each outermost loop of known length, its turns, and how many of them the program spells out.

    A `while` has no known turns, and is left out.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            turns, unrolled = equation.params["length"], max(int(equation.params["unroll"]), 1)
            yield equation.params["jaxpr"], turns, min(turns, unrolled + turns % unrolled)
        else:
            for inner in _inner_jaxprs(equation):
                yield from find_scans(unwrap_jaxpr(inner))


def has_while_loop(jaxpr: core.Jaxpr) -> bool:
    """Whether a `while` stands anywhere in it: nobody knows its turns before it runs."""
    return any(
        equation.primitive.name == "while"
        or any(has_while_loop(unwrap_jaxpr(j)) for j in _inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def unwrap_jaxpr(jaxpr: Any) -> core.Jaxpr:  # noqa: ANN401 - closed or not, by JAX's version
    """Gives a jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _inner_jaxprs(equation: core.JaxprEqn) -> Iterator[Any]:
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                yield item


def _count_equations(jaxpr: Any) -> int:  # noqa: ANN401 - closed or not, by JAX's version
    return sum(1 + sum(map(_count_equations, _inner_jaxprs(e))) for e in unwrap_jaxpr(jaxpr).eqns)


def _value_of(var: Any, stack_of: Value | None = None) -> Value:  # noqa: ANN401 - a jaxpr's variable
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    itemsize = getattr(dtype, "itemsize", 0)
    return Value(tuple(shape), math.prod(shape) * itemsize, stack_of)


class _Opener:
    """Writes down the operations of a jaxpr and of those that it calls."""

    def __init__(self) -> None:
        self.steps: list[Operation] = []
        self.slices: dict[Value, Value] = {}
        self.carried: dict[Value, int] = {}
        self.stacks: dict[Value, int] = {}

    def open(self, jaxpr: core.Jaxpr, inputs: tuple[Value | None, ...], turns: int) -> list[Value | None]:
        """Adds the operations, and gives the values of the outputs."""
        known: dict[Any, Value | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {var: _value_of(var) for var in jaxpr.constvars}

        def read(var: Any) -> Value | None:  # noqa: ANN401 - a jaxpr's variable
            return None if isinstance(var, core.Literal) else known[var]

        for equation in jaxpr.eqns:
            operands = tuple(read(var) for var in equation.invars)
            results = self._open_equation(equation, operands, turns)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _open_equation(
        self, equation: core.JaxprEqn, operands: tuple[Value | None, ...], turns: int
    ) -> list[Value | None]:
        name, inner = equation.primitive.name, list(_inner_jaxprs(equation))
        if name == "scan":
            return self._open_loop(equation, operands, turns)
        if name == "cond" and inner:  # one of them is done; the longest is the safe guess
            return self.open(unwrap_jaxpr(max(inner, key=_count_equations)), operands[1:], turns)
        if name in INLINED_CALLS and inner and len(unwrap_jaxpr(inner[0]).invars) == len(operands):
            return self.open(unwrap_jaxpr(inner[0]), operands, turns)
        outputs = tuple(_value_of(var) for var in equation.outvars)
        self.steps.append(
            Operation(name=name, params=equation.params, inputs=operands, outputs=outputs, iterations=turns)
        )
        return list(outputs)

    def _open_loop(
        self, equation: core.JaxprEqn, operands: tuple[Value | None, ...], turns: int
    ) -> list[Value | None]:
        body = unwrap_jaxpr(equation.params["jaxpr"])
        inputs: list[Value | None] = []
        for var, operand in zip(body.invars, operands, strict=True):
            value = _value_of(var)
            if operand is not None and operand.shape != value.shape:  # one slice in each turn
                self.slices[value] = operand
                inputs.append(value)
            else:
                inputs.append(operand)
        results = self.open(body, tuple(inputs), turns * equation.params["length"])
        return [
            self._close_loop(var, result, equation.params["length"])
            for var, result in zip(equation.outvars, results, strict=True)
        ]

    def _close_loop(self, var: Any, result: Value | None, turns: int) -> Value | None:  # noqa: ANN401 - a variable
        """What a loop leaves: its last carry, or what it wrote in all turns."""
        if result is None:
            return None
        if tuple(var.aval.shape) != result.shape:
            stack = _value_of(var, stack_of=result)
            self.stacks[stack] = len(self.steps) - 1
            return stack
        self.carried[result] = turns
        return result
