"""A main thread that compiles is not taken for one that waits in a broken collective."""

import itertools
import threading
import time

import jax
import jax.numpy as jnp

from resilient_jax.jax_runtime.compilation_state import is_compiling, watch_compiler
from resilient_jax.worker.unwinding_delay import UnwindingDelay
from tests.support.patience import patience

LATER_S = 100.0
DEADLINE_S = patience(6)


def trace_something_large(number: int) -> jax.stages.Lowered:
    def long_chain(x: jax.Array) -> jax.Array:
        for index in range(30):
            x = jnp.sin(x) * index + jnp.sum(x) + number
        return x

    return jax.jit(long_chain).lower(jax.ShapeDtypeStruct((64,), jnp.float32))


class Watcher(threading.Thread):
    """Looks at the delay of an interruption that began long ago, as the guard thread of a worker does.

    Attributes:
        compilation: how many the main thread has begun.
        while_compiling: whether the delay was too long, in looks that a single compilation spanned: between two of them
            the delay rightly goes on.
        has_compiled: set by the main thread at its end.
        is_too_long_afterwards: set when the delay is too long again.
    """

    def __init__(self) -> None:
        super().__init__(name="watcher")
        self.compilation = 0
        self.while_compiling: list[bool] = []
        self.has_compiled = threading.Event()
        self.is_too_long_afterwards = threading.Event()

    def run(self) -> None:
        main = threading.main_thread().ident
        delay = UnwindingDelay(time.monotonic() - LATER_S)
        while not self.has_compiled.is_set():
            compilation, was_compiling = self.compilation, is_compiling(main)
            time.sleep(0.001)
            is_too_long = delay.is_too_long(time.monotonic())
            if was_compiling and is_compiling(main) and compilation == self.compilation:
                self.while_compiling.append(is_too_long)
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s and not self.is_too_long_afterwards.is_set():
            if delay.is_too_long(LATER_S + time.monotonic()):
                self.is_too_long_afterwards.set()


def test_the_delay_begins_anew_while_the_main_thread_compiles_and_not_while_it_waits() -> None:
    watch_compiler()
    watcher = Watcher()
    watcher.start()
    until_s = time.monotonic() + DEADLINE_S
    for watcher.compilation in itertools.count():
        trace_something_large(watcher.compilation).compile()
        if watcher.while_compiling or time.monotonic() > until_s:
            break
    watcher.has_compiled.set()
    watcher.join(DEADLINE_S)
    assert watcher.while_compiling
    assert not any(watcher.while_compiling)
    assert watcher.is_too_long_afterwards.is_set()
