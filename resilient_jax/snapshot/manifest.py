"""The manifest of a host's part: the slices of leaves in it, with their offsets, and the checksum of every block.

The slices in the manifests of all hosts together cover every leaf exactly once. On the wire and in a slot a manifest
follows a header of its own (magic, version, length, CRC-32 of all but itself), so that a torn or corrupt one is never
accepted. That checksum is zlib's on every machine; the algorithm for the blocks is named in the manifest.
"""

import struct
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from resilient_jax.erasure import Buffer, Checksum, ChecksumName
from resilient_jax.errors import ChecksumMismatch, MessageError
from resilient_jax.ids import HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.protocol.snapshots import SnapshotId

SLICE_ALIGNMENT: Final = 64
"""Bytes: a cache line, and more than any dtype asks for."""
MAGIC: Final = b"RJMF"
VERSION: Final = 2
"""Of the encoding; a reader refuses every other version."""
_HEADER = struct.Struct("<4sIQI")
_CHECKED_BYTES = struct.calcsize("<4sIQ")
"""Of the header, without the checksum."""


class LeafSlice(msgspec.Struct, frozen=True, array_like=True):
    """A box of a leaf and its offset in the part, in C order.

    Attributes:
        leaf: index into the manifest's leaves.
        start: first index in each dim.
        stop: index after the last one in each dim.
        offset: bytes from the start of the part, a multiple of `SLICE_ALIGNMENT`.
    """

    leaf: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int


class PartContents(msgspec.Struct, frozen=True):
    """The worker's description of the part that it wrote.

    Attributes:
        leaves: all leaves of the state, the same on every host.
        slices: boxes of leaves in this part.
        strings: leaves that are not arrays, by path; the same on every host.
    """

    leaves: tuple[LeafSpec, ...] = ()
    slices: tuple[LeafSlice, ...] = ()
    strings: dict[str, str] = {}


class HeldPart(msgspec.Struct, frozen=True):
    """What one host holds of a state: its part of a snapshot, or what its worker has in memory.

    Attributes:
        id: the snapshot; or the step of a worker's state, and the generation that continues from it.
        block_bytes: what is read as a whole to be verified, from the start of the part; the last block may be shorter.
            0: any range is read by itself.
    """

    id: SnapshotId
    host: HostName
    contents: PartContents
    part_bytes: int
    block_bytes: int = 0


class PartManifest(HeldPart, frozen=True, kw_only=True):
    """One host's part of a snapshot, in blocks.

    Attributes:
        checksum: algorithm of `block_checksums`.
        block_checksums: checksum of each block, in order.
    """

    checksum: ChecksumName
    block_checksums: tuple[int, ...]


_DECODER: Final = msgspec.msgpack.Decoder(PartManifest)


def align_slice(num_bytes: int) -> int:
    """Return the distance from the offset of a slice to that of the next one."""
    return -(-num_bytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT


def count_blocks(part_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a part."""
    return -(-part_bytes // block_bytes)


def checksum_blocks(
    part: Buffer,
    checksum: Checksum,
    block_bytes: int,
    *,
    check_cancelled: Callable[[], None] = lambda: None,
) -> tuple[int, ...]:
    """Return the checksum of each block; the last block may be shorter.

    `check_cancelled` is called before each block; an exception that it raises ends the work.
    """
    view, digests = memoryview(part), []
    for start in range(0, len(view), block_bytes):
        check_cancelled()
        digests.append(checksum.compute(view[start : start + block_bytes]))
    return tuple(digests)


def find_corrupt_block(manifest: PartManifest, checksum: Checksum, offset: int, data: Buffer) -> int | None:
    """Return the index of the first corrupt block in a run of complete blocks, or None.

    Args:
        checksum: the manifest's algorithm.
        offset: offset of `data` in the part, at the start of a block.
        data: bytes up to the end of a block or of the part.
    """
    view, size = memoryview(data), manifest.block_bytes
    assert offset % size == 0, f"offset {offset} is not the start of a block of {size} bytes"
    assert len(view) % size == 0 or offset + len(view) == manifest.part_bytes, "data ends inside a block"
    assert checksum.name is manifest.checksum, f"{checksum.name} cannot verify {manifest.checksum}"
    for start in range(0, len(view), size):
        index = (offset + start) // size
        if checksum.compute(view[start : start + size]) != manifest.block_checksums[index]:
            return index
    return None


def encode_manifest(manifest: PartManifest) -> bytes:
    """Encode a manifest with its header."""
    body = msgspec.msgpack.encode(manifest)
    header = _HEADER.pack(MAGIC, VERSION, len(body), 0)[:_CHECKED_BYTES]
    # CRC-32 of the header, without its last field, and of the body after it.
    return header + struct.pack("<I", zlib.crc32(body, zlib.crc32(header))) + body


def decode_manifest(data: Buffer) -> PartManifest:
    """Decode a manifest with its header.

    Raises:
        ChecksumMismatch: the data is corrupt or truncated.
        MessageError: the manifest is intact, but of another version, or its sizes contradict each other.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise ChecksumMismatch(f"manifest of {len(view)} bytes, expected a header of {_HEADER.size} and more")
    magic, version, length, expected = _HEADER.unpack_from(view)
    body = view[_HEADER.size :]
    found = zlib.crc32(body, zlib.crc32(view[:_CHECKED_BYTES]))
    if magic != MAGIC or length != len(body) or found != expected:
        raise ChecksumMismatch(
            f"manifest is corrupt: found magic {magic!r}, {len(body)} bytes and CRC-32 {found:08x}, expected "
            f"{MAGIC!r}, {length} bytes and {expected:08x}"
        )
    if version != VERSION:
        raise MessageError(
            f"manifest has version {version}, this resilient_jax reads version {VERSION}; "
            "run the same version everywhere"
        )
    return _decode_body(body)


def _decode_body(body: memoryview) -> PartManifest:
    manifest = decode_message(_DECODER, body, "manifest")
    expected = count_blocks(manifest.part_bytes, manifest.block_bytes) if manifest.block_bytes > 0 else 0
    if manifest.block_bytes <= 0 or manifest.part_bytes < 0 or len(manifest.block_checksums) != expected:
        raise MessageError(
            f"manifest of {manifest.host}: found {len(manifest.block_checksums)} block checksums, expected {expected} "
            f"for {manifest.part_bytes} bytes in blocks of {manifest.block_bytes}"
        )
    return manifest
