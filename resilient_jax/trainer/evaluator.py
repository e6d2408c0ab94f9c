"""Makes the evaluations of one `fit`."""

from resilient_jax.data.prefetcher import Prefetcher
from resilient_jax.sharding.placements import Placement
from resilient_jax.step.assignment import ReplicaShape
from resilient_jax.trainer.accumulation import abstract_of, make_adder
from resilient_jax.trainer.evaluation import EvaluationProgram, read_metrics
from resilient_jax.trainer.fit_config import Order
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.step_programs import EVALUATION, Programs, zeros_like
from resilient_jax.worker.world import World


class Evaluator:
    """Evaluates; owns the evaluation's data and program."""

    def __init__(self, order: Order, programs: Programs) -> None:
        assert order.evaluation is not None
        evaluation, recipe = order.evaluation, order.recipe
        size = evaluation.microbatch_size or order.microbatch_size
        data = evaluation.microbatches_of(size, recipe.seed)
        self._evaluation, self._steps, self._sharing = evaluation, order.steps, order.sharing
        self._microbatches = evaluation.count_microbatches(size)
        self._program = EvaluationProgram(
            recipe.model,
            order.evaluation_loss,
            recipe.numerics,
            recipe.seed,
            programs.abstract_state.variables,
            abstract_of(data.batch(0, 0)),
        )
        self._data = Prefetcher(data, ahead=order.reading.ahead, threads=order.reading.threads)

    def is_due(self, step: int) -> bool:
        """Whether to evaluate when `step` steps are committed."""
        return self._evaluation.is_due(step, self._steps)

    def evaluate(
        self, world: World, variables: Variables, placement: Placement, replicas: ReplicaShape
    ) -> dict[str, float]:
        """The means over all microbatches."""
        total = world.accumulate_microbatches(
            self._microbatches,
            make_adder(self._program.accumulate, variables, placement, as_step=EVALUATION),
            zeros_like(self._program.abstract_total, placement),
            data=self._data,
            unit_size=self._sharing.unit,
            reproducible=self._sharing.reproducible,
            replica_shape=replicas,
            name="evaluate",
        )
        return read_metrics(total, self._microbatches)

    def close(self) -> None:
        """Ends the threads that read."""
        self._data.close()
