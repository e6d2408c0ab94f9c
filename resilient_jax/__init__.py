"""Training on many hosts that goes on when hosts die, slow down or come back.

Importing this package imports neither jax nor numpy; its names load what they need when first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_jax.config.job_config import JobConfig as JobConfig
    from resilient_jax.data.microbatches import MicrobatchData as MicrobatchData
    from resilient_jax.data.microbatches import make_microbatch_data as make_microbatch_data
    from resilient_jax.data.packing import PackedDocuments as PackedDocuments
    from resilient_jax.data.prefetcher import Prefetcher as Prefetcher
    from resilient_jax.errors import CallerError as CallerError
    from resilient_jax.errors import DataError as DataError
    from resilient_jax.errors import NonFiniteError as NonFiniteError
    from resilient_jax.errors import OperatorError as OperatorError
    from resilient_jax.errors import ResilientJaxError as ResilientJaxError
    from resilient_jax.errors import StateError as StateError
    from resilient_jax.planning.errors import NoFeasiblePlan as NoFeasiblePlan
    from resilient_jax.planning.errors import PlanError as PlanError
    from resilient_jax.planning.model_file import load_model_shape as load_model_shape
    from resilient_jax.planning.next_plans import NextPlan as NextPlan
    from resilient_jax.planning.plan import Plan as Plan
    from resilient_jax.planning.program_cost import ProgramCost as ProgramCost
    from resilient_jax.planning.replan_decision import ReplanDecision as ReplanDecision
    from resilient_jax.planning.replan_decision import ReplanStep as ReplanStep
    from resilient_jax.planning.replanning import replan as replan
    from resilient_jax.planning.search import search_plan as search_plan
    from resilient_jax.planning.transformer import TransformerShape as TransformerShape
    from resilient_jax.planning.transformer_cost import analyze_transformer as analyze_transformer
    from resilient_jax.program_analysis.program_analysis import analyze_program as analyze_program
    from resilient_jax.protocol.recovery_records import RecoveryAction as RecoveryAction
    from resilient_jax.protocol.recovery_records import RecoveryDecision as RecoveryDecision
    from resilient_jax.protocol.recovery_records import RecoveryOption as RecoveryOption
    from resilient_jax.sharding.logical_axes import LogicalAxisRules as LogicalAxisRules
    from resilient_jax.sharding.planned_program import compile_plan as compile_plan
    from resilient_jax.sharding.planned_program import make_mesh as make_mesh
    from resilient_jax.sharding.planned_program import make_state_shardings as make_state_shardings
    from resilient_jax.sharding.raveled_array import RaveledArray as RaveledArray
    from resilient_jax.step.assignment import AccumulationOptions as AccumulationOptions
    from resilient_jax.step.assignment import ReplicaShape as ReplicaShape
    from resilient_jax.step.microbatch_accumulator import Microbatch as Microbatch
    from resilient_jax.topology.errors import TopologyError as TopologyError
    from resilient_jax.topology.file_loader import load_topology as load_topology
    from resilient_jax.topology.topology import Topology as Topology
    from resilient_jax.trainer.checkpoints import Checkpoints as Checkpoints
    from resilient_jax.trainer.early_stopping import EarlyStopping as EarlyStopping
    from resilient_jax.trainer.evaluation import Evaluation as Evaluation
    from resilient_jax.trainer.fit_config import Parallelism as Parallelism
    from resilient_jax.trainer.fit_config import ReadOptions as ReadOptions
    from resilient_jax.trainer.fit_result import FitResult as FitResult
    from resilient_jax.trainer.numerics import Numerics as Numerics
    from resilient_jax.trainer.pipeline_options import Pipeline as Pipeline
    from resilient_jax.trainer.planner import Planner as Planner
    from resilient_jax.trainer.step_report import Callback as Callback
    from resilient_jax.trainer.step_report import StepReport as StepReport
    from resilient_jax.trainer.trainer import Trainer as Trainer
    from resilient_jax.trainer.trainer_step import TrainerStep as TrainerStep
    from resilient_jax.trainer.tree_digest import digest_tree as digest_tree
    from resilient_jax.weighted_mean import WeightedMean as WeightedMean
    from resilient_jax.worker.run import run as run
    from resilient_jax.worker.sharded_state import ShardedState as ShardedState
    from resilient_jax.worker.world import World as World

_HOME = {
    "AccumulationOptions": "resilient_jax.step.assignment",
    "Callback": "resilient_jax.trainer.step_report",
    "CallerError": "resilient_jax.errors",
    "Checkpoints": "resilient_jax.trainer.checkpoints",
    "DataError": "resilient_jax.errors",
    "EarlyStopping": "resilient_jax.trainer.early_stopping",
    "Evaluation": "resilient_jax.trainer.evaluation",
    "FitResult": "resilient_jax.trainer.fit_result",
    "JobConfig": "resilient_jax.config.job_config",
    "LogicalAxisRules": "resilient_jax.sharding.logical_axes",
    "Microbatch": "resilient_jax.step.microbatch_accumulator",
    "MicrobatchData": "resilient_jax.data.microbatches",
    "NextPlan": "resilient_jax.planning.next_plans",
    "NoFeasiblePlan": "resilient_jax.planning.errors",
    "NonFiniteError": "resilient_jax.errors",
    "Numerics": "resilient_jax.trainer.numerics",
    "OperatorError": "resilient_jax.errors",
    "PackedDocuments": "resilient_jax.data.packing",
    "Parallelism": "resilient_jax.trainer.fit_config",
    "Pipeline": "resilient_jax.trainer.pipeline_options",
    "Plan": "resilient_jax.planning.plan",
    "PlanError": "resilient_jax.planning.errors",
    "Planner": "resilient_jax.trainer.planner",
    "Prefetcher": "resilient_jax.data.prefetcher",
    "ProgramCost": "resilient_jax.planning.program_cost",
    "RaveledArray": "resilient_jax.sharding.raveled_array",
    "ReadOptions": "resilient_jax.trainer.fit_config",
    "RecoveryAction": "resilient_jax.protocol.recovery_records",
    "RecoveryDecision": "resilient_jax.protocol.recovery_records",
    "RecoveryOption": "resilient_jax.protocol.recovery_records",
    "ReplanDecision": "resilient_jax.planning.replan_decision",
    "ReplanStep": "resilient_jax.planning.replan_decision",
    "ReplicaShape": "resilient_jax.step.assignment",
    "ResilientJaxError": "resilient_jax.errors",
    "ShardedState": "resilient_jax.worker.sharded_state",
    "StateError": "resilient_jax.errors",
    "StepReport": "resilient_jax.trainer.step_report",
    "Topology": "resilient_jax.topology.topology",
    "TopologyError": "resilient_jax.topology.errors",
    "Trainer": "resilient_jax.trainer.trainer",
    "TrainerStep": "resilient_jax.trainer.trainer_step",
    "TransformerShape": "resilient_jax.planning.transformer",
    "WeightedMean": "resilient_jax.weighted_mean",
    "World": "resilient_jax.worker.world",
    "analyze_program": "resilient_jax.program_analysis.program_analysis",
    "analyze_transformer": "resilient_jax.planning.transformer_cost",
    "compile_plan": "resilient_jax.sharding.planned_program",
    "digest_tree": "resilient_jax.trainer.tree_digest",
    "load_model_shape": "resilient_jax.planning.model_file",
    "load_topology": "resilient_jax.topology.file_loader",
    "make_mesh": "resilient_jax.sharding.planned_program",
    "make_microbatch_data": "resilient_jax.data.microbatches",
    "make_state_shardings": "resilient_jax.sharding.planned_program",
    "replan": "resilient_jax.planning.replanning",
    "run": "resilient_jax.worker.run",
    "search_plan": "resilient_jax.planning.search",
}

__all__ = [
    "AccumulationOptions",
    "Callback",
    "CallerError",
    "Checkpoints",
    "DataError",
    "EarlyStopping",
    "Evaluation",
    "FitResult",
    "JobConfig",
    "LogicalAxisRules",
    "Microbatch",
    "MicrobatchData",
    "NextPlan",
    "NoFeasiblePlan",
    "NonFiniteError",
    "Numerics",
    "OperatorError",
    "PackedDocuments",
    "Parallelism",
    "Pipeline",
    "Plan",
    "PlanError",
    "Planner",
    "Prefetcher",
    "ProgramCost",
    "RaveledArray",
    "ReadOptions",
    "RecoveryAction",
    "RecoveryDecision",
    "RecoveryOption",
    "ReplanDecision",
    "ReplanStep",
    "ReplicaShape",
    "ResilientJaxError",
    "ShardedState",
    "StateError",
    "StepReport",
    "Topology",
    "TopologyError",
    "Trainer",
    "TrainerStep",
    "TransformerShape",
    "WeightedMean",
    "World",
    "analyze_program",
    "analyze_transformer",
    "compile_plan",
    "digest_tree",
    "load_model_shape",
    "load_topology",
    "make_mesh",
    "make_microbatch_data",
    "make_state_shardings",
    "replan",
    "run",
    "search_plan",
]


if "jax" in sys.modules:  # so a call before the first use of a name is refused, too
    importlib.import_module("resilient_jax.jax_runtime.distributed_refusal").refuse_under_agent()


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOME:
        raise AttributeError(f"module 'resilient_jax' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
