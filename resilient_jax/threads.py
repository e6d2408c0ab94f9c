"""Threads for processes that must go on when memory is short; and where threads are.

CPython's `Thread.start` waits until the new thread reports that it runs. A thread that gets no memory for its first
lines ends without a report, and its starter waits for ever, also when there is memory again (seen with 3.11).
Executors start their threads in this way, too, when there is first work for them.

The stack of a thread that runs can only be read while Python's garbage collector is off. In CPython 3.11 to read the
frame that called another one allocates memory. A collection that begins there calls JAX's hook, which lets other
threads run, and the frame may be gone when it returns: the process dies of SIGSEGV (seen in 1 of 360 workers).
"""

import concurrent.futures
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NamedTuple, TypeVar

CHECK_INTERVAL_S: Final = 0.1

ResultT = TypeVar("ResultT")


def start_thread_pool(num_threads: int, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """Return an executor whose threads all run already: giving it work starts none.

    Args:
        num_threads: threads of the executor, from now until the executor is shut down.
        name: beginning of the threads' names.
    """
    pool = concurrent.futures.ThreadPoolExecutor(num_threads, name)
    all_here = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        pool.submit(all_here.wait)
    all_here.wait()
    return pool


def run_all(
    pool: concurrent.futures.ThreadPoolExecutor,
    jobs: Sequence[Callable[[], ResultT]],
    check: Callable[[], None],
    on_error: Callable[[BaseException], None],
) -> list[ResultT]:
    """Run jobs, several at a time, and return their results. No job is still running when an error is raised.

    Args:
        check: called several times a second while the caller waits; an exception that `check` raises ends the jobs.
        on_error: called with the first error, while jobs still run; ends what these wait for.
    """
    futures = [pool.submit(job) for job in jobs]
    pending = set(futures)
    try:
        while pending:
            check()
            done, pending = concurrent.futures.wait(
                pending, CHECK_INTERVAL_S, concurrent.futures.FIRST_EXCEPTION
            )
            for future in done:
                future.result()
    except BaseException as error:
        for future in pending:
            future.cancel()
        on_error(error)
        concurrent.futures.wait(pending)
        raise
    return [future.result() for future in futures]


class Call(NamedTuple):
    """A line of a stack: values only, since a reference to a frame would have it read when the frame ends."""

    path: str
    function: str
    line: int


_reads_stacks = threading.Lock()
"""Held by the thread that has the garbage collector off."""


def read_stacks() -> dict[int, list[Call]]:
    """Return the stacks of all threads but the calling one by their `ident`, the innermost call of each first.

    For reports, not for ordinary looks: meanwhile the garbage collector is off in all threads.
    """
    caller = threading.get_ident()
    with _reads_stacks:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return {
                ident: _list_calls(one) for ident, one in sys._current_frames().items() if ident != caller
            }
        finally:
            if was_on:
                gc.enable()


def find_calling_line(folder: str) -> str:
    """Return the innermost line, as FILE:LINE, that calls code in a folder, in the calling thread.

    Its frames are those of callers that wait for this function: none can be gone while they are read.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"


def _list_calls(innermost: FrameType) -> list[Call]:
    calls: list[Call] = []
    frame: FrameType | None = innermost
    while frame is not None:
        calls.append(Call(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return calls
