"""Lets the replicas of a host wait, each after its first microbatch, until all hosts have agreed on the limits.

The limits follow from microbatch 0, which one replica of one host computes. All others need them before they can add
their second microbatch to their first one. So each replica's thread stops after its first microbatch. The last one that
comes calls the collective in which all hosts get the limits; then all go on. A thread that raises instead breaks the
barrier: none of the others waits for one that never comes, and each raises the first error.
"""

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
        num_replicas: number of threads that will wait: replicas of this host that compute any microbatch.
        agree: a collective of all hosts; called once, on the thread of the replica that comes last.
    """

    def __init__(self, num_replicas: int, agree: Callable[[], None]) -> None:
        self._outcome = _Outcome()
        # No method of this object: the cycle would keep a step's totals in memory until Python looks for cycles.
        self._barrier = threading.Barrier(num_replicas, action=functools.partial(_run, agree, self._outcome))

    @property
    def seconds(self) -> float:
        """How long the collective took, with its wait for other hosts."""
        return self._outcome.seconds

    def wait(self) -> None:
        """Return when the limits are known; raise what another replica's thread has raised."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as broken:
            # The cause, and not that the barrier broke: the caller tells a failed peer from an error of the user's.
            raise self._outcome.error or broken from None

    def call(self, replica_thread: Callable[[], None]) -> None:
        """Call what a replica's thread does; if it raises, the others do not wait for it."""
        try:
            replica_thread()
        except BaseException as error:
            # The first error is the cause of all later ones, which threads raise that have waited.
            self._outcome.error = self._outcome.error or error
            self._barrier.abort()
            raise


def _run(agree: Callable[[], None], outcome: _Outcome) -> None:
    started_s = time.monotonic()
    try:
        agree()
    except BaseException as error:
        # Here, since the other threads see only a broken barrier, maybe before `call` has noted this error.
        outcome.error = error
        raise
    outcome.seconds = time.monotonic() - started_s
