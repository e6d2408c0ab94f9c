"""How a host's part becomes complete and committed: a thread for each snapshot, off the training path.

1. Checksum the part, block by block. Only then it is there for anybody: until then its worker alone knew what it is.
2. Get the manifests of all members of the group: each then has its part complete.
3. Encode one stripe: that whose parity row 0 this host keeps. Piece by piece: pull the data shards from their hosts,
   multiply, keep row 0, push the other rows to the members that keep them.
4. Wait for the rows that others encode for this host. Then it is *complete*: the mark says so, and the root hears it.
5. Ask the root until all hosts are complete: *committed*.
Every call is repeated until it is answered; what it asks for may be done twice. Whoever fails for good drops the
snapshot and tells the root, so that everybody gives it up: a slot is never blocked by a snapshot that cannot commit.
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
from resilient_jax.snapshot.peer_pool import PeerPool
from resilient_jax.snapshot.slot_choice import format_snapshot_id
from resilient_jax.snapshot.slot_contents import SlotContents, cut_blocks, get_checksum
from resilient_jax.snapshot.slot_memory import SlotPhase
from resilient_jax.snapshot.snapshot_slots import SlotListener, SnapshotSlots
from resilient_jax.snapshot.stripes import data_members, parity_members

logger = logging.getLogger(__name__)

CONCURRENT_PIECES: Final = 2
"""While one is multiplied the other travels. Each holds n pieces in memory."""
MIN_RETRY_INTERVAL_S: Final = 0.01
MAX_RETRY_INTERVAL_S: Final = 0.5
MAX_ATTEMPTS: Final = 5
"""Of what fails in a way that time does not heal, but a second look may."""
ROOT_POLL_INTERVAL_S: Final = 0.005
"""Between two questions that the root is asked, by all hosts together: what it answers in a small part of a core."""

_ZEROS: Final = memoryview(bytes(PARITY_PIECE_BYTES))

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What every exchange works with."""

    host: HostName
    slots: SnapshotSlots
    votes: CommitVotes
    """Of the root; guarded by the arena's lock."""
    peers: PeerPool
    kernel: Kernel
    checksum: Checksum
    listener: SlotListener
    failpoints: FailPoints | None
    encoders: concurrent.futures.Executor
    """`CONCURRENT_PIECES` threads for each exchange."""

    def failpoint(self, place: FailPoint, id: SnapshotId, index: int = ANY_INDEX) -> None:
        """A test may hold this server here."""
        if self.failpoints is not None:
            self.failpoints.hit(place, id.step, index)

    def maybe_corrupt(self, data: memoryview) -> memoryview:
        """What another process will get: these bytes, unless a chaos campaign has one bit turned over on the way."""
        if self.failpoints is None or not data or not self.failpoints.hit(FailPoint.BEFORE_SEND):
            return data
        damaged = bytearray(data)
        damaged[len(damaged) // 2] ^= 1
        return memoryview(damaged)


class ParityExchange:
    """One snapshot's way, from the part that is there to its end."""

    def __init__(self, held: SlotContents, contents: PartContents, context: ExchangeContext) -> None:
        self._held = held
        self._contents = contents
        self._tools = context
        self._arena = context.slots
        self._failed: set[HostName] = set()
        self._is_stripe_lost = False

    def run(self) -> None:
        """Returns when the snapshot is committed or given up."""
        held, tools = self._held, self._tools
        try:
            self._seal_part()
            tools.failpoint(FailPoint.BEFORE_PARITY, held.id)
            self._collect_manifests()
            if held.group.parity:
                self._encode_stripe()
            self._wait_for_parity()
            tools.failpoint(FailPoint.BEFORE_COMPLETE, held.id)
            self._arena.advance(held, SlotPhase.COMPLETE)
            self._settle()
        except ResilientJaxError as error:
            self._arena.drop(held.id, str(error))
        except Exception as error:  # the thread's end: it becomes an event
            logger.exception("the exchange of %s failed", format_snapshot_id(held.id))
            self._arena.drop(held.id, f"{type(error).__name__}: {error}")

    def _seal_part(self) -> None:
        held = self._held
        try:
            manifest = held.build_manifest(self._contents, self._tools.checksum, self._check)
        except ValueError:  # the slot's memory was given back just now
            self._check()
            raise
        self._arena.seal(held, encode_manifest(manifest))

    def _collect_manifests(self) -> None:
        held = self._held
        for host in held.list_missing_manifests():
            request = ManifestRequest(id=held.id, host=host)

            def fetch(host: HostName = host, request: ManifestRequest = request) -> bytes:
                return self._tools.peers.call(held.layout.server_endpoints[host], MANIFEST, request).data

            data = self._until_done(host, fetch)
            with self._arena.changed:
                self._check()
                held.store_manifest(host, data)

    def _encode_stripe(self) -> None:
        offsets = range(0, self._held.slot_layout.chunk_bytes, PARITY_PIECE_BYTES)
        lanes = [offsets[lane::CONCURRENT_PIECES] for lane in range(CONCURRENT_PIECES)]
        encoding = [self._tools.encoders.submit(self._encode_lane, lane) for lane in lanes]
        concurrent.futures.wait(encoding)
        for lane in encoding:
            lane.result()

    def _encode_lane(self, offsets: Sequence[int]) -> None:
        try:
            for offset in offsets:
                if self._is_stripe_lost:  # the other lane's: this one's pieces are for nothing
                    return
                self._encode_piece(offset)
        except BaseException:
            self._is_stripe_lost = True
            raise

    def _encode_piece(self, offset: int) -> None:
        held, tools = self._held, self._tools
        self._check()
        stripe, n, m = held.member_index, len(held.group.hosts), held.group.parity
        length = min(PARITY_PIECE_BYTES, held.slot_layout.chunk_bytes - offset)
        sources = [
            self._pull(held.group.hosts[member], shard * held.slot_layout.chunk_bytes + offset, length)
            for shard, member in enumerate(data_members(stripe, n, m))
        ]
        rows = [bytearray(length) for _ in range(m)]
        encode(ReedSolomon(n - m, m), tools.kernel, sources, rows)
        for row, member in enumerate(parity_members(stripe, n, m)):
            data = bytes(rows[row])
            piece = ParityPiece(
                id=held.id,
                stripe=stripe,
                row=row,
                offset=offset,
                data=data,
                checksum=tools.checksum.name,
                checksums=tuple(map(tools.checksum.compute, cut_blocks(data, held.slot_layout.block_bytes))),
            )
            self._give(held.group.hosts[member], piece)
        tools.failpoint(FailPoint.DURING_PARITY, held.id, offset // PARITY_PIECE_BYTES)

    def _pull(self, host: HostName, offset: int, length: int) -> bytearray | memoryview:
        """Behind the end of a shorter part all is zero."""
        held = self._held
        inside = min(length, held.layout.part_bytes[host] - offset)
        if inside <= 0:
            return _ZEROS[:length]
        data = bytearray(length)
        out, address = memoryview(data)[:inside], held.layout.server_endpoints[host]
        manifest = held.get_manifest(host)

        def read() -> None:
            self._tools.peers.read_part(address, held.id, offset, out)
            bad = find_corrupt_block(manifest, get_checksum(manifest.checksum), offset, out)
            if bad is not None:
                raise ChecksumMismatch(f"block {bad} of {host}'s part came damaged")

        self._until_done(host, read)
        return data

    def _give(self, host: HostName, piece: ParityPiece) -> None:
        if host == self._tools.host:
            self._arena.store_parity(piece)
        else:
            address = self._held.layout.server_endpoints[host]
            self._until_done(host, lambda: self._tools.peers.call(address, PARITY, piece))

    def _wait_for_parity(self) -> None:
        """Until the encoders of other stripes have given their rows.

        Raises:
            SnapshotDropped: here, or by a host whose row will never come: only the root hears of that.
        """
        while True:
            with self._arena.changed:
                has_parity = self._arena.changed.wait_for(
                    lambda: self._held.has_parity() or not self._arena.is_held(self._held),
                    MAX_RETRY_INTERVAL_S,
                )
                self._check()
            if has_parity:
                return
            reply = self._ask_outcome()
            if reply.outcome is CommitOutcome.DROPPED:
                raise SnapshotDropped(reply.reason)

    def _ask_outcome(self) -> CompleteReply:
        """What the root knows; WAITING if it cannot be asked now."""
        held = self._held
        if held.layout.root == self._tools.host:
            with self._arena.changed:
                return self._tools.votes.outcome(held.id)
        request = CompleteRequest(id=held.id, host=self._tools.host, is_complete=False)
        try:
            return self._tools.peers.call(held.layout.server_endpoints[held.layout.root], COMPLETE, request)
        except (SnapshotMissing, StaleGeneration):
            pass  # the root's worker has not opened the layout yet, or a newer one
        except ResilientJaxError as error:
            self._note(held.layout.root, error)
        return CompleteReply(outcome=CommitOutcome.WAITING)

    def _settle(self) -> None:
        held, tools = self._held, self._tools
        is_root = held.layout.root == tools.host
        reply = self._decide() if is_root else self._ask_root()
        if reply.outcome is CommitOutcome.DROPPED:
            self._arena.withdraw(held, reply.reason)
        elif reply.outcome is CommitOutcome.COMMITTED:
            if not is_root:
                tools.failpoint(FailPoint.BEFORE_COMMITTED, held.id)
            self._arena.advance(held, SlotPhase.COMMITTED)
            try:
                self._arena.allocate_slots()
            except SnapshotRefused as error:  # the next begin tries again, and says so too
                tools.listener.record_event(EventKind.SNAPSHOT_REFUSED, held.id, error=str(error))

    def _decide(self) -> CompleteReply:
        """The root's side."""
        held, board = self._held, self._tools.votes
        with self._arena.changed:
            board.record_complete(held.id, self._tools.host)
            self._arena.changed.wait_for(
                lambda: (
                    board.is_complete(held.id, held.layout.part_bytes)
                    or board.outcome(held.id).outcome is not CommitOutcome.WAITING
                    or self._is_over()
                )
            )
            if not board.is_complete(held.id, held.layout.part_bytes):
                return board.outcome(held.id)
        self._tools.failpoint(FailPoint.BEFORE_COMMITTED, held.id)
        with self._arena.changed:
            return board.commit(held.id)

    def _ask_root(self) -> CompleteReply:
        """Everybody else's. After a new generation began the root may still know, but need not be waited for."""
        held = self._held
        address = held.layout.server_endpoints[held.layout.root]
        request = CompleteRequest(id=held.id, host=self._tools.host)
        limit_s = ROOT_POLL_INTERVAL_S * len(held.layout.part_bytes)
        delay_s = min(MIN_RETRY_INTERVAL_S, limit_s)
        while True:
            was_over = self._is_over()
            try:
                reply = self._tools.peers.call(address, COMPLETE, request)
                if reply.outcome is not CommitOutcome.WAITING:
                    return reply
            except SnapshotMissing:
                pass  # the root's worker has not opened the layout yet
            except StaleGeneration:
                return CompleteReply(outcome=CommitOutcome.WAITING)
            except ResilientJaxError as error:
                self._note(held.layout.root, error)
                limit_s = MAX_RETRY_INTERVAL_S
            except MemoryError:  # the root may have committed it: asked again, not given up
                limit_s = MAX_RETRY_INTERVAL_S
            if was_over:
                return CompleteReply(outcome=CommitOutcome.WAITING)
            delay_s = self._pause(delay_s, limit_s)

    def _is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        held, layout = self._held, self._arena.layout
        return (
            not self._arena.is_held(held)
            or held.phase is SlotPhase.COMMITTED
            or (layout is not None and layout.generation > held.id.generation)
        )

    def _until_done(self, host: HostName, call: Callable[[], AnswerT]) -> AnswerT:
        """Repeats a call of another server.

        Raises:
            SnapshotDropped: here or there.
            ResilientJaxError: what will not heal.
        """
        delay_s, tries = MIN_RETRY_INTERVAL_S, 0
        while True:
            self._check()
            try:
                return call()
            except SnapshotMissing:
                pass  # not yet
            except (SnapshotDropped, CallerError, MessageError):
                raise
            except (ChecksumMismatch, InternalError) as error:
                self._note(host, error)
                tries += 1
                if tries == MAX_ATTEMPTS:
                    raise
            except ResilientJaxError as error:  # cannot be reached, or has gone on to another generation
                self._note(host, error)
            delay_s = self._pause(delay_s, MAX_RETRY_INTERVAL_S)

    def _pause(self, delay_s: float, limit_s: float) -> float:
        """Waits before the next try; gives how long to wait before the one after."""
        with self._arena.changed:
            self._arena.changed.wait_for(lambda: not self._arena.is_held(self._held), delay_s)
        return min(2 * delay_s, limit_s)

    def _check(self) -> None:
        if not self._arena.is_held(self._held):
            raise SnapshotDropped(self._held.drop_reason or "its slot was taken")

    def _note(self, host: HostName, error: ResilientJaxError) -> None:
        """Once for a host: it is asked again and again."""
        if host not in self._failed:
            self._failed.add(host)
            self._tools.listener.record_event(
                EventKind.SNAPSHOT_PEER_FAILED,
                self._held.id,
                peer=host,
                error=f"{type(error).__name__}: {error}",
            )


def report_drop_to_root(
    id: SnapshotId, layout: SnapshotLayout, reason: str, context: ExchangeContext
) -> None:
    """Returns when the root knows, or nothing of this generation counts any more."""
    arena, delay_s = context.slots, MIN_RETRY_INTERVAL_S
    request = DropNotice(id=id, host=context.host, reason=f"{context.host}: {reason}")
    if layout.root == context.host:
        with arena.changed:
            context.votes.record_dropped(id, request.reason)
            arena.changed.notify_all()
        return
    while arena.layout is layout:
        try:
            context.peers.call(layout.server_endpoints[layout.root], DROPPED, request)
            return
        except StaleGeneration:
            return
        except ResilientJaxError as error:
            logger.info(
                "%s cannot be told that %s was dropped: %s", layout.root, format_snapshot_id(id), error
            )
        with arena.changed:
            arena.changed.wait_for(lambda: arena.layout is not layout, delay_s)
        delay_s = min(2 * delay_s, MAX_RETRY_INTERVAL_S)
