"""A program as a flat list of operations: calls are inlined, the body of a loop is listed once with its iterations."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from resilient_jax.sharding.jaxprs import (
    CALLS,
    get_body,
    inner_jaxprs,
    iterate_equations,
    unwrap_jaxpr,
    walk,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array that an operation reads or writes. Two are the same only if they are the same object.

    Attributes:
        stack_of: value that a loop writes into this array in each iteration; None: no loop stacks it.
    """

    shape: tuple[int, ...]
    bytes: int
    stack_of: "Value | None" = None

    @property
    def size(self) -> int:
        """Number of elements in the array."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One application of a JAX primitive.

    Attributes:
        equation: application in its jaxpr.
        inputs: arrays that the operation reads, literals included.
    """

    equation: core.JaxprEqn
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    iterations: int

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationTrace:
    """The operations of a program.

    Attributes:
        inputs: inputs, flat, in the order of the function's arguments.
        outputs: outputs, flat.
        slices: maps what a loop reads in one iteration to the array that it scans over.
        carries: what a loop hands from one iteration to the next, with the loop's number of iterations.
        stacks: what a loop has written in all iterations, with the index of the last operation of the loop's body.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    slices: Mapping[Value, Value]
    carries: Mapping[Value, int]
    stacks: Mapping[Value, int]


def trace_operations(function: Callable[..., Any], *arguments: Any) -> OperationTrace:  # noqa: ANN401 - pytrees
    """Return the operations of `function(*arguments)`, traced with the shapes of the arguments alone."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    tracer = _Tracer()
    inputs = tuple(_make_value(var.aval) for var in jaxpr.invars)
    outputs = tracer.trace(jaxpr, inputs, 1)
    return OperationTrace(
        inputs=inputs,
        outputs=tuple(outputs),
        operations=tuple(tracer.operations),
        slices=tracer.slices,
        carries=tracer.carries,
        stacks=tracer.stacks,
    )


def has_while_loop(jaxpr: core.Jaxpr) -> bool:
    """Return whether a jaxpr has a `while` anywhere: its number of iterations is known only when it runs."""
    return any(equation.primitive.name == "while" for equation in iterate_equations(jaxpr))


def _count_equations(jaxpr: Any) -> int:  # noqa: ANN401 - closed or not, by JAX's version
    return sum(1 for _ in iterate_equations(jaxpr))


def _make_value(aval: Any, stack_of: Value | None = None) -> Value:  # noqa: ANN401 - an abstract array
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    itemsize = getattr(dtype, "itemsize", 0)
    return Value(tuple(shape), math.prod(shape) * itemsize, stack_of)


class _Tracer:
    """Tracer that lists the operations of a jaxpr and of the jaxprs that it calls."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.slices: dict[Value, Value] = {}
        self.carries: dict[Value, int] = {}
        self.stacks: dict[Value, int] = {}

    def trace(self, jaxpr: Any, inputs: Sequence[Value], iterations: int) -> list[Value]:  # noqa: ANN401 - closed or not
        """Add the operations of a jaxpr that runs `iterations` times, and return the values of its outputs."""
        return walk(
            jaxpr,
            inputs,
            lambda equation, operands: self._trace_equation(equation, operands, iterations),
            read_constant=lambda aval, _: _make_value(aval),
            enters=CALLS,
        )

    def _trace_equation(
        self, equation: core.JaxprEqn, operands: tuple[Value, ...], iterations: int
    ) -> Sequence[Value]:
        name, inner = equation.primitive.name, inner_jaxprs(equation)
        if name == "scan":
            return self._trace_scan(equation, operands, iterations)
        # One branch runs; the longest is the safe estimate.
        if name == "cond" and inner:
            return self.trace(max(inner, key=_count_equations), operands[1:], iterations)
        outputs = tuple(_make_value(var.aval) for var in equation.outvars)
        self.operations.append(
            Operation(equation=equation, inputs=operands, outputs=outputs, iterations=iterations)
        )
        return outputs

    def _trace_scan(
        self, equation: core.JaxprEqn, operands: tuple[Value, ...], iterations: int
    ) -> list[Value]:
        body = get_body(equation)
        inputs: list[Value] = []
        for var, operand in zip(unwrap_jaxpr(body).invars, operands, strict=True):
            value = _make_value(var.aval)
            # A scanned operand: one slice in each iteration.
            if operand.shape != value.shape:
                self.slices[value] = operand
                inputs.append(value)
            else:
                inputs.append(operand)
        length = equation.params["length"]
        results = self.trace(body, inputs, iterations * length)
        return [
            self._finish_scan(var, result, length)
            for var, result in zip(equation.outvars, results, strict=True)
        ]

    def _finish_scan(self, var: Any, result: Value, length: int) -> Value:  # noqa: ANN401 - a variable
        """Return a result of a scan: its last carry, or the stack of what it wrote in all iterations."""
        if tuple(var.aval.shape) != result.shape:
            stack = _make_value(var.aval, stack_of=result)
            self.stacks[stack] = len(self.operations) - 1
            return stack
        self.carries[result] = length
        return result
