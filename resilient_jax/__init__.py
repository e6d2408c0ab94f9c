"""Training on many hosts that goes on when hosts die, slow down or come back.

`rj.planning` has what plans a job's devices, `rj.data` what brings its data; all other names are here. Importing this
package imports neither jax nor numpy; its names load what they need when first used.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from resilient_jax.lazy_names import make_lazy_names

if TYPE_CHECKING:
    from resilient_jax import data as data
    from resilient_jax import planning as planning
    from resilient_jax.config.job_config import JobConfig as JobConfig
    from resilient_jax.errors import CallerError as CallerError
    from resilient_jax.errors import DataError as DataError
    from resilient_jax.errors import NonFiniteError as NonFiniteError
    from resilient_jax.errors import OperatorError as OperatorError
    from resilient_jax.errors import ResilientJaxError as ResilientJaxError
    from resilient_jax.errors import StateError as StateError
    from resilient_jax.sharding.logical_axes import LogicalAxisRules as LogicalAxisRules
    from resilient_jax.sharding.raveled_array import RaveledArray as RaveledArray
    from resilient_jax.state.array_digest import digest_tree as digest_tree
    from resilient_jax.step.assignment import AccumulationOptions as AccumulationOptions
    from resilient_jax.step.assignment import ReplicaShape as ReplicaShape
    from resilient_jax.step.microbatch_accumulator import Microbatch as Microbatch
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
    from resilient_jax.weighted_mean import WeightedMean as WeightedMean
    from resilient_jax.worker.run import run as run
    from resilient_jax.worker.sharded_state import ShardedState as ShardedState
    from resilient_jax.worker.world import World as World

__getattr__, __dir__, __all__ = make_lazy_names(__name__)

if "jax" in sys.modules:  # so a call before the first use of a name is refused, too
    importlib.import_module("resilient_jax.jax_runtime.distributed_refusal").refuse_under_agent()
