"""Layouts, manifests, parity and a listener for tests of the snapshot slots."""

from dataclasses import dataclass, field

from resilient_jax.erasure import choose_checksum
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotLayout
from resilient_jax.snapshot.manifest import (
    PartContents,
    PartManifest,
    checksum_blocks,
    encode_manifest,
)
from resilient_jax.snapshot.messages import (
    PARITY_PIECE_BYTES,
    ParityPiece,
    ServerNotification,
)
from resilient_jax.snapshot.notifier import Notifier
from resilient_jax.snapshot.slot_contents import cut_blocks
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.stripes import MIN_BLOCK_BYTES, cut_grid

HOST, PEER = HostName("a"), HostName("b")


CHECKSUM = choose_checksum()


BLOCK = MIN_BLOCK_BYTES


def make_id(step, generation=1):
    return SnapshotId(step, GenerationNumber(generation))


def make_layout(part_bytes=300_000, generation=1, peer_bytes=10):
    return SnapshotLayout(
        generation=GenerationNumber(generation),
        groups=(ParityGroup(hosts=(HOST, PEER), parity=1),),
        part_bytes={HOST: part_bytes, PEER: peer_bytes},
        server_endpoints={HOST: "a:1", PEER: "b:1"},
        root=HOST,
    )


def make_manifest(id, part=b"", host=HOST):
    """Return the encoded manifest of a part, for a layout of `make_layout` with a part of this length."""
    block_bytes = cut_grid([len(part), 10], 1).block_bytes
    return encode_manifest(
        PartManifest(
            id=id,
            host=host,
            contents=PartContents(),
            part_bytes=len(part),
            checksum=CHECKSUM.name,
            block_bytes=block_bytes,
            block_checksums=checksum_blocks(part, CHECKSUM, block_bytes),
        )
    )


def make_piece(id, chunk, offset=0, *, stripe=0, row=0):
    data = chunk[offset : offset + PARITY_PIECE_BYTES]
    blocks = cut_blocks(data, cut_grid([len(chunk)], 1).block_bytes)
    return ParityPiece(
        id=id,
        stripe=stripe,
        row=row,
        offset=offset,
        data=data,
        checksum=CHECKSUM.name,
        checksums=tuple(map(CHECKSUM.compute, blocks)),
    )


@dataclass
class RecordingListener(Notifier):
    """Keeps all calls, and sends nothing."""

    events: list[EventKind] = field(default_factory=list)
    notices: list[ServerNotification] = field(default_factory=list)
    dropped: list[SnapshotId] = field(default_factory=list)
    agent_notices: int = 0

    def record_event(self, kind, id=None, **detail):
        self.events.append(kind)

    def notify_agent(self):
        self.agent_notices += 1

    def notify_worker(self, notice):
        self.notices.append(notice)

    def notify_root(self, id, layout, reason):
        self.dropped.append(id)


WRITER = object()


def take(slots, id, phase=SlotPhase.COMMITTED, part_bytes=300_000):
    """Take a snapshot up to `phase`; return its slot's contents."""
    held = slots.begin(id, WRITER)
    part = bytes([id.step]) * part_bytes
    held.part[:] = part
    if phase >= SlotPhase.PART:
        slots.seal(slots.finish(id, WRITER), make_manifest(id, part))
    for reached in (SlotPhase.COMPLETE, SlotPhase.COMMITTED):
        if phase >= reached:
            slots.advance(held, reached)
    return held
