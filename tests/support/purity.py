"""Holds the tier `pure` to its word: while one of its tests runs, no import of JAX succeeds, and no process is started.

What another tier has imported in the same process before is not seen; `tests/run.py` gives each tier its own.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

JAX_AND_KIN: Final = frozenset({"jax", "jaxlib", "flax", "optax", "orbax", "tensorstore", "grain"})
STARTS: Final = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
)
"""The audit events of what starts a process."""


class _Guard:
    """Finds modules, as an entry of `sys.meta_path`: none, but refuses those of JAX while it is on."""

    def __init__(self) -> None:
        self.is_on = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.is_on and name.partition(".")[0] in JAX_AND_KIN:
            raise ImportError(f"{name}: a test of tests/pure imports no JAX. Move it to tests/jax")
        return None

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event in STARTS:
            raise RuntimeError(
                f"{event}{arguments[:1]}: a test of tests/pure starts no process. Move it to tests/process"
            )


_guard = _Guard()


def install() -> None:
    """Watch imports and processes from now on."""
    sys.meta_path.insert(0, _guard)
    sys.addaudithook(_guard.audit)


@contextmanager
def held(is_pure: bool) -> Iterator[None]:
    """Refuse JAX and processes in the `with` block, if that is of the pure tier."""
    before, _guard.is_on = _guard.is_on, is_pure
    try:
        yield
    finally:
        _guard.is_on = before
