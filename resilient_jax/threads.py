"""Threads for processes that must go on when memory is short.

CPython's `Thread.start` waits until the new thread reports that it runs. A thread that gets no memory for its first
lines ends without a report, and its starter waits for ever, also when there is memory again (seen with 3.11).
Executors start their threads in this way, too, when there is first work for them.
"""

import concurrent.futures
import threading


def start_thread_pool(num_threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """Return an executor whose threads all run already: giving it work starts none.

    Args:
        num_threads: of the executor, from now until it is shut down.
        name: that the threads' names begin with.
    """
    pool = concurrent.futures.ThreadPoolExecutor(num_threads, name)
    all_here = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        pool.submit(all_here.wait)
    all_here.wait()
    return pool
