"""How long tests wait. Every deadline of every test is a call of `patience`.

A wait that a test expects to end may take ten times what it takes on an idle machine, times how much slower this
machine is now. That is measured with plain Python when a test process starts, and again when a `Deadline` is near: if
the machine became busy meanwhile, the deadline moves on.

An idle machine is one on which Python adds `IDLE_ADDITIONS_PER_S` times a second.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

IDLE_ADDITIONS_PER_S: Final = 20e6
MEASURED_S: Final = 0.2
FACTOR: Final = 10.0
"""Of patience: one run in many is slow for reasons that no measurement of the processor shows, such as the disk."""
USUAL_S: Final = 6.0
"""What takes a second or two on an idle machine, and a little longer now and then."""
NEVER_S: Final = 1e6
"""A time-out that must not be what ends a wait: the test's own comes first."""
CHUNK: Final = 20_000
POLL_S: Final = 0.02


def measure_slowness(seconds: float = MEASURED_S) -> float:
    """Return how many times as long as on an idle machine Python takes now; at least 1.

    Args:
        seconds: of the measurement.
    """
    began_s = now_s = time.perf_counter()
    additions = 0
    while now_s - began_s < seconds:
        for _ in range(CHUNK):
            additions += 1
        now_s = time.perf_counter()
    return max(1.0, IDLE_ADDITIONS_PER_S * (now_s - began_s) / additions)


def watch(seconds: float) -> Iterator[None]:
    """Yield again and again for so long, while what must not happen does not.

    Args:
        seconds: of the wall clock; a slower machine needs no more.
    """
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        yield
        time.sleep(POLL_S)


class _Slowness:
    """The largest slowness that this process has measured so far: what was slow once may be so again."""

    def __init__(self) -> None:
        self._largest = self._first = 0.0

    def read(self) -> float:
        return self._largest or self.measure()

    def read_first(self) -> float:
        self.read()
        return self._first

    def measure(self) -> float:
        self._largest = max(self._largest, measure_slowness())
        self._first = self._first or self._largest
        return self._largest


_slowness = _Slowness()


def slowness() -> float:
    """Return how much slower than an idle machine this one is, as far as this process has seen."""
    return _slowness.read()


def patience(idle_s: float) -> float:
    """Return for how long to wait, in seconds, for what takes `idle_s` on an idle machine."""
    return FACTOR * idle_s * slowness()


class Deadline:
    """The end of a wait; it moves on when the machine turns out to be slower than it was found to be at first.

    Args:
        timeout_s: of the wait, by `patience`; None: what is waited for takes `USUAL_S`. Most are constants of modules,
            made when the process had measured once: so it counts from that measurement, also if a wait before this
            one has found the machine slower.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._began_s = time.monotonic()
        self._timeout_s = patience(USUAL_S) if timeout_s is None else timeout_s
        self._slowness = slowness() if timeout_s is None else _slowness.read_first()

    @property
    def waited_s(self) -> float:
        """How long the wait has lasted so far, in seconds."""
        return time.monotonic() - self._began_s

    def find_rest_s(self) -> float:
        """Return how many seconds are left; 0: the wait is over."""
        if self.waited_s > self._timeout_s:
            now = _slowness.measure()
            self._timeout_s *= now / self._slowness
            self._slowness = now
        return max(0.0, self._timeout_s - self.waited_s)


def wait_until(what: str, holds: Callable[[], object], timeout_s: float | None = None) -> None:
    """Wait until `holds()` is true.

    Args:
        what: is waited for, in words.
        holds: what to ask again and again.
        timeout_s: see `Deadline`.

    Raises:
        AssertionError: it did not come in time.
    """
    deadline = Deadline(timeout_s)
    while not holds():
        assert deadline.find_rest_s() > 0, f"{what} did not happen within {deadline.waited_s:.0f} s"
        time.sleep(POLL_S)
