"""`cut_forward`: a loss that is only evaluated, as a chain of blocks without derivatives.

Its blocks are cut as those of `cut_model` are, each with a program that keeps nothing for a backward pass.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.block_kinds import Constants, ForwardKind, find_forward_kinds
from resilient_jax.blocks.block_programs import Boundary, Values, constrain
from resilient_jax.blocks.block_traces import BlockTrace, cut_trace
from resilient_jax.blocks.equation_slices import describe_var
from resilient_jax.blocks.loss_trace import LossOfVariables, trace_loss
from resilient_jax.blocks.model_weights import IsTrained, Tree, Weight, Weights, is_inexact
from resilient_jax.sharding.stage_sharding import StageSharding


class BlockOutput(NamedTuple):
    """What a block computes of a microbatch.

    Attributes:
        y: values for the next block; of the last block (loss,).
        results: auxiliary outputs of the loss that this block makes, by path.
    """

    y: Boundary
    results: dict[str, Any]


class ForwardShardings(NamedTuple):
    """How the program of a block is sharded over several devices, over a mesh without devices.

    Attributes:
        weights: shardings while the program computes with them, in the order of the block's weights.
        y: shardings of the values for the next block.
    """

    weights: tuple[NamedSharding, ...]
    y: tuple[NamedSharding, ...]
    replicated: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBlock:
    """A block that is only run forward.

    Attributes:
        number: number of the block in the chain.
        x: shapes of the values from the block before.
        result_names: paths of the auxiliary outputs that the block makes.
        shardings: shardings of the program; None: the program computes on a single device.
    """

    number: int
    weights: tuple[Weight, ...]
    x: tuple[jax.ShapeDtypeStruct, ...]
    result_names: tuple[str, ...]
    _constants: Constants
    _program: Any
    """Compiled once for all blocks of a kind."""
    shardings: ForwardShardings | None = None

    def compute(self, weights: Weights, x: Boundary, batch: Tree, key: Any) -> BlockOutput:  # noqa: ANN401 - a key
        """Compute the block for a microbatch.

        Args:
            weights: weights of the block, by name; others are ignored.
            x: values from the block before; () for the first block.
        """
        own = tuple(weights[weight.name] for weight in self.weights)
        data = (*jax.tree.leaves(batch), *jax.tree.leaves(key))
        y, results = self._program(own, tuple(x), data, self._constants, shardings=self.shardings)
        return BlockOutput(tuple(y), dict(zip(self.result_names, results, strict=True)))


def cut_forward(
    loss: LossOfVariables,
    variables: Tree,
    batch: Tree,
    key: Any,  # noqa: ANN401 - a random key, or its shape
    is_trained: IsTrained = is_inexact,
) -> tuple[ForwardBlock, ...]:
    """Return the blocks of a loss that is only evaluated, in order.

    Args:
        loss: `loss(variables, batch, key)` of a microbatch: a scalar, or that and a tree of arrays. The loss is traced
            once.
        variables: arrays or their shapes; nothing is computed. Variables that the loss does not use are in no block.
        batch: arrays of a microbatch, or their shapes.
        key: random key of a microbatch, or its shape.
        is_trained: selects the weights by which layers are found.

    Raises:
        CallerError: the loss cannot be cut; the message says what is in the way.
    """
    traces = cut_trace(trace_loss(loss, variables, batch, key, is_trained), keep_unused=False)
    blocks = [block for kind in find_forward_kinds(traces) for block in _make_blocks(kind, traces)]
    return tuple(sorted(blocks, key=lambda block: block.number))


def shard_forward(blocks: Sequence[ForwardBlock], sharding: StageSharding) -> tuple[ForwardBlock, ...]:
    """Return blocks in order that compute over the devices of a stage.

    Args:
        sharding: sharding over an abstract mesh, as for `CutModel.with_sharding`.
    """
    ends = [block.x for block in blocks[1:]]
    found = []
    for block, y in zip(blocks, [*ends, (jax.ShapeDtypeStruct((), jnp.float32),)], strict=True):
        shardings = ForwardShardings(
            weights=tuple(sharding.shard(sharding.find_gathered_spec(w.name)) for w in block.weights),
            y=tuple(sharding.shard(sharding.find_value_spec(value.shape)) for value in y),
            replicated=sharding.shard(P()),
        )
        found.append(dataclasses.replace(block, shardings=shardings))
    return tuple(found)


def _make_program(kind: ForwardKind) -> Any:  # noqa: ANN401 - a jitted function
    def run(
        weights: Values, x: Values, data: Values, constants: Values, *, shardings: ForwardShardings | None
    ) -> tuple[Any, Any]:
        if shardings is None:
            return kind.function.run(weights, x, data, constants)
        y, results = kind.function.run(constrain(weights, shardings.weights), x, data, constants)
        return constrain(y, shardings.y), constrain(results, [shardings.replicated] * len(results))

    return jax.jit(run, static_argnames="shardings")


def _make_blocks(kind: ForwardKind, traces: tuple[BlockTrace, ...]) -> list[ForwardBlock]:
    program = _make_program(kind)
    found = []
    for number, constants in zip(kind.blocks, kind.constants, strict=True):
        trace, first = traces[number], len(traces[number].weights)
        invars = trace.closed.jaxpr.invars[first : first + trace.num_inputs]
        found.append(
            ForwardBlock(
                number=number,
                weights=trace.weights,
                x=tuple(map(describe_var, invars)),
                result_names=trace.result_names,
                _constants=constants,
                _program=program,
            )
        )
    return found
