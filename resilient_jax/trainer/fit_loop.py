"""The loop of the trainer: what is done in every generation, and what it remembers between them.

Rules:
- No array is kept from one generation to the next, except by the world, which holds the committed state.
- Nothing is decided from what only this host knows, except to say it: every host makes the same collective calls in the
  same order. What a host remembers about stopping is agreed on at the beginning of a generation.
- The programs are traced once a process; the data, the log and the progress line live as long as `fit`.
"""

import logging
import time
from typing import Any

import jax
import numpy as np

from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.sharding.placements import Placement
from resilient_jax.step.assignment import AccumulationOptions
from resilient_jax.trainer.accumulation import make_abstract, make_microbatch_adder
from resilient_jax.trainer.arrangement import Arranger
from resilient_jax.trainer.checkpointer import Checkpointer
from resilient_jax.trainer.evaluator import Evaluator
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.fit_result import FitResult, copy_to_numpy
from resilient_jax.trainer.host_checks import check_batch_size, check_microbatch_size
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.nonfinite import handle_nonfinite
from resilient_jax.trainer.progress_bar import ProgressBar
from resilient_jax.trainer.speculative_compilation import SpeculativeCompiler
from resilient_jax.trainer.state_layout import StateLayout, make_state_layout
from resilient_jax.trainer.step_programs import StepPrograms, make_zeros
from resilient_jax.trainer.step_report import JsonLog, StepReport
from resilient_jax.trainer.training_state import (
    EarlyStoppingState,
    MicrobatchSums,
    StepSummary,
    TrainingState,
)
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)


class FitLoop:
    """One `fit`: `train` is called in every generation; the rest outlives them."""

    def __init__(self, config: FitConfig, progress_bar: ProgressBar | None) -> None:
        self._order = config
        self._bar = progress_bar
        self._log: JsonLog | None = None
        self._data: Prefetcher | None = None
        self._programs: StepPrograms | None = None
        self._arranger = Arranger(config)
        self._forecast: SpeculativeCompiler | None = None
        self._evaluator: Evaluator | None = None
        self._saving = (
            Checkpointer(config.checkpoints, config.num_steps) if config.checkpoints is not None else None
        )
        self._metrics: dict[str, float] = {}
        self._stop: tuple[int, str] | None = None
        """After which step this host was told to stop, and why."""
        self.result: FitResult | None = None

    def close(self) -> None:
        """Ends the threads and closes the files."""
        for closable in (self._data, self._evaluator, self._saving, self._log, self._bar):
            if closable is not None:
                closable.close()

    def run_generation(self, world: World) -> None:
        """Trains from the last committed step to the last one, with the hosts that are there now."""
        order = self._order
        programs = self._open(world)
        arrangement = self._arranger.arrange(world, programs.abstract_state.variables.params)
        check_microbatch_size(world, order, arrangement.replica_shape)
        keeping = make_state_layout(world, order.parallelism.state, arrangement)
        state = keeping.restore(programs.init, lambda placement: self._load(keeping, programs, placement))
        zeros = make_zeros(programs.abstract_sums, arrangement.placement)
        is_ahead = False
        if not self._is_stopped(world, int(state.step)):
            for step in world.steps(order.num_steps + (order.evaluation is not None)):
                state = self._evaluate(keeping, state, step)
                if step >= order.num_steps or self._stop is not None:
                    break
                state = self._step(keeping, programs, state, step, zeros)
                if self._forecast is not None and not is_ahead:
                    world.compile_ahead(self._forecast.list_jobs(world, arrangement))
                    is_ahead = True
                if self._stop is not None:
                    break
        if self._saving is not None:
            self._saving.ensure_final_saved(keeping, state)
        self.result = FitResult(
            step=int(state.step),
            metrics=dict(self._metrics),
            variables=copy_to_numpy(keeping.gather(state.variables)),
            stop_reason=self._stop[1] if self._stop is not None else None,
            host_index=world.host_index,
        )

    # Beginning.

    def _open(self, world: World) -> StepPrograms:
        """What lives as long as this process; made in its first generation, for there was no device before."""
        if self._programs is not None:
            return self._programs
        order = self._order
        example = make_abstract(order.data.batch(0, 0))
        programs = StepPrograms(order.recipe, example)
        if order.evaluation is not None:
            self._evaluator = Evaluator(order, programs)
        self._data = Prefetcher(
            order.data,
            buffer_size=order.read_options.prefetch_buffer_size,
            num_threads=order.read_options.num_threads,
        )
        if order.log_directory is not None:
            self._log = JsonLog(order.log_directory, world.host)
        if world.host_index == 0 and jax.tree.leaves(programs.abstract_state.variables.batch_stats):
            logger.warning(
                "the model keeps statistics over the examples of a batch (batch normalisation). Every microbatch of %d "
                "examples is normalised by itself, and the statistics that are kept are the mean over the %d of a "
                "step. So the weights do not depend on who computed what, but they do depend on the microbatch size: "
                "this is not the same as one batch of all examples",
                order.microbatch_size,
                order.recipe.num_microbatches,
            )
        self._programs = programs
        planner = self._arranger.plan_searcher
        if planner is not None and order.planner is not None and order.planner.compile_ahead:
            self._forecast = SpeculativeCompiler(planner, order, programs, example)
        return programs

    def find_newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint on storage. May be called on any thread."""
        return self._saving.find_newest() if self._saving is not None else None

    def _load(
        self, keeping: StateLayout, programs: StepPrograms, placement: Placement
    ) -> TrainingState | None:
        """The state where nothing is committed, from storage; None: the job begins."""
        world = keeping.world
        check_batch_size(world, self._order, keeping.arrangement.replica_shape)
        if self._saving is None:
            return None
        found = self._saving.restore(world, programs.abstract_state, placement)
        if found is None:
            return None
        step, state = found
        world.resume_at(step)
        return state

    def _is_stopped(self, world: World, step: int) -> bool:
        """Whether some host was told to stop here already: by a callback, which may not be called again."""
        mine = self._stop is not None and self._stop[0] == step
        told = int(world.all_reduce(np.array([mine], np.int32))[0])
        if not told:
            self._stop = None  # of a step that was lost again
        elif not mine:
            self._stop = (step, "another host was told to stop")
        return bool(told)

    # One step.

    def _evaluate(self, keeping: StateLayout, state: TrainingState, step: int) -> TrainingState:
        """Evaluates if it is time; gives the state with what early stopping remembers now."""
        order, evaluator = self._order, self._evaluator
        if evaluator is None or not evaluator.is_due(step):
            return state
        started_s = time.monotonic()
        metrics = evaluator.evaluate(
            keeping.world,
            keeping.gather(state.variables),
            keeping.arrangement.placement,
            keeping.arrangement.replica_shape,
        )
        if order.early_stopping is not None:
            assert isinstance(state.early_stopping, EarlyStoppingState), "it is made together with early_stop"
            patience, stops, reason = order.early_stopping.update(
                jax.device_get(state.early_stopping), metrics
            )
            state = state._replace(
                early_stopping=keeping.shard(jax.device_put(patience, keeping.local_sharding))
            )
            if stops and step < order.num_steps:
                self._stop = (step, f"early stop: {reason}")
        self._report(keeping.world, state, metrics, started_s, is_evaluation=True)
        return state

    def _step(
        self,
        keeping: StateLayout,
        programs: StepPrograms,
        state: TrainingState,
        step: int,
        zeros: MicrobatchSums,
    ) -> TrainingState:
        started_s = time.monotonic()
        world = keeping.world
        sums, measures, metrics = self._sum(keeping, programs, state.variables, zeros, step)
        state = keeping.update(programs, state, sums, measures)
        del sums  # complete, or pieces of it: nothing of a step is to be held with the next state
        world.commit(state, **{**self._metrics, **metrics})
        keeping.snapshot(state)
        if self._saving is not None:
            self._saving.save(keeping, state, step + 1)
        self._report(world, state, metrics, started_s, is_evaluation=False)
        return state

    def _sum(
        self,
        keeping: StateLayout,
        programs: StepPrograms,
        variables: Variables,
        zeros: MicrobatchSums,
        step: int,
    ) -> tuple[tuple[Any, Any], StepSummary, dict[str, float]]:
        """(gradients and statistics, measures) of all microbatches, as they lie in a state, and the metrics.

        Raises:
            NonFiniteError: a microbatch is not finite, and the policy is to stop.
        """
        order, sharing, world = self._order, self._order.parallelism, keeping.world
        total = world.accumulate_microbatches(
            order.recipe.num_microbatches,
            make_microbatch_adder(
                programs.accumulate, keeping.gather(variables), keeping.arrangement.placement
            ),
            zeros,
            data=self._data,
            options=AccumulationOptions(
                unit_size=sharing.unit_size,
                reproducible=sharing.reproducible,
                replica_shape=keeping.arrangement.replica_shape,
                balance_by_speed=sharing.balance_by_speed,
            ),
        )
        handle_nonfinite(world, order.recipe, step, np.flatnonzero(np.asarray(total.non_finite)).tolist())
        measures, found = programs.summarize(total)
        sums, measures = keeping.shard(((total.gradients, total.batch_stats), measures))
        return sums, measures, {name: float(value) for name, value in jax.device_get(found).items()}

    def _report(
        self,
        world: World,
        state: TrainingState,
        metrics: dict[str, float],
        started_s: float,
        *,
        is_evaluation: bool,
    ) -> None:
        """Tells callbacks, log and progress line."""
        self._metrics.update(metrics)
        report = StepReport(
            step=int(state.step),
            state=state,
            metrics=metrics,
            duration_s=time.monotonic() - started_s,
            host_index=world.host_index,
            generation=world.generation,
            is_evaluation=is_evaluation,
        )
        if self._log is not None:
            self._log.write(report)
        if self._bar is not None:
            self._bar.show(report)
        for callback in self._order.callbacks:
            if callback(report) is True and self._stop is None:
                self._stop = (report.step, f"a callback said so after step {report.step}")
