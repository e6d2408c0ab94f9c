"""Time as an argument: decisions get `now`, shells get a `Clock`, tests set it by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time for a shell."""

    def monotonic_s(self) -> float:
        """Return seconds that only grow; for durations and deadlines. Comparable only on one machine."""
        ...

    def wall_s(self) -> float:
        """Return seconds since the Unix epoch; for people and logs, never for deadlines."""
        ...


class SystemClock:
    """The clock of this machine, for everything but tests and simulation."""

    def monotonic_s(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return `time.time()`."""
        return time.time()
