"""Compilation ahead of time: programs that may be needed next, on a thread of low priority, while training continues.

`jax.jit` finds a program that was lowered and compiled here: a call with the same shapes and shardings neither traces,
lowers nor compiles. What is compiled also goes into the persistent cache, for later generations.
"""

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

THREAD_NAME: Final = "resilient-jax-ahead"
THREAD_NICENESS: Final = 10
"""Low, but not idle: the thread takes Python's global lock now and then, and training must not wait for it long."""
LEAVE_TIMEOUT_S: Final = 1.0
"""The longest wait for a program that is being compiled when its devices go: training is stopped meanwhile, and the old
backend may live until the program is done."""
CLOSE_TIMEOUT_S: Final = 10.0
"""The longest wait of a process that ends: otherwise the compiler would be destroyed while the thread uses it."""

_thread_local = threading.local()
"""`check` of the job that the thread is compiling; only on a thread that compiles ahead."""

CancellationCheck = Callable[[], None]
"""A job calls it before each program; it raises `CompilationCanceled` once the job is canceled."""


class CompilationCanceled(BaseException):
    """The job being compiled was canceled. Not an `Exception`: JAX catches exceptions of its cache."""


class CompilationJob(NamedTuple):
    """Programs to compile together.

    Attributes:
        compile: compiles the programs, and returns whether there was anything to compile.
    """

    name: str
    compile: Callable[[CancellationCheck], bool]


class AheadOfTimeCompiler:
    """The owner of the thread that compiles ahead.

    Args:
        on_compiled: called on the thread with each job's name and the seconds that the job took.
        on_failure: called on the thread with the name of each job that failed, and the error.
    """

    def __init__(
        self, on_compiled: Callable[[str, float], None], on_failure: Callable[[str, str], None]
    ) -> None:
        self._on_compiled, self._on_failure = on_compiled, on_failure
        self._changed = threading.Condition()
        self._jobs: deque[tuple[float, CompilationJob]] = deque()
        """Each with the monotonic time before which it does not start."""
        self._cancellations = 0
        self._is_working = False
        self._is_closed = False
        """Guarded by the condition, as all above."""
        self._thread: threading.Thread | None = None

    def enqueue(self, jobs: Iterable[CompilationJob], after_s: float = 0.0) -> None:
        """Add jobs behind those that wait, in this order, to start no sooner than in `after_s` seconds."""
        with self._changed:
            start_s = time.monotonic() + after_s
            self._jobs.extend((start_s, job) for job in jobs)
            self._changed.notify_all()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
                self._thread.start()

    def cancel(self) -> None:
        """Drop all jobs; the current one ends after the program that is being compiled."""
        with self._changed:
            self._cancellations += 1
            self._jobs.clear()
            self._changed.notify_all()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Return whether all jobs are done or canceled, waiting for `timeout_s` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_working and not self._jobs, timeout_s)

    def close(self) -> None:
        """Cancel all jobs and end the thread, waiting `CLOSE_TIMEOUT_S` at most for the program being compiled."""
        with self._changed:
            self._is_closed = True
            self._cancellations += 1
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), THREAD_NICENESS)
        while (taken := self._take()) is not None:
            job, check = taken
            started_s = time.monotonic()
            _thread_local.check = check
            try:
                has_compiled = job.compile(check)
            except CompilationCanceled:
                pass
            # What fails here fails again, and is raised, where the program is needed.
            except Exception as error:
                logger.debug("compiling %s ahead", job.name, exc_info=True)
                self._on_failure(job.name, f"{type(error).__name__}: {error}".splitlines()[0][:200])
            else:
                if has_compiled:
                    self._on_compiled(job.name, time.monotonic() - started_s)
            # Jobs hold references to devices.
            del job, taken
            _thread_local.check = None

    def _take(self) -> tuple[CompilationJob, CancellationCheck] | None:
        with self._changed:
            self._is_working = False
            self._changed.notify_all()
            while not self._is_closed:
                # Without a job the wait has no timeout: `enqueue` and `close` notify.
                remaining_s = self._jobs[0][0] - time.monotonic() if self._jobs else None
                if remaining_s is not None and remaining_s <= 0:
                    self._is_working = True
                    return self._jobs.popleft()[1], functools.partial(self._check, self._cancellations)
                self._changed.wait(remaining_s)
            return None

    def _check(self, cancellations: int) -> None:
        # The number of cancellations when the job began, so that `cancel` ends it and no later job.
        if self._cancellations != cancellations:
            raise CompilationCanceled


def check_canceled() -> None:
    """Raise CompilationCanceled if the job that the calling thread compiles ahead was canceled."""
    _thread_local.check()


def is_compiling_ahead() -> bool:
    """Return whether the calling thread compiles ahead, so that training does not wait for it."""
    return getattr(_thread_local, "check", None) is not None
