"""The evaluations of one `fit`."""

import abc

from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.step.assignment import AccumulationOptions
from resilient_jax.trainer.accumulation import make_abstract, make_microbatch_function
from resilient_jax.trainer.evaluation import EvaluationProgram, compute_metrics
from resilient_jax.trainer.fit_config import FitConfig, ReadOptions
from resilient_jax.trainer.state_layout import StateLayout
from resilient_jax.trainer.train_step import EVALUATION_STEP, TrainStep
from resilient_jax.trainer.training_state import State


class Evaluator(abc.ABC):
    """Runs the evaluation, with its own data and programs."""

    def __init__(self, config: FitConfig) -> None:
        assert config.evaluation is not None
        self._evaluation, self._num_steps = config.evaluation, config.num_steps
        self._microbatch_size = config.evaluation.microbatch_size or config.microbatch_size
        self._num_microbatches = config.evaluation.count_microbatches(self._microbatch_size)
        self._source = config.evaluation.make_data(self._microbatch_size, config.recipe.seed)
        self._example = make_abstract(self._source.batch(0, 0))

    def _start_reading(self, options: ReadOptions) -> None:
        """Start the threads of the prefetcher: last, so that no thread is left of an evaluation that is refused."""
        self._data = Prefetcher(
            self._source, buffer_size=options.prefetch_buffer_size, num_threads=options.num_threads
        )

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate when `step` steps are committed."""
        return self._evaluation.is_due(step, self._num_steps)

    @abc.abstractmethod
    def evaluate(self, layout: StateLayout, state: State) -> dict[str, float]:
        """Return the mean of each metric over all microbatches; in a rehearsal zeros. Every host must call this.

        Raises:
            PeerUnreachable: a host is lost, or late; in the next generation the evaluation is made anew.
        """

    def close(self) -> None:
        """End the threads of the prefetcher."""
        self._data.close()


class ReplicaEvaluator(Evaluator):
    """Runs the evaluation on replicas that each have all variables."""

    def __init__(self, config: FitConfig, programs: TrainStep) -> None:
        super().__init__(config)
        self._parallelism, variables = config.parallelism, programs.abstract_state.variables
        self._program = EvaluationProgram(config.recipe, config.evaluation_loss, variables, self._example)
        self._start_reading(config.read_options)

    def evaluate(self, layout: StateLayout, state: State) -> dict[str, float]:
        """Return the mean of each metric; see `Evaluator.evaluate`."""
        variables = layout.gather_variables(state, use_ema=self._evaluation.use_ema)
        placement = layout.arrangement.placement
        sums = layout.world.accumulate_microbatches(
            self._num_microbatches,
            make_microbatch_function(
                self._program.compute, variables, placement, self._example, key_step=EVALUATION_STEP
            ),
            layout.make_zeros(self._program.abstract_sums),
            data=self._data,
            options=AccumulationOptions(
                reduction=self._parallelism.reduction, replica_shape=layout.arrangement.replica_shape
            ),
            name="evaluate",
        )
        return compute_metrics(sums, self._num_microbatches)
