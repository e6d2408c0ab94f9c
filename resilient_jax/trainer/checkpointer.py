"""The checkpoints of one `fit`: what is loaded at its beginning, saved beside its steps, and waited for at its end."""

import numpy as np

from resilient_jax.checkpoint.orbax_store import OrbaxStore
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.trainer.checkpoint_restore import restore_newest
from resilient_jax.trainer.checkpoints import Checkpoints
from resilient_jax.trainer.state_layout import StateLayout
from resilient_jax.trainer.training_state import TrainingState, Tree
from resilient_jax.worker.world import World


class Checkpointer:
    """Outlives generations, as a save in flight does; it holds no array.

    The first host of a generation is_saver. When that is another one than before, the former may still have a save in
    flight: they write into folders of their own.
    """

    def __init__(self, checkpoints: Checkpoints, num_steps: int) -> None:
        self._checkpoints = checkpoints
        self._num_steps = num_steps
        self._store = OrbaxStore(checkpoints.directory, checkpoints.max_to_keep, checkpoints.timeout_s)

    def find_newest(self) -> int | None:
        """The step of the newest checkpoint that was finished, by names alone. May be called on any thread."""
        return self._store.find_newest_step()

    def restore(self, world: World, abstract: Tree, sharding: ShardingRule) -> tuple[int, Tree] | None:
        """The step and the state to go on from, if something is on storage; see `restore_newest`."""
        return restore_newest(world, self._store, self._checkpoints, abstract, sharding)

    def save(self, layout: StateLayout, state: TrainingState, step: int) -> None:
        """Begins to save the committed state, if it is time. Every host must call it: all of them gather it."""
        world = layout.world
        self._store.poll_save(world.record_event)
        if not self._checkpoints.is_due(step, self._num_steps):
            return
        if world.host_index == 0 and step == self._num_steps:
            self._store.wait_until_finished(
                world.record_event, world.raise_if_ended
            )  # no step comes after it that might be saved instead
        self._start(layout, state, step)

    def _start(self, layout: StateLayout, state: TrainingState, step: int) -> None:
        replicated = layout.gather(state)
        if layout.world.host_index == 0:
            self._store.start_save(step, replicated, layout.world.record_event)

    def ensure_final_saved(self, layout: StateLayout, state: TrainingState) -> None:
        """Returns on every host when the state that training ended with, at whichever step, is on storage.

        If the host that was to save it is dead, the first of the others does: nobody is done before this is.

        Raises:
            CheckpointFailed: the last save failed.
        """
        world, step = layout.world, int(state.step)
        is_saver = world.host_index == 0
        if is_saver:
            self._store.wait_until_saved(world.record_event, world.raise_if_ended)
        is_missing = is_saver and step > 0 and not self._store.has_checkpoint(step)
        if int(world.all_reduce(np.array([is_missing], np.int32))[0]):
            self._start(layout, state, step)
            if is_saver:
                self._store.wait_until_saved(world.record_event, world.raise_if_ended)
            world.all_reduce(np.zeros(1, np.int32))

    def close(self) -> None:
        """Ends the process that writes."""
        self._store.close()
