"""`cut_model`: a loss becomes a chain of blocks with programs and weights of their own.

cut = cut_model(loss, variables, batch, key)          # arrays or shapes; loss(variables, batch, key)
by_name = cut.trace.table.split(variables)
weights = [{weight.name: by_name[weight.name] for weight in block.weights} for block in cut.blocks]
x = ()
for block in cut.blocks:
    x, results, residuals = block.programs.forward(weights[block.number], x, batch, key)
g = cut.loss_gradient
for block in reversed(cut.blocks):
    gradients, g = block.programs.backward(weights[block.number], residuals_of[block.number], g)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from resilient_jax.blocks.block_kinds import find_kinds
from resilient_jax.blocks.block_programs import BlockPrograms, Boundary, KindPrograms, ProgramShardings
from resilient_jax.blocks.block_traces import BlockTrace, cut_trace
from resilient_jax.blocks.equation_slices import describe_var
from resilient_jax.blocks.layer_marks import read_mark
from resilient_jax.blocks.loss_trace import CHANGED, LossOfVariables, LossTrace, trace_loss
from resilient_jax.blocks.model_weights import IsTrained, Tree, Weight, is_inexact
from resilient_jax.sharding.stage_sharding import StageSharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The smallest part of a model that is never cut.

    Attributes:
        number: number of the block in the chain.
        kind: index of the block's kind in `CutModel.kinds`.
        weights: weights that the block computes with. Some may belong to several blocks: the weight's gradient is the
            sum of the blocks' gradients.
        x: shapes of the values from the block before.
        y: shapes of the values for the next block; of the last block the shape of the loss.
    """

    number: int
    kind: int
    weights: tuple[Weight, ...]
    x: tuple[Any, ...]
    y: tuple[Any, ...]
    programs: BlockPrograms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model as a chain of blocks.

    Attributes:
        blocks: in the order of forward.
        kinds: programs, which all blocks of a kind share.
        sharding: sharding over the devices of a stage, without devices; None: a stage computes on a single device.
    """

    blocks: tuple[Block, ...]
    kinds: tuple[KindPrograms, ...]
    trace: LossTrace
    sharding: StageSharding | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks, with embedding and head."""
        return len(self.blocks)

    @property
    def num_layers(self) -> int:
        """The number of layers' calls at which the model is cut."""
        marks = map(read_mark, self.trace.closed.jaxpr.eqns)
        return len({mark.call for mark in marks if mark is not None and mark.is_input})

    @property
    def loss_gradient(self) -> Boundary:
        """The gradient of the loss by itself, 1: `g` of the last block."""
        (loss,) = self.blocks[-1].y
        return (np.ones((), loss.dtype),)

    @property
    def changed_variables(self) -> dict[str, tuple[int, jax.ShapeDtypeStruct]]:
        """The weights of which the loss returns new values: the block that makes them, and their shape, by name."""
        shapes = dict(zip(self.trace.result_names, self.trace.closed.out_avals, strict=True))
        return {
            name.removeprefix(f"{CHANGED}/"): (
                block.number,
                jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype),
            )
            for block in self.blocks
            for name in block.programs.result_names
            if name.startswith(f"{CHANGED}/")
        }

    def with_sharding(self, sharding: StageSharding) -> "CutModel":
        """Return the same model with programs that compute over the devices of a stage.

        Args:
            sharding: sharding over an abstract mesh, whose axes are `AxisType.Auto`, as those of the weights' mesh must
                be.
        """
        blocks = tuple(
            dataclasses.replace(
                block,
                programs=dataclasses.replace(block.programs, shardings=_shard_programs(block, sharding)),
            )
            for block in self.blocks
        )
        return dataclasses.replace(self, blocks=blocks, sharding=sharding)


def cut_model(
    loss: LossOfVariables,
    variables: Tree,
    batch: Tree,
    key: Any,  # noqa: ANN401 - a random key, or its shape
    *,
    is_trained: IsTrained = is_inexact,
    remat: bool = False,
) -> CutModel:
    """Cut a model into blocks at its layers.

    Args:
        loss: `loss(variables, batch, key)` of a microbatch: a scalar, or that and a tree of arrays. The loss is traced
            once.
        variables: arrays or their shapes; nothing is computed.
        key: random key of a microbatch, or its shape.
        is_trained: selects by path and leaf the weights that get a gradient.
        remat: forward keeps a block's input only, and backward computes the block again.

    Raises:
        CallerError: the loss cannot be cut; the message says what is in the way.
    """
    trace = trace_loss(loss, variables, batch, key, is_trained)
    traces = cut_trace(trace)
    found = find_kinds(traces, remat=remat)
    kinds = tuple(map(KindPrograms, found))
    blocks = [
        _make_block(traces[number], number, index, kinds[index], constants)
        for index, kind in enumerate(found)
        for number, constants in zip(kind.blocks, kind.constants, strict=True)
    ]
    blocks.sort(key=lambda block: block.number)
    return CutModel(blocks=tuple(blocks), kinds=kinds, trace=trace)


def _make_block(
    trace: BlockTrace, number: int, index: int, kind: KindPrograms, constants: tuple[Any, ...]
) -> Block:
    jaxpr, first = trace.closed.jaxpr, len(trace.weights)
    programs = BlockPrograms(
        kind=kind,
        number=number,
        weight_names=tuple(weight.name for weight in trace.weights),
        trained_names=tuple(weight.name for weight in trace.weights if weight.is_trained),
        result_names=trace.result_names,
        constants=constants,
    )
    return Block(
        number=number,
        kind=index,
        weights=trace.weights,
        x=tuple(map(describe_var, jaxpr.invars[first : first + trace.num_inputs])),
        y=tuple(map(describe_var, jaxpr.outvars[: trace.num_outputs])),
        programs=programs,
    )


def _shard_programs(block: Block, sharding: StageSharding) -> ProgramShardings:
    weights = block.programs.weight_names
    floats = [value for value in block.x if jnp.issubdtype(value.dtype, jnp.inexact)]
    return ProgramShardings(
        weights=tuple(sharding.shard(sharding.find_gathered_spec(name)) for name in weights),
        gradients=tuple(
            sharding.shard(sharding.find_weight_spec(name)) for name in block.programs.trained_names
        ),
        y=tuple(sharding.shard(sharding.find_value_spec(value.shape)) for value in block.y),
        x_gradient=tuple(sharding.shard(sharding.find_value_spec(value.shape)) for value in floats),
        replicated=sharding.shard(P()),
    )
