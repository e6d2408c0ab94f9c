"""What a snapshot server answers to other servers and to readers of snapshots."""

from resilient_jax.errors import (
    CallerError,
    ChecksumMismatch,
    SnapshotMissing,
    StaleGeneration,
)
from resilient_jax.events import EventKind
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.messages import (
    COMPLETE,
    DROPPED,
    MANIFEST,
    PARITY,
    READ,
    Ack,
    CommitOutcome,
    CompleteReply,
    CompleteRequest,
    DropNotice,
    ManifestReply,
    ManifestRequest,
    ParityPiece,
    ReadRequest,
    Region,
)
from resilient_jax.snapshot.parity_exchange import ExchangeContext
from resilient_jax.snapshot.slot_choice import format_snapshot_id
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.transport.method import AnyMethod, ReadMethod
from resilient_jax.transport.peer_calls import CallHandler, CallService, MemoryAnswer


class SnapshotService:
    """Answers from the present contents of the slots. No handler waits, so clients repeat their calls."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._slots = context.slots

    def make_call_service(self) -> CallService:
        """Return what answers the calls of peers."""
        handlers: dict[AnyMethod | ReadMethod[ReadRequest], CallHandler] = {
            MANIFEST: self._manifest,
            READ: self.read,
            PARITY: self._parity,
            COMPLETE: self._complete,
            DROPPED: self._drop,
        }
        return CallService(handlers, self._context.checksum, self._context.maybe_corrupt)

    def _manifest(self, request: ManifestRequest) -> ManifestReply:
        with self._slots.changed:
            contents = self._slots.find(request.id, SlotPhase.PART)
            return ManifestReply(data=contents.read_manifest_bytes(request.host))

    def read(self, request: ReadRequest) -> MemoryAnswer:
        """Return a view of bytes in their slot.

        Raises:
            SnapshotMissing: the snapshot is not here, not yet, or no longer.
            SnapshotDropped: this host dropped the snapshot.
            ChecksumMismatch: the request asks for verification, and a block is corrupt.
            CallerError: the range is outside of the region.
        """
        is_part = request.region is Region.PART
        contents = self._slots.find(request.id, SlotPhase.PART if is_part else SlotPhase.COMPLETE)
        try:
            if is_part:
                data = contents.view_part(request.offset, request.length, verify=request.verify)
            else:
                data = contents.view_parity(
                    request.row, request.offset, request.length, verify=request.verify
                )
            # A reader that does not ask to verify has the manifest's checksums, and needs no digest of the transfer.
            return MemoryAnswer(data, request.verify)
        except ValueError:  # the slot's memory was freed meanwhile
            self._check_held(contents)
            raise
        except ChecksumMismatch as error:
            # Otherwise the slot was taken meanwhile, and its bytes are not corrupt.
            self._check_held(contents)
            self._context.listener.record_event(EventKind.SNAPSHOT_CORRUPT, request.id, error=str(error))
            raise

    def _parity(self, piece: ParityPiece) -> Ack:
        self._refuse_stale(piece.id)
        self._slots.store_parity(piece)
        return Ack()

    def _complete(self, request: CompleteRequest) -> CompleteReply:
        votes = self._context.votes
        with self._slots.changed:
            # A known outcome is given in any generation: a host that asks late must still learn of the commit.
            if votes.outcome(request.id).outcome is CommitOutcome.WAITING:
                self._check_root(request.id)
                if request.is_complete:
                    votes.record_complete(request.id, request.host)
                    self._slots.changed.notify_all()
            return votes.outcome(request.id)

    def _drop(self, request: DropNotice) -> Ack:
        with self._slots.changed:
            self._check_root(request.id)
            self._context.votes.record_dropped(request.id, request.reason)
            self._slots.drop(request.id, request.reason, known_to_root=True)
            self._slots.changed.notify_all()
        return Ack()

    def _check_held(self, contents: object) -> None:
        if not self._slots.is_held(contents):
            raise SnapshotMissing(f"{self._context.host}: the slot was taken by another snapshot meanwhile")

    def _check_root(self, id: SnapshotId) -> None:
        self._refuse_stale(id)
        layout = self._slots.layout
        if layout is None or layout.generation < id.generation:
            raise SnapshotMissing(
                f"{self._context.host} does not know the layout of {format_snapshot_id(id)} yet"
            )
        if layout.root != self._context.host:
            raise CallerError(
                f"{self._context.host} is not the root of {format_snapshot_id(id)}, {layout.root} is"
            )

    def _refuse_stale(self, id: SnapshotId) -> None:
        layout = self._slots.layout
        if layout is not None and id.generation < layout.generation:
            raise StaleGeneration(
                f"{format_snapshot_id(id)}: {self._context.host} is in generation {layout.generation}"
            )
