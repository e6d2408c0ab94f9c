"""The contents of one slot, a snapshot whose regions are stored with their checksums and verified when read.

The lock of `SnapshotSlots` guards every change. Reading bytes takes no lock, so a reader asks `SnapshotSlots.is_held`
afterwards whether the snapshot was still in its slot.
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

_CHECKSUM = struct.Struct("<I")

get_checksum: Final = functools.cache(choose_checksum)
"""Return the algorithm of checksums that another host computed."""


def compute_slot_layout(layout: SnapshotLayout, host: HostName) -> SlotLayout:
    """Return the layout of a host's slots."""
    group = layout.find_group(host)
    parts = [layout.part_bytes[member] for member in group.hosts]
    return SlotLayout(
        part_bytes=layout.part_bytes[host],
        parity_rows=group.parity,
        grid=cut_grid(parts, len(group.hosts) - group.parity),
    )


class SlotContents:
    """The data that this host has of one snapshot.

    Attributes:
        layout: layout of the snapshot's generation.
        group: the parity group of this host, and `member_index` the index of this host there.
        writer: the session of the worker that may write to the part; None when no worker may.
        drop_reason: why the snapshot will not be completed; empty if it may be.
        wall_s: time of day at which the snapshot became complete.
    """

    def __init__(
        self, id: SnapshotId, layout: SnapshotLayout, host: HostName, memory: SlotMemory, writer: object
    ) -> None:
        """Overwrite the header of the slot, which invalidates its previous contents."""
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
        memory.write_header(self._make_header())

    @property
    def nbytes(self) -> int:
        """Size in bytes of the snapshot's memory, manifests included."""
        return self.slot_layout.mapped_bytes + self._manifests_end - self.memory.mapped_bytes

    def advance(self, phase: SlotPhase, wall_s: float = 0.0) -> None:
        """Write a header with this phase; the data that the phase vouches for must be stored before."""
        self.phase = phase
        # COMMITTED keeps the time of COMPLETE: the age of the state, not that of the decision.
        self.wall_s = wall_s or self.wall_s
        self.memory.write_header(self._make_header())

    def check_header(self) -> None:
        """Raise ChecksumMismatch unless the slot's header is the one written last."""
        found = self.memory.read_header()
        if found != self._make_header():
            raise ChecksumMismatch(
                f"{self.host}: the header of slot {self.memory.number} was overwritten: found {found}, expected "
                f"{self._make_header()}"
            )

    # Manifests.

    def store_manifest(self, host: HostName, data: bytes) -> None:
        """Store the encoded manifest of a member; storing it again changes nothing.

        Raises:
            ChecksumMismatch: the manifest is corrupt.
            CallerError: the manifest belongs to another snapshot or host, or contradicts the layout.
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
                f"{host} snapshots another state than {self.host}: leaves or strings differ; expected the same on "
                "every host. Keep values that differ between hosts outside of the state"
            )
        written = os.pwrite(self.memory.descriptor, data, self._manifests_end)
        assert written == len(data), "memory takes all or raises"
        self._manifests[host] = (self._manifests_end, len(data))
        self._manifests_end += len(data)
        self._decoded[host] = manifest
        if host == self.host:
            self._own_crc = zlib.crc32(data)

    def read_manifest_bytes(self, host: HostName) -> bytes:
        """Return the encoded manifest of a member.

        Raises:
            SnapshotMissing: the manifest is not here, or not yet.
        """
        where = self._manifests.get(host)
        if where is None:
            raise SnapshotMissing(f"{self.host} does not have the manifest of {host} for {self.id} (yet)")
        return os.pread(self.memory.descriptor, where[1], where[0])

    def get_manifest(self, host: HostName) -> PartManifest:
        """Return the manifest of a member, which must have been stored."""
        return self._decoded[host]

    def list_missing_manifests(self) -> list[HostName]:
        """Return the members whose manifest is not stored yet."""
        return [host for host in self.group.hosts if host not in self._manifests]

    # The part.

    @property
    def part(self) -> memoryview:
        """A writable view of this host's part in the slot; raises ValueError once the slot's memory is freed."""
        return self.memory.view[self.slot_layout.part_offset :][: self.slot_layout.part_bytes]

    def build_manifest(
        self, contents: PartContents, checksum: Checksum, check_cancelled: Callable[[], None]
    ) -> PartManifest:
        """Compute the checksums of the blocks and return the manifest of the part, without a lock.

        Args:
            check_cancelled: called between blocks; an exception that this call raises ends the work.
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
        """Return a view of bytes of the part.

        Raises:
            ChecksumMismatch: `verify` is set and a block is corrupt.
            CallerError: the range is outside of the part.
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
        """Return a view of the parity chunk of a row."""
        return self.memory.view[self.slot_layout.parity_offset + row * self.slot_layout.chunk_bytes :][
            : self.slot_layout.chunk_bytes
        ]

    def check_parity(self, piece: ParityPiece) -> None:
        """Check a piece of parity before it is stored, without a lock.

        Raises:
            CallerError: the piece is not of a row that this host keeps, or is not aligned to the grid.
            ChecksumMismatch: the piece is corrupt.
        """
        # All pieces but the last have PARITY_PIECE_BYTES, so each has one place in its chunk.
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
                f"{piece.offset} with {len(piece.checksums)} checksums, expected a piece that fits {self.slot_layout}"
            )
        checksum = get_checksum(piece.checksum)
        for index, block in enumerate(cut_blocks(piece.data, self.slot_layout.block_bytes)):
            self._verify(
                checksum,
                block,
                piece.checksums[index],
                f"block {index} of parity at {piece.offset} as received",
            )

    def store_parity(self, piece: ParityPiece) -> None:
        """Store a piece that was checked."""
        self.parity_chunk(piece.row)[piece.offset : piece.offset + len(piece.data)] = piece.data
        first = piece.row * self.slot_layout.blocks_per_row + piece.offset // self.slot_layout.block_bytes
        at = self.slot_layout.checksums_offset + first * CHECKSUM_BYTES
        encoded = b"".join(map(_CHECKSUM.pack, piece.checksums))
        self.memory.view[at : at + len(encoded)] = encoded
        self._algorithms[piece.row] = piece.checksum
        # A set of offsets, not a count: a piece that is sent twice counts once.
        self._pieces[piece.row].add(piece.offset)

    def has_parity(self) -> bool:
        """Return whether all pieces of every row are stored."""
        pieces = -(-self.slot_layout.chunk_bytes // PARITY_PIECE_BYTES)
        return all(len(row) == pieces for row in self._pieces)

    def view_parity(self, row: int, offset: int, length: int, *, verify: bool = True) -> memoryview:
        """Return a view of bytes of a parity chunk.

        Raises:
            ChecksumMismatch: `verify` is set and a block is corrupt.
            CallerError: there is no such row, or the range is outside of the chunk.
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
            (expected,) = _CHECKSUM.unpack_from(self.memory.view, at)
            block = chunk[index * size : (index + 1) * size]
            self._verify(checksum, block, expected, f"block {index} of parity row {row}")
        return chunk[offset : offset + length]

    def _make_header(self) -> SlotHeader:
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
    """Cut a piece of parity into its blocks."""
    view = memoryview(data)
    return [view[at : at + block_bytes] for at in range(0, len(view), block_bytes)]


def _check_range(offset: int, length: int, limit: int) -> None:
    if offset < 0 or length < 0 or offset + length > limit:
        raise CallerError(
            f"read: found bytes {offset} to {offset + length}, expected none outside 0 to {limit}"
        )
