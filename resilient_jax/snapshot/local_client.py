"""A worker's line to the snapshot server of its host: synchronous, for any of its threads."""

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

ANSWER_TIMEOUT_S: Final = 60.0
OPEN_TIMEOUT_S: Final = 600.0
"""Memory is touched for the first time: a second for a GB."""
CHECK_INTERVAL_S: Final = 0.1
MAX_SETTLED_KEPT: Final = 64
"""Snapshots whose end is kept for those who ask after it."""

AnswerT = TypeVar("AnswerT", bound=ServerReply)


class LocalServerClient:
    """What the worker asks of its server; any thread may.

    The view that `begin` gives is the worker's until `finish` or `abandon`, which release it: write nothing after that.
    The server may start later than the worker: then the first answer is waited for.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes the worker's end of the socket pair."""
        self._link = Connection[WorkerRequest, ServerReply | ServerNotification](
            descriptor, SERVER_MESSAGE_DECODER
        )
        self._changed = threading.Condition()  # guards what follows
        self._calls = itertools.count()
        self._answers: dict[int, tuple[ServerReply, tuple[int, ...]] | None] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._writing: dict[SnapshotId, memoryview] = {}
        self._settled: dict[SnapshotId, bool] = {}
        self._is_closed = False
        threading.Thread(target=self._listen, name="rj-snapshot-line", daemon=True).start()

    def open_layout(
        self,
        layout: SnapshotLayout,
        *,
        restored: SnapshotId | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Has memory ready for snapshots of this layout; before the first step of its generation.

        Args:
            layout: the same on every host.
            restored: the snapshot that the generation goes on from, the same on every host. It counts as committed
                from now on, and newer ones of older generations are dropped. None if none is known.
            check: called several times a second meanwhile; what it raises ends the wait.

        Raises:
            SnapshotRefused: there is too little memory; says how much is needed and free.
            StaleGeneration: a newer generation has a layout already.
            PeerUnreachable: the server is gone, or does not answer.
        """
        call = next(self._calls)
        request = OpenLayout(request_id=call, layout=layout, restored=restored)
        answer, descriptors = self._ask(request, SlotsReady, OPEN_TIMEOUT_S, check)
        for slot, descriptor in zip(answer.slots, descriptors, strict=True):
            self._map(slot, descriptor)

    def begin(self, id: SnapshotId) -> memoryview:
        """Where this host's part of a new snapshot goes: writable, exactly as long as the part.

        Raises:
            SnapshotDropped: it is not to be taken; says why.
            StaleGeneration: a newer generation has a layout already.
            PeerUnreachable: the server is gone, or does not answer.
        """
        try:
            answer, (descriptor,) = self._ask(
                BeginSnapshot(request_id=next(self._calls), id=id), PartLocation
            )
            mapped = self._map(answer.slot, descriptor)
        except (PeerUnreachable, OSError):
            with contextlib.suppress(OSError):  # a slot that it gave, or may give later, must not wait for us
                self._link.send(AbandonSnapshot(request_id=next(self._calls), id=id))
            raise
        view = memoryview(mapped)[answer.offset :][: answer.part_bytes]
        with self._changed:
            self._writing[id] = view
        return view

    def finish(self, id: SnapshotId, contents: PartContents) -> None:
        """The part is written: from now on this host's snapshot outlives the worker. Checksums and parity come next.

        Raises:
            SnapshotDropped: another host, or the next generation, has given it up meanwhile.
            PeerUnreachable: the server is gone, or does not answer.
        """
        self._end_writing(id)
        self._ask(FinishSnapshot(request_id=next(self._calls), id=id, contents=contents), RequestDone)

    def abandon(self, id: SnapshotId) -> None:
        """The part will not be finished; on other hosts the snapshot is dropped, too."""
        self._end_writing(id)
        self._ask(AbandonSnapshot(request_id=next(self._calls), id=id), RequestDone)

    def wait_committed(self, id: SnapshotId, timeout_s: float) -> bool:
        """Whether all hosts have it complete before the time is over. False at once if it was dropped.

        Raises:
            PeerUnreachable: the server is gone.
        """
        self.wait_settled(id, timeout_s)
        with self._changed:
            return self._settled.get(id, False)

    def wait_settled(self, id: SnapshotId, timeout_s: float) -> bool:
        """Whether it is committed on all hosts, or dropped, before the time is over.

        Raises:
            PeerUnreachable: the server is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: id in self._settled or self._is_closed, timeout_s)
            if id not in self._settled and self._is_closed:
                raise PeerUnreachable("the snapshot server of this host is gone", is_refused=True)
            return id in self._settled

    def open_own_part(self, id: SnapshotId) -> tuple[PartManifest, memoryview] | None:
        """This host's own part, to read; None if it is not complete here.

        The view shows the slot, which a later snapshot overwrites once it has begun: copy before that.

        Raises:
            PeerUnreachable: the server is gone, or does not answer.
        """
        try:
            answer, (descriptor,) = self._ask(OpenOwnPart(request_id=next(self._calls), id=id), PartLocation)
        except SnapshotMissing:
            return None
        try:
            mapped = mmap.mmap(
                descriptor,
                answer.slot.mapped_bytes,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                prot=mmap.PROT_READ,
            )
        finally:
            os.close(descriptor)
        return decode_manifest(answer.manifest), memoryview(mapped)[answer.offset :][: answer.part_bytes]

    def close(self) -> None:
        """Ends the line. What was begun and not finished is dropped."""
        self._link.shut_down()

    # Asking.

    def _ask(
        self,
        request: WorkerRequest,
        expected: type[AnswerT],
        timeout_s: float = ANSWER_TIMEOUT_S,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[AnswerT, tuple[int, ...]]:
        end_s = time.monotonic() + timeout_s
        with self._changed:
            self._answers[request.request_id] = None
        try:
            with contextlib.suppress(OSError):  # gone: which the listener notices, too
                self._link.send(request)
            while not self._wait_answer(request.request_id) and time.monotonic() < end_s:
                check()
        finally:
            with self._changed:
                answered = self._answers.pop(request.request_id)
        name = type(request).__name__
        if answered is None:
            why = "is gone" if self._is_closed else f"did not answer {name} within {timeout_s} s"
            raise PeerUnreachable(f"the snapshot server of this host {why}", is_refused=self._is_closed)
        answer, descriptors = answered
        if isinstance(answer, RequestFailed):
            raise ERROR_CLASSES.get(answer.error, InternalError)(answer.message)
        if not isinstance(answer, expected):
            raise InternalError(f"the snapshot server answered {name} with {answer}, expected {expected}")
        return answer, descriptors

    def _wait_answer(self, call: int) -> bool:
        """Whether there is one soon, or will be none."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._answers[call] is not None or self._is_closed, CHECK_INTERVAL_S
            )

    def _map(self, slot: SlotInfo, descriptor: int) -> mmap.mmap:
        """The slot's memory, mapped once and whole, so that copying into it never waits for the kernel."""
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
            with contextlib.suppress(BufferError):  # arrays on it are still alive; they are the caller's care
                view.release()

    # Listening.

    def _listen(self) -> None:
        try:
            for received in self._link:
                self._hear(received)
        finally:
            with self._changed:
                self._is_closed = True
                self._mapped.clear()
                self._changed.notify_all()
            self._link.close()

    def _hear(self, received: Received[ServerReply | ServerNotification]) -> None:
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
                except MessageError as error:  # the kernel drops those that this process has no room for
                    text = f"{error}: this process can open no more (ulimit -n). Raise its limit"
                    message = RequestFailed(
                        request_id=message.request_id, error=PeerUnreachable.__name__, message=text
                    )
                if message.request_id in self._answers:
                    self._answers[message.request_id] = (message, descriptors)
                else:  # whoever asked has given up
                    for descriptor in descriptors:
                        os.close(descriptor)
            self._changed.notify_all()


def _count_descriptors(reply: ServerReply) -> int:
    """Return how many descriptors come with a reply."""
    return len(reply.slots) if isinstance(reply, SlotsReady) else int(isinstance(reply, PartLocation))
