"""Where a job in which nothing is committed yet goes on: at the newest checkpoint that every host can read."""

import logging

import numpy as np

from resilient_jax.errors import CheckpointUnreadable, StateError
from resilient_jax.events import EventKind
from resilient_jax.training.trainer.checkpoints import Checkpoints
from resilient_jax.training.trainer.checks import agree_on_checkpoint
from resilient_jax.training.trainer.state import Tree
from resilient_jax.training.trainer.storage.folders import SHOWN, Listing
from resilient_jax.training.trainer.storage.orbax_store import OrbaxStore
from resilient_jax.training.world import World

logger = logging.getLogger(__name__)
ELSEWHERE = "another host could not read it"


def restore_newest(
    world: World, store: OrbaxStore, checkpoints: Checkpoints, abstract: Tree
) -> tuple[int, Tree] | None:
    """The newest checkpoint that all hosts can read, its step and its state in host memory. All hosts must call this.

    Each that some host cannot read is an event, on every host. None: nothing was ever saved here.

    Args:
        world: the hosts.
        store: of the checkpoints.
        checkpoints: where they are.
        abstract: the state's shapes.

    Raises:
        CheckpointUnreadable: there are checkpoints, but none can be read; says why each.
        StateError: the hosts see different checkpoints, or other things than checkpoints are there, or the newest that
            can be read holds another state.
    """
    listing = store.look()
    refused: dict[int, str] = {}
    for name in listing.unfinished:
        path = str(store.path(0).with_name(name))
        world.note(EventKind.CHECKPOINT_REFUSED, path=path, reason="its save was not finished")
    while True:
        step = agree_on_checkpoint(world, listing.older_than(min(refused) if refused else None), checkpoints)
        if step is None:
            _check_nothing_is_there(listing, refused, checkpoints)
            return None
        state, reason = _try_load(store, step, abstract)
        readers = int(world.agree(np.array([state is not None], np.int32))[0])
        if readers == len(world.hosts):
            world.note(EventKind.CHECKPOINT_RESTORED, step=step, path=str(store.path(step)))
            return step, state
        refused[step] = reason or ELSEWHERE
        logger.warning("the checkpoint %s is skipped: %s", store.path(step), refused[step])
        world.note(EventKind.CHECKPOINT_REFUSED, step=step, path=str(store.path(step)), reason=refused[step])


def _try_load(store: OrbaxStore, step: int, abstract: Tree) -> tuple[Tree | None, str | None]:
    try:
        return store.load(step, abstract), None
    except CheckpointUnreadable as error:
        return None, str(error).removeprefix(f"the checkpoint {store.path(step)}: ")


def _check_nothing_is_there(listing: Listing, refused: dict[int, str], checkpoints: Checkpoints) -> None:
    """Refuses to begin anew where somebody has saved something."""
    if refused:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in list(refused.items())[:SHOWN])
        raise CheckpointUnreadable(
            f"checkpoints: found {len(refused)} in {checkpoints.directory}, and none that every host can read "
            f"({reasons}). Bring one back from a copy, or give another directory to begin anew"
        )
    if listing.foreign:
        raise StateError(
            f"checkpoints: found {', '.join(listing.foreign[:SHOWN])} in {checkpoints.directory}, expected folders "
            "named by their steps, or nothing. Give the directory above the steps' folders, or an empty one to begin "
            "anew"
        )
