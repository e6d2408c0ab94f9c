"""Lets the replicas of a host wait, each after its first microbatch, until all hosts have agreed on the limits."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable


@dataclasses.dataclass(slots=True)
class _Outcome:
    seconds: float = 0.0
    error: BaseException | None = None


class LimitExchange:
    """One exchange for all replicas of this host, in one step.

    Args:
        num_replicas: of this host that compute any microbatch.
        agree: a collective; called once, on the thread of some replica, when all have come.
    """

    def __init__(self, num_replicas: int, agree: Callable[[], None]) -> None:
        self._outcome = _Outcome()
        # No method of this object: the cycle would keep a step's totals in memory until Python looks for cycles.
        self._barrier = threading.Barrier(num_replicas, action=functools.partial(_run, agree, self._outcome))

    @property
    def seconds(self) -> float:
        """How long it took, the wait for other hosts included."""
        return self._outcome.seconds

    def wait(self) -> None:
        """Return when the limits are known; raise what another replica's thread has raised."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as broken:
            raise self._outcome.error or broken from None

    def call(self, replica_thread: Callable[[], None]) -> None:
        """Call what a replica's thread does; if it raises, the others do not wait for it."""
        try:
            replica_thread()
        except BaseException as error:
            self._outcome.error = self._outcome.error or error
            self._barrier.abort()
            raise


def _run(agree: Callable[[], None], outcome: _Outcome) -> None:
    started_s = time.monotonic()
    try:
        agree()
    except BaseException as error:
        outcome.error = error
        raise
    outcome.seconds = time.monotonic() - started_s
