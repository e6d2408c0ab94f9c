"""A slot: sealed memory without a name, touched once so that no later write has to wait for the kernel.

A slot holds one snapshot of its host: the mark, the part, the parity chunks that the host keeps for others, and the
checksums of their blocks; behind them, in memory that no worker maps, the manifests of the group. Only the server
writes the mark, and writes it after all that it vouches for. It has a checksum of itself, so a damaged mark vouches
for nothing.

The memory is a memfd: it has no name in any file system, only who is given the descriptor can open it, and the kernel
frees it when the last process that has it is gone. It is sealed against shrinking, so that nobody who maps it can be
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
"""As `/proc/PID/fd` shows it, for people and tests."""
MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python 3.11 has no name for it."""
PREFAULT_CHUNK_BYTES: Final = 16 * 2**20
"""At a time: `madvise` holds the GIL, and other hosts are to be answered meanwhile."""

_MARK = struct.Struct("<8sHHIqqQIQQId")
_MAGIC: Final = b"RJSLOT\r\n"
_VERSION: Final = 2
_CHECK = struct.Struct("<I")


class SlotPhase(enum.IntEnum):
    """How far the snapshot in a slot is; the first two are not reported."""

    WRITING = 1
    """The worker writes its part: nothing of it may be believed."""
    PART = 2
    """The part is there, the parity is not."""
    COMPLETE = 3
    COMMITTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """Where the regions of a snapshot lie in its slot.

    Attributes:
        part_bytes: of this host's part.
        rows: parity chunks that this host keeps.
        grid: of the host's group.
    """

    part_bytes: int
    parity_rows: int
    grid: Grid

    @property
    def chunk_bytes(self) -> int:
        """Of each row of parity; whole pages."""
        return self.grid.chunk_bytes

    @property
    def block_bytes(self) -> int:
        """Under one checksum."""
        return self.grid.block_bytes

    @property
    def part_offset(self) -> int:
        return PAGE_BYTES

    @property
    def parity_offset(self) -> int:
        return self.part_offset + _whole_pages(self.part_bytes)

    @property
    def checksums_offset(self) -> int:
        return self.parity_offset + self.parity_rows * self.chunk_bytes

    @property
    def mapped_bytes(self) -> int:
        """All of it but the manifests."""
        return self.checksums_offset + _whole_pages(self.parity_rows * self.blocks_per_row * CHECKSUM_BYTES)

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a parity chunk, each under a checksum."""
        return self.chunk_bytes // self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """What is in a slot, as its first page says.

    Attributes:
        phase: of the snapshot.
        manifest_bytes: of this host's manifest, and `manifest_crc` its CRC-32; 0 while there is none.
        wall_s: when it became complete; 0 before.
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
        number: never given out twice by a server.
        mapped_bytes: of memory that the worker may map; the manifests come behind it.
        descriptor: of the memfd; closed by `close`.
        memory: all that is mapped.
    """

    def __init__(self, number: int, mapped_bytes: int) -> None:
        """Takes the memory, all of it.

        Raises:
            SnapshotRefused: the kernel does not give it.
        """
        self.number = number
        self.mapped_bytes = mapped_bytes
        self.descriptor = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)  # who may open it through /proc
            os.ftruncate(self.descriptor, mapped_bytes)
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
        """From now on the slot holds that. Write first what the mark vouches for."""
        shape = header.layout
        page = _MARK.pack(
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
        self.view[: _MARK.size + _CHECK.size] = page + _CHECK.pack(zlib.crc32(page))

    def read_header(self) -> SlotHeader:
        """What the slot holds.

        Raises:
            ChecksumMismatch: the mark is not one of ours, or is damaged.
        """
        return parse_header(self.view, f"slot {self.number}")

    def close(self) -> None:
        """Lets go of the memory, whoever still knows this object; freed when the worker, too, lets go of it.

        A peer may just be reading: then with its view. Afterwards `memory` raises ValueError.
        """
        self.view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()
        os.close(self.descriptor)


def parse_header(memory: bytes | memoryview, where: str = "a slot") -> SlotHeader:
    """The mark at the beginning of a slot's memory.

    Raises:
        ChecksumMismatch: it is not one of ours, or is damaged.
    """
    page, check = bytes(memory[: _MARK.size]), bytes(memory[_MARK.size :][: _CHECK.size])
    magic, version, phase, rows, step, generation, part, block, chunk, *manifest, wall_s = _MARK.unpack(page)
    (expected,) = _CHECK.unpack(check)
    found = zlib.crc32(page)
    if magic != _MAGIC or version != _VERSION or found != expected:
        raise ChecksumMismatch(
            f"mark of {where} is damaged: found magic {magic!r}, version {version} and CRC-32 "
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
            if error.errno != 22:  # EINVAL: a kernel before 5.14, where a write to each page does the same
                raise
            for page in range(start, start + length, PAGE_BYTES):
                mapped[page] = 0


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
