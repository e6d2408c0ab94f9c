"""The gRPC service of a `MemoryStore`, which the agent that holds the store serves to the other hosts."""

import contextlib
from collections.abc import AsyncGenerator

from resilient_jax.errors import StoreReplaced
from resilient_jax.ids import LeaseId
from resilient_jax.store.interface import TransactionResult
from resilient_jax.store.lease_renewals import RenewalServer
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.messages import (
    GRANT,
    KEEP_ALIVE,
    REVOKE,
    SERVICE,
    STATUS,
    TRANSACTION,
    WATCH,
    GrantRequest,
    LeaseReply,
    LeaseRequest,
    StoreStatus,
    StoreStatusRequest,
    TransactionRequest,
    WatchBatch,
    WatchRequest,
)
from resilient_jax.transport import Server

PROGRESS_INTERVAL_REVISIONS = 1000
"""How often the watcher of a quiet prefix receives the store's revision; otherwise it would resume from a revision
that the history no longer has. It must stay well below `change_history.KEEP_REVISIONS`."""


def serve_store(server: Server, store: MemoryStore, renewals: RenewalServer | None = None) -> None:
    """Add the methods of the store to `server`; the owner of the store closes it.

    Args:
        server: not started yet.
        renewals: server of renewals of the same store; the owner enters it once `server` has started. None: every
            renewal is a call.
    """
    service = _StoreService(store, renewals)
    server.add(
        SERVICE,
        {
            STATUS: service.status,
            TRANSACTION: service.transaction,
            GRANT: service.grant,
            KEEP_ALIVE: service.keep_alive,
            REVOKE: service.revoke,
            WATCH: service.watch,
        },
    )


class _StoreService:
    def __init__(self, store: MemoryStore, renewals: RenewalServer | None) -> None:
        self._store = store
        self._renewals = renewals

    async def status(self, request: StoreStatusRequest) -> StoreStatus:
        return StoreStatus(store_id=self._store.store_id, revision=self._store.revision)

    async def transaction(self, request: TransactionRequest) -> TransactionResult:
        return await self._store.transaction(request.compares, request.success_ops, request.failure_ops)

    async def grant(self, request: GrantRequest) -> LeaseReply:
        return self._confirm(await self._store.grant(request.ttl_s), request.ttl_s)

    async def keep_alive(self, request: LeaseRequest) -> LeaseReply:
        return self._confirm(request.lease, await self._store.keep_alive(request.lease))

    async def revoke(self, request: LeaseRequest) -> LeaseReply:
        await self._store.revoke(request.lease)
        return LeaseReply(lease=request.lease, ttl_s=0.0)

    def _confirm(self, lease: LeaseId, ttl_s: float) -> LeaseReply:
        renewals = None if self._renewals is None else self._renewals.offer()
        return LeaseReply(lease=lease, ttl_s=ttl_s, renewals=renewals)

    async def watch(self, request: WatchRequest) -> AsyncGenerator[WatchBatch, None]:
        store_id = self._store.store_id
        if request.store_id not in ("", store_id):
            raise StoreReplaced(
                f"store {request.store_id} is gone with all its keys; store {store_id} answers in its place. A job "
                "ends with its store: start all its agents again, and it continues from its newest checkpoint"
            )
        reported_revision = None
        progress = self._store.watch_progress(request.prefix, request.from_revision)
        async with contextlib.aclosing(progress) as batches:
            async for events, next_revision in batches:
                if (
                    events
                    or reported_revision is None
                    or next_revision >= reported_revision + PROGRESS_INTERVAL_REVISIONS
                ):
                    reported_revision = next_revision
                    yield WatchBatch(store_id=store_id, next_revision=next_revision, events=events)
