"""Threads for processes that must go on when memory is short; and where threads are.

CPython's `Thread.start` waits until the new thread reports that it runs. A thread that gets no memory for its first
lines ends without a report, and its starter waits for ever, also when there is memory again (seen with 3.11).
Executors start their threads in this way, too, when there is first work for them.
"""

import concurrent.futures
import sys
import threading
from types import FrameType
from typing import Final

MAX_WALKS: Final = 3
"""Of a stack that changes under the eyes of the one who looks."""


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


def list_frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; none: it has ended.

    A thread that runs may leave a frame while another one looks. CPython 3.11 was seen to give something else as the
    frame before it then, so that the stack has to be walked again; of one that never holds still the inner part counts.

    Args:
        thread: its `ident`.
    """
    frames: list[FrameType] = []
    for _ in range(MAX_WALKS):
        frames = []
        frame = sys._current_frames().get(thread)
        while isinstance(frame, FrameType):
            frames.append(frame)
            frame = frame.f_back
        if frame is None:
            break
    return frames
