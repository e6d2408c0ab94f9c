"""The exchange that makes a host's part complete and committed: one thread for each snapshot, off the training path.

1. Compute the checksums of the part's blocks and seal the part. No other host can read the part before that.
2. Fetch the manifests of all members of the parity group, which shows that every member has sealed its part.
3. Encode one stripe, the one whose parity row 0 this host keeps. For each piece: pull the data shards from their hosts,
   multiply, keep row 0, push the other rows to the members that keep them.
4. Wait for the rows that other members encode for this host. Then the snapshot is *complete* here: record that in the
   slot's header and report it to the root.
5. Ask the root until the snapshot is complete on all hosts, that is *committed*.
Every call is repeated until it succeeds, and every request is idempotent. A host that fails for good drops the snapshot
and reports that to the root, so that all hosts drop it: a snapshot that cannot commit never blocks a slot.
"""

import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from resilient_jax.erasure import Checksum, Kernel, ReedSolomon, encode
from resilient_jax.errors import (
    CallerError,
    ChecksumMismatch,
    InternalError,
    MessageError,
    ResilientJaxError,
    SnapshotDropped,
    SnapshotMissing,
    SnapshotRefused,
    StaleGeneration,
)
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import ANY_INDEX, FailPoint, FailPoints
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.snapshot.commit_votes import CommitVotes
from resilient_jax.snapshot.manifest import PartContents, encode_manifest, find_corrupt_block
from resilient_jax.snapshot.messages import (
    COMPLETE,
    DROPPED,
    MANIFEST,
    PARITY,
    PARITY_PIECE_BYTES,
    CommitOutcome,
    CompleteReply,
    CompleteRequest,
    DropNotice,
    ManifestRequest,
    ParityPiece,
)
from resilient_jax.snapshot.notifier import Notifier
from resilient_jax.snapshot.peer_pool import PeerPool
from resilient_jax.snapshot.slot_choice import format_snapshot_id
from resilient_jax.snapshot.slot_contents import SlotContents, cut_blocks, get_checksum
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.snapshot_slots import SnapshotSlots
from resilient_jax.snapshot.stripes import data_members, parity_members

logger = logging.getLogger(__name__)

CONCURRENT_PIECES: Final = 2
"""One piece is multiplied while the next is transferred. Each needs memory for n pieces."""
MIN_RETRY_INTERVAL_S: Final = 0.01
MAX_RETRY_INTERVAL_S: Final = 0.5
MAX_ATTEMPTS: Final = 5
"""Of a call whose failure may be transient, such as a corrupt transfer, but is not resolved by waiting alone."""
ROOT_POLL_INTERVAL_S: Final = 0.005
"""Between two polls of the root by any host of the job: a rate that the root serves with a small part of a core."""

_ZEROS: Final = memoryview(bytes(PARITY_PIECE_BYTES))

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """The objects that all exchanges of a server share."""

    host: HostName
    slots: SnapshotSlots
    votes: CommitVotes
    """Used on the root; guarded by the lock of the slots."""
    peers: PeerPool
    kernel: Kernel
    checksum: Checksum
    listener: Notifier
    failpoints: FailPoints | None
    encoders: concurrent.futures.Executor
    """`CONCURRENT_PIECES` threads for each exchange."""

    def failpoint(self, place: FailPoint, id: SnapshotId, index: int = ANY_INDEX) -> None:
        """Pass a failpoint, where a test may stop this server."""
        if self.failpoints is not None:
            self.failpoints.hit(place, id.step, index)

    def maybe_corrupt(self, data: memoryview) -> memoryview:
        """Return the bytes to send: `data`, with one bit flipped if a chaos campaign injects that fault."""
        if self.failpoints is None or not data or not self.failpoints.hit(FailPoint.BEFORE_SEND):
            return data
        corrupt = bytearray(data)
        corrupt[len(corrupt) // 2] ^= 1
        return memoryview(corrupt)


class ParityExchange:
    """The exchange of one snapshot, from a part that its worker has finished to a commit or a drop."""

    def __init__(self, snapshot: SlotContents, part_contents: PartContents, context: ExchangeContext) -> None:
        """Prepare the exchange of a finished part, which its worker has described in `part_contents`."""
        self._snapshot = snapshot
        self._part_contents = part_contents
        self._context = context
        self._slots = context.slots
        self._failed: set[HostName] = set()
        self._is_stripe_lost = False

    def run(self) -> None:
        """Return when the snapshot is committed or dropped."""
        snapshot, context = self._snapshot, self._context
        try:
            self._seal_part()
            context.failpoint(FailPoint.BEFORE_PARITY, snapshot.id)
            self._collect_manifests()
            if snapshot.group.parity:
                self._encode_stripe()
            self._wait_for_parity()
            context.failpoint(FailPoint.BEFORE_COMPLETE, snapshot.id)
            self._slots.advance(snapshot, SlotPhase.COMPLETE)
            self._settle()
        except ResilientJaxError as error:
            self._slots.drop(snapshot.id, str(error))
        except Exception as error:  # the boundary of the thread: the error becomes an event
            logger.exception("the exchange of %s failed", format_snapshot_id(snapshot.id))
            self._slots.drop(snapshot.id, f"{type(error).__name__}: {error}")

    def _seal_part(self) -> None:
        snapshot = self._snapshot
        try:
            manifest = snapshot.build_manifest(
                self._part_contents, self._context.checksum, self._check_not_dropped
            )
        except ValueError:  # the slot's memory was freed meanwhile
            self._check_not_dropped()
            raise
        self._slots.seal(snapshot, encode_manifest(manifest))

    def _collect_manifests(self) -> None:
        snapshot = self._snapshot
        for host in snapshot.list_missing_manifests():
            request = ManifestRequest(id=snapshot.id, host=host)

            def fetch(host: HostName = host, request: ManifestRequest = request) -> bytes:
                return self._context.peers.call(
                    snapshot.layout.server_endpoints[host], MANIFEST, request
                ).data

            data = self._call_until_done(host, fetch)
            with self._slots.changed:
                self._check_not_dropped()
                snapshot.store_manifest(host, data)

    def _encode_stripe(self) -> None:
        offsets = range(0, self._snapshot.slot_layout.chunk_bytes, PARITY_PIECE_BYTES)
        lanes = [offsets[lane::CONCURRENT_PIECES] for lane in range(CONCURRENT_PIECES)]
        encoding = [self._context.encoders.submit(self._encode_lane, lane) for lane in lanes]
        # For all lanes, before an error of one is raised: none may go on after the snapshot is dropped for it.
        concurrent.futures.wait(encoding)
        for lane in encoding:
            lane.result()

    def _encode_lane(self, offsets: Sequence[int]) -> None:
        try:
            for offset in offsets:
                if self._is_stripe_lost:  # another lane failed, so this one's pieces are useless
                    return
                self._encode_piece(offset)
        except BaseException:
            self._is_stripe_lost = True
            raise

    def _encode_piece(self, offset: int) -> None:
        snapshot, context = self._snapshot, self._context
        self._check_not_dropped()
        # Stripe r has its parity row 0 on member r, and its data shard j is
        # chunk j of that shard's member (see `stripes`).
        stripe, n, m = snapshot.member_index, len(snapshot.group.hosts), snapshot.group.parity
        length = min(PARITY_PIECE_BYTES, snapshot.slot_layout.chunk_bytes - offset)
        sources = [
            self._pull(
                snapshot.group.hosts[member], shard * snapshot.slot_layout.chunk_bytes + offset, length
            )
            for shard, member in enumerate(data_members(stripe, n, m))
        ]
        rows = [bytearray(length) for _ in range(m)]
        encode(ReedSolomon(n - m, m), context.kernel, sources, rows)
        for row, member in enumerate(parity_members(stripe, n, m)):
            data = bytes(rows[row])
            piece = ParityPiece(
                id=snapshot.id,
                stripe=stripe,
                row=row,
                offset=offset,
                data=data,
                checksum=context.checksum.name,
                checksums=tuple(
                    map(context.checksum.compute, cut_blocks(data, snapshot.slot_layout.block_bytes))
                ),
            )
            self._push(snapshot.group.hosts[member], piece)
        context.failpoint(FailPoint.DURING_PARITY, snapshot.id, offset // PARITY_PIECE_BYTES)

    def _pull(self, host: HostName, offset: int, length: int) -> bytearray | memoryview:
        """Return verified bytes of a member's part, padded with zeros behind its end."""
        snapshot = self._snapshot
        inside = min(length, snapshot.layout.part_bytes[host] - offset)
        if inside <= 0:
            return _ZEROS[:length]
        data = bytearray(length)
        out, address = memoryview(data)[:inside], snapshot.layout.server_endpoints[host]
        manifest = snapshot.get_manifest(host)

        def read() -> None:
            self._context.peers.read_part(address, snapshot.id, offset, out)
            bad = find_corrupt_block(manifest, get_checksum(manifest.checksum), offset, out)
            if bad is not None:
                raise ChecksumMismatch(f"block {bad} of {host}'s part arrived corrupt")

        self._call_until_done(host, read)
        return data

    def _push(self, host: HostName, piece: ParityPiece) -> None:
        if host == self._context.host:
            self._slots.store_parity(piece)
        else:
            address = self._snapshot.layout.server_endpoints[host]
            self._call_until_done(host, lambda: self._context.peers.call(address, PARITY, piece))

    def _wait_for_parity(self) -> None:
        """Wait until the encoders of other stripes have sent their rows.

        Raises:
            SnapshotDropped: this host dropped the snapshot, or another host did, whose row will then never come. Only
                the root can report the latter.
        """
        while True:
            with self._slots.changed:
                has_parity = self._slots.changed.wait_for(
                    lambda: self._snapshot.has_parity() or not self._slots.is_held(self._snapshot),
                    MAX_RETRY_INTERVAL_S,
                )
                self._check_not_dropped()
            if has_parity:
                return
            reply = self._ask_outcome()
            if reply.outcome is CommitOutcome.DROPPED:
                raise SnapshotDropped(reply.reason)

    def _ask_outcome(self) -> CompleteReply:
        """Return the root's outcome, or WAITING if the root does not answer."""
        snapshot = self._snapshot
        if snapshot.layout.root == self._context.host:
            with self._slots.changed:
                return self._context.votes.outcome(snapshot.id)
        request = CompleteRequest(id=snapshot.id, host=self._context.host, is_complete=False)
        try:
            return self._context.peers.call(
                snapshot.layout.server_endpoints[snapshot.layout.root], COMPLETE, request
            )
        except (SnapshotMissing, StaleGeneration):
            pass  # the root has not opened the layout yet, or has opened a newer one
        except ResilientJaxError as error:
            self._record_failure(snapshot.layout.root, error)
        return CompleteReply(outcome=CommitOutcome.WAITING)

    def _settle(self) -> None:
        snapshot, context = self._snapshot, self._context
        is_root = snapshot.layout.root == context.host
        reply = self._decide_outcome() if is_root else self._poll_root()
        # If it still waits, a new generation has begun, and decides what becomes of the snapshot.
        if reply.outcome is CommitOutcome.DROPPED:
            self._slots.withdraw(snapshot, reply.reason)
        elif reply.outcome is CommitOutcome.COMMITTED:
            if not is_root:
                context.failpoint(FailPoint.BEFORE_COMMITTED, snapshot.id)
            self._slots.advance(snapshot, SlotPhase.COMMITTED)
            try:
                # The commit makes the other slot free. If that is too small,
                # replace it now and not when a snapshot waits for it.
                self._slots.table.allocate()
            except SnapshotRefused as error:  # the next begin tries again, and reports its own failure
                context.listener.record_event(EventKind.SNAPSHOT_REFUSED, snapshot.id, error=str(error))

    def _decide_outcome(self) -> CompleteReply:
        """Wait on the root until all hosts are complete, and decide the outcome."""
        snapshot, votes = self._snapshot, self._context.votes
        with self._slots.changed:
            votes.record_complete(snapshot.id, self._context.host)
            self._slots.changed.wait_for(
                lambda: (
                    votes.is_complete(snapshot.id, snapshot.layout.part_bytes)
                    or votes.outcome(snapshot.id).outcome is not CommitOutcome.WAITING
                    or self._is_over()
                )
            )
            if not votes.is_complete(snapshot.id, snapshot.layout.part_bytes):
                return votes.outcome(snapshot.id)
        self._context.failpoint(FailPoint.BEFORE_COMMITTED, snapshot.id)
        with self._slots.changed:
            # The lock was released for the failpoint: if an outcome was recorded meanwhile, that one stands.
            return votes.commit(snapshot.id)

    def _poll_root(self) -> CompleteReply:
        """Poll the root for the outcome, on every other host.

        Once a new generation has begun the root is polled one last time, since it may have decided the outcome, but
        is not waited for.
        """
        snapshot = self._snapshot
        address = snapshot.layout.server_endpoints[snapshot.layout.root]
        request = CompleteRequest(id=snapshot.id, host=self._context.host)
        limit_s = ROOT_POLL_INTERVAL_S * len(snapshot.layout.part_bytes)
        delay_s = min(MIN_RETRY_INTERVAL_S, limit_s)
        while True:
            was_over = self._is_over()
            try:
                reply = self._context.peers.call(address, COMPLETE, request)
                if reply.outcome is not CommitOutcome.WAITING:
                    return reply
            except SnapshotMissing:
                pass  # the root has not opened the layout yet
            except StaleGeneration:
                return CompleteReply(outcome=CommitOutcome.WAITING)
            except ResilientJaxError as error:
                self._record_failure(snapshot.layout.root, error)
                limit_s = MAX_RETRY_INTERVAL_S
            except MemoryError:  # the root may have committed the snapshot, so it is not dropped here
                limit_s = MAX_RETRY_INTERVAL_S
            if was_over:
                return CompleteReply(outcome=CommitOutcome.WAITING)
            delay_s = self._pause(delay_s, limit_s)

    def _is_over(self) -> bool:
        """Return whether the outcome is known here, or a new generation has made it irrelevant."""
        snapshot, layout = self._snapshot, self._slots.layout
        return (
            not self._slots.is_held(snapshot)
            or snapshot.phase is SlotPhase.COMMITTED
            or (layout is not None and layout.generation > snapshot.id.generation)
        )

    def _call_until_done(self, host: HostName, call: Callable[[], AnswerT]) -> AnswerT:
        """Repeat a call to another server until it succeeds.

        Raises:
            SnapshotDropped: this host or the other one dropped the snapshot.
            ResilientJaxError: the call failed in a way that a repetition does not change.
        """
        delay_s, attempts = MIN_RETRY_INTERVAL_S, 0
        while True:
            self._check_not_dropped()
            try:
                return call()
            except SnapshotMissing:
                pass  # not yet
            except (SnapshotDropped, CallerError, MessageError):
                raise
            except (ChecksumMismatch, InternalError) as error:
                self._record_failure(host, error)
                attempts += 1
                if attempts == MAX_ATTEMPTS:
                    raise
            except ResilientJaxError as error:  # unreachable, or in another generation
                self._record_failure(host, error)
            delay_s = self._pause(delay_s, MAX_RETRY_INTERVAL_S)

    def _pause(self, delay_s: float, limit_s: float) -> float:
        """Wait before the next attempt, and return the wait before the one after it."""
        with self._slots.changed:
            self._slots.changed.wait_for(lambda: not self._slots.is_held(self._snapshot), delay_s)
        return min(2 * delay_s, limit_s)

    def _check_not_dropped(self) -> None:
        if not self._slots.is_held(self._snapshot):
            raise SnapshotDropped(self._snapshot.drop_reason or "its slot was taken by another snapshot")

    def _record_failure(self, host: HostName, error: ResilientJaxError) -> None:
        """Record the failure of a host, once for each host, since calls are repeated."""
        if host not in self._failed:
            self._failed.add(host)
            self._context.listener.record_event(
                EventKind.SNAPSHOT_PEER_FAILED,
                self._snapshot.id,
                peer=host,
                error=f"{type(error).__name__}: {error}",
            )


def report_drop_to_root(
    id: SnapshotId, layout: SnapshotLayout, reason: str, context: ExchangeContext
) -> None:
    """Report a drop to the root; return when the root has recorded it, or a newer layout has made it irrelevant."""
    slots, delay_s = context.slots, MIN_RETRY_INTERVAL_S
    request = DropNotice(id=id, host=context.host, reason=f"{context.host}: {reason}")
    if layout.root == context.host:
        with slots.changed:
            context.votes.record_dropped(id, request.reason)
            slots.changed.notify_all()
        return
    while slots.layout is layout:
        try:
            context.peers.call(layout.server_endpoints[layout.root], DROPPED, request)
            return
        except StaleGeneration:
            return
        except ResilientJaxError as error:
            logger.info(
                "%s does not accept the report that %s was dropped: %s",
                layout.root,
                format_snapshot_id(id),
                error,
            )
        with slots.changed:
            slots.changed.wait_for(lambda: slots.layout is not layout, delay_s)
        delay_s = min(2 * delay_s, MAX_RETRY_INTERVAL_S)
