"""Lets the replicas of a host wait, each after its first microbatch, until all hosts have agreed on the limits."""

import threading
import time
from collections.abc import Callable


class LimitExchange:
    """One exchange for all replicas of this host, in one step.

    Args:
        num_replicas: of this host that compute any microbatch.
        agree: a collective; called once, on the thread of some replica, when all have come.

    Attributes:
        seconds: how long it took, the wait for other hosts included.
    """

    def __init__(self, num_replicas: int, agree: Callable[[], None]) -> None:
        self._barrier = threading.Barrier(num_replicas, action=self._run)
        self._agree = agree
        self._error: BaseException | None = None
        self.seconds = 0.0

    def _run(self) -> None:
        started_s = time.monotonic()
        try:
            self._agree()
        except BaseException as error:
            self._error = error
            raise
        self.seconds = time.monotonic() - started_s

    def wait(self) -> None:
        """Return when the limits are known; raise what another replica's thread has raised."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as broken:
            raise self._error or broken from None

    def call(self, replica_thread: Callable[[], None]) -> None:
        """Call what a replica's thread does; if it raises, the others do not wait for it."""
        try:
            replica_thread()
        except BaseException as error:
            self._error = self._error or error
            self._barrier.abort()
            raise
