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
from resilient_jax.trainer.accumulation import abstract_of, make_adder
from resilient_jax.trainer.arrangement import Arranger
from resilient_jax.trainer.checkpointer import Saving
from resilient_jax.trainer.evaluator import Evaluator
from resilient_jax.trainer.fit_config import Order
from resilient_jax.trainer.fit_result import FitResult, to_host_memory
from resilient_jax.trainer.host_checks import check_devices, check_replicas
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.nonfinite import judge
from resilient_jax.trainer.progress_bar import ProgressBar
from resilient_jax.trainer.speculative_compilation import Forecast
from resilient_jax.trainer.state_layout import Keeping, keep_state
from resilient_jax.trainer.step_programs import Programs, zeros_like
from resilient_jax.trainer.step_report import JsonLog, StepReport
from resilient_jax.trainer.training_state import Measures, Patience, Total, TrainingState
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)


class Fitting:
    """One `fit`: `train` is called in every generation; the rest outlives them."""

    def __init__(self, order: Order, bar: ProgressBar | None) -> None:
        self._order = order
        self._bar = bar
        self._log: JsonLog | None = None
        self._data: Prefetcher | None = None
        self._programs: Programs | None = None
        self._arranger = Arranger(order)
        self._forecast: Forecast | None = None
        self._evaluator: Evaluator | None = None
        self._saving = Saving(order.checkpoints, order.steps) if order.checkpoints is not None else None
        self._metrics: dict[str, float] = {}
        self._stop: tuple[int, str] | None = None
        """After which step this host was told to stop, and why."""
        self.result: FitResult | None = None

    def close(self) -> None:
        """Ends the threads and closes the files."""
        for closable in (self._data, self._evaluator, self._saving, self._log, self._bar):
            if closable is not None:
                closable.close()

    def train(self, world: World) -> None:
        """Trains from the last committed step to the last one, with the hosts that are there now."""
        order = self._order
        programs = self._open(world)
        arrangement = self._arranger.arrange(world, programs.abstract_state.variables.params)
        check_devices(world, order, arrangement.shape)
        keeping = keep_state(world, order.sharing.state, arrangement)
        state = keeping.restore(programs.init, lambda placement: self._load(keeping, programs, placement))
        zeros = zeros_like(programs.abstract_total, arrangement.placement)
        is_ahead = False
        if not self._is_stopped(world, int(state.step)):
            for step in world.steps(order.steps + (order.evaluation is not None)):
                state = self._evaluate(keeping, state, step)
                if step >= order.steps or self._stop is not None:
                    break
                state = self._step(keeping, programs, state, step, zeros)
                if self._forecast is not None and not is_ahead:
                    world.compile_ahead(self._forecast.jobs(world, arrangement))
                    is_ahead = True
                if self._stop is not None:
                    break
        if self._saving is not None:
            self._saving.finish(keeping, state)
        self.result = FitResult(
            step=int(state.step),
            metrics=dict(self._metrics),
            variables=to_host_memory(keeping.gather(state.variables)),
            stopped_because=self._stop[1] if self._stop is not None else None,
            host_index=world.host_index,
        )

    # Beginning.

    def _open(self, world: World) -> Programs:
        """What lives as long as this process; made in its first generation, for there was no device before."""
        if self._programs is not None:
            return self._programs
        order = self._order
        example = abstract_of(order.data.batch(0, 0))
        programs = Programs(order.recipe, example)
        if order.evaluation is not None:
            self._evaluator = Evaluator(order, programs)
        self._data = Prefetcher(order.data, ahead=order.reading.ahead, threads=order.reading.threads)
        if order.log is not None:
            self._log = JsonLog(order.log, world.host)
        if world.host_index == 0 and jax.tree.leaves(programs.abstract_state.variables.statistics):
            logger.warning(
                "the model keeps statistics over the examples of a batch (batch normalisation). Every microbatch of %d "
                "examples is normalised by itself, and the statistics that are kept are the mean over the %d of a "
                "step. So the weights do not depend on who computed what, but they do depend on the microbatch size: "
                "this is not the same as one batch of all examples",
                order.microbatch_size,
                order.recipe.microbatches,
            )
        self._programs = programs
        planner = self._arranger.planner
        if planner is not None and order.planning is not None and order.planning.compile_ahead:
            self._forecast = Forecast(planner, order, programs, example)
        return programs

    def find_checkpoint(self) -> int | None:
        """The step of the newest checkpoint on storage. May be called on any thread."""
        return self._saving.find_newest() if self._saving is not None else None

    def _load(self, keeping: Keeping, programs: Programs, placement: Placement) -> TrainingState | None:
        """The state where nothing is committed, from storage; None: the job begins."""
        world = keeping.world
        check_replicas(world, self._order, keeping.arrangement.shape)
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
        told = int(world.agree(np.array([mine], np.int32))[0])
        if not told:
            self._stop = None  # of a step that was lost again
        elif not mine:
            self._stop = (step, "another host was told to stop")
        return bool(told)

    # One step.

    def _evaluate(self, keeping: Keeping, state: TrainingState, step: int) -> TrainingState:
        """Evaluates if it is time; gives the state with what early stopping remembers now."""
        order, evaluator = self._order, self._evaluator
        if evaluator is None or not evaluator.is_due(step):
            return state
        started_s = time.monotonic()
        metrics = evaluator.evaluate(
            keeping.world,
            keeping.gather(state.variables),
            keeping.arrangement.placement,
            keeping.arrangement.shape,
        )
        if order.early_stop is not None:
            assert isinstance(state.patience, Patience), "it is made together with early_stop"
            patience, stops, reason = order.early_stop.judge(jax.device_get(state.patience), metrics)
            state = state._replace(patience=keeping.cut(jax.device_put(patience, keeping.local)))
            if stops and step < order.steps:
                self._stop = (step, f"early stop: {reason}")
        self._report(keeping.world, state, metrics, started_s, is_evaluation=True)
        return state

    def _step(
        self, keeping: Keeping, programs: Programs, state: TrainingState, step: int, zeros: Total
    ) -> TrainingState:
        started_s = time.monotonic()
        world = keeping.world
        sums, measures, metrics = self._sum(keeping, programs, state.variables, zeros, step)
        state = keeping.update(programs, state, sums, measures)
        del sums  # complete, or pieces of it: nothing of a step is to be held with the next state
        world.commit(state, **{**self._metrics, **metrics})
        keeping.protect(state)
        if self._saving is not None:
            self._saving.save(keeping, state, step + 1)
        self._report(world, state, metrics, started_s, is_evaluation=False)
        return state

    def _sum(
        self, keeping: Keeping, programs: Programs, variables: Variables, zeros: Total, step: int
    ) -> tuple[tuple[Any, Any], Measures, dict[str, float]]:
        """(gradients and statistics, measures) of all microbatches, as they lie in a state, and the metrics.

        Raises:
            NonFiniteError: a microbatch is not finite, and the policy is to stop.
        """
        order, sharing, world = self._order, self._order.sharing, keeping.world
        total = world.accumulate_microbatches(
            order.recipe.microbatches,
            make_adder(programs.accumulate, keeping.gather(variables), keeping.arrangement.placement),
            zeros,
            data=self._data,
            unit_size=sharing.unit,
            reproducible=sharing.reproducible,
            replica_shape=keeping.arrangement.shape,
            balance_by_speed=sharing.by_speed,
        )
        judge(world, order.recipe, step, np.flatnonzero(np.asarray(total.bad)).tolist())
        measures, found = programs.measure(total)
        sums, measures = keeping.cut(((total.gradients, total.statistics), measures))
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
            seconds=time.monotonic() - started_s,
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
