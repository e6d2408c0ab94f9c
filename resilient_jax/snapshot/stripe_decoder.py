"""Decodes bytes of a lost part from the stripes of its chunks, each from any k of the shards that are left."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import NamedTuple, cast

from resilient_jax.erasure import Kernel, ReedSolomon, decode
from resilient_jax.erasure.kernels import choose_kernel
from resilient_jax.errors import ResilientJaxError, SnapshotLost
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import ParityGroup
from resilient_jax.snapshot.manifest import PartManifest
from resilient_jax.snapshot.messages import Region
from resilient_jax.snapshot.own_part import OwnPart
from resilient_jax.snapshot.snapshot_peers import SnapshotPeers
from resilient_jax.snapshot.stripes import cut_grid, data_members, parity_members, stripe_of_chunk

BUFFER_BYTES = 32 * 2**20
"""Memory for the shards of one call."""
SPAN_BYTES = 2 * 2**20
"""Of one shard in one request; larger spans leave the cache before they are multiplied."""


class StripeShard(NamedTuple):
    """A shard of a stripe, and its location on its host.

    Attributes:
        number: index of the shard in the stripe.
        region: the host's part, or a parity chunk that the host keeps.
        offset: bytes from the start of the region to the shard's first byte.
    """

    number: int
    host: HostName
    region: Region
    row: int
    offset: int


class _Range(NamedTuple):
    """The range that is needed of every shard of a stripe, and whether its host verifies it."""

    start: int
    length: int
    verify: bool


class StripeDecoder:
    """Decodes bytes of the parts of one group; safe to share between threads."""

    def __init__(
        self,
        group: ParityGroup,
        manifests: Mapping[HostName, PartManifest],
        survivors: SnapshotPeers,
        own: OwnPart | None,
        fetching: Executor,
    ) -> None:
        """Prepare to decode, without a request.

        Args:
            group: one whose `parity` is above 0.
            manifests: manifest of every member.
            survivors: hosts to read shards from.
            own: this host's part, None: this host is not in the group or does not have the part.
            fetching: runs one fetch for a shard at a time; no fetch waits for another.
        """
        self._group = group
        self._code = ReedSolomon(len(group.hosts) - group.parity, group.parity)
        self._manifests = manifests
        parts = [manifests[host].part_bytes for host in group.hosts]
        self._block, self._chunk = cut_grid(parts, self._code.k)
        self._survivors = survivors
        self._own = own
        self._fetching = fetching
        # k spans fit into the memory; each has complete blocks, which its host can verify.
        fitting = BUFFER_BYTES // self._code.k // self._block * self._block
        self._span = min(SPAN_BYTES, max(self._block, fitting))
        self._spare: deque[bytearray] = deque()
        """Buffers of one span each, for reuse: the kernel would clear the memory of new ones."""
        self._choosing = threading.Lock()  # guards _kernel
        self._kernel: Kernel | None = None

    def decode_into(
        self,
        host: HostName,
        offset: int,
        out: memoryview,
        *,
        excluded: frozenset[HostName] = frozenset(),
        verify: bool = False,
    ) -> None:
        """Decode bytes of a host's part. Wrong shards make wrong bytes, so the caller verifies the bytes.

        Args:
            host: a member of the group, which is not read from.
            offset: bytes from the start of the part.
            excluded: further hosts that are not read from.
            verify: whether the survivors verify their shards, so that a corrupt shard counts as lost. Shards have the
                same blocks as parts, so two survivors with one corrupt block each can replace each other.

        Raises:
            SnapshotLost: fewer than k shards of a stripe are left; the message lists the missing ones and why.
        """
        member = self._group.hosts.index(host)
        stop = offset + len(out)
        for cut, following in pairwise(self._cuts(offset, stop)):
            chunk, within = divmod(cut, self._chunk)
            stripe = stripe_of_chunk(member, chunk, self._code.n, self._code.m)
            present = self._gather(stripe, chunk, _Range(within, following - cut, verify=verify), excluded)
            decode(self._code, self._get_kernel(), present, {chunk: out[cut - offset : following - offset]})
            # No lock: appends and pops of a deque are atomic.
            self._spare.extend(cast(bytearray, view.obj) for view in present.values())

    def _cuts(self, start: int, stop: int) -> list[int]:
        """Return the offsets at which to split a range of a part, so that each piece is in one chunk and one span."""
        cuts = {start, stop}
        for first in range(start // self._chunk * self._chunk, stop, self._chunk):
            begin, end = max(first, start), min(first + self._chunk, stop)
            cuts.update(range(begin, end, self._span))
        return sorted(cuts)

    def _gather(
        self, stripe: int, wanted: int, part: _Range, excluded: frozenset[HostName]
    ) -> dict[int, memoryview]:
        """Fetch a range of k other shards of a stripe concurrently; replace those that fail while others are left."""
        present, waiting, reasons = self._find_shards(stripe, wanted, part, excluded)
        candidates = iter(waiting)
        while missing := self._code.k - len(present):
            asked = self._ask(candidates, missing, part)
            if not asked:
                raise SnapshotLost(self._describe(len(present), reasons))
            for shard, answer in asked:
                try:
                    present[shard.number] = answer.result()
                except ResilientJaxError as error:
                    reasons[shard.host] = str(error)
        return present

    def _find_shards(
        self, stripe: int, wanted: int, part: _Range, excluded: frozenset[HostName]
    ) -> tuple[dict[int, memoryview], list[StripeShard], dict[HostName, str]]:
        """Return shards that are only padding, the shards to fetch in order, and why other hosts are not read from."""
        present: dict[int, memoryview] = {}
        reasons: dict[HostName, str] = {}
        waiting: list[StripeShard] = []
        for shard in self._shards(stripe):
            if shard.number == wanted:
                continue
            if (
                shard.region is Region.PART
                and shard.offset + part.start >= self._manifests[shard.host].part_bytes
            ):
                # A short part is padded with zeros, which no host has to send.
                present[shard.number] = self._take_buffer(part.length, 0)
            elif shard.host in excluded:
                reasons[shard.host] = "it is excluded"
            elif shard.host not in self._survivors and not self._is_own(shard):
                reasons[shard.host] = self._survivors.failure_reason(shard.host)
            else:
                waiting.append(shard)
        # k shards are enough; with more, `missing` in `_gather` would be negative, which counts as true.
        for surplus in list(present)[self._code.k :]:
            del present[surplus]
        waiting.sort(key=lambda shard: self._cost(shard, part.start // self._span))
        return present, waiting, reasons

    def _ask(
        self, candidates: Iterator[StripeShard], count: int, part: _Range
    ) -> list[tuple[StripeShard, Future[memoryview]]]:
        asked = zip(range(count), candidates, strict=False)
        return [(shard, self._fetching.submit(self._fetch, shard, part)) for _, shard in asked]

    def _take_buffer(self, length: int, filled: int) -> memoryview:
        """Return a buffer with zeros after the first `filled` bytes, which the caller will fill."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            return memoryview(bytearray(self._span))[:length]
        if filled < length:
            buffer[filled:length] = bytes(length - filled)
        return memoryview(buffer)[:length]

    def _fetch(self, shard: StripeShard, part: _Range) -> memoryview:
        offset, inside = shard.offset + part.start, part.length
        if shard.region is Region.PART:  # zeros follow the end of the part
            inside = min(inside, self._manifests[shard.host].part_bytes - offset)
        data = self._take_buffer(part.length, inside)
        if self._own is not None and self._is_own(shard):
            self._own.copy_into(offset, data[:inside])
        else:
            self._survivors.read_into(
                shard.host, offset, data[:inside], region=shard.region, row=shard.row, verify=part.verify
            )
        return data

    def _shards(self, stripe: int) -> Iterator[StripeShard]:
        n, m = self._code.n, self._code.m
        for chunk, member in enumerate(data_members(stripe, n, m)):
            yield StripeShard(chunk, self._group.hosts[member], Region.PART, 0, chunk * self._chunk)
        for row, member in enumerate(parity_members(stripe, n, m)):
            yield StripeShard(self._code.k + row, self._group.hosts[member], Region.PARITY, row, 0)

    def _is_own(self, shard: StripeShard) -> bool:
        return self._own is not None and shard.region is Region.PART and shard.host == self._own.manifest.host

    def _cost(self, shard: StripeShard, turn: int) -> tuple[bool, bool, int]:
        """Return the rank of a shard: own memory first, suspects last, and otherwise rotating to balance the load."""
        return (
            self._survivors.is_suspect(shard.host),
            not self._is_own(shard),
            (shard.number + turn) % self._code.n,
        )

    def _get_kernel(self) -> Kernel:
        with self._choosing:
            if self._kernel is None:
                self._kernel = choose_kernel().kernel
            return self._kernel

    def _describe(self, found: int, reasons: Mapping[HostName, str]) -> str:
        missing = "; ".join(f"{host}: {reason}" for host, reason in reasons.items())
        n, k = self._code.n, self._code.k
        return f"its stripe has {n} shards, of which {k} are needed, and {found} found ({missing})"
