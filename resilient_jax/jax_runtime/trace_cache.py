"""Keeps JAX's traces when a world is left.

A traced function is a jaxpr: it holds no device, unless the user closed over an array or a mesh. Tracing is
half of the cost of the first step in a new world, and all of it holds Python's lock.
"""

import contextlib
from collections.abc import Iterator

from jax._src import util
from jax._src.interpreters import partial_eval


@contextlib.contextmanager
def keep_traces() -> Iterator[None]:
    """A context in which `jax.extend.backend.clear_backends` clears every cache but that of traces."""
    name = util._caches.pop(partial_eval.trace_to_jaxpr)
    try:
        yield
    finally:
        util._caches[partial_eval.trace_to_jaxpr] = name


def clear_traces() -> None:
    """Drop all traces: if anything of JAX still holds a device, one of them does."""
    partial_eval.trace_to_jaxpr.cache_clear()
