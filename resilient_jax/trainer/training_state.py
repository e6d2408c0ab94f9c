"""What training keeps from step to step, and what is summed within one."""

from typing import Any, NamedTuple

import jax
import optax

from resilient_jax.errors import CallerError
from resilient_jax.trainer.model_adapters import Variables

Tree = Any
"""A pytree of arrays."""


class EarlyStoppingState(NamedTuple):
    """What early stopping remembers.

    Attributes:
        best: float32[]: the best value so far.
        bad: int32[]: how many evaluations in a row have not bettered it.
    """

    best_metric: Any
    patience_count: Any


class TrainingState(NamedTuple):
    """All that a failure must not lose.

    Attributes:
        step: int32[]: how many steps are in it.
        variables: of the model.
        optimizer: as `optax` makes it.
        patience: of early stopping; () without.
    """

    step: jax.Array
    variables: Variables
    opt_state: optax.OptState
    early_stopping: EarlyStoppingState | tuple[()]


class MicrobatchSums(NamedTuple):
    """Sums over microbatches, in float32 at least. B is the number of microbatches in a step.

    Attributes:
        gradients: in the shapes of the parameters.
        statistics: in the shapes of the model's.
        loss: [].
        metrics: [] each.
        bad: [B]: 1 at each microbatch that had a number that is not finite. So all hosts know, and nobody asks.
    """

    gradients: Tree
    batch_stats: Tree
    loss: Any
    metrics: dict[str, Any]
    non_finite: Any


class StepSummary(NamedTuple):
    """What the update needs to know of a whole step. So it looks across no leaf itself, and may have pieces of them.

    Attributes:
        count: float32[]: the microbatches in the mean: B without those that are skipped.
        norm: float32[]: of the mean gradient, before it is clipped.
        loss: float32[]: the mean.
    """

    num_microbatches: Any
    grad_norm: Any
    mean_loss: Any


def check_same_types(before: Tree, after: Tree, what: str) -> None:
    """Refuses a state whose types change in a step: it would be compiled again, and could not be handed over.

    Raises:
        CallerError: names the first leaf that does.
    """
    old, new = (jax.tree_util.tree_leaves_with_path(tree) for tree in (before, after))
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise CallerError(f"{what}: found a state whose tree changes in a step, expected the same tree")
    for (path, one), (_, other) in zip(old, new, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise CallerError(
                f"{what}: found a state whose leaf {jax.tree_util.keystr(path)} is {one.dtype}{list(one.shape)} before "
                f"a step and {other.dtype}{list(other.shape)} after it, expected the same. Fix its type where it is "
                "made"
            )
