"""For how long a main thread that was told to unwind has waited for something that only force ends."""

import threading
from typing import Final

from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.compilation_state import is_compiling
from resilient_jax.worker.processor_demand import BlockedTime

UNWINDING_GRACE_S: Final = 0.5
"""gloo unwinds within milliseconds, with large arrays in flight within 0.5 s, or not at all. Time in which this process
computes, or waits for a processor on a busy machine, does not count."""
MAX_UNWINDING_S: Final = 2.0
"""Other threads may compute while the main thread hangs. Less than `quiesce_timeout_s`, which leaves a worker out."""


class UnwindingDelay:
    """The delay of one interruption, whose first abort has been made.

    A main thread that traces, compiles or loads a program is in no collective: connections that are shut would not make
    it unwind any sooner, and the world would be lost for nothing.

    Args:
        now_s: monotonic time in seconds.
    """

    def __init__(self, now_s: float) -> None:
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._since_s = now_s
        self._process = BlockedTime(now_s)
        # `collective_thread` runs what the main thread waits for.
        threads = (threading.main_thread().native_id, collective_thread.native_id)
        self._threads = BlockedTime(now_s, frozenset(thread for thread in threads if thread is not None))

    def measure_s(self, now_s: float) -> float:
        """Return the seconds since the interruption, or since the last compilation."""
        if is_compiling(threading.main_thread().ident) or collective_thread.is_compiling:
            self._begin(now_s)
        return now_s - self._since_s

    def is_too_long(self, now_s: float) -> bool:
        """Return whether the main thread should have unwound."""
        if self.measure_s(now_s) <= UNWINDING_GRACE_S:  # to look at threads has a price
            return False
        is_process_blocked = self._process.measure_s(now_s) > UNWINDING_GRACE_S
        return is_process_blocked or self._threads.measure_s(now_s) > MAX_UNWINDING_S
