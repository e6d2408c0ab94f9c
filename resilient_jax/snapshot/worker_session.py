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
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.snapshot.fd_connection import Link
from resilient_jax.snapshot.manifest import PartContents, decode_manifest
from resilient_jax.snapshot.messages import (
    WORKER_REQUEST_DECODER,
    Abandon,
    Begin,
    Done,
    Failed,
    Finish,
    Open,
    OpenHeld,
    PartOf,
    ServerAnswer,
    Settled,
    Slots,
    SlotSize,
    WorkerRequest,
)
from resilient_jax.snapshot.slot_contents import HeldSnapshot
from resilient_jax.snapshot.slot_memory import Phase
from resilient_jax.snapshot.snapshot_slots import Arena, Listener

Answer = tuple[ServerAnswer, list[int]]
"""With the descriptors that go with it, which are ours to close."""


class WorkerLine:
    """Serves one worker, until its process ends or `end` is called."""

    def __init__(
        self,
        link: Link,
        arena: Arena,
        listener: Listener,
        on_finished: Callable[[HeldSnapshot, PartContents], None],
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
                for status in self._arena.statuses():
                    if status.phase is SnapshotPhase.COMMITTED:
                        self._link.send(Settled(id=status.id, committed=True))
                while messages := self._link.receive():
                    for message in messages:
                        self._answer(WORKER_REQUEST_DECODER.decode(message))
        finally:
            self._arena.abandon_all(self, "its worker ended before it was finished")
            self._link.close()

    def _answer(self, request: WorkerRequest) -> None:
        try:
            answer, descriptors = self._carry_out(request)
        except ResilientJaxError as error:
            answer, descriptors = Failed(call=request.call, error=_class_of(error), message=str(error)), []
        except Exception as error:  # the process boundary
            text = f"{type(error).__name__}: {error}"
            answer = Failed(call=request.call, error=InternalError.__name__, message=text)
            descriptors = []
        try:
            self._link.send(answer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _carry_out(self, request: WorkerRequest) -> Answer:
        arena = self._arena
        match request:
            case Open():
                arena.open(request.layout, request.restored)
                sizes, descriptors = arena.share_slots()
                return Slots(call=request.call, slots=sizes), descriptors
            case Begin():
                held = arena.begin(request.id, self)
                return self._part_of(request.call, held)
            case Finish():
                held = arena.finish(request.id, self)
                try:
                    self._on_finished(held, request.contents)
                except Exception as error:  # it would wait for ever for what nobody does
                    arena.drop(held.id, f"{type(error).__name__}: {error}")
                    raise
            case Abandon():
                arena.abandon(request.id, self, "its worker gave it up")
            case OpenHeld():
                return self._open_held(request)
        return Done(call=request.call), []

    def _open_held(self, request: OpenHeld) -> Answer:
        with self._arena.changed:
            try:
                held = self._arena.find(request.id, Phase.COMPLETE)
                manifest = held.manifest_of(self._arena.host)
                decode_manifest(manifest)
            except (SnapshotDropped, ChecksumMismatch) as error:
                self._listener.happened(EventKind.SNAPSHOT_REFUSED, request.id, error=str(error))
                raise SnapshotMissing(str(error)) from error
            return self._part_of(request.call, held, manifest)

    def _part_of(self, call: int, held: HeldSnapshot, manifest: bytes = b"") -> Answer:
        slot = held.slot
        answer = PartOf(
            call=call,
            slot=SlotSize(number=slot.number, mapped_bytes=slot.mapped_bytes),
            offset=held.shape.part_offset,
            part_bytes=held.shape.part_bytes,
            manifest=manifest,
        )
        with self._arena.changed:
            return answer, [os.dup(slot.descriptor)]


def _class_of(error: ResilientJaxError) -> str:
    """The nearest class that the worker knows by name."""
    return next(
        base.__name__ for base in type(error).__mro__ if base.__module__ == ResilientJaxError.__module__
    )
