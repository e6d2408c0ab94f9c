"""What other servers, and readers, may ask of a server: the handlers of its gRPC service, and bulk reads."""

from resilient_jax.errors import (
    CallerError,
    ChecksumMismatch,
    SnapshotMissing,
    StaleGeneration,
)
from resilient_jax.events import EventKind
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.messages import (
    BULK,
    COMPLETE,
    DROPPED,
    MANIFEST,
    PARITY,
    BulkReply,
    BulkRequest,
    CompleteReply,
    CompleteRequest,
    DroppedRequest,
    ManifestReply,
    ManifestRequest,
    Ok,
    Outcome,
    ParityPiece,
    ReadRequest,
    Region,
)
from resilient_jax.snapshot.parity_exchange import Tools
from resilient_jax.snapshot.slot_choice import name_of
from resilient_jax.snapshot.slot_memory import Phase
from resilient_jax.transport import BulkServer, Credentials
from resilient_jax.transport.bulk_server import Answer
from resilient_jax.transport.method import AnyMethod
from resilient_jax.transport.sync_server import UnaryHandler


class SnapshotService:
    """Answers from what the arena holds; waits for nothing, so callers ask again.

    Attributes:
        bulk: serves the reads; to be started by whoever starts the gRPC server.
    """

    def __init__(self, tools: Tools, host: str, credentials: Credentials) -> None:
        """Listens to nothing yet; `host` is an address of this machine."""
        self._tools = tools
        self._arena = tools.arena
        self.bulk = BulkServer(
            host, credentials, ReadRequest, self.read, tools.checksum, tools.put_on_the_wire
        )

    @property
    def handlers(self) -> dict[AnyMethod, UnaryHandler]:
        return {
            MANIFEST: self._manifest,
            BULK: self._find_bulk,
            PARITY: self._parity,
            COMPLETE: self._complete,
            DROPPED: self._drop,
        }

    def _manifest(self, request: ManifestRequest) -> ManifestReply:
        with self._arena.changed:
            held = self._arena.find(request.id, Phase.PART)
            return ManifestReply(data=held.manifest_of(request.host))

    def read(self, request: ReadRequest) -> Answer:
        """Bytes in their slot.

        Raises:
            SnapshotMissing: they are not here, or not any more.
            SnapshotDropped: they never will be.
            ChecksumMismatch: a block is damaged, if that is to be verified.
            CallerError: there are no such bytes.
        """
        is_part = request.region is Region.PART
        held = self._arena.find(request.id, Phase.PART if is_part else Phase.COMPLETE)
        try:
            if is_part:
                data = held.view_part(request.offset, request.length, verify=request.verify)
            else:
                data = held.view_parity(request.row, request.offset, request.length, verify=request.verify)
            return Answer(data, request.verify)
        except ValueError:  # the slot's memory was given back just now
            self._check_held(held)
            raise
        except ChecksumMismatch as error:
            self._check_held(held)  # else it is no damage: the slot was taken meanwhile
            self._tools.listener.happened(EventKind.SNAPSHOT_CORRUPT, request.id, error=str(error))
            raise

    def _find_bulk(self, _: BulkRequest) -> BulkReply:
        return BulkReply(port=self.bulk.port, ticket=self.bulk.ticket)

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
