"""The messages of a snapshot server: with its agent, with its host's worker, and between servers.

Between servers (peer calls, service `snapshot`) every call is idempotent, so it may be repeated. On the connections
with agent and worker (socket pairs, one frame for each message) descriptors travel with the frame that mentions them.
"""

import enum

import msgspec

from resilient_jax.erasure import ChecksumName
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout, SnapshotStatus
from resilient_jax.protocol.worker_messages import EventOccurred
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.snapshot.stripes import MAX_BLOCK_BYTES
from resilient_jax.transport.method import Method, ReadMethod

SERVICE = "snapshot"


# Between the agent and the server of its host.

SETTINGS_ENV_VARIABLE = "RESILIENT_JAX_SNAPSHOT_SERVER"
"""Environment variable with `ServerSettings` as JSON."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an agent passes to its server at start.

    Attributes:
        address: address of the host; the server chooses the port.
        tls: file paths of certificate, key and authority; None for plain TCP.
        connection_fd: the server's end of a socket pair with its agent. When the agent's end closes, the server ends.
    """

    host: HostName
    address: str
    token: str
    tls: tuple[str, str, str] | None = None
    connection_fd: int


SETTINGS_DECODER: msgspec.json.Decoder[ServerSettings] = msgspec.json.Decoder(ServerSettings)


class ServerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message of a server: the endpoint where it listens."""

    endpoint: str


class CompleteSnapshots(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The snapshots that are complete on the host, sent at every change."""

    snapshots: tuple[SnapshotStatus, ...]


class NewWorker(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The host has a new worker. One descriptor is attached: the server's end of a socket pair with that worker."""


ServerToAgent = ServerReady | CompleteSnapshots | EventOccurred
"""Messages from a server to its agent. The agent sends only `NewWorker`."""

SERVER_TO_AGENT_DECODER: msgspec.msgpack.Decoder[ServerToAgent] = msgspec.msgpack.Decoder(ServerToAgent)
NEW_WORKER_DECODER: msgspec.msgpack.Decoder[NewWorker] = msgspec.msgpack.Decoder(NewWorker)


# Between the host's worker and the server. A reply has the `request_id` of its request.


class OpenLayout(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Open a layout for all later snapshots. Reply: `SlotsReady`, with a descriptor of each.

    Attributes:
        restored: the snapshot that the generation resumes from, or would go back to, the same on every host.
    """

    request_id: int
    layout: SnapshotLayout
    restored: SnapshotId | None = None


class BeginSnapshot(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask for a slot to write a part to. Reply: `PartLocation`, with the slot's descriptor."""

    request_id: int
    id: SnapshotId


class FinishSnapshot(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The part is written and final. Reply: `RequestDone`."""

    request_id: int
    id: SnapshotId
    contents: PartContents


class AbandonSnapshot(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The part will not be finished, and the worker no longer writes to it. Reply: `RequestDone`."""

    request_id: int
    id: SnapshotId


class OpenOwnPart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Ask for this host's own part. Reply: `PartLocation`, with the slot's descriptor, or `RequestFailed`."""

    request_id: int
    id: SnapshotId


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that has memory.

    Attributes:
        number: unique for the lifetime of a server.
        mapped_bytes: bytes of the slot that the worker maps.
    """

    number: int
    mapped_bytes: int


class SlotsReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The slots that have memory, with one descriptor each, in order."""

    request_id: int
    slots: tuple[SlotInfo, ...]


class PartLocation(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The location of a part: a range of bytes in a slot.

    Attributes:
        manifest: encoded manifest; empty for a part that is not written yet.
    """

    request_id: int
    slot: SlotInfo
    offset: int
    part_bytes: int
    manifest: bytes = b""


class RequestDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request succeeded and has no result."""

    request_id: int


class RequestFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request failed with a class of `resilient_jax.errors`, given by name."""

    request_id: int
    error: str
    message: str


class SnapshotSettled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A notification that a snapshot is committed, or was dropped."""

    id: SnapshotId
    committed: bool
    reason: str = ""


class SlotRetired(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A notification that a slot is no longer used: its memory is freed once the worker unmaps it."""

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
    """The region of a slot that a read refers to."""

    PART = "part"
    PARITY = "parity"


class ManifestRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the manifest of a member of the server's group, its own or another's."""

    id: SnapshotId
    host: HostName


class ManifestReply(msgspec.Struct, frozen=True, kw_only=True):
    """An encoded manifest, which begins with its checksum."""

    data: bytes


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for bytes of the host's own part, or of a parity chunk that it keeps.

    Attributes:
        offset: bytes from the start of the part or chunk.
        verify: whether the server verifies the blocks and sends a digest of the bytes. Otherwise the client must verify
            what it computes from the bytes, which takes one pass over them instead of three.
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
        stripe: index of the stripe in the group.
        offset: bytes from the start of the chunk, a multiple of `PARITY_PIECE_BYTES`.
        checksum: the algorithm of `checksums`.
        checksums: checksum of each block of `data`.
    """

    id: SnapshotId
    stripe: int
    row: int
    offset: int
    data: bytes
    checksum: ChecksumName
    checksums: tuple[int, ...]


class Ack(msgspec.Struct, frozen=True):
    """The request succeeded, now or before."""


class CommitOutcome(enum.StrEnum):
    """The outcome of a snapshot, which the root decides."""

    WAITING = "waiting"
    """Not all hosts are complete yet."""
    COMMITTED = "committed"
    DROPPED = "dropped"


class CompleteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Report to the root that this host is complete, or only ask for the outcome. Repeated until it is decided."""

    id: SnapshotId
    host: HostName
    is_complete: bool = True


class CompleteReply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the snapshot, and the reason for a drop."""

    outcome: CommitOutcome
    reason: str = ""


class DropNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Report to the root that this host will never complete the snapshot, which can then never commit."""

    id: SnapshotId
    host: HostName
    reason: str


MANIFEST = Method("manifest", ManifestRequest, ManifestReply)
READ = ReadMethod("read", ReadRequest)
PARITY = Method("parity", ParityPiece, Ack)
COMPLETE = Method("complete", CompleteRequest, CompleteReply)
DROPPED = Method("dropped", DropNotice, Ack)

PARITY_PIECE_BYTES = 4 * MAX_BLOCK_BYTES
"""Of parity in one message: a multiple of every block size. Larger pieces are not faster."""
