"""The evaluations of one `fit` whose model is split over hosts: each host runs its own blocks."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
from jax.sharding import AbstractMesh

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.blocks.forward_model import ForwardBlock, cut_forward, shard_forward
from resilient_jax.data.microbatch_rows import ALL_ROWS
from resilient_jax.errors import CallerError
from resilient_jax.pipeline.stage_evaluation import StageEvaluation
from resilient_jax.pipeline.stage_runner import LOSS
from resilient_jax.pipeline_schedule.makespan import share_tasks
from resilient_jax.pipeline_schedule.routes import list_microbatches, make_routes
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.sharding.trace_mesh import use_trace_mesh
from resilient_jax.step.random_keys import make_microbatch_id, make_microbatch_key
from resilient_jax.trainer.evaluation import EvaluationSums, compute_metrics
from resilient_jax.trainer.evaluator import Evaluator
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.pipelined_loss import make_marked_loss
from resilient_jax.trainer.pipelined_steps import PipelinedSteps
from resilient_jax.trainer.state_layout import StateLayout
from resilient_jax.trainer.train_step import EVALUATION_STEP, TrainStep
from resilient_jax.trainer.training_state import Tree
from resilient_jax.trainer.unit_states import PipelinedState
from resilient_jax.trainer.variable_tree import VariableTree
from resilient_jax.weighted_mean import join_weights
from resilient_jax.worker.world import World

READ_WINDOW: Final = 32
"""Microbatches, of which at most so many are kept once they are computed."""


class PipelinedEvaluator(Evaluator):
    """Runs the evaluation through the stages, with its own data and programs. No weights go from host to host."""

    def __init__(self, config: FitConfig, programs: TrainStep, steps: PipelinedSteps) -> None:
        """Cut the loss of the evaluation, without a device.

        Raises:
            CallerError: the evaluation's loss cannot be cut where the training's loss is; the message says what stands
                in the way.
        """
        super().__init__(config)
        self._steps, size = steps, self._microbatch_size
        blocks = _cut(config, programs, self._example, steps.sharding.mesh.abstract_mesh)
        _check_blocks(blocks, steps.cut)
        # Examples that do not divide among the devices are on each of them.
        is_divisible = size % steps.sharding.num_example_shares == 0
        self._num_examples = size if is_divisible else 0
        sharding = steps.sharding.with_examples(self._num_examples)
        self._blocks = shard_forward(blocks, sharding) if sharding.mesh.size > 1 else blocks
        self._make_key = jax.jit(functools.partial(make_microbatch_key, config.recipe.seed))
        self._start_reading(config.read_options)

    def evaluate(self, layout: StateLayout, state: PipelinedState) -> dict[str, float]:
        """Return the mean of each metric; see `Evaluator.evaluate`."""
        if layout.world.is_rehearsal:  # the other hosts send nothing
            names = [LOSS, *(name for block in self._blocks for name in block.result_names)]
            return self._compute_metrics(dict.fromkeys(names, 0.0))
        placement, mail = self._steps.find_stage()
        world, step = layout.world, mail.step
        # Replicas get as much as in a step: in proportion to their hosts, or as their speed was measured.
        shares = share_tasks(self._num_microbatches, placement.quotas)
        routes = make_routes(placement.teams, shares)
        own = list_microbatches(routes, world.host)
        places = {index: place for place, index in enumerate(own)}

        def read(index: int) -> tuple[Tree, jax.Array]:
            place = places[index]
            if place % READ_WINDOW == 0:  # those before are done, and not kept
                self._data.expect([(step, next_one, ALL_ROWS) for next_one in own[place:][: 2 * READ_WINDOW]])
            return self._data.get(step, index), self._make_key(make_microbatch_id(EVALUATION_STEP, index))

        stage = StageEvaluation(
            host=world.host,
            blocks=self._blocks,
            read=read,
            sharding=placement.sharding.with_examples(self._num_examples),
            before_microbatch=functools.partial(_before_microbatch, world),
        )
        weights = placement.list_weights(state, use_ema=self._evaluation.use_ema)
        try:
            sums = stage.evaluate(routes, tuple(sorted(world.hosts)), weights, mail)
        finally:
            self._data.expect([])  # no microbatches are kept until the next evaluation
        return self._compute_metrics(sums)

    def _compute_metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Return the means, from sums by name, those of weights among them."""
        found = join_weights(sums)
        return compute_metrics(EvaluationSums(found.pop(LOSS), found), self._num_microbatches)


def _before_microbatch(world: World, microbatch: int) -> None:
    world.raise_if_ended()
    world.step_services.hit_failpoint(FailPoint.BEFORE_EVALUATION_MICROBATCH, microbatch)


def _cut(
    config: FitConfig, programs: TrainStep, example: Tree, mesh: AbstractMesh
) -> tuple[ForwardBlock, ...]:
    variables = programs.abstract_state.variables
    tree = VariableTree(variables)
    loss = make_marked_loss(config.recipe, config.evaluation_loss, tree, training=False)
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        with use_trace_mesh(mesh):
            return cut_forward(loss, tree.join(variables), example, key, tree.is_trained)
    except CallerError as error:
        raise CallerError(f"evaluation: {error}") from error


def _check_blocks(blocks: Sequence[ForwardBlock], cut: CutModel) -> None:
    """Check that each block of the evaluation can be computed where the training's block of that number is."""
    remedy = (
        "Every host evaluates the layers that it trains. Call the model as the training's loss does, or evaluate its "
        "checkpoints in a job of their own"
    )
    if len(blocks) != cut.num_blocks:
        raise CallerError(
            f"evaluation: found a loss that is cut into {len(blocks)} blocks, expected {cut.num_blocks}, as that of "
            f"the training. {remedy}"
        )
    for block in blocks:
        known = {weight.name for weight in cut.blocks[block.number].weights}
        missing = [weight.name for weight in block.weights if weight.name not in known]
        if missing:
            raise CallerError(
                f"evaluation: found that block {block.number} of {cut.num_blocks} uses {', '.join(missing)}, expected "
                f"only what that block uses in the training's loss. {remedy}"
            )
