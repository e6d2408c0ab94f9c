"""Checkpoints on storage, in Orbax's format, written and read by a process of its own."""

from typing import TYPE_CHECKING

from resilient_jax.lazy_names import make_lazy_names

if TYPE_CHECKING:
    from resilient_jax.checkpoint.orbax_store import OrbaxStore as OrbaxStore

__getattr__, __dir__, __all__ = make_lazy_names(__name__)
