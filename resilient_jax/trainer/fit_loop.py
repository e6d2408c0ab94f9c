"""The loop of the trainer: what is done in every generation, and what outlives generations.

Rules:
- No array is kept from one generation to the next, except by the world, which keeps the committed state.
- No decision depends on information of one host alone: every host makes the same collective calls in the same order.
  Whether to stop is agreed on at the beginning of a generation.
- The programs are traced once per process; the data, the log and the progress bar last as long as `fit`.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.errors import CallerError, CheckpointFailed, InternalError
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.state.state_placement import place_initial_state
from resilient_jax.step.assignment import AccumulationOptions
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.trainer.accumulation import make_abstract, make_microbatch_function
from resilient_jax.trainer.arrangement import Arrangement
from resilient_jax.trainer.arranger import Arranger
from resilient_jax.trainer.checkpointer import Checkpointer
from resilient_jax.trainer.evaluator import Evaluator, ReplicaEvaluator
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.fit_result import FitResult
from resilient_jax.trainer.host_checks import (
    check_batch_size,
    check_initial_variables_agree,
    check_microbatch_size,
    require_equal_devices,
)
from resilient_jax.trainer.initial_variables import match_variables
from resilient_jax.trainer.mesh_layout import MeshLayout
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.nonfinite import handle_nonfinite
from resilient_jax.trainer.pipeline_options import Pipeline
from resilient_jax.trainer.pipelined_evaluator import PipelinedEvaluator
from resilient_jax.trainer.pipelined_layout import PipelinedLayout
from resilient_jax.trainer.pipelined_steps import PipelinedSteps
from resilient_jax.trainer.progress_bar import ProgressBar, ProgressLines
from resilient_jax.trainer.speculative_compilation import SpeculativeCompiler
from resilient_jax.trainer.stage_axes import explain_equal_axes
from resilient_jax.trainer.state_layout import (
    MeshShape,
    StateLayout,
    SumMicrobatches,
    make_state_layout,
)
from resilient_jax.trainer.step_report import JsonLog, ReportedEvaluations, StepReport, wants_to_stop
from resilient_jax.trainer.train_step import TrainStep
from resilient_jax.trainer.training_state import (
    MicrobatchSums,
    State,
    StepSummary,
    TrainingState,
)
from resilient_jax.worker.observers import PRECOMPILE_DELAY_S
from resilient_jax.worker.training_control import CorruptionFound
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitGeneration:
    """What computes the steps of one generation.

    Attributes:
        compiler: compiler of programs of likely next worlds; None: without a planner.
    """

    layout: StateLayout
    programs: TrainStep
    sum_microbatches: SumMicrobatches
    compiler: SpeculativeCompiler | None = None

    @property
    def world(self) -> World:
        """The world of the generation."""
        return self.layout.world

    def step(self, state: State, step: int) -> tuple[State, dict[str, float]]:
        """Return the next state and the metrics; nothing is committed."""
        return self.layout.step(self.programs, state, step, self.sum_microbatches)

    def end_step(self, number: int, seconds: float) -> None:
        """Note that the step of this number in the generation, from 0, took so long. A rehearsal has no next world."""
        if self.compiler is not None and not self.world.is_rehearsal:
            self.compiler.end_step(self.world, self.layout.arrangement, number, seconds)


class FitLoop:
    """One `fit`: `run_generation` is called in every generation; all other state outlives generations.

    Or the parts of it, for a loop of the user's: `open_generation`, `evaluate`, `save`, `finish`.
    """

    def __init__(self, config: FitConfig, progress: ProgressBar | ProgressLines | None) -> None:
        self._config = config
        self._progress = progress
        self._log: JsonLog | None = None
        self._data: Prefetcher | None = None
        self._programs: TrainStep | None = None
        self._arranger = Arranger(config)
        self._compiler: SpeculativeCompiler | None = None
        self._compiled_meshes: set[MeshShape] = set()
        """Those for which the programs of a sharded state are in the compilation cache."""
        self._evaluator: Evaluator | None = None
        self._pipeline: PipelinedSteps | None = None
        self._checkpointer = (
            Checkpointer(config.checkpoints, config.num_steps) if config.checkpoints is not None else None
        )
        self._metrics: dict[str, float] = {}
        self._reported = ReportedEvaluations()
        self._stop: tuple[int, str] | None = None
        """The step after which to stop, and the reason; None: continue."""
        self.result: FitResult | None = None

    def close(self) -> None:
        """End the threads and close the files."""
        for closable in (
            self._pipeline,
            self._data,
            self._evaluator,
            self._checkpointer,
            self._log,
            self._progress,
        ):
            if closable is not None:
                closable.close()

    def run_generation(self, world: World) -> None:
        """Train from the last committed step to the last one, on the live hosts."""
        self.run_own(world, lambda: self._train(world))

    def run_own(self, world: World, train: Callable[[], None]) -> None:
        """Run the loop of one generation; checkpoints of steps that a host has computed wrongly are set aside."""
        try:
            train()
        except CorruptionFound as found:
            if self._checkpointer is not None:
                self._checkpointer.distrust_after(world, found.trusted_step)
            raise
        finally:
            if self._compiler is not None:
                self._compiler.leave_world()

    def _train(self, world: World) -> None:
        config = self._config
        generation, state = self.open_generation(world)
        if not self._is_stopped(world, generation.layout.read_step(state)):
            # One more than there are steps: the last evaluation is made in it, and it commits nothing.
            num_steps = config.num_steps + (config.evaluation is not None)
            for number, step in enumerate(world.steps(num_steps, num_commits=config.num_steps)):
                if number == 1:
                    self.compile_ahead(generation)
                state = self._evaluate(generation, state, step)
                if step >= config.num_steps or self._stop is not None:
                    break
                began_s = time.monotonic()
                state = self._step(generation, state, step)
                generation.end_step(number, time.monotonic() - began_s)
                if self._stop is not None:
                    break
        if world.is_rehearsal:
            return  # its state is no trained one, and must not be saved
        self.result = self.finish(generation, state)

    # The parts of a generation.

    def open_generation(self, world: World) -> tuple[FitGeneration, State]:
        """Return what computes the steps of a generation, and the state to go on from."""
        if self._programs is not None:
            require_equal_devices(world, self._arranger.why_equal_stages, is_first=False)
        programs = self._open(world)
        arrangement = self._arranger.arrange(world, programs.abstract_state.variables)
        check_microbatch_size(world, self._config, arrangement.replica_shape)
        layout = self._make_layout(world, arrangement, programs)
        state = layout.restore(programs.init, lambda placement: self._load(layout, programs, placement))
        generation = FitGeneration(
            layout=layout,
            programs=programs,
            sum_microbatches=self._make_sum(layout, programs),
            compiler=self._compiler,
        )
        if self._compiler is not None and world.step_services.is_joining:
            self._compiler.prepare_join(world, arrangement)
        return generation, state

    def compile_ahead(self, generation: FitGeneration) -> None:
        """Compile on a thread what fewer hosts, or more, would need of the state's layout.

        After the first step of a generation: behind the reductions, which `World` has enqueued. These are smaller, and
        needed first.
        """
        jobs = generation.layout.list_jobs(generation.programs, self._compiled_meshes)
        generation.world.step_services.compile_ahead(jobs, PRECOMPILE_DELAY_S)

    def evaluate(self, generation: FitGeneration, state: State) -> dict[str, float]:
        """Return the metrics of an evaluation. Every host must call this.

        Raises:
            CallerError: the trainer has no evaluation.
        """
        if self._evaluator is None:
            raise CallerError(
                "evaluate: found a trainer without an evaluation, expected rj.Trainer(evaluation=rj.Evaluation(...))"
            )
        with worker_activity.task(WorkerTask.EVALUATION):
            return self._evaluator.evaluate(generation.layout, state)

    def save(self, generation: FitGeneration, state: State, step: int) -> None:
        """Take a snapshot of the state after `step` steps, which is committed, and start a checkpoint if one is due."""
        generation.layout.snapshot(state)
        if self._checkpointer is not None:
            with worker_activity.task(WorkerTask.CHECKPOINT):
                self._checkpointer.save(generation.layout, state, step)

    def finish(self, generation: FitGeneration, state: State) -> FitResult:
        """Return the result of the last state; with checkpoints when it is on storage. Every host must call this.

        Raises:
            CheckpointFailed: the checkpoint is not on storage, and no host has all of the model in memory.
        """
        trained = generation.layout.gather_result(state)  # first: storage that fails must not cost the model
        failure = ""
        if self._checkpointer is not None:
            with worker_activity.task(WorkerTask.CHECKPOINT):
                failure = self._checkpointer.ensure_final_saved(generation.layout, state)
        if failure and trained.variables is None:
            raise CheckpointFailed(failure)
        if failure:
            logger.error("the trained model is not on storage, but only in the result of `fit`: %s", failure)
        checkpoints = self._config.checkpoints if not failure else None
        return FitResult(
            step=generation.layout.read_step(state),
            metrics=dict(self._metrics),
            trained=trained,
            adapter=self._config.recipe.model,
            stop_reason=self._stop[1] if self._stop is not None else None,
            host_index=generation.world.host_index,
            checkpoint_directory=checkpoints.directory if checkpoints is not None else None,
            checkpoint_failure=failure,
        )

    # Start of a generation.

    def _make_layout(self, world: World, arrangement: Arrangement, programs: TrainStep) -> StateLayout:
        if self._pipeline is not None:
            return PipelinedLayout(world, arrangement, self._pipeline)
        if arrangement.spans_hosts:
            return MeshLayout(world, arrangement)
        return make_state_layout(world, self._config.parallelism.state, arrangement, programs)

    def _open(self, world: World) -> TrainStep:
        """Return the programs; in the first generation, the first with devices, make all that outlives it."""
        if self._programs is not None:
            return self._programs
        config = self._config
        example = make_abstract(config.data.batch(0, 0))
        # The plan of a pipeline stays the same, whichever hosts are left.
        searcher = self._arranger.plan_searcher if config.parallelism.pipeline is None else None
        is_mesh_free = searcher is not None and searcher.allows_axes_by_host
        programs = TrainStep(dataclasses.replace(config.recipe, is_mesh_free=is_mesh_free), example)
        if config.parallelism.pipeline is not None:
            # First, because it may end the generation: what is made after it outlives that.
            _require_devices(self._arranger, world, config.parallelism.pipeline, programs)
        self._data = Prefetcher(
            config.data,
            buffer_size=config.read_options.prefetch_buffer_size,
            num_threads=config.read_options.num_threads,
        )
        if config.parallelism.pipeline is not None:
            axes = self._arranger.fit_own_axes(world)
            self._pipeline = PipelinedSteps(
                config, programs, self._data, axes, world.local_devices, self._arranger.why_equal_stages
            )
        is_in_shards = config.parallelism.axes is not None or (searcher is not None and searcher.spans_hosts)
        _warn_of_lost_model(world, config, is_in_shards=is_in_shards)
        if config.evaluation is not None:
            pipeline = self._pipeline
            self._evaluator = (
                ReplicaEvaluator(config, programs)
                if pipeline is None
                else PipelinedEvaluator(config, programs, pipeline)
            )
        if config.log_directory is not None and world.replay is None:
            self._log = JsonLog(config.log_directory, world.host)
        if world.host_index == 0 and jax.tree.leaves(programs.abstract_state.variables.batch_stats):
            logger.warning(
                "the model keeps statistics over the examples of a batch (batch normalization). Every microbatch of %d "
                "examples is normalized separately, and the running statistics are the mean over the %d microbatches "
                "of a step. So the weights do not depend on the hosts, but they do depend on the microbatch size: the "
                "result is not that of one batch of all examples",
                config.microbatch_size,
                config.recipe.num_microbatches,
            )
        self._programs = programs
        if searcher is not None:
            searcher.forbid_axes_by_host(programs.why_mesh_bound)
        if searcher is not None:
            self._compiler = SpeculativeCompiler(searcher, config, programs, example)
        return programs

    def find_newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint on storage. Thread-safe."""
        return self._checkpointer.find_newest() if self._checkpointer is not None else None

    def _load(
        self, layout: StateLayout, programs: TrainStep, placement: ShardingRule
    ) -> TrainingState | None:
        """Return the state from storage, where none is committed; None without a checkpoint or given variables."""
        world, load_variables = layout.world, self._config.initial_variables
        check_batch_size(world, self._config, layout.arrangement.replica_shape)
        if self._checkpointer is not None:
            with worker_activity.task(WorkerTask.RESTORE):
                found = self._checkpointer.restore(layout, layout.ravel(programs.abstract_state), placement)
            if found is not None:
                step, state = found
                world.resume_at(step)
                return state
        if load_variables is None:
            return None
        given = match_variables(programs.abstract_state.variables, load_variables())
        check_initial_variables_agree(world, given)
        return place_initial_state(layout.ravel(programs.init(given)), placement)

    def _is_stopped(self, world: World, step: int) -> bool:
        """Return whether some host stopped training at this step; its callback may not be called again."""
        if world.is_repetition:
            return False  # others have made the step that it finishes
        mine = self._stop is not None and self._stop[0] == step
        num_stopped = int(world.all_reduce(np.array([mine], np.int32))[0])
        if not num_stopped:
            self._stop = None  # the request was for a step that has been lost since
        elif not mine:
            self._stop = (step, "another host stopped training")
        return bool(num_stopped)

    # One step.

    def _evaluate(self, generation: FitGeneration, state: State, step: int) -> State:
        """Evaluate if an evaluation is due; return the state with the new state of early stopping."""
        config, evaluator, layout = self._config, self._evaluator, generation.layout
        if evaluator is None or layout.world.is_rehearsal or not evaluator.is_due(step):
            return state
        started_s = time.monotonic()
        is_reported = layout.world.is_repetition or self._reported.was_reported(layout.world, step)
        metrics = self.evaluate(generation, state)
        if config.early_stopping is not None:
            early_stopping, is_over, reason = config.early_stopping.update(
                layout.read_early_stopping(state), metrics
            )
            state = state._replace(
                early_stopping=layout.shard(jax.device_put(early_stopping, layout.local_sharding))
            )
            # After the last step training ends anyway, and for another reason.
            if is_over and step < config.num_steps:
                self._stop = (step, f"early stop: {reason}")
        self._reported.note(step)
        if is_reported:
            self._metrics.update(metrics)
        else:
            self._report(layout, state, metrics, started_s, is_evaluation=True)
        return state

    def _step(self, generation: FitGeneration, state: State, step: int) -> State:
        started_s = time.monotonic()
        world = generation.world
        state, metrics = generation.step(state, step)
        committed = {**self._metrics, **metrics}
        metrics = {**generation.layout.read_learning_rate(state), **metrics}
        report = functools.partial(
            self._report, generation.layout, state, metrics, started_s, is_evaluation=False
        )
        if world.is_repetition:
            report()  # others have committed the step, and the commit here ends this call
        world.commit(state, **committed)
        # Before the snapshot, in which a change of hosts may end this generation: the step would go unreported.
        report()
        # After the commit: snapshots and checkpoints are of committed states only.
        self.save(generation, state, step + 1)
        return state

    def _make_sum(self, layout: StateLayout, programs: TrainStep) -> SumMicrobatches:
        """Return the function that sums up the microbatches of a step; a pipeline never calls it."""
        if self._pipeline is not None:
            return _refuse_sum
        zeros = layout.make_zeros(programs.abstract_sums)
        return functools.partial(self._sum, layout, programs, zeros)

    def _sum(
        self,
        layout: StateLayout,
        programs: TrainStep,
        zeros: MicrobatchSums,
        variables: Variables,
        step: int,
    ) -> tuple[tuple[Any, Any], StepSummary, dict[str, float]]:
        """Return ((gradients, collections), summary) of all microbatches, placed as the state is, and the metrics.

        Raises:
            NonFiniteError: a microbatch is not finite, and the policy is to stop.
        """
        config, parallelism, world = self._config, self._config.parallelism, layout.world
        accumulated = world.accumulate_microbatches(
            config.recipe.num_microbatches,
            make_microbatch_function(
                programs.compute,
                layout.gather(variables),
                layout.arrangement.placement,
                programs.example,
                update=programs.update_description,
            ),
            zeros,
            data=self._data,
            options=AccumulationOptions(
                reduction=parallelism.reduction,
                replica_shape=layout.arrangement.replica_shape,
                balance_by_speed=parallelism.balance_by_speed,
            ),
        )
        handle_nonfinite(
            world, config.recipe, step, np.flatnonzero(np.asarray(accumulated.non_finite)).tolist()
        )
        summary, found = layout.summarize(programs, accumulated)
        sums, summary = layout.shard_sums((accumulated.gradients, accumulated.collections), summary)
        return sums, summary, {name: float(value) for name, value in jax.device_get(found).items()}

    def _report(
        self,
        layout: StateLayout,
        state: State,
        metrics: dict[str, float],
        started_s: float,
        *,
        is_evaluation: bool,
    ) -> None:
        """Report to callbacks, log and progress bar."""
        world = layout.world
        self._metrics.update(metrics)
        report = StepReport(
            step=layout.read_step(state),
            state=state,
            metrics=metrics,
            duration_s=time.monotonic() - started_s,
            host_index=world.host_index,
            generation=world.generation,
            is_evaluation=is_evaluation,
        )
        if self._log is not None:
            self._log.write(report)
        if self._progress is not None:
            self._progress.show(report)
        for callback in self._config.callbacks if world.replay is None else ():
            if wants_to_stop(callback, report) and self._stop is None:
                self._stop = (report.step, f"a callback returned True after step {report.step}")


def _refuse_sum(_: Variables, step: int) -> NoReturn:
    raise InternalError(f"step {step}: the sums of a pipeline are made by block")


def _require_devices(arranger: Arranger, world: World, options: Pipeline, programs: TrainStep) -> None:
    """Let a pipeline's first generation go on if all hosts have as many devices, where they must."""
    arranger.why_equal_stages = explain_equal_axes(options, programs.why_mesh_bound)
    if options.axes_by_host and arranger.why_equal_stages and world.host_index == 0:
        logger.warning(
            "found axes_by_host=True, but all hosts must have as many devices: %s", arranger.why_equal_stages
        )
    require_equal_devices(world, arranger.why_equal_stages, is_first=True)


def _warn_of_lost_model(world: World, config: FitConfig, *, is_in_shards: bool) -> None:
    pipeline = config.parallelism.pipeline
    is_lost = is_in_shards or (pipeline is not None and not pipeline.gather_result)
    if world.host_index == 0 and is_lost and config.checkpoints is None:
        logger.warning(
            "found a job without checkpoints of which no host has the whole model: when training ends, the model is "
            "lost. To keep it use Trainer(checkpoints=rj.Checkpoints(...)), or Pipeline(gather_result=True) if that of "
            "a pipeline fits the memory of each host"
        )
