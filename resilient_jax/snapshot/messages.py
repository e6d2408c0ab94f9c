"""What is said to and by a snapshot server: to its agent, to its host's worker, between servers.

Between servers (gRPC, service `snapshot`) every call may be repeated: it asks for a level, never for a change by one.
On the two links (socket pairs, one frame a message) descriptors travel beside the frame that names them.
"""

import enum

import msgspec

from resilient_jax.erasure import ChecksumName
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout, SnapshotStatus
from resilient_jax.protocol.worker_messages import EventOccurred
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.snapshot.stripes import MAX_BLOCK_BYTES
from resilient_jax.transport import Method

SERVICE = "snapshot"


# Between the agent and the server of its host.

SETTINGS_ENV_VARIABLE = "RESILIENT_JAX_SNAPSHOT_SERVER"
"""Environment variable with `ServerSettings` as JSON."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent tells its server once, at start.

    Attributes:
        address: of the host, where the server finds itself a port.
        token: of the job.
        tls: paths of certificate, key and authority; None for plain TCP.
        connection_fd: the server's end of a socket pair with its agent. When it closes the server ends.
    """

    host: HostName
    address: str
    token: str
    tls: tuple[str, str, str] | None = None
    connection_fd: int


class ServerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The server listens there. Said once, first."""

    endpoint: str


class CompleteSnapshots(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the host's server holds complete, whenever that changes."""

    snapshots: tuple[SnapshotStatus, ...]


class NewWorker(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The host has a new worker; one descriptor comes with it: the server's end of a socket pair with that worker."""


ServerToAgent = ServerReady | CompleteSnapshots | EventOccurred
"""Server to agent. The other way there is only `NewWorker`."""

SERVER_TO_AGENT_DECODER: msgspec.msgpack.Decoder[ServerToAgent] = msgspec.msgpack.Decoder(ServerToAgent)
NEW_WORKER_DECODER: msgspec.msgpack.Decoder[NewWorker] = msgspec.msgpack.Decoder(NewWorker)


# Between the host's worker and the server. `call` numbers a worker's requests; the answer has its number.


class OpenLayout(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From now on snapshots have this layout. Answer: `Slots`, with a descriptor of each.

    Attributes:
        restored: the snapshot that the generation goes on from, the same on every host.
    """

    request_id: int
    layout: SnapshotLayout
    restored: SnapshotId | None = None


class BeginSnapshot(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Gives the worker a slot to write its part to. Answer: `PartLocation`, with the slot's descriptor."""

    request_id: int
    id: SnapshotId


class FinishSnapshot(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The part is there and will not change any more. Answer: `Done`."""

    request_id: int
    id: SnapshotId
    contents: PartContents


class AbandonSnapshot(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The part will not be finished, and the worker writes to it no more. Answer: `Done`."""

    request_id: int
    id: SnapshotId


class OpenOwnPart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask for this host's own part. Reply: `PartLocation`, with the slot's descriptor, or `RequestFailed`."""

    request_id: int
    id: SnapshotId


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that exists.

    Attributes:
        number: never given out twice by a server.
        mapped_bytes: of its memory, for the worker to map.
    """

    number: int
    mapped_bytes: int


class SlotsReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The slots that are ready; one descriptor each, in order."""

    request_id: int
    slots: tuple[SlotInfo, ...]


class PartLocation(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Where a part lies: so many bytes from an offset of a slot.

    Attributes:
        manifest: encoded; empty for a part that is yet to be written.
    """

    request_id: int
    slot: SlotInfo
    offset: int
    part_bytes: int
    manifest: bytes = b""


class RequestDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """There is nothing more to say."""

    request_id: int


class RequestFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request failed with this error of ours, by the name of its class."""

    request_id: int
    error: str
    message: str


class SnapshotSettled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Unasked: a snapshot is committed, or it was dropped."""

    id: SnapshotId
    committed: bool
    reason: str = ""


class SlotRetired(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Unasked: the slot is used no more; its memory is freed when the worker, too, lets go of it."""

    number: int


WorkerRequest = OpenLayout | BeginSnapshot | FinishSnapshot | AbandonSnapshot | OpenOwnPart
ServerReply = SlotsReady | PartLocation | RequestDone | RequestFailed
ServerNotification = SnapshotSettled | SlotRetired

WORKER_REQUEST_DECODER: msgspec.msgpack.Decoder[WorkerRequest] = msgspec.msgpack.Decoder(WorkerRequest)
SERVER_MESSAGE_DECODER: msgspec.msgpack.Decoder[ServerReply | ServerNotification] = msgspec.msgpack.Decoder(
    ServerReply | ServerNotification
)


# Between servers, and from a reader to servers.


class Region(enum.StrEnum):
    """What a read is of."""

    PART = "part"
    PARITY = "parity"


class ManifestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the manifest of a member of the server's group, its own or another's."""

    id: SnapshotId
    host: HostName


class ManifestReply(msgspec.Struct, frozen=True, kw_only=True):
    """The encoded manifest, with its checksum in front."""

    data: bytes


class BulkAddressRequest(msgspec.Struct, frozen=True):
    """Asks where to read."""


class BulkAddressReply(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server's `BulkServer` is: a port of the same host, and what admits there."""

    port: int
    ticket: bytes


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """To the bulk server: asks for bytes of the host's own part, or of a parity chunk that it keeps.

    Attributes:
        row: of the parity chunk.
        offset: in the part, or in the chunk.
        verify: the server compares the blocks with their checksums, and what comes has a digest. Without it the asker
            must find out whether what it makes of the bytes is right: one pass over them instead of three.
    """

    id: SnapshotId
    region: Region
    row: int = 0
    offset: int
    length: int
    verify: bool = True


class ParityPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a parity chunk, from the member that encodes the stripe to the one that keeps the row.

    Attributes:
        stripe: of the group.
        row: of the stripe's parity.
        offset: in the chunk, a multiple of `PARITY_PIECE_BYTES`.
        checksum: the algorithm of `digests`.
        digests: of each block of `data`.
    """

    id: SnapshotId
    stripe: int
    row: int
    offset: int
    data: bytes
    checksum: ChecksumName
    checksums: tuple[int, ...]


class Ack(msgspec.Struct, frozen=True):
    """Done, or it had been done before."""


class CommitOutcome(enum.StrEnum):
    """What the root knows of a snapshot."""

    WAITING = "waiting"
    """Somebody is not complete yet."""
    COMMITTED = "committed"
    DROPPED = "dropped"


class CompleteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """To the root: this host is complete, or only asks. Said again until the outcome is known."""

    id: SnapshotId
    host: HostName
    is_complete: bool = True


class CompleteReply(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of the snapshot."""

    outcome: CommitOutcome
    reason: str = ""


class DropNotice(msgspec.Struct, frozen=True, kw_only=True):
    """To the root: this host will never be complete, so nobody can be."""

    id: SnapshotId
    host: HostName
    reason: str


MANIFEST = Method("manifest", ManifestRequest, ManifestReply)
BULK_ADDRESS = Method("bulk", BulkAddressRequest, BulkAddressReply)
PARITY = Method("parity", ParityPiece, Ack)
COMPLETE = Method("complete", CompleteRequest, CompleteReply)
DROPPED = Method("dropped", DropNotice, Ack)

PARITY_PIECE_BYTES = 4 * MAX_BLOCK_BYTES
"""Of parity in one message: whole blocks, however large they are. So many are in flight that more gains nothing."""
