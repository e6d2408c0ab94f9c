"""The checkpoints of one `fit`: restored at its beginning, saved during its steps, complete at its end."""

import contextlib
import secrets
from typing import Final

import numpy as np

from resilient_jax.checkpoint.messages import SaveShare
from resilient_jax.checkpoint.orbax_store import OrbaxStore
from resilient_jax.errors import CheckpointFailed
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.trainer.checkpoint_restore import restore_newest
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.state_layout import StateLayout
from resilient_jax.trainer.training_state import State, Tree
from resilient_jax.worker.world import World

TOKEN_BYTES: Final = 4


class Checkpointer:
    """Saves and restores the training state; outlives generations, as a save in flight does, and keeps no array.

    Each host of a generation saves its part, and the first one's process puts the parts together. When that host
    changes, the former one may still have a save in flight: each save has a folder of its own.
    """

    def __init__(self, checkpoints: Checkpoints, num_steps: int) -> None:
        self._checkpoints = checkpoints
        self._num_steps = num_steps
        self._store = OrbaxStore(checkpoints.directory, checkpoints.max_to_keep, checkpoints.timeout_s)
        self._generation: int | None = None
        """In which it is known that all parts of a save in flight may still come."""

    def find_newest(self) -> int | None:
        """Return the step of the newest finished checkpoint, by the names alone. Thread-safe."""
        return self._store.find_newest_step()

    def restore(self, layout: StateLayout, abstract: Tree, sharding: ShardingRule) -> tuple[int, Tree] | None:
        """Return the step and the state to resume from; None without a checkpoint. See `restore_newest`."""
        self._give_up_without_lost_parts(layout.world)  # a save in flight is waited for
        return restore_newest(layout.world, self._store, self._checkpoints, abstract, sharding)

    def save(self, layout: StateLayout, state: State, step: int) -> None:
        """Start to save the committed state if a checkpoint is due. All hosts must call this.

        A replay and a rehearsal save nothing.
        """
        world = layout.world
        if world.replay is not None or world.is_rehearsal:
            return
        if world.is_leaving:
            self._save_before_end(layout, state)
            return
        self._store.poll_save(world.record_event)
        self._give_up_without_lost_parts(world)
        if not self._checkpoints.is_due(step, self._num_steps):
            return
        if world.host_index == 0 and step == self._num_steps:
            # This save may not be skipped: no later step will be saved.
            self._store.wait_until_finished(world.record_event, world.raise_if_ended)
        self._start(layout, state, step)

    def _start(self, layout: StateLayout, state: State, step: int) -> None:
        world = layout.world
        world.step_services.hit_failpoint(FailPoint.BEFORE_CHECKPOINT)
        verified_step = world.audits.verified_step if world.audits is not None else None
        if (share := self._agree_on_share(world, step)) is not None:
            part = layout.make_checkpoint_part(state)
            self._store.start_save(step, part, share, world.record_event, verified_step)

    def _save_before_end(self, layout: StateLayout, state: State) -> None:
        """Return when the state is on storage, or its save has failed: the job ends, and its outcome says which."""
        with contextlib.suppress(CheckpointFailed):
            self.ensure_final_saved(layout, state)

    def _agree_on_share(self, world: World, step: int) -> SaveShare | None:
        """Return this host's share of a save; None: the first host's last one is not done. All hosts must call this."""
        token = ""
        if world.host_index == 0 and not self._store.in_flight.must_skip(step, world.record_event):
            token = secrets.token_hex(TOKEN_BYTES)
        (token,) = CollectiveExchange.between_hosts(world).gather(token, speakers=[0])
        if not token:
            return None
        return SaveShare(token=token, number=world.host_index, hosts=tuple(world.hosts))

    def _give_up_without_lost_parts(self, world: World) -> None:
        """Give up a save in flight whose parts will not all come. All hosts must call this.

        Where a worker has ended, so has the process that wrote its part.
        """
        if world.generation == self._generation:
            return
        self._generation = world.generation
        share = self._store.in_flight.share
        tokens = CollectiveExchange.between_hosts(world).gather(share.token if share is not None else "")
        written = {
            host for host, token in zip(world.hosts, tokens, strict=True) if share and token == share.token
        }
        if lost := [host for host in self._store.in_flight.list_missing_parts() if host not in written]:
            names = ", ".join(lost)
            self._store.in_flight.give_up(f"{names} ended before its part was written", world.record_event)

    def distrust_after(self, world: World, step: int) -> None:
        """Set aside the checkpoints of more than `step` steps, which a host that computed wrongly may have touched."""
        self._store.distrust_after(step, world.record_event)

    def ensure_final_saved(self, layout: StateLayout, state: State) -> str:
        """Return on every host when the final state, at whichever step training ended, is on storage, or is not.

        If the host that was to save it is dead, the first live host saves it. A save that failed is made once more.

        Returns:
            Why the state is not on storage; empty: it is.
        """
        world, step = layout.world, layout.read_step(state)
        if world.replay is not None:
            return ""
        is_saver = world.host_index == 0
        self._give_up_without_lost_parts(world)
        # Of a part, too: should its process fail, the first host is told.
        self._store.wait_until_finished(world.record_event, world.raise_if_ended)
        is_missing = is_saver and step > 0 and not self._store.has_checkpoint(step)
        if int(world.all_reduce(np.array([is_missing], np.int32))[0]):
            self._start(layout, state, step)
            # A barrier: no host returns, and ends its process, before the checkpoint is on storage.
            failure = self._wait_saved(world) if is_saver else ""
            (told,) = CollectiveExchange.between_hosts(world).gather(failure, speakers=[0])
            return told
        return ""

    def _wait_saved(self, world: World) -> str:
        """Wait until the last save has ended; return why it failed, or an empty text."""
        try:
            self._store.wait_until_saved(world.record_event, world.raise_if_ended)
        except CheckpointFailed as error:
            return str(error)
        return ""

    def close(self) -> None:
        """End the storage process, once a save in flight is done or has taken too long."""
        self._store.close()
