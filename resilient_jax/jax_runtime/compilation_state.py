"""Which threads are inside JAX's compiler, which cannot be interrupted.

Each thread notes that it enters and leaves the compiler. So a look from another thread walks no stack, which is neither
cheap nor always safe: see `resilient_jax.threads`.
"""

import functools
import threading
from typing import Any, Final, TypeAlias

from jax._src import compiler

_compiling: Final[set[int]] = set()
"""Threads by their `ident`. Each change is one operation of a set, so no lock is needed."""
_is_watched = False

Untyped: TypeAlias = Any
"""What JAX's compiler takes and returns."""


def watch_compiler() -> None:
    """Have every thread note when it compiles or loads a program, from now on."""
    global _is_watched
    if not _is_watched:
        compiler.compile_or_get_cached = functools.partial(_compile, compiler.compile_or_get_cached)
        _is_watched = True


def is_compiling(thread: int | None) -> bool:
    """Return whether a thread compiles, loads a program, or waits for one that another host compiles.

    Args:
        thread: the thread's `ident`; None: the thread has not begun.
    """
    return thread in _compiling


def _compile(original: Untyped, *arguments: Untyped, **more: Untyped) -> Untyped:
    thread = threading.get_ident()
    _compiling.add(thread)
    try:
        return original(*arguments, **more)
    finally:
        _compiling.discard(thread)
