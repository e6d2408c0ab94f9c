"""Errors at unknown positions: found, corrected, and believed only after a checksum.

This is for stripes whose checksums are themselves lost or doubted. Where a checksum says which shard is bad,
that shard is an erasure: leave it out and `decode`, which is faster and cannot guess wrong.

Location can be wrong: with more errors than the parity can tell, a stripe is "corrected" into another codeword,
and nothing in the stripe shows it. So `repair` asks the caller about every shard, also those that it left
alone, and takes its changes back unless all are right.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resilient_jax.erasure.buffers import Buffer, view_bytes
from resilient_jax.erasure.decoding import decode
from resilient_jax.erasure.errors import NotRepaired
from resilient_jax.erasure.kernel import Kernel
from resilient_jax.erasure.locator import locate_in_column, locate_jointly
from resilient_jax.erasure.reed_solomon import ReedSolomon
from resilient_jax.erasure.scanning import DirtyBlock, scan

Verify = Callable[[int, memoryview], bool]
"""Whether a shard (index, all its bytes) has the checksum that it should have."""

SAMPLE_COLUMNS = 64
"""Columns that a location starts from, at least: enough to span the errors of r - 1 shards, for r up to 32, and
twice r beyond that. What they missed shows when the rest is checked."""
MAX_SINGLE_COLUMNS = 10_000
"""Columns that reedsolo may be asked about, at about 0.2 ms each."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes that should be in a shard.

    Attributes:
        shard: its index.
        start: offset of the first byte.
        data: the right bytes.
    """

    shard: int
    start: int
    data: bytes


def repair(
    code: ReedSolomon, kernel: Kernel, shards: Mapping[int, Buffer], verify: Verify
) -> tuple[Patch, ...]:
    """Corrects the shards in place. All or nothing, as long as the process lives.

    Args:
        code: k and m.
        kernel: does the work.
        shards: writable, at least k + 1 by index, uint8[length] each. A lost shard is left out, and costs one of
            the errors that can be located.
        verify: asked about each shard after the correction.

    Returns:
        What was changed; nothing if the stripe was right.

    Raises:
        NotRepaired: the errors cannot be located, or a shard fails `verify`. The shards are as they were.
        TooManyErasures: fewer than k shards.
        ErasureCodeError: exactly k shards, or buffers that do not fit or are read-only.
    """
    views = {i: view_bytes(shard, f"shard {i}", writable=True) for i, shard in shards.items()}
    patches = locate(code, kernel, views)
    before = [
        Patch(p.shard, p.start, bytes(views[p.shard][p.start : p.start + len(p.data)])) for p in patches
    ]
    _write(views, patches)
    failed: list[int] | None = None
    try:
        failed = [shard for shard in sorted(views) if not verify(shard, views[shard])]
    finally:
        if failed is None or failed:
            _write(views, before)
    if failed:
        raise NotRepaired(
            f"shards {failed} fail their checksum after {len(patches)} corrections in shards "
            f"{sorted({patch.shard for patch in patches})}, which were taken back: more is wrong than parity can tell "
            f"(k = {code.k}, m = {code.m}, {len(views)} shards present)"
        )
    return patches


def locate(code: ReedSolomon, kernel: Kernel, shards: Mapping[int, Buffer]) -> tuple[Patch, ...]:
    """What to change so that every column belongs together again. Only reads.

    Finds up to r - 1 wrong shards, r = len(shards) - k, where the same are wrong in r + 3 columns or more, and up
    to r // 2 wrong bytes in a column of its own. Past that it may be wrong, see `repair`.

    Raises:
        NotRepaired: no set of errors small enough explains what was found.
        TooManyErasures: fewer than k shards.
        ErasureCodeError: exactly k shards, or buffers that do not fit.
    """
    views = {i: view_bytes(shard, f"shard {i}") for i, shard in shards.items()}
    search = _Search(code, kernel, views)
    for block in scan(code, kernel, views):
        search.explain(block)
    return tuple(search.patches)


class _Search:
    """Explains dirty blocks one after the other; keeps the patches and how much work is left."""

    def __init__(self, code: ReedSolomon, kernel: Kernel, views: Mapping[int, memoryview]) -> None:
        self.patches: list[Patch] = []
        self._code = code
        self._kernel = kernel
        self._views = views
        self._check = code.check(views)
        self._single_columns_left = MAX_SINGLE_COLUMNS

    def explain(self, block: DirtyBlock) -> None:
        """Puts in the patches for a block.

        One set of wrong shards for all of it is tried first. If none is right for all columns, the block is cut
        in two between its dirty columns and each half is explained by itself, down to a single column.
        """
        pending = [block]
        while pending:
            block = pending.pop()
            sample = block.sample(max(SAMPLE_COLUMNS, 2 * len(self._check.matrix)))
            first, last = sample[0], sample[-1]
            if self._explain_jointly(block, sample):
                continue
            if first == last:
                self._explain_column(first)
                continue
            middle = (first + last + 1) // 2
            halves = (block.part(middle, last + 1), block.part(first, middle))
            pending += [half for half in halves if half is not None]

    def _explain_jointly(self, block: DirtyBlock, sample: list[int]) -> bool:
        wrong = locate_jointly(self._check, [block.syndrome(column) for column in sample])
        if wrong is None:
            return False
        start, stop = sample[0], sample[-1] + 1
        cut = {shard: view[start:stop] for shard, view in self._views.items() if shard not in wrong}
        right = {shard: memoryview(bytearray(stop - start)) for shard in wrong}
        decode(self._code, self._kernel, cut, right)
        # The wrong shards were computed from k of the others; the check is whether all others agree.
        if next(scan(self._code, self._kernel, cut | right), None) is not None:
            return False
        self.patches += [Patch(shard, start, bytes(data)) for shard, data in right.items()]
        return True

    def _explain_column(self, column: int) -> None:
        self._single_columns_left -= 1
        if self._single_columns_left < 0:
            raise NotRepaired(
                f"more than {MAX_SINGLE_COLUMNS} columns have errors of their own; damage like that is faster undone "
                f"from another copy"
            )
        found = locate_in_column(self._code, {shard: view[column] for shard, view in self._views.items()})
        if not found:
            raise NotRepaired(
                f"byte {column} of the shards: errors in more than {len(self._check.matrix) // 2} of "
                f"{len(self._views)} shards, no codeword is near (k = {self._code.k}, m = {self._code.m})"
            )
        self.patches += [Patch(shard, column, bytes([byte])) for shard, byte in found.items()]


def _write(views: Mapping[int, memoryview], patches: tuple[Patch, ...] | list[Patch]) -> None:
    for patch in patches:
        views[patch.shard][patch.start : patch.start + len(patch.data)] = patch.data
