"""The compiled programs of a block: forward, and backward in two tasks, B and W.

There is no program that does both tasks: XLA would fuse across them and round differently (seen: scales of layer
norms), and the bits of a step would depend on its schedule.

The programs of a kind are compiled once and called with the weights and constants of each of its blocks. They hold no
array, device or mesh: on new devices of the same number and kind they are compiled again, or found in the compilation
cache, but not traced again. Over several devices they are one program for all of them: weights come and gradients go
with the shardings of `StageSharding`, and what crosses cuts has those of its examples.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from resilient_jax.blocks.block_kinds import BlockKind, Constants
from resilient_jax.blocks.derivatives import Values
from resilient_jax.blocks.model_weights import Tree, Weights

Boundary = tuple[Any, ...]
"""Arrays that cross a cut: of forward the values for the next block, of backward the gradients of those of them that
are floating-point numbers. Before the first block it is empty; after the last it is (loss,)."""


class ForwardResult(NamedTuple):
    """What forward returns.

    Attributes:
        y: values for the next block; of the last block (loss,).
        results: auxiliary outputs of the loss that the block makes, by path.
        residuals: what backward needs; no weights are among the residuals.
    """

    y: Boundary
    results: dict[str, Any]
    residuals: tuple[Any, ...]


class BackwardResult(NamedTuple):
    """What backward returns.

    Attributes:
        gradients: gradients of the trained weights, by name.
        g: gradients for the block before.
    """

    gradients: dict[str, Any]
    g: Boundary


class BackwardInputResult(NamedTuple):
    """What B returns.

    Attributes:
        g: gradients for the block before.
        kept: what W needs: residuals, and values that B has computed.
    """

    g: Boundary
    kept: "KeptForWeights"


class KeptForWeights(NamedTuple):
    """What W needs, a pytree.

    Attributes:
        passed: residuals and gradients that W needs; the same arrays as those of B.
        intermediates: values that B has computed.
    """

    passed: tuple[Any, ...]
    intermediates: tuple[Any, ...]


class ProgramShardings(NamedTuple):
    """How the programs of a block are sharded over several devices, over a mesh without devices.

    Attributes:
        weights: shardings while programs compute with them, in the order of `BlockPrograms.weight_names`.
        gradients: shardings of the gradients of trained weights, and of weights between programs.
        y: shardings of the values for the next block.
        x_gradient: shardings of the gradients for the block before.
    """

    weights: tuple[NamedSharding, ...]
    gradients: tuple[NamedSharding, ...]
    y: tuple[NamedSharding, ...]
    x_gradient: tuple[NamedSharding, ...]
    replicated: NamedSharding


class KindPrograms:
    """The jitted programs of a kind. `shardings` is None on a single device."""

    def __init__(self, kind: BlockKind) -> None:
        self.kind, derivative = kind, kind.derivative
        self._derivative = derivative
        # A gradient becomes the gradient of the input, where it has its shape; a donation without one would be in vain.
        is_alike = _count_shapes(derivative.g) == _count_shapes(derivative.x_gradient)
        num_residuals = len(derivative.residuals)
        is_passed = any(place >= num_residuals for place in derivative.passed)
        self.donates_g = is_alike and not is_passed
        self.forward = jax.jit(self._forward, static_argnames="shardings")
        self.backward_input = jax.jit(
            self._backward_input, static_argnames="shardings", donate_argnums=(3,) if self.donates_g else ()
        )
        self.backward_weights = jax.jit(self._backward_weights, static_argnames="shardings")

    def _forward(
        self,
        weights: Values,
        x: Values,
        data: Values,
        constants: Values,
        *,
        shardings: ProgramShardings | None,
    ) -> tuple[Any, Any, Any]:
        if shardings is None:
            return self._derivative.forward(weights, x, data, constants)
        gathered = constrain(weights, shardings.weights)
        y, results, residuals = self._derivative.forward(gathered, x, data, constants)
        replicated = tuple(jax.lax.with_sharding_constraint(value, shardings.replicated) for value in results)
        return constrain(y, shardings.y), replicated, residuals

    def _backward_input(
        self,
        weights: Values,
        constants: Values,
        residuals: Values,
        g: Values,
        *,
        shardings: ProgramShardings | None,
    ) -> tuple[Any, Any]:
        if shardings is None:
            return self._derivative.backward_input(weights, constants, residuals, g)
        gathered = constrain(weights, shardings.weights)
        x_gradient, made = self._derivative.backward_input(gathered, constants, residuals, g)
        return constrain(x_gradient, shardings.x_gradient), made

    def _backward_weights(
        self,
        weights: Values,
        constants: Values,
        passed: Values,
        intermediates: Values,
        *,
        shardings: ProgramShardings | None,
    ) -> Any:  # noqa: ANN401 - a tuple of arrays
        if shardings is None:
            return self._derivative.backward_weights(weights, constants, passed, intermediates)
        gathered = constrain(weights, shardings.weights)
        found = self._derivative.backward_weights(gathered, constants, passed, intermediates)
        return constrain(found, shardings.gradients)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrograms:
    """The programs of one block.

    Attributes:
        number: number of the block in the chain.
        weight_names: names of the weights that each program takes, in the order of its arguments.
        trained_names: names of the weights that get a gradient.
        result_names: paths of the auxiliary outputs that the block makes.
        shardings: shardings of the programs; None: the programs compute on a single device.
    """

    kind: KindPrograms
    number: int
    weight_names: tuple[str, ...]
    trained_names: tuple[str, ...]
    result_names: tuple[str, ...]
    constants: Constants
    shardings: ProgramShardings | None = None

    def forward(self, weights: Weights, x: Boundary, batch: Tree, key: Any) -> ForwardResult:  # noqa: ANN401 - a key
        """Compute the block for a microbatch.

        Args:
            weights: weights of the block, by name; others are ignored.
            x: values from the block before; () for the first block.
        """
        data = (*jax.tree.leaves(batch), *jax.tree.leaves(key))
        y, results, residuals = self.kind.forward(
            self._select(weights), tuple(x), data, self.constants, shardings=self.shardings
        )
        return ForwardResult(tuple(y), dict(zip(self.result_names, results, strict=True)), tuple(residuals))

    def backward(self, weights: Weights, residuals: Sequence[Any], g: Boundary) -> BackwardResult:
        """Compute all gradients: B, then W. `g` is donated where it can be: do not use its arrays afterwards."""
        x_gradient, kept = self.backward_input(weights, residuals, g)
        return BackwardResult(self.backward_weights(weights, kept), x_gradient)

    def backward_input(self, weights: Weights, residuals: Sequence[Any], g: Boundary) -> BackwardInputResult:
        """Compute B, the gradient of the input. `g` is donated where it can be: do not use its arrays afterwards."""
        x_gradient, made = self.kind.backward_input(
            self._select(weights), self.constants, tuple(residuals), tuple(g), shardings=self.shardings
        )
        moved = (*residuals, *g)
        passed = tuple(moved[place] for place in self.kind.kind.derivative.passed)
        return BackwardInputResult(tuple(x_gradient), KeptForWeights(passed, tuple(made)))

    def backward_weights(self, weights: Weights, kept: KeptForWeights) -> dict[str, Any]:
        """Compute W, the gradients of the trained weights, by name."""
        found = self.kind.backward_weights(
            self._select(weights),
            self.constants,
            kept.passed,
            kept.intermediates,
            shardings=self.shardings,
        )
        return self._name(found)

    def _select(self, weights: Weights) -> tuple[Any, ...]:
        return tuple(weights[name] for name in self.weight_names)

    def _name(self, gradients: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.trained_names, gradients, strict=True))


def _count_shapes(shapes: Sequence[jax.ShapeDtypeStruct]) -> Mapping[Any, int]:
    return collections.Counter((shape.shape, shape.dtype) for shape in shapes)


def constrain(values: Sequence[Any], shardings: Sequence[NamedSharding]) -> tuple[Any, ...]:
    """Return traced values with these shardings."""
    return tuple(
        jax.lax.with_sharding_constraint(value, sharding)
        for value, sharding in zip(values, shardings, strict=True)
    )
