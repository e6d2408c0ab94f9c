"""Checkpoints in Orbax's format. This process copies the state; a process of its own does the rest.

Rules: at most one save is in flight; what becomes of it is an event, seen by the next call of any method that takes
`note`. The copy lies in memory of ours, so the arrays may be donated and their devices left while it is written. A save
outlives generations, but not this process: a writer without its worker is killed, and leaves nothing that counts.
"""

import dataclasses
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
from resilient_jax.checkpoint.host_copy import HostCopy
from resilient_jax.checkpoint.messages import (
    FailureReply,
    ReadBoxesReply,
    ReadBoxesRequest,
    Reply,
    Request,
    SaveReply,
    SaveRequest,
    VerifyReply,
    VerifyRequest,
)
from resilient_jax.checkpoint.storage_connection import StorageConnection
from resilient_jax.checkpoint.stored_tree import Tree, allocate_memory
from resilient_jax.errors import CheckpointFailed, CheckpointUnreadable
from resilient_jax.events import EventKind
from resilient_jax.state.flat_state import ShardingRule

logger = logging.getLogger(__name__)

RecordEvent = Callable[..., object]
"""Takes an `EventKind` and details."""
TIMEOUT_S: Final = 1800.0
POLL_INTERVAL_S: Final = 0.1
CLOSE_TIMEOUT_S: Final = 60.0
"""What a save in flight gets when training has failed."""


def ignore_event(kind: EventKind, **detail: object) -> None:
    """For whoever keeps no events."""


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    started_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Patience:
    """How long a load is waited for: since when, and what may end it before its time."""

    since_s: float
    check: Callable[[], None] | None


class OrbaxStore:
    """The checkpoints in one directory, each in a folder named by its step.

    Args:
        directory: of the checkpoints; made by the first save.
        keep: how many of the newest to keep.
        timeout_s: for one save or load; then it has failed.
    """

    def __init__(self, directory: str | Path, max_to_keep: int, timeout_s: float = TIMEOUT_S) -> None:
        self._directory = Path(directory).absolute()
        self._keep = max_to_keep
        self._timeout_s = timeout_s
        self._line: StorageConnection | None = None
        self._copy = HostCopy()
        self._in_flight: _InFlight | None = None
        self._failure: str | None = None
        """Of the last save."""
        self._distrusted: set[int] = set()
        self.bytes_read = 0
        """Of arrays, by all loads."""

    # Looking.

    def list_directory(self) -> DirectoryListing:
        """What is in the directory, by names alone."""
        return list_directory(self._directory)

    def find_newest_step(self) -> int | None:
        """The step of the newest checkpoint, by names alone; None: there is none."""
        return max((step for step in self.list_directory().steps if self.has_checkpoint(step)), default=None)

    def has_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint of this step was finished; that it can be read is another question."""
        return find_tree_folder(self.get_folder(step)) is not None

    def get_folder(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self._directory / str(step)

    # Saving.

    @property
    def process_id(self) -> int | None:
        """The id of the storage process; None: it was not needed yet, or has ended."""
        return self._line.pid if self._line is not None else None

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight, as far as was seen."""
        return self._in_flight is not None

    def start_save(self, step: int, state: Tree, record_event: RecordEvent = ignore_event) -> bool:
        """Copies the state into memory of ours, and has it written. Returns when it is copied.

        Gives False, and an event, if the save before is still in flight: then this one is skipped.

        Args:
            step: how many steps are in the state. If a whole checkpoint of it is on storage, that one stays.
            state: arrays of which this process's devices have all.
            note: takes events.
        """
        self.poll_save(record_event)
        if self._in_flight is not None:
            since_s = time.monotonic() - self._in_flight.started_s
            logger.warning("step %d: no checkpoint, that of step %d is not done", step, self._in_flight.step)
            record_event(
                EventKind.CHECKPOINT_SKIPPED, step=step, in_flight=self._in_flight.step, in_flight_s=since_s
            )
            return False
        started_s = time.monotonic()
        leaves, descriptor = self._copy.copy(state)
        self._in_flight = _InFlight(step, started_s)
        order = SaveRequest(
            directory=str(self._directory),
            step=step,
            max_to_keep=self._keep,
            distrusted=tuple(self._distrusted),
            leaves=leaves,
        )
        try:
            self._connect().send(order, descriptor)
        except CheckpointFailed as error:
            self._drop_line()
            self._end_save(FailureReply(reason=str(error)), record_event)
        return True

    def poll_save(self, record_event: RecordEvent = ignore_event) -> None:
        """Notes what has become of the save in flight, if that is known. Waits for nothing."""
        self._wait_save(record_event, timeout_s=0.0)

    def wait_until_finished(
        self, record_event: RecordEvent = ignore_event, check: Callable[[], None] | None = None
    ) -> None:
        """Returns when no save is in flight.

        Args:
            note: takes events.
            check: called while it waits; may raise, to wait no longer.
        """
        while self._in_flight is not None:
            self._wait_save(record_event, POLL_INTERVAL_S)
            if check is not None:
                check()

    def wait_until_saved(
        self, record_event: RecordEvent = ignore_event, check: Callable[[], None] | None = None
    ) -> None:
        """Returns when no save is in flight, and the last one is on storage; arguments as those of `wait`.

        Raises:
            CheckpointFailed: the last save failed; says why.
        """
        self.wait_until_finished(record_event, check)
        if self._failure is not None:
            newest = self.find_newest_step()
            there = (
                "there is none on storage" if newest is None else f"the newest on storage is of step {newest}"
            )
            raise CheckpointFailed(
                f"checkpoints in {self._directory}: the last save failed ({self._failure}); {there}. Make the storage "
                "work again and start the job anew: it goes on from there"
            )

    def save(self, step: int, state: Tree) -> None:
        """Saves, and returns when it is on storage.

        Raises:
            CheckpointFailed: it is not; says why.
        """
        self.wait_until_finished()
        self.start_save(step, state)
        self.wait_until_saved()

    def close(self) -> None:
        """Ends the process, which may finish its save, and frees the memory."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self.wait_until_finished(check=lambda: _check_deadline(deadline_s))
        except CheckpointFailed as error:
            logger.warning("checkpoints in %s: %s", self._directory, error)
        self._drop_line()
        self._copy.free()

    def _wait_save(self, note: RecordEvent, timeout_s: float) -> None:
        if self._in_flight is None:
            return
        answer = self._receive(timeout_s, self._in_flight.started_s)
        if answer is not None:
            self._end_save(answer, note)

    def _end_save(self, answer: Reply, note: RecordEvent) -> None:
        assert self._in_flight is not None
        step, self._in_flight = self._in_flight.step, None
        path = str(self.get_folder(step))
        if isinstance(answer, SaveReply):
            self._failure = None
            self._distrusted.discard(step)
            note(
                EventKind.CHECKPOINT_SAVED,
                step=step,
                path=path,
                bytes=answer.nbytes,
                seconds=answer.duration_s,
                existed=answer.existed,
            )
        else:
            reason = answer.reason if isinstance(answer, FailureReply) else "an answer to another order"
            self._failure = f"step {step}: {reason}"
            logger.warning("the checkpoint %s could not be written: %s", path, reason)
            note(EventKind.CHECKPOINT_FAILED, step=step, path=path, reason=reason)

    # Loading.

    def load(
        self,
        step: int,
        abstract: Tree,
        sharding: ShardingRule | None = None,
        check: Callable[[], None] | None = None,
    ) -> Tree:
        """The state of a checkpoint. Of each array nothing is read but what this host's devices need.

        Args:
            step: of the checkpoint.
            abstract: the state's shapes.
            sharding: where each leaf shall lie, on any mesh; None: whole, in host memory.
            check: called while it waits; may raise, to wait no longer.

        Raises:
            CheckpointUnreadable: it is incomplete or damaged; says how. It is not counted among those to keep.
            StateError: it is whole, but holds another state; names a leaf.
        """
        self.wait_until_finished(check=check)
        patience = _Patience(time.monotonic(), check)
        try:
            found = self._ask(VerifyRequest(folder=str(self.get_folder(step))), patience)
            if not isinstance(found, VerifyReply):
                raise _unreadable(found)
            if not found.has_digests:
                logger.warning(
                    "the checkpoint %s has no digests: damaged numbers would not be seen",
                    self.get_folder(step),
                )
            tree, reads = plan_reads(found.arrays, abstract, sharding, self.get_folder(step))
            return tree.build(self._read(step, reads, patience))
        except CheckpointUnreadable as error:
            self._distrusted.add(step)
            raise CheckpointUnreadable(f"the checkpoint {self.get_folder(step)}: {error}") from error

    def _read(
        self, step: int, arrays: Sequence[ArrayRead], patience: _Patience
    ) -> list[np.ndarray | jax.Array]:
        """The arrays, batch by batch through one piece of memory."""
        size = max(map(count_bytes, split_into_batches(arrays)), default=0)
        descriptor = allocate_memory(size)
        try:
            memory = mmap.mmap(descriptor, 0)
            placed: list[np.ndarray | jax.Array] = []
            for batch in split_into_batches(arrays):
                boxes = [box for array in batch for box in array.boxes]
                answer = self._ask(
                    ReadBoxesRequest(folder=str(self.get_folder(step)), boxes=boxes), patience, descriptor
                )
                if not isinstance(answer, ReadBoxesReply):
                    raise _unreadable(answer)
                placed += [array.build_array(memory) for array in batch]
                self.bytes_read += sum(box.nbytes for box in boxes)
            return placed
        finally:
            os.close(descriptor)

    def _ask(self, order: Request, patience: _Patience, descriptor: int | None = None) -> Reply:
        """Gives an order, and waits for its answer. If that is broken off the process ends, too: it owes an answer."""
        try:
            self._connect().send(order, descriptor)
            while (answer := self._receive(POLL_INTERVAL_S, patience.since_s)) is None:
                if patience.check is not None:
                    patience.check()
        except CheckpointFailed as error:
            self._drop_line()
            answer = FailureReply(reason=str(error))
        except BaseException:
            self._drop_line()
            raise
        return answer

    # The process.

    def _connect(self) -> StorageConnection:
        """The line for a new order: one whose process has died since the last is replaced."""
        if self._line is not None and self._line.has_ended:
            self._drop_line()
        if self._line is None:
            self._line = StorageConnection()
        return self._line

    def _drop_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _receive(self, timeout_s: float, started_s: float) -> Reply | None:
        """The answer to the order in flight; that the process died, or took too long, is one, too."""
        assert self._line is not None, "an order is in flight"
        try:
            answer = self._line.receive(timeout_s)
        except CheckpointFailed as error:
            self._drop_line()
            return FailureReply(reason=str(error))
        if answer is None and time.monotonic() - started_s > self._timeout_s:
            self._drop_line()
            return FailureReply(reason=f"it took more than {self._timeout_s:g} s, and was given up")
        return answer


def _unreadable(answer: Reply) -> CheckpointUnreadable:
    return CheckpointUnreadable(
        answer.reason if isinstance(answer, FailureReply) else "an answer to another order"
    )


def _check_deadline(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise CheckpointFailed(f"a save was not done within {CLOSE_TIMEOUT_S:g} s after training had ended")
