"""What other servers, and readers, may ask of a server: the handlers of its gRPC service."""

from collections.abc import Iterator
from typing import Final

from resilient_jax.errors import (
    CallerError,
    ChecksumMismatch,
    SnapshotMissing,
    StaleGeneration,
)
from resilient_jax.events import EventKind
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.exchange import Tools
from resilient_jax.snapshot.messages import (
    COMPLETE,
    DROPPED,
    MANIFEST,
    PARITY,
    READ,
    CompleteReply,
    CompleteRequest,
    DroppedRequest,
    ManifestReply,
    ManifestRequest,
    Ok,
    Outcome,
    ParityPiece,
    ReadReply,
    ReadRequest,
    Region,
)
from resilient_jax.snapshot.slot_choice import name_of
from resilient_jax.snapshot.slots import Phase
from resilient_jax.transport.method import AnyMethod
from resilient_jax.transport.thread_server import StreamHandler, UnaryHandler

REPLY_BYTES: Final = 4 * 2**20
"""Of one message of a read."""


class SnapshotService:
    """Answers from what the arena holds; waits for nothing, so callers ask again."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._arena = tools.arena

    @property
    def handlers(self) -> dict[AnyMethod, UnaryHandler | StreamHandler]:
        return {
            MANIFEST: self._manifest,
            READ: self._read,
            PARITY: self._parity,
            COMPLETE: self._complete,
            DROPPED: self._drop,
        }

    def _manifest(self, request: ManifestRequest) -> ManifestReply:
        with self._arena.changed:
            held = self._arena.find(request.id, Phase.PART)
            return ManifestReply(data=held.manifest_of(request.host))

    def _read(self, request: ReadRequest) -> Iterator[ReadReply]:
        is_part = request.region is Region.PART
        held = self._arena.find(request.id, Phase.PART if is_part else Phase.COMPLETE)
        end = request.offset + request.length
        for start in range(request.offset, end, REPLY_BYTES):
            length = min(REPLY_BYTES, end - start)
            try:
                data = (
                    held.read_part(start, length) if is_part else held.read_parity(request.row, start, length)
                )
            except ValueError:  # the slot's memory was given back just now
                self._check_held(held)
                raise
            except ChecksumMismatch as error:
                self._check_held(held)  # else it is no damage: the slot was taken meanwhile
                self._tools.listener.happened(EventKind.SNAPSHOT_DAMAGED, request.id, error=str(error))
                raise
            self._check_held(held)
            checksum = self._tools.checksum
            yield ReadReply(data=data, checksum=checksum.name, digest=checksum.compute(data))

    def _parity(self, piece: ParityPiece) -> Ok:
        self._refuse_stale(piece.id)
        self._arena.store_piece(piece)
        return Ok()

    def _complete(self, request: CompleteRequest) -> CompleteReply:
        board = self._tools.board
        with self._arena.changed:
            if board.outcome(request.id).outcome is Outcome.WAITING:
                self._check_root(request.id)
                if request.is_complete:
                    board.hear_complete(request.id, request.host)
                    self._arena.changed.notify_all()
            return board.outcome(request.id)

    def _drop(self, request: DroppedRequest) -> Ok:
        with self._arena.changed:
            self._check_root(request.id)
            self._tools.board.hear_dropped(request.id, request.reason)
            self._arena.drop(request.id, request.reason, known_to_root=True)
            self._arena.changed.notify_all()
        return Ok()

    def _check_held(self, held: object) -> None:
        if not self._arena.is_held(held):
            raise SnapshotMissing(f"{self._tools.host}: the slot was taken by another snapshot meanwhile")

    def _check_root(self, id: SnapshotId) -> None:
        self._refuse_stale(id)
        layout = self._arena.layout
        if layout is None or layout.generation < id.generation:
            raise SnapshotMissing(f"{self._tools.host} does not know the layout of {name_of(id)} yet")
        if layout.root != self._tools.host:
            raise CallerError(f"{self._tools.host} is not the root of {name_of(id)}, {layout.root} is")

    def _refuse_stale(self, id: SnapshotId) -> None:
        layout = self._arena.layout
        if layout is not None and id.generation < layout.generation:
            raise StaleGeneration(f"{name_of(id)}: {self._tools.host} is in generation {layout.generation}")
