"""Which threads training waits for: they wait for what other hosts compile, and notice the end of a generation."""

import threading
from typing import Final

from resilient_jax.jax_runtime.collective_thread import collective_thread

_marks: Final = threading.local()


def mark_training_thread() -> None:
    """Say of the calling thread that training waits for it; the initializer of a pool's threads."""
    _marks.is_of_training = True


def is_training_thread() -> bool:
    """Return whether training waits for the calling thread: the main one, that of collectives, or a marked one."""
    if threading.current_thread() is threading.main_thread() or collective_thread.is_current:
        return True
    return getattr(_marks, "is_of_training", False)
