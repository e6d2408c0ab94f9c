"""Checkpoints of trees that one process has all of, as the only host of a job writes them."""

import functools
import mmap
import secrets
from pathlib import Path

from resilient_jax.checkpoint.messages import SaveShare
from resilient_jax.checkpoint.orbax_store import OrbaxStore, ignore_event
from resilient_jax.checkpoint.orbax_writer import write_checkpoint
from resilient_jax.checkpoint.part_plan import HostCopy, HostPart, PartPlan, describe_state
from resilient_jax.checkpoint.part_writer import write_first_part
from resilient_jax.checkpoint.save_in_flight import RecordEvent
from resilient_jax.checkpoint.stored_tree import Tree, view_boxes
from resilient_jax.ids import HostName

HOST = HostName("host-0")


def plan_whole(tree: Tree) -> HostPart:
    """Return the part of a host that writes a state alone."""
    state = describe_state(tree)
    return PartPlan(state, HOST, lambda device: HOST, [HOST]).make_part(state.leaves)


def make_share() -> SaveShare:
    """Return the share of a host that writes a state alone."""
    return SaveShare(token=secrets.token_hex(4), number=0, hosts=(HOST,))


def write_whole(directory: Path, step: int, tree: Tree) -> int | None:
    """Write a checkpoint in this process, as the storage process does."""
    part, copy, share = plan_whole(tree), HostCopy(), make_share()
    mapped = mmap.mmap(copy.copy(part), 0)
    held = [(leaf, view_boxes(leaf, mapped)) for leaf in part.leaves]
    write = functools.partial(write_first_part, step=step, leaves=held, share=share)
    try:
        return write_checkpoint(directory, step, share, write)
    finally:
        copy.free()


class WholeStore(OrbaxStore):
    """Saves trees, of which this process has all."""

    def try_save(self, step: int, state: Tree, record_event: RecordEvent = ignore_event) -> bool:
        """Start to save a state; return False if the last save is still in flight."""
        if self.in_flight.must_skip(step, record_event):
            return False
        self.start_save(step, plan_whole(state), make_share(), record_event)
        return True

    def save(self, step: int, state: Tree) -> None:
        """Return when the checkpoint is on storage; raise as `wait_until_saved`."""
        self.wait_until_finished()
        self.try_save(step, state)
        self.wait_until_saved()
