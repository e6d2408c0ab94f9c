"""A main thread that compiles is not taken for one that waits in a broken collective."""

import threading
import time

import jax
import jax.numpy as jnp

from resilient_jax.jax_runtime.compilation_state import is_compiling, watch_compiler
from resilient_jax.worker.unwinding_delay import UnwindingDelay
from tests.support.patience import patience

LATER_S = 100.0
DEADLINE_S = patience(6)


def compile_something_large() -> None:
    def long_chain(x: jax.Array) -> jax.Array:
        for index in range(30):
            x = jnp.sin(x) * index + jnp.sum(x)
        return x

    jax.jit(long_chain).lower(jnp.ones(64)).compile()


def test_the_delay_begins_anew_while_the_main_thread_compiles_and_not_while_it_waits() -> None:
    watch_compiler()
    main = threading.main_thread().ident
    while_compiling: list[bool] = []
    is_too_long_afterwards = threading.Event()
    has_compiled = threading.Event()

    def watch() -> None:
        delay = UnwindingDelay(time.monotonic() - LATER_S)
        while not has_compiled.is_set():
            was_compiling = is_compiling(main)
            time.sleep(0.001)
            is_too_long = delay.is_too_long(time.monotonic())
            if was_compiling and is_compiling(main):
                while_compiling.append(is_too_long)
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s and not is_too_long_afterwards.is_set():
            if delay.is_too_long(LATER_S + time.monotonic()):
                is_too_long_afterwards.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    compile_something_large()
    has_compiled.set()
    watcher.join(DEADLINE_S)
    assert while_compiling
    assert not any(while_compiling)
    assert is_too_long_afterwards.is_set()
