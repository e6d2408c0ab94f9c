"""What one `fit` has to do."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from resilient_jax.training.data.microbatches import MicrobatchData
from resilient_jax.training.step.assignment import ReplicaShape
from resilient_jax.training.trainer.checkpoints import Checkpoints
from resilient_jax.training.trainer.early_stop import EarlyStop
from resilient_jax.training.trainer.evaluation import Evaluation
from resilient_jax.training.trainer.loss import Loss
from resilient_jax.training.trainer.programs import Recipe
from resilient_jax.training.trainer.reports import Callback
from resilient_jax.training.world import ONE_HOST


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the microbatches of a step are shared out and added up; see `World.sum_microbatches`.

    Attributes:
        unit: microbatches that one host adds up in one go.
        reproducible: the same bits whoever lives.
        replicas: the hosts of a replica, or the replicas of a host.
        by_speed: more for faster hosts, as measured; else evenly.
    """

    unit: int = 1
    reproducible: bool = True
    replicas: ReplicaShape = ONE_HOST
    by_speed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the data is read.

    Attributes:
        shuffle: of a source of examples: anew in each epoch, unless False. Of others: None.
        ahead: microbatches to hold for later.
        threads: that read.
    """

    shuffle: bool | None = None
    ahead: int = 8
    threads: int = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that one `fit` has to do; no arrays.

    Attributes:
        steps: to have committed in the end.
        data: of the training.
        evaluation: with its loss, data and microbatch size; None: none.
    """

    steps: int
    recipe: Recipe
    microbatch_size: int
    data: MicrobatchData
    sharing: Sharing
    reading: Reading
    evaluation: Evaluation | None
    evaluation_loss: Loss
    early_stop: EarlyStop | None
    checkpoints: Checkpoints | None
    callbacks: Sequence[Callback]
    log: str | Path | None
