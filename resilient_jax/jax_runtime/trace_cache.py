"""Keeps JAX's traces when a world is left.

A traced function is a jaxpr: it refers to no device, unless the user closed over an array or a mesh. Tracing is
half of the cost of the first step in a new world, all of it under Python's global lock.
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
    """Drop all traces: if anything of JAX still refers to a device, a trace does."""
    partial_eval.trace_to_jaxpr.cache_clear()
