"""Forward and backward of a block, and backward cut in two: B, the gradient of the input, and W, those of the weights.

    forward:  (weights, x, data, constants)     -> y, results, residuals
    B:        (weights, constants, residuals, g) -> gradient of x, intermediates
    W:        (weights, constants, those residuals and g that it needs, intermediates) -> gradients of the weights

What `jax.vjp` keeps for backward, weights among it, comes out of a compiled function as copies, for each microbatch in
flight. So what depends on weights and constants alone is not kept, but computed again in backward: a weight itself, its
cast to bfloat16, a mask of positions. Everything else is computed once: no equation that depends on the batch is in
both B and W.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from resilient_jax.blocks.equation_slices import (
    INLINED,
    REMATERIALIZED,
    Value,
    describe_var,
    evaluate_slice,
    inline_calls,
    list_inputs,
    list_vars,
    propagate_flags,
    select_equations,
)

Values = Sequence[Value]
Shapes = tuple[jax.ShapeDtypeStruct, ...]
_OF_WEIGHTS, _OF_DATA = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockFunction:
    """What a block computes.

    Attributes:
        run: `run(weights, x, data, constants)` returns (values for the next block, results).
        x: shapes of the values from the block before.
    """

    run: Callable[[Values, Values, Values, Values], tuple[tuple[Value, ...], tuple[Value, ...]]]
    weights: Shapes
    x: Shapes
    data: Shapes
    constants: Shapes
    is_trained: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockDerivative:
    """The programs of a block as functions to be compiled.

    Attributes:
        forward: `forward(weights, x, data, constants)` returns (y, results, residuals).
        backward_input: B; `backward_input(weights, constants, residuals, g)` returns (gradient of x, intermediates).
        backward_weights: W; `backward_weights(weights, constants, passed, intermediates)` returns the gradients of
            trained weights.
        passed: indices of those of `(*residuals, *g)` that W needs.
        residuals: shapes of what forward keeps for backward.
        g: shapes of the gradient of y: of the floating-point values of y only.
        forward_jaxpr: the program of forward, before slicing.
        backward_jaxpr: the program of backward, before backward is cut in two.
    """

    forward: Callable[[Values, Values, Values, Values], tuple[Any, Any, Any]]
    backward_input: Callable[[Values, Values, Values, Values], tuple[Any, Any]]
    backward_weights: Callable[[Values, Values, Values, Values], Any]
    passed: tuple[int, ...]
    residuals: Shapes
    g: Shapes
    x_gradient: Shapes
    forward_jaxpr: core.ClosedJaxpr
    backward_jaxpr: core.ClosedJaxpr
    backward_shapes: tuple[Shapes, ...]
    backward_weights_shapes: tuple[Shapes, ...]


def differentiate(function: BlockFunction, *, remat: bool) -> BlockDerivative:
    """Return the programs of a block.

    Args:
        remat: True: keep the block's input and compute all else again in backward.
    """
    forward = _Forward(function, remat=remat)
    return _Backward(function, forward).make_derivative()


class _Forward:
    """The program of forward, with all residuals, and which of them are kept."""

    def __init__(self, function: BlockFunction, *, remat: bool) -> None:
        self._function, self._remat = function, remat
        arguments = function.weights, function.x, function.data, function.constants
        traced, shapes = jax.make_jaxpr(self._run, return_shape=True)(*arguments)
        self.closed = inline_calls(traced)
        jaxpr = self.closed.jaxpr
        counts = [len(part) for part in arguments]
        self.weight_vars, self.x_vars, self.data_vars, self.constant_vars = _divide(jaxpr.invars, counts)
        self.outputs, self.results, self.residual_atoms = _divide(
            jaxpr.outvars, [len(part) for part in shapes]
        )
        self.g = tuple(shape for shape in shapes[0] if _is_differentiable(shape))
        self._flags = propagate_flags(
            jaxpr, [int(var in {*self.x_vars, *self.data_vars}) for var in jaxpr.invars]
        )
        residuals = dict.fromkeys(list_vars(self.residual_atoms))
        self.kept = [var for var in residuals if self._flags[var] == _OF_DATA]
        self._equations = select_equations(jaxpr.eqns, [*self.outputs, *self.results, *self.kept])

    def _run(self, weights: Values, x: Values, data: Values, constants: Values) -> tuple[Any, Any, Any]:
        function = self._function
        trained = [
            weight for weight, is_trained in zip(weights, function.is_trained, strict=True) if is_trained
        ]
        floats = [value for value in x if _is_differentiable(value)]

        def of_moved(trained: Values, floats: Values) -> tuple[Any, Any]:
            trained_left, floats_left = iter(trained), iter(floats)
            all_weights = [
                next(trained_left) if is_trained else weight
                for weight, is_trained in zip(weights, function.is_trained, strict=True)
            ]
            all_x = [next(floats_left) if _is_differentiable(value) else value for value in x]
            y, results = function.run(all_weights, all_x, data, constants)
            return [value for value in y if _is_differentiable(value)], (y, results)

        if self._remat:
            of_moved = jax.checkpoint(of_moved)
        _, pull_back, (y, results) = jax.vjp(of_moved, trained, floats, has_aux=True)
        residuals, self.treedef = jax.tree.flatten(pull_back)
        return y, results, residuals

    def evaluate(self, weights: Values, x: Values, data: Values, constants: Values) -> tuple[Any, Any, Any]:
        """Return (y, results, residuals that are kept)."""
        inputs = [*self.weight_vars, *self.x_vars, *self.data_vars, *self.constant_vars]
        values = dict(zip(inputs, [*weights, *x, *data, *constants], strict=True))
        found = evaluate_slice(
            self._equations,
            self._read_constants() | values,
            [*self.outputs, *self.results, *self.kept],
        )
        return tuple(_divide(found, [len(self.outputs), len(self.results), len(self.kept)]))  # pyright: ignore[reportReturnType] - three

    def complete(self, weights: Values, constants: Values, kept: Values) -> list[Value]:
        """Return all residuals, of which those that depend on weights and constants alone are computed."""
        values = self._read_constants() | dict(
            zip(
                [*self.weight_vars, *self.constant_vars, *self.kept],
                [*weights, *constants, *kept],
                strict=True,
            )
        )
        missing = [var for var in list_vars(self.residual_atoms) if self._flags[var] == _OF_WEIGHTS]
        equations = select_equations(self.closed.jaxpr.eqns, missing)
        return evaluate_slice(equations, values, self.residual_atoms)

    def _read_constants(self) -> dict[Any, Value]:
        return dict(zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True))


class _Backward:
    """The program of backward, and its two slices."""

    def __init__(self, function: BlockFunction, forward: _Forward) -> None:
        self._forward = forward
        self._residuals = tuple(map(describe_var, forward.kept))
        arguments = function.weights, function.constants, self._residuals, forward.g
        traced, shapes = jax.make_jaxpr(self._run, return_shape=True)(*arguments)
        self._shapes = arguments
        self._closed = inline_calls(traced, INLINED | REMATERIALIZED)
        jaxpr = self._closed.jaxpr
        counts = [len(part) for part in arguments]
        self._weight_vars, self._constant_vars, residuals, g = _divide(jaxpr.invars, counts)
        self._moved_vars = [*residuals, *g]
        self._weight_gradients, self._x_gradients = _divide(jaxpr.outvars, [len(part) for part in shapes])
        self._x_shapes = tuple(shapes[1])
        self._cut()

    def _run(self, weights: Values, constants: Values, kept: Values, g: Values) -> tuple[Any, Any]:
        residuals = self._forward.complete(weights, constants, kept)
        pull_back = jax.tree.unflatten(self._forward.treedef, residuals)
        trained, floats = pull_back(list(g))
        return tuple(trained), tuple(floats)

    def _cut(self) -> None:
        """Choose the equations of B, and of W from those that are left; what is of weights alone may be in both."""
        jaxpr = self._closed.jaxpr
        moved = set(self._moved_vars)
        flags = propagate_flags(jaxpr, [int(var in moved) for var in jaxpr.invars])
        self._input_equations = select_equations(jaxpr.eqns, self._x_gradients)
        taken = {
            id(equation)
            for equation in self._input_equations
            if any(flags[var] == _OF_DATA for var in equation.outvars)
        }
        left = [equation for equation in jaxpr.eqns if id(equation) not in taken]
        self._weight_equations = select_equations(left, self._weight_gradients)
        known = {*self._weight_vars, *self._constant_vars, *jaxpr.constvars}
        needed = [
            var for var in list_inputs(self._weight_equations, self._weight_gradients) if var not in known
        ]
        self._passed = tuple(place for place, var in enumerate(self._moved_vars) if var in set(needed))
        self._intermediates = [var for var in needed if var not in moved]

    def make_derivative(self) -> BlockDerivative:
        """Return forward, input gradient and weight gradients of the block, to be traced and compiled."""
        passed = tuple(describe_var(self._moved_vars[place]) for place in self._passed)
        return BlockDerivative(
            forward=self._forward.evaluate,
            backward_input=self._evaluate_input,
            backward_weights=self._evaluate_weights,
            passed=self._passed,
            residuals=self._residuals,
            g=self._forward.g,
            x_gradient=self._x_shapes,
            forward_jaxpr=self._forward.closed,
            backward_jaxpr=self._closed,
            backward_shapes=self._shapes,
            backward_weights_shapes=(
                *self._shapes[:2],
                passed,
                tuple(map(describe_var, self._intermediates)),
            ),
        )

    def _evaluate_input(self, weights: Values, constants: Values, kept: Values, g: Values) -> tuple[Any, Any]:
        found = evaluate_slice(
            self._input_equations,
            self._bind(weights, constants, self._moved_vars, [*kept, *g]),
            [*self._x_gradients, *self._intermediates],
        )
        count = len(self._x_gradients)
        return tuple(found[:count]), tuple(found[count:])

    def _evaluate_weights(self, weights: Values, constants: Values, passed: Values, made: Values) -> Any:  # noqa: ANN401
        variables = [*(self._moved_vars[place] for place in self._passed), *self._intermediates]
        found = evaluate_slice(
            self._weight_equations,
            self._bind(weights, constants, variables, [*passed, *made]),
            self._weight_gradients,
        )
        return tuple(found)

    def _bind(
        self, weights: Values, constants: Values, variables: Sequence[Any], values: Values
    ) -> dict[Any, Value]:
        names = [*self._closed.jaxpr.constvars, *self._weight_vars, *self._constant_vars, *variables]
        return dict(zip(names, [*self._closed.consts, *weights, *constants, *values], strict=True))


def _is_differentiable(value: Any) -> bool:  # noqa: ANN401 - an array or its shape
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _divide(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Return the values in parts of these sizes."""
    left = iter(values)
    return [[next(left) for _ in range(count)] for count in counts]
