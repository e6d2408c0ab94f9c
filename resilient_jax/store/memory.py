"""The store in this process: an asyncio shell over `StoreStateMachine`."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, cast

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import LeaseId, Revision
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
from resilient_jax.store.state_machine import KEEP_REVISIONS, StoreStateMachine

EXPIRY_CHECK_INTERVAL_S = 0.1
"""How often the shell looks at the time: how late an expired lease is noticed, at most."""
SUSPENSION_THRESHOLD_S = 0.2
"""Waking this much later than planned is a suspension. Less is a busy machine, and shorter than any sensible
lease."""
MAX_BATCH_BYTES = 1024 * 1024
"""Of a watch, roughly: a long replay comes in pieces, of whole revisions (see MAX_TRANSACTION_BYTES)."""


class MemoryStore:
    """A store that lives and dies with this process; enter it (`async with`) so that leases expire.

    Leases are counted in time during which the store could be reached. If its own process is suspended
    (SIGSTOP, a laptop's lid, a debugger) nobody could keep a lease alive; on waking, every lease gets the
    lag on top, so that the others' leases do not die because the store slept. The price: a host that died
    while the store slept is noticed that much later.

    A watcher holds no queue, only its place in the history: one that reads too slowly gets
    CompactedRevision, it does not fill the memory.

    Attributes:
        store_id: a random name of this store; a successor at the same address has another.
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
        """Of the last change."""
        return self._machine.revision

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> Revision:
        operation = PutOp(key, value, NO_LEASE if lease is None else lease)
        return (await self.transaction((), (operation,))).revision

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        self._advance_time()
        return self._machine.get(key)

    async def range(self, prefix: str) -> tuple[Revision, list[KeyValue]]:
        check_prefix(prefix)
        self._advance_time()
        return self._machine.revision, self._machine.range(prefix)

    async def delete(self, key: str) -> bool:
        result = await self.transaction((), (DeleteOp(key),))
        return cast(DeleteResponse, result.responses[0]).deleted > 0

    async def delete_prefix(self, prefix: str) -> int:
        result = await self.transaction((), (DeleteOp(prefix, is_prefix=True),))
        return cast(DeleteResponse, result.responses[0]).deleted

    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        self._advance_time()
        before = self._machine.revision
        result = self._machine.transaction(compares, success_ops, failure_ops)
        self._wake_watchers_after(before)
        return result

    async def grant(self, ttl_s: float) -> LeaseId:
        return self._machine.grant(ttl_s, self._advance_time())

    async def keep_alive(self, lease: LeaseId) -> float:
        return self._machine.keep_alive(lease, self._advance_time())

    async def revoke(self, lease: LeaseId) -> None:
        self._advance_time()
        before = self._machine.revision
        self._machine.revoke(lease)
        self._wake_watchers_after(before)

    async def watch(self, prefix: str, from_revision: Revision) -> AsyncGenerator[list[WatchEvent], None]:
        async with contextlib.aclosing(self.watch_progress(prefix, from_revision)) as batches:
            async for events, _ in batches:
                if events:
                    yield events

    async def watch_progress(
        self, prefix: str, from_revision: Revision
    ) -> AsyncGenerator[tuple[list[WatchEvent], Revision], None]:
        """As `watch`, with the revision to go on from, and also when nothing matched.

        The first pair comes at once: the watch is accepted.
        """
        check_prefix(prefix)
        next_revision = from_revision
        while True:
            self._check_open()
            changed = self._changed
            events, next_revision = self._machine.read_history(prefix, next_revision, MAX_BATCH_BYTES)
            yield events, next_revision
            if next_revision > self._machine.revision and not self._is_closed:
                await changed.wait()

    async def close(self) -> None:
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
        """Now, after all that follows from it: leases extended if we were suspended, then expired."""
        self._check_open()
        now_s = self._clock.monotonic_s()
        lag_s = now_s - self._planned_wake_s
        if lag_s > SUSPENSION_THRESHOLD_S:
            self._machine.extend_leases(lag_s)
            self._planned_wake_s = now_s  # the lag is paid for, once
        before = self._machine.revision
        self._machine.expire(now_s)
        self._wake_watchers_after(before)
        return now_s

    def _wake_watchers_after(self, revision: Revision) -> None:
        if self._machine.revision != revision:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerUnreachable("the store is closed")
