"""Copies this host's part of a snapshot into the snapshot server's memory while training continues.

A capture is *copying* from `start` until its arrays are read, and can be cancelled until it is *finishing*, when the
server gets the description of the part. An unfinished part is abandoned, with an event: no reader ever sees it.
"""

import contextlib
import enum
import itertools
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import jax

from resilient_jax.errors import InternalError, ResilientJaxError, SnapshotDropped, StateError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.state.copy_sources import CopyTask, is_on_accelerator, plan_copies, start_host_transfer
from resilient_jax.state.flat_state import FlatLeaf
from resilient_jax.state.interfaces import EventRecorder, FailPointHook, PartServer, ignore_failpoint
from resilient_jax.state.part_copy import copy_into_part
from resilient_jax.state.state_partition import StatePartition, check_same_structure

SLOT_TIMEOUT_S: Final = 2.0
"""How long a snapshot waits for the previous one to settle; if that takes longer, snapshots outpace the parity."""
CHECK_INTERVAL_S: Final = 0.02
NO_STRINGS: Final[Mapping[str, str]] = types.MappingProxyType({})


class _Phase(enum.Enum):
    COPYING = enum.auto()
    COPIED = enum.auto()
    FINISHING = enum.auto()


@dataclass(slots=True)
class _Order:
    """A snapshot that is to be taken, or is being taken."""

    id: SnapshotId
    state_cut: StatePartition
    leaves: Sequence[FlatLeaf]
    texts: Mapping[str, str]
    tasks: list[CopyTask] | None
    """None if they are still to be planned, from the leaves."""
    started_s: float = field(default_factory=time.monotonic)
    phase: _Phase = _Phase.COPYING
    cancelled: str | None = None
    """The reason, once the snapshot is cancelled."""

    @property
    def is_reading(self) -> bool:
        """Whether the arrays are being read and the snapshot is not cancelled."""
        return self.phase is _Phase.COPYING and self.cancelled is None

    def let_go(self) -> None:
        """Drop the references to the arrays, so that they keep no device memory alive."""
        self.tasks, self.leaves = None, ()


class _Cancelled(Exception):
    """Ends a copy that was cancelled."""


class SnapshotCapture:
    """Copies this host's part of snapshots, one after the other, on a thread of its own. No failure stops training.

    The arrays are read until `wait_until_copied` returns True; from then on they may be donated. Donated earlier, they
    make the snapshot fail, with an event; they are never read while something else is written there.

    Attributes:
        newest_finished: newest snapshot whose part is complete on this host.
        duration_s: duration of that snapshot, from its start.
    """

    def __init__(
        self,
        server: PartServer,
        host: HostName,
        record_event: EventRecorder,
        failpoint: FailPointHook = ignore_failpoint,
        *,
        num_threads: int = 1,
    ) -> None:
        """Start the thread, without work.

        Args:
            server: server that takes the part.
            record_event: called with the outcome of each snapshot.
            failpoint: passes failpoints, where a test may stop this process.
            num_threads: threads that share a copy.
        """
        self.newest_finished: SnapshotId | None = None
        self.duration_s = 0.0
        self._server = server
        self._host = host
        self._note = record_event
        self._reach = failpoint
        self._threads = num_threads
        self._changed = threading.Condition()  # guards what follows, and the phases of the orders
        self._orders: list[_Order] = []
        """The first one is being taken; the others wait until the first is finished."""
        self._skipped: list[SnapshotId] = []
        """Snapshots to be declined at the server, so that other hosts do not wait for this host's part."""
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="resilient-jax-snapshot", daemon=True)
        self._thread.start()

    # For the main thread.

    def start(
        self,
        id: SnapshotId,
        partition: StatePartition,
        leaves: Sequence[FlatLeaf],
        strings: Mapping[str, str] = NO_STRINGS,
    ) -> None:
        """Begin a snapshot, unless a previous one still reads its arrays; return at once.

        Args:
            strings: leaves that are strings, by path; these go into the manifest.

        Raises:
            StateError: the state has another structure than the partition.
        """
        check_same_structure(partition, leaves)
        order = _Order(id, partition, leaves, strings, None)
        with self._changed:
            reading = next((order for order in self._orders if order.is_reading), None)
        if reading is not None:
            seconds = order.started_s - reading.started_s
            self._skip(
                id,
                f"that of step {reading.id.step} is still being copied, {seconds:.3g} s after it began; take snapshots "
                "less often",
            )
            return
        if is_on_accelerator(leaves):
            try:  # dispatched before the next step's programs, for which the slices would wait otherwise
                order.tasks = start_host_transfer(plan_copies(leaves, partition.slices[self._host]))
            except (StateError, jax.errors.JaxRuntimeError) as error:
                self._skip(id, _say(error))
                return
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    def wait_until_copied(self, timeout_s: float) -> bool:
        """Return whether all arrays are read, and may be donated, before the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(order.phase is not _Phase.COPYING for order in self._orders), timeout_s
            )

    def wait_until_finished(self, timeout_s: float) -> bool:
        """Return whether all snapshots are finished or dropped before the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._orders, timeout_s)

    def cancel(self, reason: str) -> None:
        """Cancel the snapshots that are not finishing; return at once. `wait_until_copied` waits for their arrays."""
        with self._changed:
            for order in self._orders:
                if order.phase is not _Phase.FINISHING and order.cancelled is None:
                    order.cancelled = reason

    def close(self, timeout_s: float = 60.0) -> bool:
        """Cancel the snapshots that are not finishing and end the thread; return whether it has ended in time."""
        self.cancel("the worker stops")
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _skip(self, id: SnapshotId, reason: str) -> None:
        self._drop(id, reason)
        with self._changed:
            self._skipped.append(id)
            self._changed.notify_all()

    # For the thread.

    def _serve(self) -> None:
        while self._wait_for_work():
            # Declined before anything is copied: the other hosts wait for this host's part until they hear of it.
            if self._skipped:
                self._decline(self._skipped[0])
                done: list[SnapshotId] | list[_Order] = self._skipped
            else:
                self._take(self._orders[0])
                done = self._orders
            with self._changed:
                del done[0]
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait for a snapshot to take or decline; return False once there is none and the capture is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders or self._skipped or self._closed)
            return bool(self._orders or self._skipped)

    def _decline(self, id: SnapshotId) -> None:
        with contextlib.suppress(
            ResilientJaxError
        ):  # if the server refuses the snapshot or is gone, the snapshot is dropped anyway
            self._server.begin(id)
            self._server.abandon(id)

    def _take(self, order: _Order) -> None:
        try:
            self._wait_for_slot(order)
            _check(order)
            part = self._server.begin(order.id)
        except (
            Exception
        ) as error:  # here and below, the boundary of the thread: training continues without this snapshot
            order.let_go()
            self._drop(order.id, _say(error) if order.cancelled is None else f"cancelled: {order.cancelled}")
            if order.cancelled is not None:
                self._decline(order.id)
            return
        try:
            self._copy(order, part)
            del part  # its memory may be unmapped from now on
            self._finish(order)
        except Exception as error:
            self._drop(order.id, _say(error) if order.cancelled is None else f"cancelled: {order.cancelled}")
            self._abandon(order.id)
            return
        self.newest_finished, self.duration_s = order.id, time.monotonic() - order.started_s
        self._note(
            EventKind.SNAPSHOT_COPIED,
            step=order.id.step,
            bytes=order.state_cut.part_bytes[self._host],
            seconds=self.duration_s,
        )

    def _wait_for_slot(self, order: _Order) -> None:
        """Wait until the previous snapshot has exchanged its parity, which frees the slot that this snapshot takes."""
        before, end_s = self.newest_finished, time.monotonic() + SLOT_TIMEOUT_S
        while (
            before is not None
            # One of an older generation may never settle, and the server may give its slot away.
            and before.generation == order.id.generation
            and order.cancelled is None
            and time.monotonic() < end_s
            and not self._server.wait_settled(before, CHECK_INTERVAL_S)
        ):
            pass

    def _copy(self, order: _Order, part: memoryview) -> None:
        """Copy the slices into the part; release all arrays before returning or raising."""
        try:
            expected = order.state_cut.part_bytes[self._host]
            if part.nbytes != expected:
                raise InternalError(f"the server gave {part.nbytes} bytes for a part of {expected}")
            self._reach(FailPoint.BEFORE_COPY, order.id.step)
            _check(order)
            tasks = order.tasks
            if tasks is None:
                tasks = plan_copies(order.leaves, order.state_cut.slices[self._host])
            steps = itertools.count()

            def go_on() -> None:
                if next(steps) == 1:  # the first step is done
                    self._reach(FailPoint.DURING_COPY, order.id.step)
                _check(order)

            copy_into_part(part.cast("B"), tasks, go_on, self._threads)
            go_on()  # so that a copy of a single step passes the failpoint, too
        finally:
            order.let_go()
            with self._changed:
                order.phase = _Phase.COPIED
                self._changed.notify_all()

    def _finish(self, order: _Order) -> None:
        self._reach(FailPoint.AFTER_COPY, order.id.step)
        with self._changed:
            _check(order)
            order.phase = _Phase.FINISHING  # from here on `cancel` has no effect
        contents = PartContents(order.state_cut.leaves, order.state_cut.slices[self._host], dict(order.texts))
        self._server.finish(order.id, contents)

    def _abandon(self, id: SnapshotId) -> None:
        try:
            self._server.abandon(id)
        except Exception as error:  # the server is gone, and the part with it
            self._drop(id, f"it could not be abandoned either: {_say(error)}")

    def _drop(self, id: SnapshotId, reason: str) -> None:
        self._note(EventKind.SNAPSHOT_DROPPED, step=id.step, reason=reason)


def _check(order: _Order) -> None:
    if order.cancelled is not None:
        raise _Cancelled


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, SnapshotDropped) else f"{type(error).__name__}: {error}"
