"""The state of a model that is split over hosts, as the loop of the trainer uses it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from resilient_jax.checkpoint.part_plan import StoredState
from resilient_jax.pipeline.weight_digests import digest_weights
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.trainer.arrangement import Arrangement
from resilient_jax.trainer.fit_result import TrainedModel, copy_to_numpy
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.parameter_ema import find_ema_params
from resilient_jax.trainer.pipelined_steps import PipelinedSteps
from resilient_jax.trainer.state_layout import StateLayout, SumMicrobatches
from resilient_jax.trainer.train_step import TrainStep
from resilient_jax.trainer.training_state import StepSummary, TrainingState, Tree, read_learning_rate
from resilient_jax.trainer.unit_states import PipelinedState
from resilient_jax.worker.world import World


class PipelinedLayout(StateLayout):
    """Every host has some of the model's units: its state is a `PipelinedState` where others have a `TrainingState`."""

    def __init__(self, world: World, arrangement: Arrangement, steps: PipelinedSteps) -> None:
        self._steps = steps
        self._units = steps.enter(world, arrangement.replica_shape)
        super().__init__(world, self._units, arrangement)

    def restore(
        self, init: Callable[[], TrainingState], load: Callable[[ShardingRule], TrainingState | None]
    ) -> PipelinedState:
        """Return the state to continue from; of the whole model no host makes or reads more than it needs."""
        return self._steps.restore(self._units, init, load)

    def gather(self, tree: Tree) -> Tree:
        """Refuse: what is gathered is the whole state."""
        raise NotImplementedError

    def describe_stored(self, state: PipelinedState) -> StoredState:
        """Return the state of the whole model, of which the units are parts."""
        return self._units.describe_stored(state, self._steps.abstract_state)

    def gather_variables(self, state: PipelinedState, *, use_ema: bool = False) -> Variables:
        """Refuse: an evaluation runs by stage."""
        raise NotImplementedError

    def gather_result(self, state: PipelinedState) -> TrainedModel:
        """Return the digest of the parameters; and the model in this host's memory, if that was asked for."""
        world = self.world
        placement, mail = self._steps.find_stage()
        with worker_activity.task(WorkerTask.SUM):  # a wait for other hosts
            digest = digest_weights(mail, world.host, tuple(sorted(world.hosts)), placement.read_held(state))
        if self._steps.options.gather_result:
            found = self._steps.gather_state(state)
            ema_params = find_ema_params(found.opt_state)
            return TrainedModel(copy_to_numpy(found.variables), copy_to_numpy(ema_params), digest)
        # A barrier: no host leaves before all have what it sent.
        world.all_reduce(np.zeros(1, np.int32))
        return TrainedModel(None, None, digest)

    def read_learning_rate(self, state: PipelinedState) -> dict[str, float]:
        """Return the metric of a unit of this host: all units have the same."""
        return read_learning_rate(self._units.read_held(state))

    def step(
        self,
        programs: TrainStep,
        state: PipelinedState,
        step: int,
        sum_microbatches: SumMicrobatches,
    ) -> tuple[PipelinedState, dict[str, float]]:
        """Return the next state and the metrics."""
        return self._steps.step(state, step)

    def shard(self, tree: Tree) -> Tree:
        """Return leaves as arrays that every host has."""
        return jax.tree.map(self._units.replicate, tree)

    def shard_sums(self, sums: tuple[Any, Any], summary: StepSummary) -> tuple[tuple[Any, Any], StepSummary]:
        """Refuse: a pipeline sums by block."""
        raise NotImplementedError

    def update(
        self, programs: TrainStep, state: TrainingState, sums: tuple[Any, Any], summary: StepSummary
    ) -> TrainingState:
        """Refuse: a pipeline updates by unit."""
        raise NotImplementedError
