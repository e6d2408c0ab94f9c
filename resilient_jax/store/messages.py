"""The gRPC methods of a store and their messages."""

import msgspec

from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.interface import Compare, Operation, TransactionResult, WatchEvent
from resilient_jax.transport.method import Method

SERVICE = "rj.store"


class StoreStatusRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the identity of the store."""


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the store, and its revision."""

    store_id: str
    revision: Revision


class TransactionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Runs a transaction, see `Store.transaction`."""

    compares: tuple[Compare, ...]
    success_ops: tuple[Operation, ...]
    failure_ops: tuple[Operation, ...]


class GrantRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a new lease, which expires `ttl_s` seconds after its last renewal."""

    ttl_s: float


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a lease alive, or revokes it."""

    lease: LeaseId


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A lease and the seconds until it expires, 0 once revoked; and the port where to renew it, if not by a call."""

    lease: LeaseId
    ttl_s: float
    renewals: int | None = None


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Watches from a revision of the store `store_id` on, "" where that is unknown."""

    prefix: str
    from_revision: Revision
    store_id: str


class WatchBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events, and the revision from which to resume if the stream breaks. The first batch arrives at once."""

    store_id: str
    next_revision: Revision
    events: list[WatchEvent]


STATUS = Method("status", StoreStatusRequest, StoreStatus)
TRANSACTION = Method("transaction", TransactionRequest, TransactionResult)
GRANT = Method("grant", GrantRequest, LeaseReply)
KEEP_ALIVE = Method("keep_alive", LeaseRequest, LeaseReply)
REVOKE = Method("revoke", LeaseRequest, LeaseReply)
WATCH = Method("watch", WatchRequest, WatchBatch, is_streaming=True)
