"""The configuration of one `fit`, and options of `Trainer`."""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.data.microbatches import MicrobatchData
from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import Axis
from resilient_jax.sharding.logical_axes import LogicalAxisRules
from resilient_jax.step.assignment import Reduction, ReplicaShape
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.early_stopping import EarlyStopping
from resilient_jax.trainer.evaluation import Evaluation
from resilient_jax.trainer.loss_function import LossFunction
from resilient_jax.trainer.pipeline_options import Pipeline
from resilient_jax.trainer.planner import Planner
from resilient_jax.trainer.step_report import Callback
from resilient_jax.trainer.train_step import Recipe
from resilient_jax.worker.world import ONE_REPLICA_PER_HOST

MESH_AXES: Final = (Axis.FSDP.value, Axis.EXPERT.value, Axis.TENSOR.value)
"""Axes of a replica's mesh, outermost first; the first one shards the examples."""


class StateSharding(enum.StrEnum):
    """How the training state is kept between steps."""

    REPLICATED = "replicated"
    """Every host has all of it."""
    SHARDED = "sharded"
    """Every host has a shard of it."""


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How microbatches are assigned to hosts and reduced (see `AccumulationOptions`), and how the state is kept.

    Attributes:
        reduction: "exact": sums that have the same bits, whichever hosts are alive, and are as precise as floats, at
            twice their memory and traffic; "exact_wide": the same of any range; "fast": one all-reduce of floats.
        replica_shape: the hosts of a replica, or the replicas of a host.
        balance_by_speed: faster hosts get more microbatches, as measured; else all get as many.
        state: between steps, "replicated" on every host or "sharded" over all of them. A host then has a shard of
            parameters and optimizer state, and gathers the parameters to compute a step.

            Sharded states have the bits of replicated ones: what optimizers add up over a leaf or all leaves (lamb,
            lars, adafactor, `clip_by_global_norm`) is added in integers. Products of matrices and loops (muon,
            shampoo) depend on the number of hosts; a warning names the operation.
        axes: for a model that is too large for a host: sizes of "fsdp", "expert" and "tensor", which multiply to the
            devices of one host or several. These are a replica, over whose devices parameters, their gradients and
            optimizer state are sharded by the names of their dims. `replica_shape` and `state` are not given.
        logical_axis_rules: with `axes`: the logical names of the parameters' dims, where the model's Flax metadata does
            not name the dims, and the axis of each name.
        pipeline: for a model that is too large for a host: replicas that span hosts, each with some of the layers. The
            state is then on the hosts that need it, and `state` is not given.

    Raises:
        CallerError: a value is of another type, or `state` is neither of the two.
    """

    reduction: Reduction = "exact"
    replica_shape: ReplicaShape = ONE_REPLICA_PER_HOST
    balance_by_speed: bool = True
    state: StateSharding | str = StateSharding.REPLICATED
    axes: Mapping[str, int] | None = None
    logical_axis_rules: LogicalAxisRules | None = None
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.state not in list(StateSharding):
            raise CallerError(
                f"parallelism: found state={self.state!r}, expected one of {', '.join(StateSharding)}"
            )
        is_default = self.replica_shape == ONE_REPLICA_PER_HOST and self.state == StateSharding.REPLICATED
        if self.axes is None and self.logical_axis_rules is not None:
            raise CallerError(
                "parallelism: found logical_axis_rules without axes, expected both. Of a pipeline or a planner give "
                "them to rj.Pipeline or rj.Planner"
            )
        if self.axes is not None:
            self._check_axes(self.axes, is_alone=is_default and self.pipeline is None)
        if self.pipeline is not None and not is_default:
            raise CallerError(
                f"parallelism: found replica_shape={self.replica_shape}, state={self.state!r} with a pipeline, "
                "expected neither to be given: the pipeline says which hosts make a replica, and each has the state "
                "of its layers alone"
            )

    @staticmethod
    def _check_axes(axes: Mapping[str, int], *, is_alone: bool) -> None:
        if (
            not axes
            or axes.keys() - set(MESH_AXES)
            or not all(type(n) is int and n > 0 for n in axes.values())
        ):
            raise CallerError(
                f"parallelism: found axes={dict(axes)}, expected positive sizes of {', '.join(MESH_AXES)}, such as "
                '{"fsdp": 8}'
            )
        if not is_alone:
            raise CallerError(
                f"parallelism: found axes={dict(axes)} with replica_shape, state or pipeline, expected axes "
                "alone: they say which devices are a replica, and that the state is sharded over them"
            )


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How the data is read.

    Attributes:
        shuffle: a source of examples is shuffled newly in each epoch, unless this is False. For other sources: None.
        prefetch_buffer_size: microbatches that are kept ready.
        num_threads: how many threads read.

    Raises:
        CallerError: a value is of another type, or a number is below 1.
    """

    shuffle: bool | None = None
    prefetch_buffer_size: int = 8
    num_threads: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefetch_buffer_size < 1 or self.num_threads < 1:
            raise CallerError(
                f"read_options: found prefetch_buffer_size={self.prefetch_buffer_size}, "
                f"num_threads={self.num_threads}, expected at least 1 of each"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """The configuration of one `fit`, without arrays.

    Attributes:
        initial_variables: returns the variables that the initial state has; None: the model makes them.
        planner: planner of the replicas; None: the user specifies replicas.
    """

    num_steps: int
    recipe: Recipe
    microbatch_size: int
    model: object
    data: MicrobatchData
    initial_variables: Callable[[], Any] | None
    parallelism: Parallelism
    planner: Planner | None
    read_options: ReadOptions
    evaluation: Evaluation | None
    evaluation_loss: LossFunction
    early_stopping: EarlyStopping | None
    checkpoints: Checkpoints | None
    callbacks: Sequence[Callback]
    log_directory: str | Path | None

    @property
    def global_batch(self) -> int:
        """The examples of a step."""
        return self.microbatch_size * self.recipe.num_microbatches

    @property
    def num_shared_examples(self) -> int:
        """The number that shares of examples have to divide: those of training and of an evaluation."""
        evaluated = self.evaluation.microbatch_size if self.evaluation is not None else None
        return math.gcd(self.microbatch_size, evaluated or self.microbatch_size)
