"""This host's own part, in memory that it shares with its snapshot server: read in place, each block verified once."""

import ctypes

from resilient_jax.erasure import Checksum, choose_checksum
from resilient_jax.erasure.buffers import check_operands
from resilient_jax.errors import ChecksumMismatch
from resilient_jax.snapshot.manifest import PartManifest, find_corrupt_block

_UNKNOWN, _GOOD, _BAD = range(3)


class OwnPart:
    """A part whose memory nobody changes while it is read; safe to share between threads."""

    def __init__(self, manifest: PartManifest, view: memoryview) -> None:
        """Takes the part over.

        Raises:
            ChecksumMismatch: manifest and memory are not of one length.
            KernelUnavailable: no library here computes the manifest's checksum.
        """
        if len(view) != manifest.part_bytes:
            raise ChecksumMismatch(
                f"own part: found {len(view)} bytes, expected {manifest.part_bytes} as its manifest says"
            )
        self.manifest = manifest
        self._view = view
        self._checksum: Checksum = choose_checksum(manifest.checksum)
        self._verdicts = bytearray(len(manifest.block_checksums))  # threads may find the same one twice

    def copy_into(self, offset: int, out: memoryview) -> None:
        """Copies bytes of the part; afterwards nothing of `out` is shared memory.

        Raises:
            ChecksumMismatch: a block that has some of them is damaged. Nothing was written.
        """
        self._verify(offset, offset + len(out))
        source = self._view[offset : offset + len(out)]
        if len(out):
            # Unlike a slice assignment it lets other threads run meanwhile.
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
                raise ChecksumMismatch(
                    f"block {block} of {self.manifest.host}'s own part is not what it was when the snapshot was taken"
                )

    def close(self) -> None:
        """Lets the memory go."""
        self._view.release()
