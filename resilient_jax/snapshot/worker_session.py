"""The server's side of the connection to its host's worker, which answers one request after the other."""

import contextlib
import os
from collections.abc import Callable

from resilient_jax.errors import ChecksumMismatch, SnapshotDropped, SnapshotMissing
from resilient_jax.events import EventKind
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.snapshot.manifest import PartContents, decode_manifest
from resilient_jax.snapshot.messages import (
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
    SlotsReady,
    SnapshotSettled,
    WorkerRequest,
)
from resilient_jax.snapshot.notifier import Notifier
from resilient_jax.snapshot.slot_contents import SlotContents
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.snapshot_slots import SnapshotSlots
from resilient_jax.transport.error_codec import name_error

ReplyWithDescriptors = tuple[ServerReply, list[int]]
"""A reply, and the descriptors that are sent with it, which the sender closes."""


class WorkerSession:
    """Serves one worker, until its process ends or `end` is called; then drops what the worker has not finished."""

    def __init__(
        self,
        connection: Connection[ServerReply | ServerNotification, WorkerRequest],
        slots: SnapshotSlots,
        listener: Notifier,
        on_finished: Callable[[SlotContents, PartContents], None],
    ) -> None:
        """Prepare the session; `serve` answers the requests.

        Args:
            on_finished: starts the exchange of a snapshot whose part is written; must return at once.
        """
        self._connection = connection
        self._slots = slots
        self._listener = listener
        self._on_finished = on_finished

    def end(self) -> None:
        """End the session, even if another process still has the other end of the connection."""
        self._slots.abandon_all(self, "its worker was replaced before it was finished")
        self._connection.shut_down()

    def serve(self) -> None:
        """Answer requests; return when the worker's process has ended."""
        try:
            with contextlib.suppress(OSError):  # the worker died
                # A new worker may wait for a snapshot that was committed before it came.
                for status in self._slots.list_statuses():
                    if status.phase is SnapshotPhase.COMMITTED:
                        self._connection.send(SnapshotSettled(id=status.id, committed=True))
                for received in self._connection:
                    self._reply(received.message)
        finally:
            self._slots.abandon_all(self, "its worker ended before it was finished")
            self._connection.close()

    def _reply(self, request: WorkerRequest) -> None:
        try:
            reply, descriptors = self._handle(request)
        except Exception as error:  # the process boundary
            name, text = name_error(error, type(request).__name__)
            reply = RequestFailed(request_id=request.request_id, error=name, message=text)
            descriptors = []
        try:
            self._connection.send(reply, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _handle(self, request: WorkerRequest) -> ReplyWithDescriptors:
        slots = self._slots
        match request:
            case OpenLayout():
                slots.open_layout(request.layout, request.restored)
                infos, descriptors = slots.table.share()
                return SlotsReady(request_id=request.request_id, slots=infos), descriptors
            case BeginSnapshot():
                contents = slots.begin(request.id, self)
                return self._locate_part(request.request_id, contents)
            case FinishSnapshot():
                contents = slots.finish(request.id, self)
                try:
                    self._on_finished(contents, request.contents)
                except Exception as error:  # without an exchange the snapshot would block its slot
                    slots.drop(contents.id, f"{type(error).__name__}: {error}")
                    raise
            case AbandonSnapshot():
                slots.abandon(request.id, self, "its worker abandoned it")
            case OpenOwnPart():
                return self._open_own_part(request)
        return RequestDone(request_id=request.request_id), []

    def _open_own_part(self, request: OpenOwnPart) -> ReplyWithDescriptors:
        with self._slots.changed:
            try:
                contents = self._slots.find(request.id, SlotPhase.COMPLETE)
                manifest = contents.read_manifest_bytes(self._slots.host)
                decode_manifest(manifest)
            except (SnapshotDropped, ChecksumMismatch) as error:
                self._listener.record_event(EventKind.SNAPSHOT_REFUSED, request.id, error=str(error))
                raise SnapshotMissing(str(error)) from error
            return self._locate_part(request.request_id, contents, manifest)

    def _locate_part(
        self, request_id: int, contents: SlotContents, manifest: bytes = b""
    ) -> ReplyWithDescriptors:
        memory = contents.memory
        reply = PartLocation(
            request_id=request_id,
            slot=SlotInfo(number=memory.number, mapped_bytes=memory.mapped_bytes),
            offset=contents.slot_layout.part_offset,
            part_bytes=contents.slot_layout.part_bytes,
            manifest=manifest,
        )
        with self._slots.changed:
            return reply, [os.dup(memory.descriptor)]
