"""Keeps what JAX traced when a world is left.

A traced function is a jaxpr: no device is in it, unless the user closed over an array or a mesh. Tracing is
half of what the first step in a new world costs, and all of it under Python's lock.
"""

import contextlib
from collections.abc import Iterator

from jax._src import util
from jax._src.interpreters import partial_eval


@contextlib.contextmanager
def keep_traces() -> Iterator[None]:
    """While this lasts, `jax.extend.backend.clear_backends` clears every cache but that of traces."""
    name = util._caches.pop(partial_eval.trace_to_jaxpr)
    try:
        yield
    finally:
        util._caches[partial_eval.trace_to_jaxpr] = name


def clear_traces() -> None:
    """Drops them after all: one of them holds a device, if anything of JAX does."""
    partial_eval.trace_to_jaxpr.cache_clear()
