"""How much processor time a process uses or waits for: a thread that does neither is blocked."""

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

NS_PER_S: Final = 1_000_000_000


def measure_processor_demand_s(threads: frozenset[int] | None = None) -> float | None:
    """Return the seconds that the other threads of this process have run, or waited for a processor, so far.

    A process that is starved, or computes, thus differs from one that hangs. Threads that have ended do not count.
    None if the kernel does not say (CONFIG_SCHED_INFO).

    Args:
        threads: native ids of the threads that count; None: all threads.
    """
    caller, total_ns, is_known = str(threading.get_native_id()), 0, False
    for thread in os.listdir("/proc/self/task"):
        if thread == caller or (threads is not None and int(thread) not in threads):
            continue
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile; or the kernel does not say
            run_ns, wait_ns, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
            total_ns += int(run_ns) + int(wait_ns)
            is_known = True
    return total_ns / NS_PER_S if is_known else None


class BlockedTime:
    """How long this process, or some of its threads, have been blocked since a moment.

    Args:
        now_s: monotonic time of that moment.
        threads: native ids of the threads that count; None: all threads.
    """

    def __init__(self, now_s: float, threads: frozenset[int] | None = None) -> None:
        self._since_s = now_s
        self._threads = threads
        self._demand_s = measure_processor_demand_s(threads)

    def measure_s(self, now_s: float) -> float:
        """Return a lower bound of the seconds in which no other thread that counts ran or waited for a processor."""
        demand_s = measure_processor_demand_s(self._threads)
        elapsed_s = now_s - self._since_s
        if self._demand_s is None or demand_s is None:
            return elapsed_s
        return elapsed_s - max(0.0, demand_s - self._demand_s)
