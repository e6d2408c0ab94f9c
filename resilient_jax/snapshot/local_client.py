"""A worker's synchronous client of the snapshot server on its own host."""

import contextlib
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from resilient_jax.errors import InternalError, MessageError, PeerUnreachable, SnapshotMissing
from resilient_jax.protocol.connection import Connection, Received
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.snapshot.manifest import PartContents, PartManifest, decode_manifest
from resilient_jax.snapshot.messages import (
    SERVER_MESSAGE_DECODER,
    AbandonSnapshot,
    BeginSnapshot,
    FinishSnapshot,
    OpenLayout,
    OpenOwnPart,
    PartLocation,
    RequestDone,
    RequestFailed,
    ServerNotification,
    ServerReply,
    SlotInfo,
    SlotRetired,
    SlotsReady,
    SnapshotSettled,
    WorkerRequest,
)
from resilient_jax.transport.error_codec import ERROR_CLASSES

REPLY_TIMEOUT_S: Final = 60.0
OPEN_TIMEOUT_S: Final = 600.0
"""Longer, because the memory is prefaulted: about a second for a GB."""
CHECK_INTERVAL_S: Final = 0.1
MAX_SETTLED_KEPT: Final = 64
"""Snapshots whose outcome is kept, for late calls of `wait_settled`."""

ReplyT = TypeVar("ReplyT", bound=ServerReply)


class LocalServerClient:
    """Sends requests to the server and waits for the replies; safe to share between threads.

    The worker owns the view that `begin` returns until `finish` or `abandon` releases it, and must not write to it
    after that. The server may start later than the worker; the first request then waits for it.
    """

    def __init__(self, descriptor: int) -> None:
        """Take ownership of the worker's end of the socket pair."""
        self._connection = Connection[WorkerRequest, ServerReply | ServerNotification](
            descriptor, SERVER_MESSAGE_DECODER
        )
        self._changed = threading.Condition()  # guards what follows
        self._request_ids = itertools.count()
        self._replies: dict[int, tuple[ServerReply, tuple[int, ...]] | None] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._writing: dict[SnapshotId, memoryview] = {}
        self._settled: dict[SnapshotId, bool] = {}
        self._is_closed = False
        threading.Thread(target=self._listen, name="rj-snapshot-client", daemon=True).start()

    def open_layout(
        self,
        layout: SnapshotLayout,
        *,
        restored: SnapshotId | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Allocate memory for snapshots of this layout; to be called before the first step of its generation.

        Args:
            layout: layout, the same on every host.
            restored: the snapshot that the generation resumes from, or would go back to; None: unknown. The snapshot
                counts as committed from now on, and newer ones of older generations are dropped.
            check: called several times a second meanwhile; an exception that `check` raises ends the wait.

        Raises:
            SnapshotRefused: the host has too little memory; the message has the required and the free amount.
            StaleGeneration: a newer generation has a layout already.
            PeerUnreachable: the server is gone, or does not answer.
        """
        request_id = next(self._request_ids)
        request = OpenLayout(request_id=request_id, layout=layout, restored=restored)
        reply, descriptors = self._call(request, SlotsReady, OPEN_TIMEOUT_S, check)
        for slot, descriptor in zip(reply.slots, descriptors, strict=True):
            self._map(slot, descriptor)

    def begin(self, id: SnapshotId) -> memoryview:
        """Begin a snapshot; return writable memory for this host's part, exactly as long as the part.

        Raises:
            SnapshotDropped: the server refuses the snapshot; the message has the reason.
            StaleGeneration: a newer generation has a layout already.
            PeerUnreachable: the server is gone, or does not answer.
        """
        try:
            reply, (descriptor,) = self._call(
                BeginSnapshot(request_id=next(self._request_ids), id=id), PartLocation
            )
            mapped = self._map(reply.slot, descriptor)
        except (PeerUnreachable, OSError):
            with contextlib.suppress(
                OSError
            ):  # a slot that the server assigns, now or later, must not stay blocked
                self._connection.send(AbandonSnapshot(request_id=next(self._request_ids), id=id))
            raise
        view = memoryview(mapped)[reply.offset :][: reply.part_bytes]
        with self._changed:
            self._writing[id] = view
        return view

    def finish(self, id: SnapshotId, contents: PartContents) -> None:
        """Finish a part that is written, which from now on outlives the worker. Checksums and parity follow.

        Raises:
            SnapshotDropped: another host, or the next generation, has dropped the snapshot meanwhile.
            PeerUnreachable: the server is gone, or does not answer.
        """
        # Released before the request: from then on the server computes the checksums of what is there.
        self._end_writing(id)
        self._call(FinishSnapshot(request_id=next(self._request_ids), id=id, contents=contents), RequestDone)

    def abandon(self, id: SnapshotId) -> None:
        """Abandon a part that will not be finished, which drops the snapshot on all hosts."""
        self._end_writing(id)
        self._call(AbandonSnapshot(request_id=next(self._request_ids), id=id), RequestDone)

    def wait_committed(self, id: SnapshotId, timeout_s: float) -> bool:
        """Return whether the snapshot is committed before the timeout; False at once if it was dropped.

        Raises:
            PeerUnreachable: the server is gone.
        """
        self.wait_settled(id, timeout_s)
        with self._changed:
            return self._settled.get(id, False)

    def wait_settled(self, id: SnapshotId, timeout_s: float) -> bool:
        """Return whether the snapshot is committed or dropped before the timeout.

        Raises:
            PeerUnreachable: the server is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: id in self._settled or self._is_closed, timeout_s)
            # An outcome that came before the server's end counts.
            if id not in self._settled and self._is_closed:
                raise PeerUnreachable("the snapshot server of this host has ended", is_refused=True)
            return id in self._settled

    def open_own_part(self, id: SnapshotId) -> tuple[PartManifest, memoryview] | None:
        """Return the manifest and a read-only view of this host's own part, or None if it is not complete here.

        The view shows the slot, which a later snapshot may overwrite: copy before one begins.

        Raises:
            PeerUnreachable: the server is gone, or does not answer.
        """
        try:
            reply, (descriptor,) = self._call(
                OpenOwnPart(request_id=next(self._request_ids), id=id), PartLocation
            )
        except SnapshotMissing:
            return None
        try:
            mapped = mmap.mmap(
                descriptor,
                reply.slot.mapped_bytes,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                prot=mmap.PROT_READ,
            )
        finally:
            os.close(descriptor)
        return decode_manifest(reply.manifest), memoryview(mapped)[reply.offset :][: reply.part_bytes]

    def close(self) -> None:
        """Close the connection, which drops every snapshot that was begun and not finished."""
        self._connection.shut_down()

    # Requests.

    def _call(
        self,
        request: WorkerRequest,
        expected: type[ReplyT],
        timeout_s: float = REPLY_TIMEOUT_S,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[ReplyT, tuple[int, ...]]:
        end_s = time.monotonic() + timeout_s
        with self._changed:
            # Entered before the request is sent: the reply may arrive before `send` has returned.
            self._replies[request.request_id] = None
        try:
            with contextlib.suppress(OSError):  # the server is gone, which the receiving thread notices, too
                self._connection.send(request)
            while not self._wait_reply(request.request_id) and time.monotonic() < end_s:
                check()
        finally:
            with self._changed:
                # From here on `_handle` closes the descriptors of a reply that comes late.
                received = self._replies.pop(request.request_id)
        name = type(request).__name__
        if received is None:
            why = "has ended" if self._is_closed else f"did not answer {name} within {timeout_s} s"
            raise PeerUnreachable(f"the snapshot server of this host {why}", is_refused=self._is_closed)
        reply, descriptors = received
        if isinstance(reply, RequestFailed):
            raise ERROR_CLASSES.get(reply.error, InternalError)(reply.message)
        if not isinstance(reply, expected):
            raise InternalError(f"the snapshot server replied to {name} with {reply}, expected {expected}")
        return reply, descriptors

    def _wait_reply(self, request_id: int) -> bool:
        """Wait for at most `CHECK_INTERVAL_S`; return whether the reply has arrived or never will."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._replies[request_id] is not None or self._is_closed, CHECK_INTERVAL_S
            )

    def _map(self, slot: SlotInfo, descriptor: int) -> mmap.mmap:
        """Return the mapping of a slot, made once and populated, so that copying into it never waits for the kernel."""
        try:
            with self._changed:
                mapped = self._mapped.get(slot.number)
                if mapped is None:
                    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                    mapped = self._mapped[slot.number] = mmap.mmap(descriptor, slot.mapped_bytes, flags=flags)
                return mapped
        finally:
            os.close(descriptor)

    def _end_writing(self, id: SnapshotId) -> None:
        with self._changed:
            view = self._writing.pop(id, None)
        if view is not None:
            with contextlib.suppress(BufferError):  # arrays on the view are still alive; the caller owns them
                view.release()

    # Replies and notifications.

    def _listen(self) -> None:
        try:
            for received in self._connection:
                self._handle(received)
        finally:
            with self._changed:
                self._is_closed = True
                self._mapped.clear()
                self._changed.notify_all()
            self._connection.close()

    def _handle(self, received: Received[ServerReply | ServerNotification]) -> None:
        message = received.message
        with self._changed:
            if isinstance(message, SnapshotSettled):
                self._settled[message.id] = message.committed
                while len(self._settled) > MAX_SETTLED_KEPT:
                    del self._settled[next(iter(self._settled))]
            elif isinstance(message, SlotRetired):
                self._mapped.pop(message.number, None)
            else:
                descriptors: tuple[int, ...] = ()
                try:
                    descriptors = received.take_descriptors(_count_descriptors(message))
                except MessageError as error:  # the kernel drops descriptors above the limit of a process
                    text = f"{error}: this process can open no more (ulimit -n). Raise its limit"
                    message = RequestFailed(
                        request_id=message.request_id, error=PeerUnreachable.__name__, message=text
                    )
                if message.request_id in self._replies:
                    self._replies[message.request_id] = (message, descriptors)
                else:  # the caller no longer waits
                    for descriptor in descriptors:
                        os.close(descriptor)
            self._changed.notify_all()


def _count_descriptors(reply: ServerReply) -> int:
    """Return how many descriptors come with a reply."""
    return len(reply.slots) if isinstance(reply, SlotsReady) else int(isinstance(reply, PartLocation))
