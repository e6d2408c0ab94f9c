"""What one `fit` has to do."""

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path

from resilient_jax.data.microbatches import MicrobatchData
from resilient_jax.errors import CallerError
from resilient_jax.step.assignment import ReplicaShape
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.early_stopping import EarlyStopping
from resilient_jax.trainer.evaluation import Evaluation
from resilient_jax.trainer.loss_function import LossFunction
from resilient_jax.trainer.planner import Planner
from resilient_jax.trainer.step_programs import Recipe
from resilient_jax.trainer.step_report import Callback
from resilient_jax.worker.world import ONE_REPLICA_PER_HOST


class StateSharding(enum.StrEnum):
    """How the training state is kept between steps."""

    REPLICATED = "replicated"
    """Every host has all of it."""
    SHARDED = "sharded"
    """Every host has its share."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How the microbatches of a step are shared out and added up; see `World.accumulate_microbatches`.

    Attributes:
        unit: microbatches that one host adds up in one go.
        reproducible: the same bits whoever lives.
        replicas: the hosts of a replica, or the replicas of a host.
        balance_by_speed: more for faster hosts, as measured; else evenly.
        state: how it is kept between steps: "replicated" on every host, or "sharded" over all of them. Then a host has
            its share of parameters and optimizer state; while it computes a step it gathers the parameters.

            Sharded states have the bits of complete ones with optimizers that treat every number by itself (adam,
            adamw, sgd, lion, rmsprop, adagrad, ...). Those that look across a leaf or all of them (lamb, lars,
            adafactor, `clip_by_global_norm`) are right, but what they add up is added in an order that depends on the
            number of hosts. To clip, use `Numerics(clip_norm=)`, which keeps the bits.

    Raises:
        CallerError: `state` is neither.
    """

    unit_size: int = 1
    reproducible: bool = True
    replica_shape: ReplicaShape = ONE_REPLICA_PER_HOST
    balance_by_speed: bool = False
    state: StateSharding | str = StateSharding.REPLICATED

    def __post_init__(self) -> None:
        if self.state not in list(StateSharding):
            raise CallerError(
                f"parallelism: found state={self.state!r}, expected one of {', '.join(StateSharding)}"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How the data is read.

    Attributes:
        shuffle: of a source of examples: anew in each epoch, unless False. Of others: None.
        ahead: microbatches to hold for later.
        threads: that read.
    """

    shuffle: bool | None = None
    prefetch_buffer_size: int = 8
    num_threads: int = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """All that one `fit` has to do; no arrays.

    Attributes:
        steps: to have committed in the end.
        data: of the training.
        model: as the user gave it.
        planning: what plans are searched for; None: the user has said how steps are computed.
        evaluation: with its loss, data and microbatch size; None: none.
    """

    num_steps: int
    recipe: Recipe
    microbatch_size: int
    model: object
    data: MicrobatchData
    parallelism: Parallelism
    planner: Planner | None
    read_options: ReadOptions
    evaluation: Evaluation | None
    evaluation_loss: LossFunction
    early_stopping: EarlyStopping | None
    checkpoints: Checkpoints | None
    callbacks: Sequence[Callback]
    log_directory: str | Path | None
