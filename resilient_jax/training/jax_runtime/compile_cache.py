"""A persistent compilation cache that every process writes (jax's own: process 0 only)."""


def share_compilation_cache() -> str | None:
    """Not there yet: the stock cache stays as it is.

    Returns:
        A warning for the caller's event, None when the shared cache is on.
    """
    return "the shared compilation cache is not implemented yet; jax's own is used"
