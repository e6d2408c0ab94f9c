"""One snapshot in a slot: its regions, stored with their checksums and read back verified.

The arena's lock guards what changes here; reading the bytes takes no lock, so whoever reads asks the arena afterwards
whether the snapshot was still there.
"""

import functools
import os
import struct
import zlib
from collections.abc import Callable
from typing import Final

from resilient_jax.erasure import Buffer, Checksum, ChecksumName, choose_checksum
from resilient_jax.errors import CallerError, ChecksumMismatch, SnapshotMissing
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotLayout
from resilient_jax.snapshot.manifest import (
    PartContents,
    PartManifest,
    checksum_blocks,
    decode_manifest,
)
from resilient_jax.snapshot.messages import PARITY_PIECE_BYTES, ParityPiece
from resilient_jax.snapshot.slot_memory import CHECKSUM_BYTES, SlotHeader, SlotLayout, SlotMemory, SlotPhase
from resilient_jax.snapshot.stripes import cut_grid, stripe_of_row

_DIGEST = struct.Struct("<I")

get_checksum: Final = functools.cache(choose_checksum)
"""The algorithm of digests that came from elsewhere."""


def compute_slot_layout(layout: SnapshotLayout, host: HostName) -> SlotLayout:
    """What a host's slots must hold."""
    group = layout.find_group(host)
    parts = [layout.part_bytes[member] for member in group.hosts]
    return SlotLayout(
        part_bytes=layout.part_bytes[host],
        parity_rows=group.parity,
        grid=cut_grid(parts, len(group.hosts) - group.parity),
    )


class SlotContents:
    """What this host has of one snapshot.

    Attributes:
        layout: that it belongs to.
        group: that this host is in, and `member` its place there.
        phase: as in the mark.
        writer: the line to the worker that may write to the part; None when nobody may.
        dropped: why it will not be completed; empty if it may be.
        wall_s: when it became complete.
    """

    def __init__(
        self, id: SnapshotId, layout: SnapshotLayout, host: HostName, memory: SlotMemory, writer: object
    ) -> None:
        """Makes the slot dirty: what it held before is gone."""
        self.id = id
        self.layout = layout
        self.host = host
        self.group: ParityGroup = layout.find_group(host)
        self.member_index = self.group.hosts.index(host)
        self.slot_layout = compute_slot_layout(layout, host)
        self.memory = memory
        self.phase = SlotPhase.WRITING
        self.writer: object | None = writer
        self.drop_reason = ""
        self.wall_s = 0.0
        self._decoded: dict[HostName, PartManifest] = {}
        self._manifests: dict[HostName, tuple[int, int]] = {}
        self._manifests_end = memory.mapped_bytes
        self._own_crc = 0
        self._pieces: list[set[int]] = [set() for _ in range(self.slot_layout.parity_rows)]
        self._algorithms: list[ChecksumName] = [ChecksumName.CRC32] * self.slot_layout.parity_rows
        memory.write_header(self._mark())

    @property
    def nbytes(self) -> int:
        """Of memory, manifests included."""
        return self.slot_layout.mapped_bytes + self._manifests_end - self.memory.mapped_bytes

    def advance(self, phase: SlotPhase, wall_s: float = 0.0) -> None:
        """Writes the mark: all that it vouches for must be there."""
        self.phase = phase
        self.wall_s = wall_s or self.wall_s
        self.memory.write_header(self._mark())

    def check_header(self) -> None:
        """Raises ChecksumMismatch if the slot does not say what it should."""
        found = self.memory.read_header()
        if found != self._mark():
            raise ChecksumMismatch(
                f"{self.host}: the mark of slot {self.memory.number} was overwritten: found {found}, expected "
                f"{self._mark()}"
            )

    # Manifests.

    def store_manifest(self, host: HostName, data: bytes) -> None:
        """Keeps the encoded manifest of a member.

        Raises:
            ChecksumMismatch: it is damaged.
            CallerError: it is of another snapshot or host, or not as the layout says.
        """
        manifest = decode_manifest(data)
        found = (manifest.id, manifest.host, manifest.part_bytes)
        expected = (self.id, host, self.layout.part_bytes[host])
        if found != expected:
            raise CallerError(f"manifest: found (id, host, part_bytes) {found}, expected {expected}")
        if host in self._manifests:
            return
        own = self._decoded.get(self.host)
        if own is not None and (own.contents.leaves, own.contents.strings) != (
            manifest.contents.leaves,
            manifest.contents.strings,
        ):
            raise CallerError(
                f"{host} snapshots another state than {self.host}: leaves or texts differ; expected the same on every "
                "host. What differs from host to host belongs outside of the state"
            )
        written = os.pwrite(self.memory.descriptor, data, self._manifests_end)
        assert written == len(data), "memory takes all or raises"
        self._manifests[host] = (self._manifests_end, len(data))
        self._manifests_end += len(data)
        self._decoded[host] = manifest
        if host == self.host:
            self._own_crc = zlib.crc32(data)

    def read_manifest_bytes(self, host: HostName) -> bytes:
        """The encoded manifest of a member.

        Raises:
            SnapshotMissing: it is not here, or not yet.
        """
        where = self._manifests.get(host)
        if where is None:
            raise SnapshotMissing(f"{self.host} does not have the manifest of {host} for {self.id} (yet)")
        return os.pread(self.memory.descriptor, where[1], where[0])

    def get_manifest(self, host: HostName) -> PartManifest:
        """The manifest of a member, which is here."""
        return self._decoded[host]

    def list_missing_manifests(self) -> list[HostName]:
        """Of which members there is none yet."""
        return [host for host in self.group.hosts if host not in self._manifests]

    # The part.

    @property
    def part(self) -> memoryview:
        return self.memory.view[self.slot_layout.part_offset :][: self.slot_layout.part_bytes]

    def build_manifest(
        self, contents: PartContents, checksum: Checksum, check_cancelled: Callable[[], None]
    ) -> PartManifest:
        """The manifest of the part as it lies there. Takes no lock.

        Args:
            contents: what the worker says of it.
            checksum: of the blocks.
            go_on: called between blocks; what it raises ends it.
        """
        part, size = self.part, self.slot_layout.block_bytes
        return PartManifest(
            id=self.id,
            host=self.host,
            contents=contents,
            part_bytes=len(part),
            checksum=checksum.name,
            block_bytes=size,
            block_checksums=checksum_blocks(part, checksum, size, check_cancelled=check_cancelled),
        )

    def view_part(self, offset: int, length: int, *, verify: bool = True) -> memoryview:
        """Bytes of the part, as they lie.

        Raises:
            ChecksumMismatch: a block is not what the worker wrote, if that is to be verified.
        """
        manifest = self._decoded[self.host]
        part, size = self.part, manifest.block_bytes
        end = offset + length
        _check_range(offset, length, len(part))
        checksum = get_checksum(ChecksumName(manifest.checksum))
        for index in range(offset // size, -(-end // size)) if verify else ():
            self._verify(
                checksum,
                part[index * size : (index + 1) * size],
                manifest.block_checksums[index],
                f"block {index} of the part",
            )
        return part[offset:end]

    # Parity.

    def parity_chunk(self, row: int) -> memoryview:
        """The chunk of a row."""
        return self.memory.view[self.slot_layout.parity_offset + row * self.slot_layout.chunk_bytes :][
            : self.slot_layout.chunk_bytes
        ]

    def check_parity(self, piece: ParityPiece) -> None:
        """Takes no lock.

        Raises:
            CallerError: the piece is not of a row that this host keeps, or not on the grid.
            ChecksumMismatch: it is damaged.
        """
        expected = min(PARITY_PIECE_BYTES, self.slot_layout.chunk_bytes - piece.offset)
        fits = (
            0 <= piece.row < self.slot_layout.parity_rows
            and piece.stripe
            == stripe_of_row(self.member_index, piece.row, len(self.group.hosts), self.group.parity)
            and piece.offset % PARITY_PIECE_BYTES == 0
            and 0 < expected == len(piece.data)
            and len(piece.checksums) == expected // self.slot_layout.block_bytes
        )
        if not fits:
            raise CallerError(
                f"parity for {self.host}: found stripe {piece.stripe}, row {piece.row}, {len(piece.data)} bytes at "
                f"{piece.offset} with {len(piece.checksums)} digests, which {self.slot_layout} has no place for"
            )
        checksum = get_checksum(piece.checksum)
        for index, block in enumerate(cut_blocks(piece.data, self.slot_layout.block_bytes)):
            self._verify(
                checksum,
                block,
                piece.checksums[index],
                f"block {index} of parity at {piece.offset} that came",
            )

    def store_parity(self, piece: ParityPiece) -> None:
        """Keeps a piece that was checked."""
        self.parity_chunk(piece.row)[piece.offset : piece.offset + len(piece.data)] = piece.data
        first = piece.row * self.slot_layout.blocks_per_row + piece.offset // self.slot_layout.block_bytes
        at = self.slot_layout.checksums_offset + first * CHECKSUM_BYTES
        digests = b"".join(map(_DIGEST.pack, piece.checksums))
        self.memory.view[at : at + len(digests)] = digests
        self._algorithms[piece.row] = piece.checksum
        self._pieces[piece.row].add(piece.offset)

    def has_parity(self) -> bool:
        """Whether every row is there whole."""
        pieces = -(-self.slot_layout.chunk_bytes // PARITY_PIECE_BYTES)
        return all(len(row) == pieces for row in self._pieces)

    def view_parity(self, row: int, offset: int, length: int, *, verify: bool = True) -> memoryview:
        """Bytes of a parity chunk, as they lie.

        Raises:
            ChecksumMismatch: a block is not what was stored, if that is to be verified.
        """
        _check_range(row, 1, self.slot_layout.parity_rows)
        _check_range(offset, length, self.slot_layout.chunk_bytes)
        chunk, checksum = self.parity_chunk(row), get_checksum(self._algorithms[row])
        size = self.slot_layout.block_bytes
        for index in range(offset // size, -(-(offset + length) // size)) if verify else ():
            at = (
                self.slot_layout.checksums_offset
                + (row * self.slot_layout.blocks_per_row + index) * CHECKSUM_BYTES
            )
            (expected,) = _DIGEST.unpack_from(self.memory.view, at)
            block = chunk[index * size : (index + 1) * size]
            self._verify(checksum, block, expected, f"block {index} of parity row {row}")
        return chunk[offset : offset + length]

    def _mark(self) -> SlotHeader:
        return SlotHeader(
            id=self.id,
            phase=self.phase,
            layout=self.slot_layout,
            manifest_bytes=self._manifests.get(self.host, (0, 0))[1],
            manifest_crc=self._own_crc,
            wall_s=self.wall_s,
        )

    def _verify(self, checksum: Checksum, block: memoryview, expected: int, what: str) -> None:
        found = checksum.compute(block)
        if found != expected:
            raise ChecksumMismatch(
                f"{self.host}, snapshot {self.id}: {what} has {checksum.name} {found:08x}, expected {expected:08x}"
            )


def cut_blocks(data: Buffer, block_bytes: int) -> list[memoryview]:
    """The blocks of a piece of parity."""
    view = memoryview(data)
    return [view[at : at + block_bytes] for at in range(0, len(view), block_bytes)]


def _check_range(offset: int, length: int, limit: int) -> None:
    if offset < 0 or length < 0 or offset + length > limit:
        raise CallerError(
            f"read: found bytes {offset} to {offset + length}, expected none outside 0 to {limit}"
        )
