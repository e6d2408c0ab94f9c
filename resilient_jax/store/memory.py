"""The store of this process: `StoreStateMachine` with a clock, expiry of leases, and asyncio watches."""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Self

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.change_history import KEEP_REVISIONS
from resilient_jax.store.interface import (
    Compare,
    Operation,
    Store,
    TransactionResult,
    WatchEvent,
    check_prefix,
)
from resilient_jax.store.journal import Changed, LeaseEnded, LeaseGranted, StoreImage, StoreJournal
from resilient_jax.store.state_machine import StoreStateMachine
from resilient_jax.store.watch_channels import WatchChannels

EXPIRY_CHECK_INTERVAL_S = 0.1
"""The interval of the expiry of leases, and so the largest delay of it."""
SUSPENSION_THRESHOLD_S = 0.2
"""A wake-up this much later than planned counts as a suspension. A shorter delay is a busy machine, and shorter than
any sensible lease."""
MAX_BATCH_BYTES = 1024 * 1024
"""The approximate size of a batch of a watch: a long replay has several, each of complete revisions (see
MAX_TRANSACTION_BYTES)."""


class MemoryStore(Store):
    """A store in the memory of this process; enter it (`async with`) so that leases expire.

    It ends with the process, unless it has a journal (`from_journal`): then a store in another process goes on from it.

    A lease counts only time in which the store was reachable. While the store's process is suspended (SIGSTOP, a
    laptop's lid, a debugger) no host can keep a lease alive; when it resumes, it extends every lease by the time of
    the suspension. The price: a host that died meanwhile is detected that much later.

    A watcher has no queue, only a position in the history: one that reads too slowly gets CompactedRevision and does
    not fill the memory.

    Attributes:
        store_id: a random identity of this store; a successor at the same address has another one.
    """

    def __init__(self, clock: Clock | None = None, *, keep_revisions: int = KEEP_REVISIONS) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._machine = StoreStateMachine(
            first_lease=LeaseId(1 + secrets.randbits(48)), keep_revisions=keep_revisions
        )
        self.store_id = secrets.token_hex(8)
        self._channels = WatchChannels()
        self._is_closed = False
        self._renewing = threading.Lock()
        """Guards what leases are until: none is renewed while it is judged which have expired."""
        self._planned_wake_s = self._clock.monotonic_s() + EXPIRY_CHECK_INTERVAL_S
        self._ticking: asyncio.Task[None] | None = None
        self._journal: StoreJournal | None = None
        self._told_revision = self._machine.revision
        """The last revision that watchers may know: that of the last change in the journal."""

    @classmethod
    def from_journal(
        cls,
        path: Path,
        clock: Clock | None = None,
        *,
        keep_revisions: int = KEEP_REVISIONS,
        on_trouble: Callable[[str], None] = lambda why: None,
    ) -> Self:
        """Return the store that a journal is of, or a new one whose journal this will be.

        Args:
            keep_revisions: number of revisions that a watch may resume from.
            on_trouble: called with why the journal cannot be written, once; with an empty text when the journal can be
                written again. Until then nothing changes in the store, and leases go on.

        Raises:
            LogUnwritable: the file cannot be created or written.
            OperatorError: the file is damaged.
        """
        store = cls(clock, keep_revisions=keep_revisions)
        store._journal, records = StoreJournal.open(path)
        store._journal.on_trouble = on_trouble
        for record in records:
            if isinstance(record, StoreImage):
                store.store_id = record.store_id
            store._machine.replay(record, store._clock.monotonic_s())
        store._told_revision = store._machine.revision
        if not records:
            store._journal.begin(store._make_image())
        return store

    async def __aenter__(self) -> Self:
        self._planned_wake_s = self._clock.monotonic_s() + EXPIRY_CHECK_INTERVAL_S
        self._ticking = asyncio.create_task(self._expire_leases(), name="store-leases")
        return self

    @property
    def revision(self) -> Revision:
        """The revision of the last change that was confirmed."""
        return self._told_revision

    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        """Run a transaction; see `Store.transaction`."""
        self._advance_time()
        before = self._machine.revision
        result = self._machine.transaction(compares, success_ops, failure_ops)
        self._record_since(before)
        await self._tell()
        return result

    async def grant(self, ttl_s: float) -> LeaseId:
        """Return a new lease; see `Store.grant`."""
        lease = self._machine.grant(ttl_s, self._advance_time())
        if self._journal is not None:
            self._journal.append([LeaseGranted(lease=lease, ttl_s=ttl_s)])
        await self._tell()
        return lease

    async def keep_alive(self, lease: LeaseId) -> float:
        """Extend a lease; see `Store.keep_alive`."""
        self._advance_time()
        return self.renew(lease)

    def renew(self, lease: LeaseId) -> float:
        """Extend a lease as `keep_alive` does, from any thread, whatever the event loop does meanwhile.

        A renewal that comes before the store judges a lease counts, also past its time to live.

        Raises:
            LeaseExpired: the lease is gone, and its keys are deleted.
            PeerUnreachable: the store is closed.
        """
        self._check_open()
        with self._renewing:
            return self._machine.keep_alive(lease, self._clock.monotonic_s())

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see `Store.revoke`."""
        self._advance_time()
        before = self._machine.revision
        self._machine.revoke(lease)
        self._record_since(before, ended=[lease])
        await self._tell()

    async def watch(self, prefix: str, from_revision: Revision) -> AsyncGenerator[list[WatchEvent], None]:
        """Yield the changes of a prefix; see `Store.watch`."""
        async with contextlib.aclosing(self.watch_progress(prefix, from_revision)) as batches:
            async for events, _ in batches:
                if events:
                    yield events

    async def watch_progress(
        self, prefix: str, from_revision: Revision
    ) -> AsyncGenerator[tuple[list[WatchEvent], Revision], None]:
        """Yield the events of `watch` with the revision from which to resume, also where no event matched.

        The first pair arrives at once, and shows that the watch is accepted.
        """
        check_prefix(prefix)
        next_revision = from_revision
        while True:
            self._check_open()
            # Taken before the history is read: a change after the read wakes this very channel.
            channel = self._channels.get(prefix)
            events, next_revision = self._machine.history.read(
                prefix, next_revision, MAX_BATCH_BYTES, self._told_revision
            )
            yield events, next_revision
            if next_revision > self._told_revision and not self._is_closed:
                await channel.wait()
                next_revision = max(next_revision, channel.resume_from)

    async def close(self) -> None:
        """End all watches and close the store; see `Store.close`."""
        self._is_closed = True
        self._channels.wake_all(Revision(0))
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
            self._ticking = None
        if self._journal is not None:
            await self._journal.close()

    async def _expire_leases(self) -> None:
        while True:
            now_s = self._advance_time()
            with contextlib.suppress(PeerUnreachable):  # the journal cannot be written; it is tried again
                await self._tell()
            deadline_s = self._machine.next_deadline_s()
            wait_s = (
                EXPIRY_CHECK_INTERVAL_S
                if deadline_s is None
                else min(EXPIRY_CHECK_INTERVAL_S, max(0.0, deadline_s - now_s))
            )
            self._planned_wake_s = now_s + wait_s
            await asyncio.sleep(wait_s)

    def _advance_time(self) -> float:
        """Return the time, after extending the leases by a suspension and then expiring them."""
        self._check_open()
        now_s = self._clock.monotonic_s()
        lag_s = now_s - self._planned_wake_s
        before = self._machine.revision
        with self._renewing:
            if lag_s > SUSPENSION_THRESHOLD_S:
                self._machine.extend_leases(lag_s)
                self._planned_wake_s = now_s  # the lag is granted once
            ended = self._machine.expire(now_s)
        self._record_since(before, ended=ended)
        return now_s

    def _record_since(self, revision: Revision, *, ended: Sequence[LeaseId] = ()) -> None:
        """Append to the journal what changed after a revision, and which leases ended."""
        if self._journal is not None and (ended or self._machine.revision != revision):
            changes = self._machine.history.list_since(revision)
            self._journal.append(
                [
                    *(Changed(revision=number, events=events) for number, events in changes),
                    *(LeaseEnded(lease=lease) for lease in ended),
                ]
            )

    async def _tell(self) -> None:
        """Return when all changes until now are in the journal, and watchers are told of them."""
        revision = self._machine.revision
        if self._journal is not None and not self._journal.is_durable:
            await self._journal.sync(self._make_image)
            self._check_open()
        if self._told_revision < revision:
            told, self._told_revision = self._told_revision, revision
            history = self._machine.history
            if told >= history.compacted_revision:
                self._channels.tell(history.list_since(told), revision)
            else:
                self._channels.wake_all(Revision(told + 1))

    def _make_image(self) -> StoreImage:
        return self._machine.make_image(self.store_id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerUnreachable("the store is closed")
