"""Runs collectives on a thread that can be given up, so that the main thread never depends on gloo's.

gloo tells waiting receives that their connection broke, except for the one whose data had begun to arrive; the same
holds for a send of which a part is written. That wait ends by XLA's timeout (`collective_timeout_s`) and by nothing
else. Measured: 1 kill in 6 with gradients of 32 MB on an idle machine.

A worker that is about to join rehearses a step: it loads the programs of all collectives, which would wait for the
others if they ran.

What a given-up collective refers to stays in memory until its wait ends: its arguments, and the backend of its world.
"""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from resilient_jax.jax_runtime.compilation_state import is_compiling
from resilient_jax.jax_runtime.failures import CollectiveGivenUp, RehearsalFailed


class _Call:
    """A program and its arguments, until it has returned or was given up."""

    def __init__(
        self,
        program: Callable[..., Any],
        arguments: tuple[Any, ...],
        enter: Callable[[], object] | None,
    ) -> None:
        self._enter = enter
        self._program = program
        self._arguments = arguments
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def execute(self) -> None:
        program, arguments = self._program, self._arguments
        self._arguments = ()  # the frame below has the last reference, which ends with it
        try:
            if self._enter is not None:
                self._enter()
            result = jax.block_until_ready(program(*arguments))
        except BaseException as error:  # raised again by `wait`, in the thread that called
            self.settle(None, error)
        else:
            self.settle(result, None)

    def settle(self, result: Any, error: BaseException | None) -> bool:  # noqa: ANN401 - what the program returns
        """End the wait of the caller; return False if it had ended."""
        with self._lock:
            if self._settled.is_set():
                return False
            self._result, self._error = result, error
            self._settled.set()
            return True

    def wait(self) -> Any:  # noqa: ANN401 - what the program returns
        self._settled.wait()
        result, self._result = self._result, None
        error, self._error = (
            self._error,
            None,
        )  # its traceback refers to this call: a cycle would keep the arrays
        if error is None:
            return result
        try:
            raise error
        finally:
            del error


class CollectiveThread:
    """The thread that runs one collective at a time, for the main thread.

    Attributes:
        enter: called on the thread before each collective, for a test that holds or breaks it there; None: nothing is.
    """

    def __init__(self) -> None:
        self.enter: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: _Call | None = None
        self._is_rehearsing = False

    @contextlib.contextmanager
    def rehearse(self) -> Iterator[None]:
        """Have `run` load programs without running them, as long as the peers do not take part."""
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def run(self, program: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - arrays
        """Return what `program(*arguments)` returns, once its arrays are computed.

        For the main thread. A program that calls `run` itself is on the thread already. In a rehearsal the program is
        loaded, and zeros are returned.

        Raises:
            CollectiveGivenUp: see `give_up`.
            RehearsalFailed: the program is no jitted function, or a partial of one, so it is not loaded without a run.
        """
        if self._is_rehearsing:
            return _load(program, arguments)
        if self.is_current:
            return jax.block_until_ready(program(*arguments))
        call = _Call(program, arguments, self.enter)
        del arguments
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=(self._calls,), name="resilient-jax-collective", daemon=True
                )
                self._thread.start()
            self._current = call
            self._calls.put(call)
        try:
            return call.wait()
        finally:
            with self._lock:
                self._current = None

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one; False on a thread that was given up."""
        with self._lock:
            return threading.current_thread() is self._thread

    @property
    def native_id(self) -> int | None:
        """The kernel's id of the thread; None if there is none now."""
        with self._lock:
            return self._thread.native_id if self._thread is not None else None

    @property
    def is_compiling(self) -> bool:
        """Whether the collective that the main thread waits for is being compiled."""
        with self._lock:
            return self._current is not None and self._thread is not None and is_compiling(self._thread.ident)

    def give_up(self) -> bool:
        """Make the main thread raise CollectiveGivenUp, if it waits for a collective that is not being compiled.

        For the guard thread, once `abort_collectives` has had no effect for longer than gloo needs.
        """
        # That is no hang, however long it takes.
        if self.is_compiling:
            return False
        with self._lock:
            error = CollectiveGivenUp(
                "gloo still waits for a peer although its connections are shut; that wait is left to a thread of its "
                "own, which ends with collective_timeout_s"
            )
            if self._current is None or not self._current.settle(None, error):
                return False
            # The thread ends when the collective does: nothing else comes through its queue.
            self._calls.put(None)
            self._calls, self._thread = queue.SimpleQueue(), None
            return True


def _load(program: Any, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401 - as `run`
    """Compile a jitted function, and return zeros of the shapes and shardings of its results."""
    jitted: Any = program
    keywords: dict[str, Any] = {}
    if isinstance(program, functools.partial):
        jitted, keywords = program.func, program.keywords
    if not hasattr(jitted, "lower"):
        raise RehearsalFailed("a computation on several hosts runs with all of them only")
    compiled = jitted.lower(*arguments, **keywords).compile()
    return jax.tree.map(
        lambda shape, sharding: jax.make_array_from_callback(
            shape.shape,
            sharding,
            lambda index: np.zeros(_compute_shape(index, shape.shape), shape.dtype),  # pyright: ignore[reportArgumentType]
        ),
        jax.eval_shape(program, *arguments),
        compiled.output_shardings,
    )


def _compute_shape(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True))


def _serve(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        call.execute()
        del call  # or the thread would keep the arrays until the next collective


collective_thread = CollectiveThread()
