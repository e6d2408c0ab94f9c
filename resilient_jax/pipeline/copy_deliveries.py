"""What a member sends to the hosts that are about to hold its units, and when it sends no more. Pure.

A delivery that nobody comes for must end by itself: the sums of each step that wait for a host fill that host's memory.
"""

import dataclasses
from typing import Final

from resilient_jax.pipeline.unit_exchange import UnitMove

MAX_DELIVERY_S: Final = 300.0
"""For so long copies are kept up to date, if nobody joins."""
MAX_IDLE_S: Final = 10.0
MIN_IDLE_STEPS: Final = 2
"""A worker that has all copies waits to join, and keeps the sums that come in memory. It joins at the next step
boundary as a rule. If the leader delays that, no more sums are sent."""


@dataclasses.dataclass(slots=True, kw_only=True)
class CopyDelivery:
    """The copies that this host sends for one request.

    Attributes:
        moves: the units that this host sends.
        max_sums_bytes: limit of the sums that are sent before the change is let come as it is.
        sums_bytes: size of the sums that were sent to hosts that read their mail only when they join.
        since_s: monotonic time when this host began to send states; None: it has sent nothing yet.
        idle_since_s: monotonic time when the worker that joins said that it has all copies; None: it has not said so.
        idle_steps: committed steps since then.
    """

    moves: tuple[UnitMove, ...]
    max_sums_bytes: int
    sums_bytes: int = 0
    since_s: float | None = None
    idle_since_s: float | None = None
    idle_steps: int = 0

    @property
    def units(self) -> list[int]:
        """The units that this host sends, ascending, each once."""
        return sorted({move.unit for move in self.moves})

    def is_over(self, now_s: float) -> bool:
        """Return whether this host has sent for so long, or so much, that nobody will come for it.

        Args:
            now_s: monotonic time, at which `since_s` has passed.
        """
        assert self.since_s is not None, "it has begun"
        # Time alone does not say that the leader delays the worker: one step may take longer than that.
        is_idle = self.idle_since_s is not None and now_s - self.idle_since_s > MAX_IDLE_S
        return (
            now_s - self.since_s > MAX_DELIVERY_S
            or (is_idle and self.idle_steps >= MIN_IDLE_STEPS)
            or self.sums_bytes > 2 * self.max_sums_bytes
        )
