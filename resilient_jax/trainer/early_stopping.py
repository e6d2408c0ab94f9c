"""Early stopping: a pure function of its state and the new value of a metric."""

import dataclasses
import math

import numpy as np

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.errors import CallerError
from resilient_jax.trainer.training_state import EarlyStoppingState


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """When to stop before the last step.

    Its state is part of the training state, so it is the same after any failure, and after resuming.

    Attributes:
        metric: a metric of the evaluation, with the prefix `eval_`.
        patience: how many evaluations in a row may fail to improve on the best value.
        min_delta: the smallest improvement that counts.
        larger_is_better: False for a loss, True for an accuracy.

    Raises:
        CallerError: a value is impossible.
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    larger_is_better: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.patience < 1 or not self.min_delta >= 0:
            raise CallerError(
                f"early_stopping: found patience={self.patience}, min_delta={self.min_delta}, expected a patience of "
                "at least 1 and a min_delta of at least 0"
            )

    def make_initial_state(self) -> EarlyStoppingState:
        """Return the state before the first evaluation."""
        worst = -math.inf if self.larger_is_better else math.inf
        return EarlyStoppingState(np.array(worst, np.float32), np.array(0, np.int32))

    def update(
        self, state: EarlyStoppingState, metrics: dict[str, float]
    ) -> tuple[EarlyStoppingState, bool, str]:
        """Return (new state, whether to stop, reason). NaN improves on nothing.

        Raises:
            CallerError: the evaluation has no such metric.
        """
        if self.metric not in metrics:
            raise CallerError(
                f"early_stopping: found the metrics {', '.join(sorted(metrics))}, expected {self.metric!r} among them. "
                "Name one of these, or let the evaluation's loss return it"
            )
        value, best = metrics[self.metric], float(state.best_metric)
        sign = 1 if self.larger_is_better else -1
        if sign * value > sign * best + self.min_delta:
            found = EarlyStoppingState(np.array(value, np.float32), np.array(0, np.int32))
            return found, False, f"{self.metric} is the best so far"
        patience_count = int(state.patience_count) + 1
        reason = f"{self.metric} has not improved on {best:.6g} in {patience_count} evaluations"
        found = EarlyStoppingState(state.best_metric, np.array(patience_count, np.int32))
        return found, patience_count >= self.patience, reason
