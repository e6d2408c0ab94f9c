"""The evaluations of one `fit`."""

from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.step.assignment import AccumulationOptions
from resilient_jax.trainer.accumulation import make_abstract, make_microbatch_function
from resilient_jax.trainer.evaluation import EvaluationProgram, compute_metrics
from resilient_jax.trainer.fit_config import FitConfig
from resilient_jax.trainer.state_layout import StateLayout
from resilient_jax.trainer.train_step import EVALUATION_STEP, TrainStep
from resilient_jax.trainer.training_state import State


class Evaluator:
    """Runs the evaluation, with its own data and program, on hosts that each have all variables."""

    def __init__(self, config: FitConfig, programs: TrainStep) -> None:
        assert config.evaluation is not None
        evaluation, recipe = config.evaluation, config.recipe
        size = evaluation.microbatch_size or config.microbatch_size
        data = evaluation.make_data(size, recipe.seed)
        self._evaluation, self._num_steps, self._parallelism = (
            evaluation,
            config.num_steps,
            config.parallelism,
        )
        self._num_microbatches = evaluation.count_microbatches(size)
        self._example = make_abstract(data.batch(0, 0))
        self._program = EvaluationProgram(
            recipe.model,
            config.evaluation_loss,
            recipe.numerics,
            recipe.seed,
            programs.abstract_state.variables,
            self._example,
            recipe.axis_names,
        )
        self._data = Prefetcher(
            data,
            buffer_size=config.read_options.prefetch_buffer_size,
            num_threads=config.read_options.num_threads,
        )

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate when `step` steps are committed."""
        return self._evaluation.is_due(step, self._num_steps)

    def evaluate(self, layout: StateLayout, state: State) -> dict[str, float]:
        """Return the mean of each metric over all microbatches. Every host must call this."""
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
                reduction=self._parallelism.reduction,
                replica_shape=layout.arrangement.replica_shape,
            ),
            name="evaluate",
        )
        return compute_metrics(sums, self._num_microbatches)

    def close(self) -> None:
        """End the threads of the prefetcher."""
        self._data.close()
