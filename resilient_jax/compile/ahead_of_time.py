"""Compiles what may be needed next, on a thread with low priority, while training goes on.

`jax.jit` finds a program that was lowered and compiled here: a call with the same shapes and shardings neither traces,
lowers nor compiles. What is compiled also goes into the persistent cache, for worlds to come.
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
"""Low, but not idle: the thread holds Python's lock now and then, and training must not wait for it long."""
LEAVE_TIMEOUT_S: Final = 1.0
"""A program that is being compiled when its devices go is not waited for longer: training stands still, and the old
backend may as well live until the program is done."""
CLOSE_TIMEOUT_S: Final = 10.0
"""Of a process that ends: it would take the compiler away under the thread."""


_of_thread = threading.local()
"""`check`, where a thread compiles ahead: of what it is at."""

CancellationCheck = Callable[[], None]
"""To be called before each program; raises `Dropped` if it is not wanted any more."""


class CompilationCanceled(BaseException):
    """What was being compiled is for a world that has ended. No `Exception`: JAX catches those of its cache."""


class CompilationJob(NamedTuple):
    """Programs to compile: a name for people, and what compiles them; False: there was nothing to do."""

    name: str
    compile: Callable[[CancellationCheck], bool]


class AheadOfTimeCompiler:
    """Owns the thread.

    Args:
        on_compiled: told of each program with the seconds that it took; on the thread.
        on_failure: told of each program that could not be compiled, and why.
    """

    def __init__(
        self, on_compiled: Callable[[str, float], None], on_failure: Callable[[str, str], None]
    ) -> None:
        self._on_compiled, self._on_failure = on_compiled, on_failure
        self._changed = threading.Condition()
        self._jobs: deque[tuple[float, CompilationJob]] = deque()
        """With the monotonic time before which none is begun."""
        self._drops = 0
        self._is_working = False
        self._is_closed = False
        """All guarded by the condition."""
        self._thread: threading.Thread | None = None

    def enqueue(self, jobs: Iterable[CompilationJob], after_s: float = 0.0) -> None:
        """Compiles these after those that wait, in this order, and not within the next `after_s` seconds."""
        with self._changed:
            begin_s = time.monotonic() + after_s
            self._jobs.extend((begin_s, job) for job in jobs)
            self._changed.notify_all()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
                self._thread.start()

    def cancel(self) -> None:
        """Forgets what waits, and all but the program that is being compiled: other worlds are likely now."""
        with self._changed:
            self._drops += 1
            self._jobs.clear()
            self._changed.notify_all()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether all that was expected and not dropped is done, or was after so long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_working and not self._jobs, timeout_s)

    def close(self) -> None:
        """Ends the thread, after the program that it is compiling, which is waited for: not for ever."""
        with self._changed:
            self._is_closed = True
            self._drops += 1
            self._jobs.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), THREAD_NICENESS)
        while (taken := self._take()) is not None:
            job, check = taken
            started_s = time.monotonic()
            _of_thread.check = check
            try:
                has_compiled = job.compile(check)
            except CompilationCanceled:
                pass
            except (
                Exception
            ) as error:  # a thread's end: what fails here fails again, and is raised, where it is needed
                logger.debug("compiling %s ahead", job.name, exc_info=True)
                self._on_failure(job.name, f"{type(error).__name__}: {error}".splitlines()[0][:200])
            else:
                if has_compiled:
                    self._on_compiled(job.name, time.monotonic() - started_s)
            del job, taken  # it holds the devices
            _of_thread.check = None

    def _take(self) -> tuple[CompilationJob, CancellationCheck] | None:
        with self._changed:
            self._is_working = False
            self._changed.notify_all()
            while not self._is_closed:
                left_s = self._jobs[0][0] - time.monotonic() if self._jobs else None
                if left_s is not None and left_s <= 0:
                    self._is_working = True
                    return self._jobs.popleft()[1], functools.partial(self._check, self._drops)
                self._changed.wait(left_s)
            return None

    def _check(self, drops: int) -> None:
        if self._drops != drops:
            raise CompilationCanceled


def may_wait() -> bool:
    """Whether the calling thread compiles ahead.

    Raises:
        Dropped: it does, but what it is at is not wanted any more.
    """
    if not is_compiling_ahead():
        return False
    _of_thread.check()
    return True


def is_compiling_ahead() -> bool:
    """Whether the calling thread compiles ahead: nobody waits for it."""
    return getattr(_of_thread, "check", None) is not None
