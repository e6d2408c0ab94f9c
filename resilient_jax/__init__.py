"""Training on many hosts that goes on when hosts die, slow down or come back.

Importing this package imports neither jax nor numpy; its names load what they need when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_jax.errors import ResilientJaxError as ResilientJaxError
    from resilient_jax.training.run import run as run
    from resilient_jax.training.step.assignment import ReplicaShape as ReplicaShape
    from resilient_jax.training.step.sums import Microbatch as Microbatch
    from resilient_jax.training.world import World as World

_HOME = {
    "Microbatch": "resilient_jax.training.step.sums",
    "ReplicaShape": "resilient_jax.training.step.assignment",
    "ResilientJaxError": "resilient_jax.errors",
    "World": "resilient_jax.training.world",
    "run": "resilient_jax.training.run",
}

__all__ = ["Microbatch", "ReplicaShape", "ResilientJaxError", "World", "run"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOME:
        raise AttributeError(f"module 'resilient_jax' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
