"""Resuming a job that has no state in memory: from the newest checkpoint that every host can read."""

import logging
from typing import Any

import numpy as np

from resilient_jax.checkpoint.directory_listing import MAX_SHOWN, DirectoryListing
from resilient_jax.checkpoint.orbax_store import OrbaxStore
from resilient_jax.checkpoint.stored_tree import check_storable
from resilient_jax.errors import CheckpointUnreadable, StateError
from resilient_jax.events import EventKind
from resilient_jax.protocol.replay import ReplayOrder
from resilient_jax.protocol.state_records import StateLoss
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.host_checks import agree_on_checkpoint
from resilient_jax.trainer.training_state import Tree
from resilient_jax.worker.world import World

logger = logging.getLogger(__name__)
UNREADABLE_ON_ANOTHER_HOST = "another host could not read it"


def restore_newest(
    world: World, store: OrbaxStore, checkpoints: Checkpoints, abstract: Tree, sharding: ShardingRule | None
) -> tuple[int, Tree] | None:
    """Return the step and the state of the newest checkpoint that all hosts can read. All hosts must call this.

    Only a checkpoint counts that no host which computed wrongly can have touched; in a replay one from before the step
    that is computed again.

    Each checkpoint that some host cannot read is an event, on every host. None: the directory has no checkpoint.

    Args:
        abstract: tree of the state's shapes.
        sharding: sharding of each leaf; None: leaves in host memory.

    Raises:
        CheckpointUnreadable: there are checkpoints, but none can be read; the message says why for each. Or there is no
            checkpoint although the job's state was lost, and the job was to resume from a checkpoint.
        StateError: the hosts see different checkpoints, or the directory has other contents than checkpoints, or the
            newest readable one is of another state; or the state cannot be on storage.
    """
    check_storable(abstract)  # also where there is no checkpoint: before the first step
    store.wait_until_finished(world.record_event, world.raise_if_ended)
    # A barrier: no host is saving after it, so all see the same checkpoints.
    world.all_reduce(np.zeros(1, np.int32))
    listing = store.list_directory()
    refused: dict[int, str] = {}
    for name in listing.unfinished:
        path = str(store.get_folder(0).with_name(name))
        world.record_event(EventKind.CHECKPOINT_REFUSED, path=path, reason="its save was not finished")
    newest = world.trusted_step if world.replay is None else world.replay.step
    end = None if newest is None else newest + 1
    while True:
        step = agree_on_checkpoint(
            world, listing.find_newest_before(min(refused) if refused else end), checkpoints
        )
        if step is None and world.replay is not None and not refused:
            _check_may_replay(world.replay, listing, checkpoints)
            return None
        if step is None:
            _check_directory_is_unused(listing, refused, checkpoints)
            _check_may_begin(world.state_loss, checkpoints)
            return None
        bytes_before = store.bytes_read
        state, reason = _try_load(world, store, step, abstract, sharding)
        readers = int(world.all_reduce(np.array([state is not None], np.int32))[0])
        if readers == len(world.hosts):
            detail: dict[str, Any] = (
                {"steps_lost": world.state_loss.step - step} if world.state_loss is not None else {}
            )
            nbytes = store.bytes_read - bytes_before
            world.record_event(
                EventKind.CHECKPOINT_RESTORED,
                step=step,
                path=str(store.get_folder(step)),
                bytes=nbytes,
                **detail,
            )
            return step, state
        refused[step] = reason or UNREADABLE_ON_ANOTHER_HOST
        logger.warning("the checkpoint %s is skipped: %s", store.get_folder(step), refused[step])
        world.record_event(
            EventKind.CHECKPOINT_REFUSED, step=step, path=str(store.get_folder(step)), reason=refused[step]
        )


def _try_load(
    world: World, store: OrbaxStore, step: int, abstract: Tree, sharding: ShardingRule | None
) -> tuple[Tree | None, str | None]:
    try:
        return store.load(step, abstract, sharding, world.raise_if_ended), None
    except CheckpointUnreadable as error:
        return None, str(error).removeprefix(f"the checkpoint {store.get_folder(step)}: ")


def _check_may_begin(lost: StateLoss | None, checkpoints: Checkpoints) -> None:
    """Refuse to start from scratch where a lost job was to resume from a checkpoint that is gone."""
    if lost is not None and lost.checkpoint_step is not None:
        raise CheckpointUnreadable(
            f"checkpoints: found none in {checkpoints.directory}, expected that of step {lost.checkpoint_step}, which "
            "a host saw there when the job's state was lost. Restore it and launch the job again, or give another "
            "directory to start from scratch"
        )


def _check_may_replay(replay: ReplayOrder, listing: DirectoryListing, checkpoints: Checkpoints) -> None:
    """Refuse to compute all steps from the first one, unless that was asked for."""
    if replay.step > 0 and not replay.from_start:
        steps = ", ".join(map(str, sorted(listing.steps))) or "none"
        raise StateError(
            f"replay of step {replay.step}: found checkpoints after {steps} steps in {checkpoints.directory}, expected "
            f"one after at most {replay.step}. Keep more of them (rj.Checkpoints(max_to_keep=...)), give another step, "
            "or compute all steps from the first one with --from-start"
        )


def _check_directory_is_unused(
    listing: DirectoryListing, refused: dict[int, str], checkpoints: Checkpoints
) -> None:
    """Refuse to start from scratch in a directory that has checkpoints, or folders of something else."""
    if refused:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in list(refused.items())[:MAX_SHOWN])
        raise CheckpointUnreadable(
            f"checkpoints: found {len(refused)} in {checkpoints.directory}, and none that every host can read "
            f"({reasons}). Restore one from a copy, or give another directory to start from scratch"
        )
    if listing.foreign:
        raise StateError(
            f"checkpoints: found {', '.join(listing.foreign[:MAX_SHOWN])} in {checkpoints.directory}, expected folders "
            "named by their steps, or nothing. Give the directory above the steps' folders, or an empty one to start "
            "from scratch"
        )
