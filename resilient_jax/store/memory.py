"""The store of this process: `StoreStateMachine` with a clock, expiry of leases, and asyncio watches."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, cast

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.change_history import KEEP_REVISIONS
from resilient_jax.store.interface import (
    NO_LEASE,
    Compare,
    DeleteOp,
    DeleteResponse,
    KeyValue,
    Operation,
    PutOp,
    TransactionResult,
    WatchEvent,
    check_key,
    check_prefix,
)
from resilient_jax.store.state_machine import StoreStateMachine

EXPIRY_CHECK_INTERVAL_S = 0.1
"""The interval of the expiry of leases, and so the largest delay of it."""
SUSPENSION_THRESHOLD_S = 0.2
"""A wake-up this much later than planned counts as a suspension. A shorter delay is a busy machine, and shorter than
any sensible lease."""
MAX_BATCH_BYTES = 1024 * 1024
"""The approximate size of a batch of a watch: a long replay has several, each of complete revisions (see
MAX_TRANSACTION_BYTES)."""


class MemoryStore:
    """A store that ends with this process; enter it (`async with`) so that leases expire.

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
        self._changed = asyncio.Event()  # set, and replaced, with each new revision
        self._is_closed = False
        self._planned_wake_s = self._clock.monotonic_s() + EXPIRY_CHECK_INTERVAL_S
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._planned_wake_s = self._clock.monotonic_s() + EXPIRY_CHECK_INTERVAL_S
        self._ticking = asyncio.create_task(self._expire_leases(), name="store-leases")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def revision(self) -> Revision:
        """The revision of the last change."""
        return self._machine.revision

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> Revision:
        """Write one key; see `Store.put`."""
        operation = PutOp(key, value, NO_LEASE if lease is None else lease)
        return (await self.transaction((), (operation,))).revision

    async def get(self, key: str) -> KeyValue | None:
        """Return one key; see `Store.get`."""
        check_key(key)
        self._advance_time()
        return self._machine.get(key)

    async def range(self, prefix: str) -> tuple[Revision, list[KeyValue]]:
        """Return all keys with a prefix; see `Store.range`."""
        check_prefix(prefix)
        self._advance_time()
        return self._machine.revision, self._machine.range(prefix)

    async def delete(self, key: str) -> bool:
        """Delete one key; see `Store.delete`."""
        result = await self.transaction((), (DeleteOp(key),))
        return cast(DeleteResponse, result.responses[0]).deleted > 0

    async def delete_prefix(self, prefix: str) -> int:
        """Delete all keys with a prefix; see `Store.delete_prefix`."""
        result = await self.transaction((), (DeleteOp(prefix, is_prefix=True),))
        return cast(DeleteResponse, result.responses[0]).deleted

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
        self._wake_watchers_after(before)
        return result

    async def grant(self, ttl_s: float) -> LeaseId:
        """Return a new lease; see `Store.grant`."""
        return self._machine.grant(ttl_s, self._advance_time())

    async def keep_alive(self, lease: LeaseId) -> float:
        """Extend a lease; see `Store.keep_alive`."""
        return self._machine.keep_alive(lease, self._advance_time())

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see `Store.revoke`."""
        self._advance_time()
        before = self._machine.revision
        self._machine.revoke(lease)
        self._wake_watchers_after(before)

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
            # Taken before the history is read: a change after the read sets this very event.
            changed = self._changed
            events, next_revision = self._machine.read_history(prefix, next_revision, MAX_BATCH_BYTES)
            yield events, next_revision
            if next_revision > self._machine.revision and not self._is_closed:
                await changed.wait()

    async def close(self) -> None:
        """End all watches and close the store; see `Store.close`."""
        self._is_closed = True
        self._changed.set()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
            self._ticking = None

    async def _expire_leases(self) -> None:
        while True:
            now_s = self._advance_time()
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
        if lag_s > SUSPENSION_THRESHOLD_S:
            self._machine.extend_leases(lag_s)
            self._planned_wake_s = now_s  # the lag is granted once
        before = self._machine.revision
        self._machine.expire(now_s)
        self._wake_watchers_after(before)
        return now_s

    def _wake_watchers_after(self, revision: Revision) -> None:
        if self._machine.revision != revision:
            # Replaced and not cleared, so that every watcher that waits for the old one wakes.
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerUnreachable("the store is closed")
