"""A server's line to its host's worker: one request after the other; what a dead worker began is given up."""

import contextlib
import os
from collections.abc import Callable

from resilient_jax.errors import (
    ChecksumMismatch,
    InternalError,
    ResilientJaxError,
    SnapshotDropped,
    SnapshotMissing,
)
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
from resilient_jax.snapshot.slot_contents import SlotContents
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.snapshot_slots import SlotListener, SnapshotSlots

ReplyWithDescriptors = tuple[ServerReply, list[int]]
"""With the descriptors that go with it, which are ours to close."""


class WorkerSession:
    """Serves one worker, until its process ends or `end` is called."""

    def __init__(
        self,
        link: Connection[ServerReply | ServerNotification, WorkerRequest],
        arena: SnapshotSlots,
        listener: SlotListener,
        on_finished: Callable[[SlotContents, PartContents], None],
    ) -> None:
        """`on_finished` starts the exchange of a snapshot whose part is there; it must return at once."""
        self._link = link
        self._arena = arena
        self._listener = listener
        self._on_finished = on_finished

    def end(self) -> None:
        """The worker is gone, whoever else may still have the other end."""
        self._arena.abandon_all(self, "its worker was replaced before it was finished")
        self._link.shut_down()

    def serve(self) -> None:
        """Returns when the worker is gone."""
        try:
            with contextlib.suppress(OSError):  # the worker died
                for status in self._arena.list_statuses():
                    if status.phase is SnapshotPhase.COMMITTED:
                        self._link.send(SnapshotSettled(id=status.id, committed=True))
                for received in self._link:
                    self._answer(received.message)
        finally:
            self._arena.abandon_all(self, "its worker ended before it was finished")
            self._link.close()

    def _answer(self, request: WorkerRequest) -> None:
        try:
            answer, descriptors = self._carry_out(request)
        except ResilientJaxError as error:
            answer, descriptors = (
                RequestFailed(request_id=request.request_id, error=_class_of(error), message=str(error)),
                [],
            )
        except Exception as error:  # the process boundary
            text = f"{type(error).__name__}: {error}"
            answer = RequestFailed(request_id=request.request_id, error=InternalError.__name__, message=text)
            descriptors = []
        try:
            self._link.send(answer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _carry_out(self, request: WorkerRequest) -> ReplyWithDescriptors:
        arena = self._arena
        match request:
            case OpenLayout():
                arena.open_layout(request.layout, request.restored)
                sizes, descriptors = arena.share_slots()
                return SlotsReady(request_id=request.request_id, slots=sizes), descriptors
            case BeginSnapshot():
                held = arena.begin(request.id, self)
                return self._part_of(request.request_id, held)
            case FinishSnapshot():
                held = arena.finish(request.id, self)
                try:
                    self._on_finished(held, request.contents)
                except Exception as error:  # it would wait for ever for what nobody does
                    arena.drop(held.id, f"{type(error).__name__}: {error}")
                    raise
            case AbandonSnapshot():
                arena.abandon(request.id, self, "its worker gave it up")
            case OpenOwnPart():
                return self._open_held(request)
        return RequestDone(request_id=request.request_id), []

    def _open_held(self, request: OpenOwnPart) -> ReplyWithDescriptors:
        with self._arena.changed:
            try:
                held = self._arena.find(request.id, SlotPhase.COMPLETE)
                manifest = held.read_manifest_bytes(self._arena.host)
                decode_manifest(manifest)
            except (SnapshotDropped, ChecksumMismatch) as error:
                self._listener.record_event(EventKind.SNAPSHOT_REFUSED, request.id, error=str(error))
                raise SnapshotMissing(str(error)) from error
            return self._part_of(request.request_id, held, manifest)

    def _part_of(self, call: int, held: SlotContents, manifest: bytes = b"") -> ReplyWithDescriptors:
        slot = held.memory
        answer = PartLocation(
            request_id=call,
            slot=SlotInfo(number=slot.number, mapped_bytes=slot.mapped_bytes),
            offset=held.slot_layout.part_offset,
            part_bytes=held.slot_layout.part_bytes,
            manifest=manifest,
        )
        with self._arena.changed:
            return answer, [os.dup(slot.descriptor)]


def _class_of(error: ResilientJaxError) -> str:
    """The nearest class that the worker knows by name."""
    return next(
        base.__name__ for base in type(error).__mro__ if base.__module__ == ResilientJaxError.__module__
    )
