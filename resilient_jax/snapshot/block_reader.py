"""Reads verified blocks of one host's part from the first source that has them."""

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, combinations, islice

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import ChecksumMismatch, ResilientJaxError, SnapshotLost
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import ParityGroup
from resilient_jax.snapshot.manifest import PartManifest, find_corrupt_block
from resilient_jax.snapshot.own_part import OwnPart
from resilient_jax.snapshot.snapshot_peers import SnapshotPeers
from resilient_jax.snapshot.stripe_decoder import StripeDecoder

MAX_EXCLUDED_SETS = 64
"""Sets of survivors that are excluded, one after the other, when shards that passed their checks give a wrong block."""
MAX_LEAVES_LISTED = 8


class BlockOrigin(enum.StrEnum):
    """The source of a block."""

    LOCAL = "local"
    PEER = "peer"
    PARITY = "decoded"


BlockSource = tuple[BlockOrigin, Callable[[int, memoryview], None]]
"""A source, and a function that fills a run of blocks from an offset of the part, verified, or raises."""


class BlockReader:
    """Reads blocks of a part; safe to share between threads."""

    def __init__(
        self,
        manifest: PartManifest,
        group: ParityGroup,
        survivors: SnapshotPeers,
        own: OwnPart | None,
        get_decoder: Callable[[], StripeDecoder],
    ) -> None:
        """Prepare to read, without a request.

        Args:
            survivors: hosts to read from.
            own: the part itself; None: the part is of another host, or not in memory.
            get_decoder: makes a decoder for the group; called only if the group has parity.
        """
        self.manifest = manifest
        self._group = group
        self._survivors = survivors
        self._own = own
        self._get_decoder = get_decoder
        self._checksum = choose_checksum(manifest.checksum)

    def read_into(self, offset: int, out: memoryview) -> Counter[BlockOrigin]:
        """Fill a run of complete blocks; return how many bytes came from each source.

        Args:
            offset: bytes from the start of the part to the first block.
            out: memory as long as these blocks.

        Raises:
            SnapshotLost: no source is left for one of the blocks; the message lists what is lost.
        """
        size = self.manifest.block_bytes
        if len(out) <= size:
            return Counter({self._fill_block(offset, out): len(out)})
        origin = self._try_fill_run(offset, out)
        if origin is not None:
            return Counter({origin: len(out)})
        given: Counter[BlockOrigin] = Counter()
        for start in range(0, len(out), size):
            block = out[start : start + size]
            given[self._fill_block(offset + start, block)] += len(block)
        return given

    def _try_fill_run(self, offset: int, out: memoryview) -> BlockOrigin | None:
        """Fill several blocks from one source; return None if one is corrupt or lost, to read them one by one."""
        for origin, try_fill in self._sources(self._decode):
            try:
                try_fill(offset, out)
            except ChecksumMismatch:
                return None
            except ResilientJaxError:
                continue  # an event has recorded the error
            return origin
        return None

    def _fill_block(self, offset: int, out: memoryview) -> BlockOrigin:
        reasons: list[str] = []
        for origin, try_fill in self._sources(self._decode_block):
            try:
                try_fill(offset, out)
            except ResilientJaxError as error:
                reasons.append(str(error))
            else:
                return origin
        raise SnapshotLost(self._describe_loss(offset, offset + len(out), reasons))

    def _sources(self, decode: Callable[[int, memoryview], None]) -> Iterator[BlockSource]:
        # A generator, so that the event of a fallback is recorded only if the source before it has failed.
        host, survivors = self.manifest.host, self._survivors
        reason = ""
        if self._own is not None:
            yield BlockOrigin.LOCAL, self._copy
            reason = "its memory on this host is corrupt"
        elif host in survivors:
            if not survivors.is_suspect(host):
                yield BlockOrigin.PEER, self._read
            reason = survivors.failure_reason(host) if survivors.is_suspect(host) else "its memory is corrupt"
        else:
            reason = survivors.failure_reason(host)
        if self._group.parity:
            survivors.record_event(
                EventKind.SNAPSHOT_FALLBACK, part=host, to=BlockOrigin.PARITY, reason=reason
            )
            yield BlockOrigin.PARITY, decode
        if self._own is None and survivors.is_suspect(host):
            survivors.record_event(
                EventKind.SNAPSHOT_FALLBACK, part=host, to=BlockOrigin.PEER, reason="no other source is left"
            )
            yield BlockOrigin.PEER, self._read

    def _copy(self, offset: int, out: memoryview) -> None:
        assert self._own is not None
        try:
            self._own.copy_into(offset, out)
        except ChecksumMismatch as error:
            self._record_corrupt(self.manifest.host, "its memory", str(error))
            raise

    def _read(self, offset: int, out: memoryview) -> None:
        self._survivors.read_into(self.manifest.host, offset, out)
        try:
            self._verify(offset, out)
        except ChecksumMismatch as error:  # the server was not asked to verify, or failed to
            self._record_corrupt(self.manifest.host, "its part", str(error))
            raise

    def _decode(self, offset: int, out: memoryview) -> None:
        """Decode a run of blocks and verify only the result, which is a small part of the bytes that were read."""
        self._get_decoder().decode_into(self.manifest.host, offset, out)
        self._verify(offset, out)

    def _decode_block(self, offset: int, out: memoryview) -> None:
        """Decode one block, and find the corrupt shards if shards without a known fault give a wrong block."""
        decode, host = self._get_decoder().decode_into, self.manifest.host
        decode(host, offset, out, verify=True)
        try:
            self._verify(offset, out)
        except ChecksumMismatch:
            wrong = self._decode_excluding(offset, out)
            if wrong is None:
                raise
            reason = f"the block of {host}'s part at {offset} is wrong with them, and correct without"
            self._record_corrupt(", ".join(wrong), "shards", reason)

    def _decode_excluding(self, offset: int, out: memoryview) -> tuple[HostName, ...] | None:
        """Decode the block without some survivors until it is correct; return the excluded survivors."""
        others = [host for host in self._group.hosts if host != self.manifest.host]
        # Small sets first: one host with corrupt shards is likelier than two.
        sets = chain.from_iterable(combinations(others, count + 1) for count in range(self._group.parity))
        for excluded in islice(sets, MAX_EXCLUDED_SETS):
            try:
                self._get_decoder().decode_into(
                    self.manifest.host, offset, out, excluded=frozenset(excluded), verify=True
                )
                self._verify(offset, out)
            except (SnapshotLost, ChecksumMismatch):
                continue
            return excluded
        return None

    def _record_corrupt(self, source: str, asked: str, reason: str) -> None:
        self._survivors.record_event(
            EventKind.SNAPSHOT_BLOCK_CORRUPT, source=source, asked=asked, reason=reason
        )

    def _verify(self, offset: int, out: memoryview) -> None:
        bad = find_corrupt_block(self.manifest, self._checksum, offset, out)
        if bad is not None:
            raise ChecksumMismatch(f"block {bad} of {self.manifest.host}'s part is corrupt")

    def _describe_loss(self, start: int, stop: int, reasons: list[str]) -> str:
        """Describe what is lost, with the leaves that have bytes there, and why."""
        manifest = self.manifest
        pieces = sorted(manifest.contents.slices, key=lambda piece: piece.offset)
        ends = [piece.offset for piece in pieces[1:]] + [manifest.part_bytes]
        paths = [
            manifest.contents.leaves[piece.leaf].path
            for piece, end in zip(pieces, ends, strict=False)
            if piece.offset < stop and end > start
        ]
        more = f" and {len(paths) - MAX_LEAVES_LISTED} more" if len(paths) > MAX_LEAVES_LISTED else ""
        leaves = f", with bytes of {', '.join(paths[:MAX_LEAVES_LISTED])}{more}," if paths else ""
        why = "; ".join(dict.fromkeys(reasons)) or self._survivors.failure_reason(manifest.host)
        return (
            f"bytes {start} to {stop} of {manifest.part_bytes} that host {manifest.host} kept{leaves} are lost "
            f"(its group of {len(self._group.hosts)} has parity {self._group.parity}): {why}"
        )
