"""How often a worker may be started again, and how long to wait before. Pure."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """At most `limit` restarts in any `window_s` seconds; the first at once, then `backoff_s`, doubled.

    Attributes:
        restarts: monotonic times of the restarts so far, in seconds.
    """

    max_restarts: int
    window_s: float
    backoff_s: float
    restarts: tuple[float, ...] = ()

    def spend(self, now: float) -> tuple["RestartBudget", float | None]:
        """The budget after one more restart and the seconds to wait before it; None if it is used up."""
        recent = tuple(t for t in self.restarts if now - t < self.window_s)
        if len(recent) >= self.max_restarts:
            return dataclasses.replace(self, restarts=recent), None
        delay_s = 0.0 if not recent else self.backoff_s * 2 ** (len(recent) - 1)
        return dataclasses.replace(self, restarts=(*recent, now)), delay_s
