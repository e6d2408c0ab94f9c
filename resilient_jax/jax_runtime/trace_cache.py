"""Keeps JAX's traces when a world is left.

A traced function is a jaxpr: it refers to no device, unless the user closed over an array or a mesh. Tracing is
half of the cost of the first step in a new world, all of it under Python's global lock. What JAX derives from a trace
before it lowers it is kept, too, because `lowering_cache` finds a module by that.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from jax._src import dispatch, util
from jax._src.interpreters import partial_eval, pxla

OPERATIONS: Final[Any] = dispatch.xla_primitive_callable
KEPT_CACHES: Final[tuple[Any, ...]] = (partial_eval.trace_to_jaxpr, pxla._dce_jaxpr, OPERATIONS)
"""Of traces; of these without the arguments that they do not use; of operations that are called outside of `jit`, each
of which is a function to be traced."""


@contextlib.contextmanager
def keep_traces() -> Iterator[None]:
    """A context in which `jax.extend.backend.clear_backends` clears every cache but those of traces."""
    names = [util._caches.pop(cache) for cache in KEPT_CACHES]
    try:
        yield
    finally:
        util._caches.update(zip(KEPT_CACHES, names, strict=True))


def clear_operations() -> None:
    """Drop operations that were called outside of `jit`: a parameter of one may be a sharding on devices."""
    OPERATIONS.cache_clear()


def clear_traces() -> None:
    """Drop all traces: if anything of JAX still refers to a device, a trace does."""
    for cache in KEPT_CACHES:
        cache.cache_clear()
