"""The policy for microbatches that are not finite, applied."""

import logging
import math
from collections.abc import Sequence

from resilient_jax.errors import NonFiniteError
from resilient_jax.events import EventKind
from resilient_jax.pipeline.commit_table import CommitTable
from resilient_jax.trainer.numerics import NonFinitePolicy
from resilient_jax.trainer.train_step import Recipe
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)


def handle_nonfinite(world: World, recipe: Recipe, step: int, microbatches: Sequence[int]) -> None:
    """Apply the policy to the non-finite `microbatches` of a step; the same on every host.

    Raises:
        NonFiniteError: the policy is to stop, or no other microbatch is left.
    """
    if not microbatches:
        return
    policy = recipe.numerics.non_finite
    names = ", ".join(f"{index} (host {world.host_of_microbatch(index)})" for index in microbatches)
    found = f"step {step}: found a loss, gradient or statistic that is not finite in the microbatches {names}"
    if policy == NonFinitePolicy.STOP or (
        policy == NonFinitePolicy.SKIP and len(microbatches) == recipe.num_microbatches
    ):
        raise NonFiniteError(
            f"{found}, expected finite numbers. Nothing of this step was committed. Look at these microbatches of "
            "the data, lower the learning rate, or clip; numerics=Numerics(non_finite='skip') leaves them out of "
            "the mean, as long as there are others",
            step=step,
            microbatch=microbatches[0],
            host=world.host_of_microbatch(microbatches[0]),
        )
    done = "left out of the step's mean" if policy == NonFinitePolicy.SKIP else "used as they are"
    world.record_event(EventKind.NONFINITE, step=step, microbatches=names, done=done)
    if world.host_index == 0:
        logger.warning("%s; %s", found, done)


def check_table(recipe: Recipe, step: int, table: CommitTable) -> None:
    """Refuse numbers of a pipeline that are not finite, if that is the policy, before its state is updated.

    Raises:
        NonFiniteError: a number is not finite; the message says which.
    """
    is_finite = math.isfinite(table.norm) and math.isfinite(table.loss)
    if not is_finite and recipe.numerics.non_finite == NonFinitePolicy.STOP:
        raise NonFiniteError(
            f"step {step}: found a loss of {table.loss} and a gradient norm of {table.norm}, expected finite "
            "numbers. Nothing of this step was committed. Lower the learning rate, or clip: "
            "Numerics(clip_norm=)",
            step=step,
        )
