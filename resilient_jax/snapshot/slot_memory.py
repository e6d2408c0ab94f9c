"""The memory of a slot: a sealed memfd, prefaulted so that no later write waits for the kernel, and its header.

A slot contains one snapshot of its host: the header, the part, the parity chunks that the host keeps for others, and
the checksums of their blocks; behind them, in memory that no worker maps, the manifests of the group. Only the server
writes the header, and only after everything that the header vouches for. The header has a checksum of its own, so a
corrupt header vouches for nothing.

A memfd has no name in any file system, only a process that is given the descriptor can open it, and the kernel frees
it when the last process that has it is gone. It is sealed against shrinking, so that no process that maps it can be
killed by a bus error.
"""

import contextlib
import enum
import fcntl
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from resilient_jax.errors import ChecksumMismatch, SnapshotRefused
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.stripes import Grid

PAGE_BYTES: Final = 4096
CHECKSUM_BYTES: Final = 4
MEMFD_NAME: Final = "resilient_jax_snapshot"
"""The name that `/proc/PID/fd` shows, for operators and tests."""
MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python 3.11 has no name for it."""
PREFAULT_CHUNK_BYTES: Final = 16 * 2**20
"""Prefaulted by one call: `madvise` holds the GIL, and requests of other hosts must be answered meanwhile."""

_HEADER = struct.Struct("<8sHHIqqQIQQId")
_MAGIC: Final = b"RJSLOT\r\n"
_VERSION: Final = 2
_HEADER_CRC = struct.Struct("<I")


class SlotPhase(enum.IntEnum):
    """The phase of the snapshot in a slot; the first two are not reported."""

    WRITING = 1
    """The worker writes its part, so nothing in the slot can be trusted."""
    PART = 2
    """The part is sealed, the parity is incomplete."""
    COMPLETE = 3
    COMMITTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """The offsets of the regions of a snapshot in its slot.

    Attributes:
        part_bytes: bytes of this host's part.
    """

    part_bytes: int
    parity_rows: int
    grid: Grid

    @property
    def chunk_bytes(self) -> int:
        """Length of each row of parity, in complete pages."""
        return self.grid.chunk_bytes

    @property
    def block_bytes(self) -> int:
        """Length of a block, which has one checksum."""
        return self.grid.block_bytes

    @property
    def part_offset(self) -> int:
        """Offset of the part; the header is before it."""
        return PAGE_BYTES

    @property
    def parity_offset(self) -> int:
        """Offset of the first row of parity."""
        return self.part_offset + _whole_pages(self.part_bytes)

    @property
    def checksums_offset(self) -> int:
        """Offset of the checksums of parity blocks."""
        return self.parity_offset + self.parity_rows * self.chunk_bytes

    @property
    def mapped_bytes(self) -> int:
        """Length of all regions but the manifests."""
        return self.checksums_offset + _whole_pages(self.parity_rows * self.blocks_per_row * CHECKSUM_BYTES)

    @property
    def blocks_per_row(self) -> int:
        """Number of blocks of a parity chunk, each with a checksum."""
        return self.chunk_bytes // self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The contents of a slot, as recorded on its first page.

    Attributes:
        manifest_bytes: bytes of this host's manifest, and `manifest_crc` the CRC-32 of these; 0 while there is none.
        wall_s: time of day at which the snapshot became complete; 0 before.
    """

    id: SnapshotId
    phase: SlotPhase
    layout: SlotLayout
    manifest_bytes: int = 0
    manifest_crc: int = 0
    wall_s: float = 0.0


class SlotMemory:
    """The memory of one snapshot.

    Attributes:
        number: unique among all slots of a server, past ones included.
        mapped_bytes: bytes that the worker may map; the manifests come behind it.
        descriptor: file descriptor of the memfd; closed by `close`.
        view: all mapped memory.
    """

    def __init__(self, number: int, mapped_bytes: int) -> None:
        """Allocate and prefault the memory.

        Raises:
            SnapshotRefused: the kernel cannot allocate the memory.
        """
        self.number = number
        self.mapped_bytes = mapped_bytes
        self.descriptor = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)  # only this user may open it through /proc
            os.ftruncate(self.descriptor, mapped_bytes)
            # Not sealed against growing: manifests are written behind the mapped memory.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._mapped = mmap.mmap(self.descriptor, mapped_bytes, flags=mmap.MAP_SHARED)
            _prefault(self._mapped)
        except OSError as error:
            os.close(self.descriptor)
            raise SnapshotRefused(
                f"the kernel refused {mapped_bytes} bytes of memory for a snapshot: {error}. Give the host or its "
                "container more memory, use more hosts, or switch snapshots off"
            ) from error
        self.view = memoryview(self._mapped)

    def write_header(self, header: SlotHeader) -> None:
        """Record the contents of the slot, which must be written before the header that vouches for them."""
        shape = header.layout
        page = _HEADER.pack(
            _MAGIC,
            _VERSION,
            header.phase,
            shape.parity_rows,
            header.id.step,
            header.id.generation,
            shape.part_bytes,
            *shape.grid,
            header.manifest_bytes,
            header.manifest_crc,
            header.wall_s,
        )
        self.view[: _HEADER.size + _HEADER_CRC.size] = page + _HEADER_CRC.pack(zlib.crc32(page))

    def read_header(self) -> SlotHeader:
        """Return the recorded contents of the slot.

        Raises:
            ChecksumMismatch: the header is missing or corrupt.
        """
        return parse_header(self.view, f"slot {self.number}")

    def close(self) -> None:
        """Release the memory, which is freed when the worker has unmapped it, too.

        A read that is in progress keeps its view alive until it ends. Afterwards `view` raises ValueError.
        """
        self.view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()
        os.close(self.descriptor)


def parse_header(memory: bytes | memoryview, where: str = "a slot") -> SlotHeader:
    """Return the header at the beginning of a slot's memory.

    Raises:
        ChecksumMismatch: the header is missing or corrupt.
    """
    page, check = bytes(memory[: _HEADER.size]), bytes(memory[_HEADER.size :][: _HEADER_CRC.size])
    magic, version, phase, rows, step, generation, part, block, chunk, *manifest, wall_s = _HEADER.unpack(
        page
    )
    (expected,) = _HEADER_CRC.unpack(check)
    found = zlib.crc32(page)
    # Before any field is interpreted: a corrupt phase, for instance, is no `SlotPhase`.
    if magic != _MAGIC or version != _VERSION or found != expected:
        raise ChecksumMismatch(
            f"header of {where} is corrupt: found magic {magic!r}, version {version} and CRC-32 "
            f"{found:08x}, expected {_MAGIC!r}, {_VERSION} and {expected:08x}"
        )
    return SlotHeader(
        id=SnapshotId(step=step, generation=GenerationNumber(generation)),
        phase=SlotPhase(phase),
        layout=SlotLayout(part_bytes=part, parity_rows=rows, grid=Grid(block, chunk)),
        manifest_bytes=manifest[0],
        manifest_crc=manifest[1],
        wall_s=wall_s,
    )


def _prefault(mapped: mmap.mmap) -> None:
    for start in range(0, len(mapped), PREFAULT_CHUNK_BYTES):
        length = min(PREFAULT_CHUNK_BYTES, len(mapped) - start)
        try:
            mapped.madvise(MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if (
                error.errno != 22
            ):  # EINVAL: a kernel before 5.14, where a write to each page has the same effect
                raise
            for page in range(start, start + length, PAGE_BYTES):
                mapped[page] = 0


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
