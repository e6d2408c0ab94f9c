"""Stops when the evaluation gets no better. Pure: a function of what was remembered and the new value."""

import dataclasses
import math

import numpy as np

from resilient_jax.errors import CallerError
from resilient_jax.trainer.training_state import EarlyStoppingState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """When to stop before the last step.

    What it remembers is in the training state, so it is the same after any failure, and after a resume.

    Attributes:
        metric: of the evaluation, with "eval_" in front.
        patience: how many evaluations in a row may fail to better the best value.
        min_delta: by how much a value must be better to count.
        larger_is_better: False for a loss, True for an accuracy.

    Raises:
        CallerError: a value is impossible.
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    larger_is_better: bool = False

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            raise CallerError(
                f"early stop: found patience={self.patience}, min_delta={self.min_delta}, expected a patience of at "
                "least 1 and a min_delta of at least 0"
            )

    def make_initial_state(self) -> EarlyStoppingState:
        """Before the first evaluation."""
        worst = -math.inf if self.larger_is_better else math.inf
        return EarlyStoppingState(np.array(worst, np.float32), np.array(0, np.int32))

    def update(
        self, state: EarlyStoppingState, metrics: dict[str, float]
    ) -> tuple[EarlyStoppingState, bool, str]:
        """(what to remember now, whether to stop, why).

        A value that is NaN betters nothing.

        Raises:
            CallerError: the evaluation has no such metric.
        """
        if self.metric not in metrics:
            raise CallerError(
                f"early stop: found the metrics {', '.join(sorted(metrics))}, expected {self.metric!r} among them. "
                "Name one of these, or let the evaluation's loss return it"
            )
        value, best = metrics[self.metric], float(state.best_metric)
        sign = 1 if self.larger_is_better else -1
        if sign * value > sign * best + self.min_delta:
            found = EarlyStoppingState(np.array(value, np.float32), np.array(0, np.int32))
            return found, False, f"{self.metric} is the best so far"
        bad = int(state.patience_count) + 1
        reason = f"{self.metric} has not bettered {best:.6g} in {bad} evaluations"
        return EarlyStoppingState(state.best_metric, np.array(bad, np.int32)), bad >= self.patience, reason
