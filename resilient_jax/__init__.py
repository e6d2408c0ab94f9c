"""Training on many hosts that goes on when hosts die, slow down or come back.

Importing this package imports neither jax nor numpy; its names load what they need when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_jax.errors import NonFiniteError as NonFiniteError
    from resilient_jax.errors import ResilientJaxError as ResilientJaxError
    from resilient_jax.planning.model_file import load_model_shape as load_model_shape
    from resilient_jax.planning.plan import Plan as Plan
    from resilient_jax.planning.profile import Profile as Profile
    from resilient_jax.planning.replanning import replan as replan
    from resilient_jax.planning.search import search as search
    from resilient_jax.planning.transformer import TransformerShape as TransformerShape
    from resilient_jax.planning.transformer_profile import profile_transformer as profile_transformer
    from resilient_jax.sharding.naming import Naming as Naming
    from resilient_jax.sharding.program_profile import profile_of as profile_of
    from resilient_jax.topology.loading import load_topology as load_topology
    from resilient_jax.topology.topology import Topology as Topology
    from resilient_jax.training.data.microbatches import microbatch_data as microbatch_data
    from resilient_jax.training.data.packing import PackedDocuments as PackedDocuments
    from resilient_jax.training.data.prefetch import Prefetcher as Prefetcher
    from resilient_jax.training.run import run as run
    from resilient_jax.training.step.assignment import ReplicaShape as ReplicaShape
    from resilient_jax.training.step.sums import Microbatch as Microbatch
    from resilient_jax.training.trainer.checkpoints import Checkpoints as Checkpoints
    from resilient_jax.training.trainer.digest import digest as digest
    from resilient_jax.training.trainer.early_stop import EarlyStop as EarlyStop
    from resilient_jax.training.trainer.evaluation import Evaluation as Evaluation
    from resilient_jax.training.trainer.numerics import Numerics as Numerics
    from resilient_jax.training.trainer.order import Reading as Reading
    from resilient_jax.training.trainer.order import Sharing as Sharing
    from resilient_jax.training.trainer.planning import Planning as Planning
    from resilient_jax.training.trainer.reports import StepReport as StepReport
    from resilient_jax.training.trainer.result import FitResult as FitResult
    from resilient_jax.training.trainer.trainer import Trainer as Trainer
    from resilient_jax.training.world import World as World

_HOME = {
    "Checkpoints": "resilient_jax.training.trainer.checkpoints",
    "EarlyStop": "resilient_jax.training.trainer.early_stop",
    "Evaluation": "resilient_jax.training.trainer.evaluation",
    "FitResult": "resilient_jax.training.trainer.result",
    "Microbatch": "resilient_jax.training.step.sums",
    "Naming": "resilient_jax.sharding.naming",
    "NonFiniteError": "resilient_jax.errors",
    "Numerics": "resilient_jax.training.trainer.numerics",
    "PackedDocuments": "resilient_jax.training.data.packing",
    "Plan": "resilient_jax.planning.plan",
    "Planning": "resilient_jax.training.trainer.planning",
    "Prefetcher": "resilient_jax.training.data.prefetch",
    "Profile": "resilient_jax.planning.profile",
    "Reading": "resilient_jax.training.trainer.order",
    "ReplicaShape": "resilient_jax.training.step.assignment",
    "ResilientJaxError": "resilient_jax.errors",
    "Sharing": "resilient_jax.training.trainer.order",
    "StepReport": "resilient_jax.training.trainer.reports",
    "Topology": "resilient_jax.topology.topology",
    "Trainer": "resilient_jax.training.trainer.trainer",
    "TransformerShape": "resilient_jax.planning.transformer",
    "World": "resilient_jax.training.world",
    "digest": "resilient_jax.training.trainer.digest",
    "load_model_shape": "resilient_jax.planning.model_file",
    "load_topology": "resilient_jax.topology.loading",
    "microbatch_data": "resilient_jax.training.data.microbatches",
    "profile_of": "resilient_jax.sharding.program_profile",
    "profile_transformer": "resilient_jax.planning.transformer_profile",
    "replan": "resilient_jax.planning.replanning",
    "run": "resilient_jax.training.run",
    "search": "resilient_jax.planning.search",
}

__all__ = [
    "Checkpoints",
    "EarlyStop",
    "Evaluation",
    "FitResult",
    "Microbatch",
    "Naming",
    "NonFiniteError",
    "Numerics",
    "PackedDocuments",
    "Plan",
    "Planning",
    "Prefetcher",
    "Profile",
    "Reading",
    "ReplicaShape",
    "ResilientJaxError",
    "Sharing",
    "StepReport",
    "Topology",
    "Trainer",
    "TransformerShape",
    "World",
    "digest",
    "load_model_shape",
    "load_topology",
    "microbatch_data",
    "profile_of",
    "profile_transformer",
    "replan",
    "run",
    "search",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOME:
        raise AttributeError(f"module 'resilient_jax' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
