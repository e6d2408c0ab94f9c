"""This host's own part, in memory shared with its snapshot server, read in place with each block verified once."""

import ctypes

from resilient_jax.erasure import Checksum, choose_checksum
from resilient_jax.erasure.buffers import check_operands
from resilient_jax.errors import ChecksumMismatch
from resilient_jax.snapshot.manifest import PartManifest, find_corrupt_block

_UNKNOWN, _GOOD, _BAD = range(3)


class OwnPart:
    """A part whose memory does not change while it is read; safe to share between threads."""

    def __init__(self, manifest: PartManifest, view: memoryview) -> None:
        """Take ownership of the view of a part.

        Raises:
            ChecksumMismatch: manifest and memory differ in length.
            KernelUnavailable: no library here computes the manifest's checksum.
        """
        if len(view) != manifest.part_bytes:
            raise ChecksumMismatch(
                f"own part: found {len(view)} bytes, expected {manifest.part_bytes} as its manifest says"
            )
        self.manifest = manifest
        self._view = view
        self._checksum: Checksum = choose_checksum(manifest.checksum)
        self._verdicts = bytearray(len(manifest.block_checksums))  # two threads may both verify a block

    def copy_into(self, offset: int, out: memoryview) -> None:
        """Copy bytes of the part from shared memory into `out`.

        Raises:
            ChecksumMismatch: a block that has some of the bytes is corrupt. Nothing was written.
        """
        self._verify(offset, offset + len(out))
        source = self._view[offset : offset + len(out)]
        if len(out):
            # Unlike a slice assignment, ctypes.memmove releases the GIL.
            operands = check_operands([source], [out])
            ctypes.memmove(operands.destination_addresses[0], operands.source_addresses[0], len(out))

    def _verify(self, start: int, stop: int) -> None:
        size = self.manifest.block_bytes
        for block in range(start // size, -(-stop // size)):
            if self._verdicts[block] == _UNKNOWN:
                data = self._view[block * size : (block + 1) * size]
                bad = find_corrupt_block(self.manifest, self._checksum, block * size, data)
                self._verdicts[block] = _GOOD if bad is None else _BAD
            if self._verdicts[block] == _BAD:
                raise ChecksumMismatch(f"block {block} of {self.manifest.host}'s own part is corrupt")

    def close(self) -> None:
        """Release the view, so that its memory can be unmapped."""
        self._view.release()
