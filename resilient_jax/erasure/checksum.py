"""Checksums of shards: CRC32C where a library computes it, else zlib's CRC32.

The two have different values for the same bytes: a digest is stored with the name of its algorithm, and verified
by that algorithm or not at all. Both find every burst of up to 32 bits and miss other damage once in 4 billion;
neither protects against an attacker.
"""

import enum
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from resilient_jax.erasure.buffers import Buffer, check_operands, view_bytes
from resilient_jax.erasure.errors import KernelUnavailable
from resilient_jax.erasure.isal_library import MAX_CALL_BYTES, load_isal

# Optional: without google-crc32c only the choice of the library changes.
try:
    import google_crc32c  # pyright: ignore[reportMissingImports]
except ImportError:
    google_crc32c = None

_ONES = 0xFFFFFFFF
COPY_CHUNK_BYTES = 64 * 2**10
"""google-crc32c takes `bytes` only, so other buffers are copied, in chunks that stay in cache."""


class ChecksumName(enum.StrEnum):
    """The algorithm of a digest, which is stored with the digest."""

    CRC32C = "crc32c"
    """Castagnoli's polynomial, as in iSCSI (RFC 3720, appendix B.4)."""
    CRC32 = "crc32"
    """The polynomial of zlib and Ethernet (IEEE 802.3)."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """An algorithm and the function that computes it.

    Attributes:
        compute: maps uint8[length] to a number below 2^32.
    """

    name: ChecksumName
    library: str
    compute: Callable[[Buffer], int]


def choose_checksum(requested: ChecksumName | None = None) -> Checksum:
    """Return the fastest of CRC32C from ISA-L, CRC32C from google-crc32c (which holds the GIL), CRC32 from zlib.

    Args:
        requested: the algorithm of existing digests, if there are any; None: the fastest.

    Raises:
        KernelUnavailable: CRC32C is requested and no library has it.
    """
    if requested is ChecksumName.CRC32:
        return Checksum(ChecksumName.CRC32, "zlib", _zlib_crc32)
    try:
        return Checksum(ChecksumName.CRC32C, load_isal().path, _isal_crc32c)
    except KernelUnavailable as missing:
        if google_crc32c is not None and google_crc32c.implementation == "c":
            return Checksum(ChecksumName.CRC32C, "google-crc32c", _google_crc32c)
        if requested is ChecksumName.CRC32C:
            raise KernelUnavailable(
                f"no library for CRC32C, and no google-crc32c either. {missing}"
            ) from missing
    return Checksum(ChecksumName.CRC32, "zlib", _zlib_crc32)


def _isal_crc32c(buffer: Buffer) -> int:
    operands = check_operands([buffer], [])
    library, (address,) = load_isal(), operands.source_addresses
    # crc32_iscsi neither starts from all ones nor inverts at the end; the standard CRC32C does both.
    crc = _ONES
    for start in range(0, operands.length, MAX_CALL_BYTES):
        crc = library.crc32c(address + start, min(MAX_CALL_BYTES, operands.length - start), crc)
    return crc ^ _ONES


def _google_crc32c(buffer: Buffer) -> int:
    assert google_crc32c is not None
    view, crc = view_bytes(buffer, "data"), 0
    for start in range(0, len(view), COPY_CHUNK_BYTES):
        # crc(a b) = extend(crc(a), b): the checksum of a buffer is that of its chunks, one after the other.
        crc = google_crc32c.extend(crc, bytes(view[start : start + COPY_CHUNK_BYTES]))
    return crc


def _zlib_crc32(buffer: Buffer) -> int:
    return zlib.crc32(view_bytes(buffer, "data"))
