"""The checkpoints of one `fit`: restored at its beginning, saved during its steps, complete at its end."""

import numpy as np

from resilient_jax.checkpoint.orbax_store import OrbaxStore
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.trainer.checkpoint_restore import restore_newest
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.state_layout import StateLayout
from resilient_jax.trainer.training_state import State, Tree
from resilient_jax.worker.world import World


class Checkpointer:
    """Saves and restores the training state; outlives generations, as a save in flight does, and keeps no array.

    The first host of a generation saves. When that host changes, the former one may still have a save in flight: each
    host writes into a folder of its own.
    """

    def __init__(self, checkpoints: Checkpoints, num_steps: int) -> None:
        self._checkpoints = checkpoints
        self._num_steps = num_steps
        self._store = OrbaxStore(checkpoints.directory, checkpoints.max_to_keep, checkpoints.timeout_s)

    def find_newest(self) -> int | None:
        """Return the step of the newest finished checkpoint, by the names alone. Thread-safe."""
        return self._store.find_newest_step()

    def restore(self, world: World, abstract: Tree, sharding: ShardingRule) -> tuple[int, Tree] | None:
        """Return the step and the state to resume from; None without a checkpoint. See `restore_newest`."""
        return restore_newest(world, self._store, self._checkpoints, abstract, sharding)

    def save(self, layout: StateLayout, state: State, step: int) -> None:
        """Start to save the committed state if a checkpoint is due. All hosts must call this: they gather the state.

        A replay saves nothing.
        """
        world = layout.world
        if world.replay is not None:
            return
        self._store.poll_save(world.record_event)
        if not self._checkpoints.is_due(step, self._num_steps):
            return
        if world.host_index == 0 and step == self._num_steps:
            # This save may not be skipped: no later step will be saved.
            self._store.wait_until_finished(world.record_event, world.raise_if_ended)
        self._start(layout, state, step)

    def _start(self, layout: StateLayout, state: State, step: int) -> None:
        layout.world.step_services.hit_failpoint(FailPoint.BEFORE_CHECKPOINT)
        replicated = layout.gather_state(state)
        if layout.world.host_index == 0:
            world = layout.world
            self._store.start_save(
                step,
                replicated,
                world.record_event,
                world.audits.verified_step if world.audits is not None else None,
            )

    def distrust_after(self, world: World, step: int) -> None:
        """Set aside the checkpoints of more than `step` steps, which a host that computed wrongly may have touched."""
        self._store.distrust_after(step, world.record_event)

    def ensure_final_saved(self, layout: StateLayout, state: State) -> None:
        """Return on every host when the final state, at whichever step training ended, is on storage.

        If the host that was to save it is dead, the first live host saves it.

        Raises:
            CheckpointFailed: the last save failed.
        """
        world, step = layout.world, int(state.step)
        if world.replay is not None:
            return
        is_saver = world.host_index == 0
        if is_saver:
            self._store.wait_until_saved(world.record_event, world.raise_if_ended)
        is_missing = is_saver and step > 0 and not self._store.has_checkpoint(step)
        if int(world.all_reduce(np.array([is_missing], np.int32))[0]):
            self._start(layout, state, step)
            if is_saver:
                self._store.wait_until_saved(world.record_event, world.raise_if_ended)
            # A barrier: no host returns, and ends its process, before the checkpoint is on storage.
            world.all_reduce(np.zeros(1, np.int32))

    def close(self) -> None:
        """End the storage process, once a save in flight is done or has taken too long."""
        self._store.close()
