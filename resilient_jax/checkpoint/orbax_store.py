"""Checkpoints in Orbax's format. This process copies the state; the storage process does the rest.

Rules: at most one save is in flight; its outcome is an event, recorded by the next call of any method that takes
`record_event`. The copy is in memory of its own, so the arrays may be donated and their devices left while it is
written. A save outlives generations, but not this process: a storage process without its worker is killed, and leaves
only an unfinished folder.
"""

import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import jax
import numpy as np

from resilient_jax.checkpoint.array_reads import ArrayRead, count_bytes, plan_reads, split_into_batches
from resilient_jax.checkpoint.directory_listing import DirectoryListing, find_tree_folder, list_directory
from resilient_jax.checkpoint.messages import (
    FailureReply,
    ReadBoxesReply,
    ReadBoxesRequest,
    Reply,
    SaveRequest,
    SaveShare,
    VerifyReply,
    VerifyRequest,
)
from resilient_jax.checkpoint.part_plan import HostCopy, HostPart
from resilient_jax.checkpoint.save_in_flight import RecordEvent, SaveInFlight
from resilient_jax.checkpoint.storage_client import POLL_INTERVAL_S, ReplyWait, StorageClient
from resilient_jax.checkpoint.stored_tree import Tree, allocate_memory
from resilient_jax.errors import CheckpointFailed, CheckpointUnreadable
from resilient_jax.events import EventKind
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.telemetry.worker_activity import worker_activity

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 1800.0
CLOSE_TIMEOUT_S: Final = 60.0
"""How long a save in flight may take after training has failed."""


def ignore_event(kind: EventKind, **detail: object) -> None:
    """Ignore an event; the default of `record_event`."""


class OrbaxStore:
    """The checkpoints in one directory, each in a folder named by its step.

    Args:
        directory: directory of the checkpoints; made by the first save.
        max_to_keep: how many of the newest checkpoints to keep.
        timeout_s: limit of one save or load; after this time the save or load has failed.
    """

    def __init__(self, directory: str | Path, max_to_keep: int, timeout_s: float = TIMEOUT_S) -> None:
        self._directory = Path(directory).absolute()
        self._keep = max_to_keep
        self._client = StorageClient(timeout_s)
        self._copy = HostCopy()
        self._distrusted: set[int] = set()
        self.in_flight = SaveInFlight(self._directory, self._client, self._distrusted)
        self.bytes_read = 0
        """Bytes of arrays, by all loads."""

    # Listing.

    def list_directory(self) -> DirectoryListing:
        """Return the contents of the directory, by names alone."""
        return list_directory(self._directory)

    def find_newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, by names alone; None: there is none."""
        return max((step for step in self.list_directory().steps if self.has_checkpoint(step)), default=None)

    def has_checkpoint(self, step: int) -> bool:
        """Return whether a checkpoint of this step was finished; whether it can be read is another question."""
        return find_tree_folder(self.get_folder(step)) is not None

    def get_folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._directory / str(step)

    # Saving.

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight, as of the last call."""
        return self.in_flight.step is not None

    def start_save(
        self,
        step: int,
        part: HostPart,
        share: SaveShare,
        record_event: RecordEvent = ignore_event,
        verified_step: int | None = None,
    ) -> None:
        """Copy this host's part of a state, and have the copy written. Return once it is copied.

        All hosts of the share must call this. A complete checkpoint of the step that is on storage stays. If a save of
        this host's is still in flight, it is given up: the first host has begun this one without it.

        Args:
            step: steps of the state.
            verified_step: the newest checkpoint of at most so many steps is kept beside the newest ones.
        """
        self.poll_save(record_event)
        self.in_flight.give_up("another one was begun", record_event)
        started_s = time.monotonic()
        descriptor = self._copy.copy(part)
        self.in_flight.begin(step, share, started_s)
        request = SaveRequest(
            directory=str(self._directory),
            step=step,
            max_to_keep=self._keep,
            distrusted=tuple(self._distrusted - {step}),
            verified_step=verified_step,
            leaves=part.leaves,
            share=share,
        )
        try:
            self._client.send(request, descriptor)
        except CheckpointFailed as error:
            self._client.close()
            self.in_flight.end(FailureReply(reason=str(error)), record_event)

    def poll_save(self, record_event: RecordEvent = ignore_event) -> None:
        """Record the outcome of the save in flight, if there is one. Do not wait."""
        self.in_flight.wait(record_event, timeout_s=0.0)

    def wait_until_finished(
        self, record_event: RecordEvent = ignore_event, check: Callable[[], None] | None = None
    ) -> None:
        """Return when no save is in flight.

        Args:
            check: called while waiting; may raise to end the wait.
        """
        with worker_activity.task(WorkerTask.STORAGE):
            while self.is_saving:
                self.in_flight.wait(record_event, POLL_INTERVAL_S)
                if check is not None:
                    check()

    def wait_until_saved(
        self, record_event: RecordEvent = ignore_event, check: Callable[[], None] | None = None
    ) -> None:
        """Return when no save is in flight, and the last one is on storage; arguments as of `wait_until_finished`.

        Raises:
            CheckpointFailed: the last save failed; says why.
        """
        self.wait_until_finished(record_event, check)
        if self.in_flight.failure is not None:
            newest = self.find_newest_step()
            on_storage = (
                "there is none on storage" if newest is None else f"the newest on storage is of step {newest}"
            )
            raise CheckpointFailed(
                f"checkpoints in {self._directory}: the last save failed ({self.in_flight.failure}); {on_storage}. "
                "Make the storage work again and launch the job again: it resumes from there"
            )

    def close(self) -> None:
        """End the storage process, which may finish its save first, and free the memory."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self.wait_until_finished(check=lambda: _check_deadline(deadline_s))
        except CheckpointFailed as error:
            logger.warning("checkpoints in %s: %s", self._directory, error)
        self._client.close()
        self._copy.free()

    def distrust_after(self, step: int, record_event: RecordEvent = ignore_event) -> None:
        """Rename the checkpoints of more than `step` steps, so that none is read again, or counts as one.

        Several hosts may do so at once. A save in flight is waited for, since its checkpoint is one of them.
        """
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self.wait_until_finished(record_event, lambda: _check_deadline(deadline_s))
        except CheckpointFailed as error:
            logger.warning("checkpoints in %s: %s", self._directory, error)
            self._client.close()  # its process ends with the save
            self.in_flight.step = None
        for newer in (s for s in self.list_directory().steps if s > step):
            path = self._directory / f".distrusted-{newer}-{time.time_ns()}"
            try:
                self.get_folder(newer).rename(path)
            except FileNotFoundError:  # another host was faster
                continue
            record_event(EventKind.CHECKPOINT_DISTRUSTED, step=newer, path=str(path))

    # Loading.

    def load(
        self,
        step: int,
        abstract: Tree,
        sharding: ShardingRule | None = None,
        check: Callable[[], None] | None = None,
    ) -> Tree:
        """Return the state of a checkpoint. Of each array only what this host's devices need is read.

        Args:
            abstract: tree of the state's shapes.
            sharding: sharding of each leaf, on any mesh; None: leaves in host memory.
            check: called while waiting; may raise to end the load.

        Raises:
            CheckpointUnreadable: the checkpoint is incomplete or damaged; the message says how. The checkpoint no
                longer counts among those to keep.
            StateError: the checkpoint is complete, but of another state; names leaves.
        """
        self.wait_until_finished(check=check)
        # No save is in flight from here on: replies come in order, and its reply would be taken for ours.
        wait = ReplyWait(time.monotonic(), check)
        try:
            found = self._client.request(VerifyRequest(folder=str(self.get_folder(step))), wait)
            if not isinstance(found, VerifyReply):
                raise _unreadable(found)
            if not found.has_digests:
                logger.warning(
                    "the checkpoint %s has no digests: damaged arrays would not be noticed",
                    self.get_folder(step),
                )
            tree, reads = plan_reads(found.arrays, abstract, sharding, self.get_folder(step))
            return tree.build(self._read(step, reads, wait))
        except CheckpointUnreadable as error:
            self._distrusted.add(step)
            raise CheckpointUnreadable(f"the checkpoint {self.get_folder(step)}: {error}") from error

    def _read(self, step: int, arrays: Sequence[ArrayRead], wait: ReplyWait) -> list[np.ndarray | jax.Array]:
        """Return the arrays, read batch by batch through one piece of memory."""
        size = max(map(count_bytes, split_into_batches(arrays)), default=0)
        descriptor = allocate_memory(size)
        try:
            memory = mmap.mmap(descriptor, 0)
            placed: list[np.ndarray | jax.Array] = []
            for batch in split_into_batches(arrays):
                boxes = [box for array in batch for box in array.boxes]
                reply = self._client.request(
                    ReadBoxesRequest(folder=str(self.get_folder(step)), boxes=boxes), wait, descriptor
                )
                if not isinstance(reply, ReadBoxesReply):
                    raise _unreadable(reply)
                placed += [array.build_array(memory) for array in batch]
                self.bytes_read += sum(box.nbytes for box in boxes)
            return placed
        finally:
            os.close(descriptor)


def _unreadable(reply: Reply) -> CheckpointUnreadable:
    return CheckpointUnreadable(
        reply.reason if isinstance(reply, FailureReply) else "a reply to another request"
    )


def _check_deadline(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise CheckpointFailed(f"a save was not done within {CLOSE_TIMEOUT_S:g} s after training had ended")
