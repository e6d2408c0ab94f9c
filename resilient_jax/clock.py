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


class ManualClock:
    """A clock that stands still until it is advanced; for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        """Return the time that the clock was set to."""
        return self._now_s

    def wall_s(self) -> float:
        """Return the same time as `monotonic_s`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the time on by `seconds`, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: asked to advance by {seconds} s")
        self._now_s += seconds
