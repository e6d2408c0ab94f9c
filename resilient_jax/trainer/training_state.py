"""The training state, which is kept from step to step, and the sums of one step."""

from typing import Any, Final, NamedTuple

import jax
import numpy as np
import optax

from resilient_jax.errors import CallerError
from resilient_jax.trainer.model_adapters import Variables

Tree = Any
"""A pytree of arrays."""
State = Any
"""A `TrainingState`; of a pipeline a `PipelinedState`."""


LEARNING_RATE: Final = "learning_rate"
"""The name of the metric, and that of the argument of Optax's optimizers."""


class EarlyStoppingState(NamedTuple):
    """The state of early stopping.

    Attributes:
        best_metric: float32[]: the best value so far.
        patience_count: int32[]: how many evaluations in a row have not improved on it.
    """

    best_metric: Any
    patience_count: Any


class TrainingState(NamedTuple):
    """The state that a failure must not lose.

    Attributes:
        step: int32[]: how many steps are committed.
        early_stopping: state of early stopping; () without.
    """

    step: jax.Array | np.ndarray
    variables: Variables
    opt_state: optax.OptState
    early_stopping: EarlyStoppingState | tuple[()]


class MicrobatchSums(NamedTuple):
    """Sums over microbatches, in float32 at least, but for integers. B is the number of microbatches in a step.

    Attributes:
        gradients: gradients in the shapes of the parameters.
        collections: what the microbatches contribute to the variables that the loss changes; see `VariableReducer`.
        loss: [], or a `WeightedMean` of two such arrays.
        metrics: [] for each metric, or a `WeightedMean` of two such arrays.
        non_finite: [B]: 1 at each microbatch that has a non-finite element, so that no further communication is
            needed.
    """

    gradients: Tree
    collections: Tree
    loss: Any
    metrics: dict[str, Any]
    non_finite: Any


class StepSummary(NamedTuple):
    """The reductions over all leaves that the update needs. The update itself is element-wise, so it can run on shards.

    Attributes:
        num_microbatches: float32[]: microbatches in the mean: B without those that are skipped.
        divisor: float32[]: what the sums of gradients are divided by: `num_microbatches`, or of a loss that is a
            `WeightedMean` what `find_divisor` makes of the loss's weight.
        grad_norm: float32[]: norm of the mean gradient, before it is clipped.
        mean_loss: float32[]: mean loss of the step.
    """

    num_microbatches: Any
    divisor: Any
    grad_norm: Any
    mean_loss: Any


def read_learning_rate(opt_state: optax.OptState) -> dict[str, float]:
    """Return the metric `learning_rate`: what the last update used, of `optax.inject_hyperparams`; {} without."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: hasattr(node, "hyperparams"))
    found = [getattr(node, "hyperparams", {}) for node in nodes]
    rates = [float(one[LEARNING_RATE]) for one in found if LEARNING_RATE in one]
    return {LEARNING_RATE: rates[0]} if rates else {}


def check_same_types(before: Tree, after: Tree, what: str) -> None:
    """Check that a state keeps its types in a step; else it would be recompiled, and could not be handed over.

    Raises:
        CallerError: a leaf changes; the message names the first.
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
