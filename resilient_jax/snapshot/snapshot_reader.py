"""Reads bytes of any host's part of a snapshot: from memory here, else from that host, else decoded from parity.

Rules. All bytes are verified against the checksums of their blocks. A corrupt block counts as lost, and only that
block. If one source fails the next one is used, with an event; if all fail the error is `SnapshotLost`. Reading works
in units of complete blocks, several at a time, so that memory is bounded for reads of any size.
"""

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple, Protocol

from resilient_jax.errors import ChecksumMismatch, ResilientJaxError, SnapshotLost
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPlan
from resilient_jax.snapshot.block_reader import BlockOrigin, BlockReader
from resilient_jax.snapshot.manifest import PartManifest
from resilient_jax.snapshot.own_part import OwnPart
from resilient_jax.snapshot.slot_choice import format_snapshot_id
from resilient_jax.snapshot.snapshot_peers import RecordEvent, SnapshotPeers
from resilient_jax.snapshot.stripe_decoder import StripeDecoder
from resilient_jax.threads import ResultT, run_all
from resilient_jax.transport import Credentials

UNIT_BYTES = 4 * 2**20
"""Read by one request: large enough to make requests cheap, small enough that several units take little memory."""
CONCURRENT_UNITS = 4
CONCURRENT_FETCHES = 16
"""Concurrent fetches of shards, for all units: they mostly wait for other hosts."""
MAX_EDGE_BLOCKS = 32
"""Cached blocks of which only some bytes were requested: the next leaf is often in the same block."""


class PartRead(NamedTuple):
    """A range of a host's part to read.

    Attributes:
        host: a host of any of the snapshot's groups.
        offset: bytes from the start of the part.
        target: memory that the bytes are copied to; the target is as long as the range.
    """

    host: HostName
    offset: int
    target: memoryview


class OwnPartOpener(Protocol):
    """Opens this host's own part; implemented by `LocalServerClient`."""

    def open_own_part(self, id: SnapshotId, /) -> tuple[PartManifest, memoryview] | None:
        """Return manifest and read-only memory of this host's own complete part, or None."""
        ...


class SnapshotReader:
    """Reads one snapshot, for one thread at a time. After an error it may only be closed."""

    def __init__(
        self,
        plan: SnapshotPlan,
        host: HostName,
        local: OwnPartOpener | None,
        credentials: Credentials,
        *,
        check: Callable[[], None],
        record_event: RecordEvent,
    ) -> None:
        """Open this host's own part, if it has one.

        Args:
            plan: the snapshot, and the hosts that have it.
            local: opens the host's own part; None, the host's server is used like that of another host.
            check: called several times a second while the caller waits; an exception that `check` raises ends the
                reading.
            record_event: called as `record_event(kind, **detail)` from several threads, one at a time.
        """
        self._plan = plan
        self._check = check
        self._survivors = SnapshotPeers(plan, credentials, record_event)
        self._units = ThreadPoolExecutor(CONCURRENT_UNITS, "rj-snapshot-unit")
        self._fetching = ThreadPoolExecutor(CONCURRENT_FETCHES, "rj-snapshot-fetch")
        self._lock = threading.Lock()
        """Guards what follows; never held while something is read."""
        self._manifests: dict[HostName, PartManifest] = {}
        self._parts: dict[HostName, BlockReader] = {}
        self._decoders: dict[ParityGroup, StripeDecoder] = {}
        self._edges: OrderedDict[tuple[HostName, int], tuple[memoryview, BlockOrigin]] = OrderedDict()
        self._bytes_read: Counter[BlockOrigin] = Counter()
        self._own = self._open_own(host, local)

    @property
    def has_copies(self) -> bool:
        """Whether several hosts may have an element: of the parts of a snapshot it is one."""
        return False

    @property
    def local_host(self) -> HostName | None:
        """This host, if its own part is in memory here."""
        return self._own.manifest.host if self._own is not None else None

    @property
    def bytes_local(self) -> int:
        """Bytes read so far from this host's own memory."""
        return self._bytes_read[BlockOrigin.LOCAL]

    @property
    def bytes_peer(self) -> int:
        """Bytes read so far from the parts of other hosts."""
        return self._bytes_read[BlockOrigin.PEER]

    @property
    def bytes_decoded(self) -> int:
        """Bytes decoded so far from the shards of other hosts."""
        return self._bytes_read[BlockOrigin.PARITY]

    def read_manifests(self) -> dict[HostName, PartManifest]:
        """Return the manifests of all hosts, each from the first member of its group that has it intact.

        Raises:
            SnapshotLost: no member of a host's group has its manifest.
        """
        hosts = [host for group in self._plan.groups for host in group.hosts]
        found = self._run([lambda host=host: self._read_manifest(host) for host in hosts])
        return dict(zip(hosts, found, strict=True))

    def read_all(self, reads: Sequence[PartRead]) -> list[int]:
        """Copy bytes of parts into the targets, several reads at a time; return none: no read is left to others.

        Raises:
            SnapshotLost: more is lost than parity covers; the message lists what is lost and what survives. The
                contents of the targets are then undefined, but no thread still writes to them.
        """
        self._run([job for read in reads for job in self._split_units(read)])
        return []

    def close(self) -> None:
        """End running reads, close connections, and release the memory of the own part."""
        # First, because this ends the calls that the threads wait in.
        self._survivors.close()
        self._fetching.shutdown(cancel_futures=True)
        self._units.shutdown(cancel_futures=True)
        if self._own is not None:
            self._own.close()

    def _split_units(self, read: PartRead) -> Iterator[Callable[[], None]]:
        """Split a read into jobs of bounded size."""
        offset, out = read.offset, memoryview(read.target).cast("B")
        if not len(out):
            return
        part = self._open_part(read.host)
        stop, size = offset + len(out), part.manifest.block_bytes
        assert 0 <= offset < stop <= part.manifest.part_bytes, (
            read.host,
            offset,
            stop,
            part.manifest.part_bytes,
        )
        unit = max(1, UNIT_BYTES // size) * size
        # Units are counted from the start of the part, not of the read: only the first and the last can cut a block.
        cuts = [offset, *range((offset // unit + 1) * unit, stop, unit), stop]
        for first, last in pairwise(cuts):
            yield functools.partial(self._read_unit, part, first, out[first - offset : last - offset])

    def _open_own(self, host: HostName, local: OwnPartOpener | None) -> OwnPart | None:
        try:
            held = local.open_own_part(self._plan.id) if local is not None else None
            own = OwnPart(*held) if held is not None else None
        except ResilientJaxError as error:
            self._survivors.record_event(
                EventKind.SNAPSHOT_FALLBACK, part=host, to="its server", reason=str(error)
            )
            return None
        if own is not None:
            self._manifests[host] = own.manifest
        return own

    def _open_part(self, host: HostName) -> BlockReader:
        if host not in self._parts:
            (manifest,) = self._run([lambda: self._read_manifest(host)])
            group = self._group_of(host)
            own = self._own if self._own is not None and self._own.manifest is manifest else None
            self._parts[host] = BlockReader(
                manifest, group, self._survivors, own, lambda: self._open_decoder(group)
            )
        return self._parts[host]

    def _group_of(self, host: HostName) -> ParityGroup:
        return next(group for group in self._plan.groups if host in group.hosts)

    def _open_decoder(self, group: ParityGroup) -> StripeDecoder:
        manifests = {host: self._read_manifest(host) for host in group.hosts}
        own = self._own if self._own is not None and self._own.manifest.host in group.hosts else None
        reader = StripeDecoder(group, manifests, self._survivors, own, self._fetching)
        with self._lock:
            return self._decoders.setdefault(group, reader)

    def _read_manifest(self, host: HostName) -> PartManifest:
        with self._lock:
            if host in self._manifests:
                return self._manifests[host]
        members = self._group_of(host).hosts
        # The host itself first, suspects last.
        members_by_preference = sorted(
            (member for member in members if member in self._survivors),
            key=lambda member: (self._survivors.is_suspect(member), member != host),
        )
        for member in members_by_preference:
            try:
                manifest = self._survivors.fetch_manifest(member, host)
            except ResilientJaxError:
                continue  # an event has recorded the error
            with self._lock:
                return self._manifests.setdefault(host, manifest)
        reasons = "; ".join(f"{member}: {self._survivors.failure_reason(member)}" for member in members)
        raise SnapshotLost(
            f"the contents of host {host}'s part are unknown: no member of its group has its manifest ({reasons})"
        )

    def _read_unit(self, part: BlockReader, offset: int, out: memoryview) -> None:
        """Fill one unit: complete blocks in place, partly requested blocks through a cached copy."""
        if self._own is not None and part.manifest is self._own.manifest:
            try:
                self._own.copy_into(offset, out)
            except ChecksumMismatch:
                pass  # read block by block: only the corrupt one has to come from another source
            else:
                self._count(Counter({BlockOrigin.LOCAL: len(out)}))
                return
        size = part.manifest.block_bytes
        for first, last in _cut_at_edges(offset, offset + len(out), size, part.manifest.part_bytes):
            piece = out[first - offset : last - offset]
            if first % size == 0 and (last % size == 0 or last == part.manifest.part_bytes):
                self._count(part.read_into(first, piece))
            else:
                block, origin = self._read_edge(part, first // size)
                piece[:] = block[first % size : first % size + len(piece)]
                self._count(Counter({origin: len(piece)}))

    def _read_edge(self, part: BlockReader, block: int) -> tuple[memoryview, BlockOrigin]:
        """Return a verified block of which only a part is requested, and its source."""
        key = (part.manifest.host, block)
        with self._lock:
            if key in self._edges:
                self._edges.move_to_end(key)
                return self._edges[key]
        offset = block * part.manifest.block_bytes
        data = memoryview(bytearray(min(part.manifest.block_bytes, part.manifest.part_bytes - offset)))
        ((origin, _),) = part.read_into(offset, data).items()
        with self._lock:
            self._edges[key] = (data, origin)
            if len(self._edges) > MAX_EDGE_BLOCKS:
                self._edges.popitem(last=False)
        return data, origin

    def _count(self, given: Counter[BlockOrigin]) -> None:
        with self._lock:
            self._bytes_read.update(given)

    def _run(self, jobs: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        explanations: list[str] = []

        def end(error: BaseException) -> None:
            # Explained before the survivors are closed, which makes a suspect of every host with a running call.
            if isinstance(error, SnapshotLost):
                explanations.append(self._explain(error))
            self._survivors.close()

        try:
            return run_all(self._units, jobs, self._check, end)
        except SnapshotLost as error:
            raise SnapshotLost(explanations[0]) from error

    def _explain(self, error: SnapshotLost) -> str:
        left = [source.host for source in self._plan.sources if not self._survivors.is_suspect(source.host)]
        return (
            f"the {format_snapshot_id(self._plan.id)} cannot be rebuilt: {error}. The parts of "
            f"{', '.join(left) or 'no host'} survive. Resume from a checkpoint, if there is one"
        )


def _cut_at_edges(start: int, stop: int, size: int, end: int) -> Iterator[tuple[int, int]]:
    """Split a range into a run of complete blocks and the partial blocks before and after it."""
    first = min(stop, -(-start // size) * size)
    last = stop if stop == end else max(first, stop // size * size)
    yield from ((a, b) for a, b in ((start, first), (first, last), (last, stop)) if a < b)
