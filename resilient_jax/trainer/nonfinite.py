"""What is done about microbatches that are not finite."""

import logging
from collections.abc import Sequence

from resilient_jax.errors import NonFiniteError
from resilient_jax.events import EventKind
from resilient_jax.trainer.numerics import NonFinite
from resilient_jax.trainer.step_programs import Recipe
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)


def judge(world: World, recipe: Recipe, step: int, bad: Sequence[int]) -> None:
    """Does what the policy says about the microbatches `bad` of a step; the same on every host.

    Raises:
        NonFiniteError: stop.
    """
    if not bad:
        return
    policy = recipe.numerics.non_finite
    names = ", ".join(f"{index} (host {world.host_of_microbatch(index)})" for index in bad)
    found = f"step {step}: found a loss, gradient or statistic that is not finite in the microbatches {names}"
    if policy == NonFinite.STOP or (policy == NonFinite.SKIP and len(bad) == recipe.microbatches):
        raise NonFiniteError(
            f"{found}, expected finite numbers. Nothing of this step was committed. Look at these microbatches of "
            "the data, lower the learning rate, or clip; numerics=Numerics(non_finite='skip') leaves them out of "
            "the mean, as long as there are others",
            step=step,
            microbatch=bad[0],
            host=world.host_of_microbatch(bad[0]),
        )
    done = "left out of the step's mean" if policy == NonFinite.SKIP else "used as they are"
    world.record_event(EventKind.NONFINITE, step=step, microbatches=names, done=done)
    if world.host_index == 0:
        logger.warning("%s; %s", found, done)
