"""Whether a thread compiles, which cannot be interrupted. Imports no jax."""

import sys


def is_compiling(thread: int | None) -> bool:
    """Return whether the thread is inside JAX's compiler, judging by the files on its stack.

    Args:
        thread: its `ident`.
    """
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith("jax/_src/compiler.py"):
            return True
        frame = frame.f_back
    return False
