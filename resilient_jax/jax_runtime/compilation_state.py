"""Whether a thread compiles, which cannot be interrupted. Imports no jax."""

from resilient_jax.threads import list_frames


def is_compiling(thread: int | None) -> bool:
    """Return whether the thread is inside JAX's compiler, judging by the files on its stack.

    Args:
        thread: its `ident`.
    """
    return any(
        frame.f_code.co_filename.endswith("jax/_src/compiler.py") for frame in list_frames(thread or 0)
    )
