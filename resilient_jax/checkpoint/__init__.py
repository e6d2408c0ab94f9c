"""Checkpoints on storage, in Orbax's format, written and read by a process of its own."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_jax.checkpoint.orbax_store import OrbaxStore as OrbaxStore

_HOME = {"OrbaxStore": "resilient_jax.checkpoint.orbax_store"}

__all__ = ["OrbaxStore"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
