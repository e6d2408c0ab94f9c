"""What slow hosts cost, as it is reported: once the same host has been the slowest for a while, and without noise."""

import statistics
from typing import Final

import msgspec

from resilient_jax.protocol.slow_hosts import Slowdown

LASTING_EXCHANGES: Final = 3
"""So often in a row it must be estimated that the same host is the slowest, in one generation, before that is reported
as lasting: some 40 steps."""
REPORTED_CHANGE: Final = 0.1
"""What slow hosts cost is reported again when it has changed by this part. Each report is a write to the store."""
SPEED_FIELDS: Final = ("kept", "replaced", "without", "redivided", "fewer_devices")
"""Of a `Slowdown`."""


class LastingSlowdown:
    """The estimates of one generation.

    Attributes:
        reported: what slow hosts cost; None: no host is slow, or slowness has not lasted.
    """

    def __init__(self) -> None:
        self.reported: Slowdown | None = None
        self._estimates: list[Slowdown] = []
        """The last ones in a row about the same host."""

    def clear(self) -> None:
        """Forget all estimates."""
        self.reported, self._estimates = None, []

    def add(self, found: Slowdown | None) -> None:
        """Note an estimate; None: nothing is slow."""
        last = self._estimates[-1] if self._estimates else None
        if found is None or last is None or _get_subject(last) != _get_subject(found):
            self.clear()
        if found is None:
            return
        self._estimates = [*self._estimates, found][-LASTING_EXCHANGES:]
        if len(self._estimates) < LASTING_EXCHANGES:
            return
        # One exchange may have met a busy moment.
        medians = {
            name: round(statistics.median(getattr(one, name) for one in self._estimates), 4)
            for name in SPEED_FIELDS
        }
        usual = msgspec.structs.replace(found, **medians)
        if self.reported is None or _has_changed(self.reported, usual):
            self.reported = usual


def _get_subject(found: Slowdown) -> tuple[object, ...]:
    """Return what an estimate is about: a host, its devices, a division of layers."""
    return found.host, found.devices, found.speeds


def _has_changed(before: Slowdown, after: Slowdown) -> bool:
    pairs = ((getattr(before, name), getattr(after, name)) for name in SPEED_FIELDS)
    return any(abs(old - new) > REPORTED_CHANGE * max(old, new) for old, new in pairs)
