"""Bytes of a part that is gone, computed from the stripes that its chunks are in; from any k of the shards left."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import NamedTuple

from resilient_jax.erasure import Buffer, Kernel, ReedSolomon, decode
from resilient_jax.erasure_kernels import choose_kernel
from resilient_jax.errors import ResilientJaxError, SnapshotLost
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import CHUNK_ALIGNMENT, Group
from resilient_jax.snapshot.manifest import Manifest
from resilient_jax.snapshot.messages import PARITY_BLOCK_BYTES, PIECE_BYTES, Region
from resilient_jax.snapshot.own_part import OwnPart
from resilient_jax.snapshot.stripes import chunk_bytes, data_members, parity_members, stripe_of_chunk
from resilient_jax.snapshot.survivors import Survivors

BUFFER_BYTES = 32 * 2**20
"""Of shards in memory for one call; with few members the messages are the limit, not this."""


class Shard(NamedTuple):
    """A shard of a stripe, and where its host has it.

    Attributes:
        number: in the stripe.
        host: that has it.
        region: where.
        row: of parity.
        offset: of the shard's first byte in the region.
    """

    number: int
    host: HostName
    region: Region
    row: int
    offset: int


class GroupReader:
    """Computes bytes of the parts of one group; safe to share between threads."""

    def __init__(
        self,
        group: Group,
        manifests: Mapping[HostName, Manifest],
        survivors: Survivors,
        own: OwnPart | None,
        fetching: Executor,
    ) -> None:
        """Reads nothing yet.

        Args:
            group: with parity.
            manifests: of every member.
            survivors: are asked for shards.
            own: this host's part, if it is in the group and has it.
            fetching: runs one fetch for a shard at a time; nothing that it runs waits for another.
        """
        self._group = group
        self._code = ReedSolomon(len(group.hosts) - group.parity, group.parity)
        self._manifests = manifests
        self._chunk = chunk_bytes([manifests[host].part_bytes for host in group.hosts], self._code.k)
        self._survivors = survivors
        self._own = own
        self._fetching = fetching
        fitting = BUFFER_BYTES // self._code.k // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
        self._span = min(PIECE_BYTES, max(CHUNK_ALIGNMENT, fitting))
        self._choosing = threading.Lock()  # guards _kernel
        self._kernel: Kernel | None = None

    def rebuild_into(
        self,
        host: HostName,
        offset: int,
        out: memoryview,
        *,
        without: frozenset[HostName] = frozenset(),
        finely: bool = False,
    ) -> None:
        """Computes bytes of a host's part. They are right if all shards are: verify them.

        Args:
            host: in the group; nothing is asked of it.
            offset: in its part.
            out: where they go.
            without: further hosts that nothing is asked of.
            finely: take apart what lies in different blocks of the shards' checksums. Then two survivors with a bad
                block each do not stand in for each other's bytes, at the price of smaller requests.

        Raises:
            SnapshotLost: fewer than k shards are left of a stripe; says which are not, and why.
        """
        member = self._group.hosts.index(host)
        stop = offset + len(out)
        for cut, following in pairwise(self._cuts(member, offset, stop, finely=finely)):
            chunk, within = divmod(cut, self._chunk)
            stripe = stripe_of_chunk(member, chunk, self._code.n, self._code.m)
            present = self._gather(stripe, chunk, within, following - cut, without)
            decode(self._code, self._get_kernel(), present, {chunk: out[cut - offset : following - offset]})

    def _cuts(self, member: int, start: int, stop: int, *, finely: bool) -> list[int]:
        """Where to cut a range of a part so that every piece is in one chunk, and in one span."""
        chunk = self._chunk
        cuts = {start, stop}
        for first in range(start // chunk * chunk, stop, chunk):
            begin, end = max(first, start), min(first + chunk, stop)
            cuts.update(range(begin, end, self._span))
            if finely:
                stripe = stripe_of_chunk(member, first // chunk, self._code.n, self._code.m)
                for shard in self._shards(stripe):
                    # Data shard j begins in its part at j chunks, so blocks end at other places of each shard.
                    size = self._block_bytes(shard)
                    ahead = (shard.offset + begin - first) % size
                    cuts.update(range(begin + size - ahead, end, size))
        return sorted(cuts)

    def _block_bytes(self, shard: Shard) -> int:
        return (
            PARITY_BLOCK_BYTES if shard.region is Region.PARITY else self._manifests[shard.host].block_bytes
        )

    def _gather(
        self, stripe: int, wanted: int, within: int, length: int, without: frozenset[HostName]
    ) -> dict[int, Buffer]:
        """A range of k other shards of a stripe, fetched at the same time; who fails is replaced if somebody can."""
        present: dict[int, Buffer] = {}
        reasons: dict[HostName, str] = {}
        waiting: list[Shard] = []
        for shard in self._shards(stripe):
            if shard.number == wanted:
                continue
            if (
                shard.region is Region.PART
                and shard.offset + within >= self._manifests[shard.host].part_bytes
            ):
                present[shard.number] = bytes(
                    length
                )  # behind the end of a short part all is zero, whoever has it
            elif shard.host in without:
                reasons[shard.host] = "it is left out"
            elif shard.host not in self._survivors and not self._is_own(shard):
                reasons[shard.host] = self._survivors.why_not(shard.host)
            else:
                waiting.append(shard)
        for surplus in list(present)[self._code.k :]:
            del present[surplus]
        waiting.sort(key=lambda shard: self._cost(shard, within // self._span))
        candidates = iter(waiting)
        while missing := self._code.k - len(present):
            asked = self._ask(candidates, missing, within, length)
            if not asked:
                raise SnapshotLost(self._describe(len(present), reasons))
            for shard, answer in asked:
                try:
                    present[shard.number] = answer.result()
                except ResilientJaxError as error:
                    reasons[shard.host] = str(error)
        return present

    def _ask(
        self, candidates: Iterator[Shard], count: int, within: int, length: int
    ) -> list[tuple[Shard, Future[Buffer]]]:
        asked = zip(range(count), candidates, strict=False)
        return [(shard, self._fetching.submit(self._fetch, shard, within, length)) for _, shard in asked]

    def _fetch(self, shard: Shard, within: int, length: int) -> Buffer:
        offset = shard.offset + within
        data = bytearray(length)
        inside = memoryview(data)
        if shard.region is Region.PART:  # behind its end all is zero
            inside = inside[: self._manifests[shard.host].part_bytes - offset]
        if self._own is not None and self._is_own(shard):
            self._own.copy_into(offset, inside)
        else:
            self._survivors.read_into(shard.host, offset, inside, region=shard.region, row=shard.row)
        return data

    def _shards(self, stripe: int) -> Iterator[Shard]:
        n, m = self._code.n, self._code.m
        for chunk, member in enumerate(data_members(stripe, n, m)):
            yield Shard(chunk, self._group.hosts[member], Region.PART, 0, chunk * self._chunk)
        for row, member in enumerate(parity_members(stripe, n, m)):
            yield Shard(self._code.k + row, self._group.hosts[member], Region.PARITY, row, 0)

    def _is_own(self, shard: Shard) -> bool:
        return self._own is not None and shard.region is Region.PART and shard.host == self._own.manifest.host

    def _cost(self, shard: Shard, turn: int) -> tuple[bool, bool, int]:
        """Own memory first, suspects last. A member has another number in every stripe, so each is spared in turn."""
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
