"""How often a worker may be started again, and how long to wait before each restart. Pure."""

import dataclasses
import math

from resilient_jax.membership.severities import Action, Evidence, Tries, choose_action


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """At most `max_restarts` in any `window_s` seconds; the first at once, then after `backoff_s`, doubled each time.

    Attributes:
        max_backoff_s: limit of the doubled wait.
        restarts: monotonic times of the restarts so far, in seconds.
    """

    max_restarts: int
    window_s: float
    backoff_s: float
    max_backoff_s: float = math.inf
    restarts: tuple[float, ...] = ()

    def spend(self, now: float) -> tuple["RestartBudget", float | None]:
        """Return the budget after one more restart and the seconds to wait before it; None if the budget is spent."""
        recent = tuple(t for t in self.restarts if now - t < self.window_s)
        tries = {Tries.RESTARTS: self.max_restarts}
        if choose_action(Evidence.WORKER_DIED, len(recent), tries) is not Action.RESTART_WORKER:
            return dataclasses.replace(self, restarts=recent), None
        doubled_s = 0.0 if not recent else self.backoff_s * 2 ** (len(recent) - 1)
        delay_s = min(doubled_s, self.max_backoff_s)
        return dataclasses.replace(self, restarts=(*recent, now)), delay_s
