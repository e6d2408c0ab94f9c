"""The checksum that says whether bytes are right: CRC32C where a library gives it, else zlib's CRC32.

They are different numbers for the same bytes: a digest is kept together with the name of its algorithm, and
verified by that algorithm or not at all. Both find every burst of up to 32 bits, and miss other damage once in
4 billion; neither protects against someone who means harm.
"""

import enum
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resilient_jax.erasure.buffers import Buffer, check_operands, view_bytes
from resilient_jax.erasure.errors import ErasureCodeError, KernelUnavailable
from resilient_jax.erasure.isal_library import MAX_CALL_BYTES, load_isal
from resilient_jax.erasure.repairing import Verify

try:  # optional: only the choice changes
    import google_crc32c  # pyright: ignore[reportMissingImports]
except ImportError:
    google_crc32c = None

_ONES = 0xFFFFFFFF
COPY_CHUNK_BYTES = 64 * 2**10
"""google-crc32c takes `bytes` only, so others are copied, in pieces that stay in cache."""


class ChecksumName(enum.StrEnum):
    """The algorithm of a digest, to be kept with it."""

    CRC32C = "crc32c"
    """Castagnoli's polynomial, as in iSCSI (RFC 3720, appendix B.4)."""
    CRC32 = "crc32"
    """Of zlib and Ethernet."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """An algorithm and what computes it.

    Attributes:
        name: of the algorithm.
        origin: the library.
        compute: uint8[length] to a number below 2^32.
    """

    name: ChecksumName
    library: str
    compute: Callable[[Buffer], int]


def choose_checksum(requested: ChecksumName | None = None) -> Checksum:
    """The fastest on this machine: CRC32C of ISA-L, CRC32C of google-crc32c (which holds the GIL), CRC32 of zlib.

    Args:
        forced: the algorithm of the digests at hand, if there are some.

    Raises:
        KernelUnavailable: CRC32C is asked for and no library has it.
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


def verify_against(checksum: Checksum, digests: Mapping[int, int]) -> Verify:
    """A `Verify` for `repair` that compares with the digests that the shards should have, by index.

    Raises (when it is called):
        ErasureCodeError: there is no digest for a shard; unverified bytes are never passed on.
    """

    def verify(shard: int, data: memoryview) -> bool:
        if shard not in digests:
            raise ErasureCodeError(
                f"no digest for shard {shard}, expected one for each; found {sorted(digests)}"
            )
        return checksum.compute(data) == digests[shard]

    return verify


def _isal_crc32c(buffer: Buffer) -> int:
    operands = check_operands([buffer], [])
    library, (address,) = load_isal(), operands.source_addresses
    crc = _ONES
    for start in range(0, operands.length, MAX_CALL_BYTES):
        crc = library.crc32c(address + start, min(MAX_CALL_BYTES, operands.length - start), crc)
    return crc ^ _ONES


def _google_crc32c(buffer: Buffer) -> int:
    assert google_crc32c is not None
    view, crc = view_bytes(buffer, "data"), 0
    for start in range(0, len(view), COPY_CHUNK_BYTES):
        crc = google_crc32c.extend(crc, bytes(view[start : start + COPY_CHUNK_BYTES]))
    return crc


def _zlib_crc32(buffer: Buffer) -> int:
    return zlib.crc32(view_bytes(buffer, "data"))
