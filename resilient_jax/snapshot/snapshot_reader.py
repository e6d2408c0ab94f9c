"""Any bytes of any host's part of a snapshot: from memory here, else from that host, else from the stripes.

Rules. Nothing is given that was not verified against its block's checksum. A damaged block is as good as lost, and only
that block. What one way does not give, the next one is asked for, with an event; what none gives is `SnapshotLost`.
Reading works in units of whole blocks, several at a time, so memory is bounded whatever is asked for.
"""

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

from resilient_jax.errors import ChecksumMismatch, ResilientJaxError, SnapshotLost
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPlan
from resilient_jax.snapshot.block_reader import BlockOrigin, BlockReader
from resilient_jax.snapshot.manifest import PartManifest
from resilient_jax.snapshot.own_part import OwnPart
from resilient_jax.snapshot.snapshot_choice import name_snapshot
from resilient_jax.snapshot.stripe_decoder import StripeDecoder
from resilient_jax.snapshot.survivors import RecordEvent, Survivors
from resilient_jax.transport import Credentials

UNIT_BYTES = 4 * 2**20
"""Read in one go: large enough that requests cost nothing, small enough that several units are little memory."""
CONCURRENT_UNITS = 4
CONCURRENT_FETCHES = 16
"""Of the shards of all units: they mostly wait for somebody else's machine."""
MAX_EDGE_BLOCKS = 32
"""Blocks of which only some bytes were wanted: the next leaf often lies in the same one."""
CHECK_INTERVAL_S = 0.1

ResultT = TypeVar("ResultT")


class PartRead(NamedTuple):
    """What to read.

    Attributes:
        host: whose part; in any of the snapshot's groups.
        offset: in the part.
        target: memory of the caller's own; as many bytes are read as it has.
    """

    host: HostName
    offset: int
    target: memoryview


class OwnPartOpener(Protocol):
    """Whoever gives this host's own part: `LocalServerClient`."""

    def open_own_part(self, id: SnapshotId, /) -> tuple[PartManifest, memoryview] | None:
        """Manifest and read-only memory of this host's own complete part, if it is there."""
        ...


class SnapshotReader:
    """Reads one snapshot, for one thread at a time. After an error that it raised it may only be closed."""

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
        """Opens this host's own part, if it has one.

        Args:
            plan: which snapshot, and who has it.
            host: this one.
            local: gives its own part; without it, its server is asked like another's.
            credentials: of the job.
            check: called several times a second while the caller waits; raises what should end the reading.
            note: `note(kind, **detail)` makes an event; called from several threads, one at a time.
        """
        self._plan = plan
        self._check = check
        self._survivors = Survivors(plan, credentials, record_event)
        self._units = ThreadPoolExecutor(CONCURRENT_UNITS, "rj-snapshot-unit")
        self._fetching = ThreadPoolExecutor(CONCURRENT_FETCHES, "rj-snapshot-fetch")
        self._lock = threading.Lock()
        """Guards what follows; never held while something is read."""
        self._manifests: dict[HostName, PartManifest] = {}
        self._parts: dict[HostName, BlockReader] = {}
        self._group_readers: dict[ParityGroup, StripeDecoder] = {}
        self._edges: OrderedDict[tuple[HostName, int], tuple[memoryview, BlockOrigin]] = OrderedDict()
        self._given: Counter[BlockOrigin] = Counter()
        self._own = self._open_own(host, local)

    @property
    def local_host(self) -> HostName | None:
        """Whose part is in memory here, if one is."""
        return self._own.manifest.host if self._own is not None else None

    @property
    def bytes_local(self) -> int:
        """Given so far from this host's own memory."""
        return self._given[BlockOrigin.LOCAL]

    @property
    def bytes_peer(self) -> int:
        """Given so far as another host had them."""
        return self._given[BlockOrigin.PEER]

    @property
    def bytes_decoded(self) -> int:
        """Given so far as computed from the shards of others."""
        return self._given[BlockOrigin.PARITY]

    def read_manifests(self) -> dict[HostName, PartManifest]:
        """Every host's, each from the first member of its group that gives it whole.

        Raises:
            SnapshotLost: nobody in a host's group gives its manifest.
        """
        hosts = [host for group in self._plan.groups for host in group.hosts]
        found = self._run([lambda host=host: self._manifest(host) for host in hosts])
        return dict(zip(hosts, found, strict=True))

    def read_all(self, reads: Iterable[PartRead]) -> None:
        """Copies bytes of parts, several reads at a time.

        Raises:
            SnapshotLost: more is gone than parity covers; says what is lost, and what survives. The targets then hold
                anything, but nobody writes to them any more.
        """
        self._run([job for read in reads for job in self._units_of(read)])

    def close(self) -> None:
        """Ends what is still running, closes connections, lets the own part's memory go."""
        self._survivors.close()
        self._fetching.shutdown(cancel_futures=True)
        self._units.shutdown(cancel_futures=True)
        if self._own is not None:
            self._own.close()

    def _units_of(self, read: PartRead) -> Iterator[Callable[[], None]]:
        """A read in pieces of bounded size."""
        offset, out = read.offset, memoryview(read.target).cast("B")
        if not len(out):
            return
        part = self._part(read.host)
        stop, size = offset + len(out), part.manifest.block_bytes
        assert 0 <= offset < stop <= part.manifest.part_bytes, (
            read.host,
            offset,
            stop,
            part.manifest.part_bytes,
        )
        unit = max(1, UNIT_BYTES // size) * size
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

    def _part(self, host: HostName) -> BlockReader:
        if host not in self._parts:
            (manifest,) = self._run([lambda: self._manifest(host)])
            group = self._group_of(host)
            own = self._own if self._own is not None and self._own.manifest is manifest else None
            self._parts[host] = BlockReader(
                manifest, group, self._survivors, own, lambda: self._group_reader(group)
            )
        return self._parts[host]

    def _group_of(self, host: HostName) -> ParityGroup:
        return next(group for group in self._plan.groups if host in group.hosts)

    def _group_reader(self, group: ParityGroup) -> StripeDecoder:
        manifests = {host: self._manifest(host) for host in group.hosts}
        own = self._own if self._own is not None and self._own.manifest.host in group.hosts else None
        reader = StripeDecoder(group, manifests, self._survivors, own, self._fetching)
        with self._lock:
            return self._group_readers.setdefault(group, reader)

    def _manifest(self, host: HostName) -> PartManifest:
        with self._lock:
            if host in self._manifests:
                return self._manifests[host]
        members = self._group_of(host).hosts
        # The host itself first, suspects last.
        keepers = sorted(
            (member for member in members if member in self._survivors),
            key=lambda member: (self._survivors.is_suspect(member), member != host),
        )
        for keeper in keepers:
            try:
                manifest = self._survivors.fetch_manifest(keeper, host)
            except ResilientJaxError:
                continue  # an event said so
            with self._lock:
                return self._manifests.setdefault(host, manifest)
        reasons = "; ".join(f"{member}: {self._survivors.failure_reason(member)}" for member in members)
        raise SnapshotLost(
            f"what host {host} kept is unknown, since nobody of its group gives its manifest ({reasons})"
        )

    def _read_unit(self, part: BlockReader, offset: int, out: memoryview) -> None:
        """Fills one unit: whole blocks in place, and blocks that are only partly wanted by way of a copy."""
        if self._own is not None and part.manifest is self._own.manifest:
            try:
                self._own.copy_into(offset, out)
            except ChecksumMismatch:
                pass  # by blocks, then: only the damaged one has to come from elsewhere
            else:
                self._count(Counter({BlockOrigin.LOCAL: len(out)}))
                return
        size = part.manifest.block_bytes
        for first, last in _cut_at_edges(offset, offset + len(out), size, part.manifest.part_bytes):
            piece = out[first - offset : last - offset]
            if first % size == 0 and (last % size == 0 or last == part.manifest.part_bytes):
                self._count(part.read_into(first, piece))
            else:
                block, origin = self._edge(part, first // size)
                piece[:] = block[first % size : first % size + len(piece)]
                self._count(Counter({origin: len(piece)}))

    def _edge(self, part: BlockReader, block: int) -> tuple[memoryview, BlockOrigin]:
        """A block of which not all is wanted now, verified, and where it came from."""
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
            self._given.update(given)

    def _run(self, jobs: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """Runs jobs several at a time. When it raises, none of them is running any more."""
        futures = [self._units.submit(job) for job in jobs]
        pending = set(futures)
        try:
            while pending:
                self._check()
                done, pending = wait(pending, CHECK_INTERVAL_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
        except BaseException as error:
            for future in pending:
                future.cancel()
            # Before the survivors are closed, which makes suspects of all that are being asked.
            explanation = self._explain(error) if isinstance(error, SnapshotLost) else ""
            self._survivors.close()  # ends what is running at once
            wait(pending)
            if explanation:
                raise SnapshotLost(explanation) from error
            raise
        return [future.result() for future in futures]

    def _explain(self, error: SnapshotLost) -> str:
        left = [source.host for source in self._plan.sources if not self._survivors.is_suspect(source.host)]
        return (
            f"{name_snapshot(self._plan.id)} cannot be rebuilt: {error}. What {', '.join(left) or 'no host'} kept "
            "survives. Go on from a checkpoint, if there is one"
        )


def _cut_at_edges(start: int, stop: int, size: int, end: int) -> Iterator[tuple[int, int]]:
    """Cuts a range into a run of whole blocks, and what is left before and after it."""
    first = min(stop, -(-start // size) * size)
    last = stop if stop == end else max(first, stop // size * size)
    yield from ((a, b) for a, b in ((start, first), (first, last), (last, stop)) if a < b)
