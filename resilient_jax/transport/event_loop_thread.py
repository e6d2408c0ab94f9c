"""The event loop of synchronous processes: one daemon thread per process, on which all of their gRPC runs.

There is one loop per process because grpc.aio has one poller per process: with several loops every event wakes all
of them. The thread starts at the first use (an import starts nothing) and runs until the interpreter exits, so
that no later use depends on memory or threads being available.
"""

import asyncio
import atexit
import concurrent.futures
import functools
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

ResultT = TypeVar("ResultT")

STOP_TIMEOUT_S: Final = 2.0
"""How long the exit of the interpreter waits for the thread."""


class EventLoopThread:
    """An event loop on a daemon thread, for callers on any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_unless_spurious)
        self._thread = threading.Thread(target=self._serve, name="rj-event-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `coroutine`, run on the loop; an interrupted caller cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            del future  # else its exception would keep this frame, and the frame the future, in a cycle

    def submit(self, coroutine: Coroutine[Any, Any, ResultT]) -> "concurrent.futures.Future[ResultT]":
        """Run `coroutine` on the loop without waiting for it.

        Raises:
            RuntimeError: the interpreter is exiting.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("the event loop has stopped: the interpreter is exiting")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Stop the loop, so that its thread runs no Python while the interpreter is finalized."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            except MemoryError:  # raised between two callbacks: their state is intact
                continue


@functools.cache
def _start_shared() -> EventLoopThread:
    shared = EventLoopThread()
    atexit.register(shared.stop)
    return shared


_start_lock = threading.Lock()


def share_event_loop() -> EventLoopThread:
    """Return the event loop thread of this process, started at the first call."""
    with _start_lock:  # `functools.cache` may call twice
        return _start_shared()


def _log_unless_spurious(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task handles, except for grpc.aio's wake-ups that another loop of this process has consumed.

    grpc.aio's poller wakes every loop through one socket, and the loops that come too late find the socket empty
    (https://github.com/grpc/grpc/issues/25364).
    """
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
