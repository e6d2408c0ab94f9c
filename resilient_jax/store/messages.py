"""The embedded store on the wire: one method per question."""

import msgspec

from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.interface import Compare, KeyValue, Operation, TransactionResult, WatchEvent
from resilient_jax.transport.method import Method

SERVICE = "rj.store"


class StoreStatusRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who are you?"""


class StoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Which store this is, and how far it is."""

    store_id: str
    revision: Revision


class RangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    prefix: str


class RangeReply(msgspec.Struct, frozen=True, kw_only=True):
    revision: Revision
    key_values: list[KeyValue]


class TransactionRequest(msgspec.Struct, frozen=True, kw_only=True):
    compares: tuple[Compare, ...]
    success_ops: tuple[Operation, ...]
    failure_ops: tuple[Operation, ...]


class GrantRequest(msgspec.Struct, frozen=True, kw_only=True):
    ttl_s: float


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    lease: LeaseId


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """A lease and the seconds it has; 0 once revoked."""

    lease: LeaseId
    ttl_s: float


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Watch from a revision on; `store_id` is the store that the revision is of, "" where unknown."""

    prefix: str
    from_revision: Revision
    store_id: str


class WatchBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Events, and where to go on from if the stream breaks. The first batch comes at once."""

    store_id: str
    next_revision: Revision
    events: list[WatchEvent]


STATUS = Method("status", StoreStatusRequest, StoreStatus)
RANGE = Method("range", RangeRequest, RangeReply)
TRANSACTION = Method("transaction", TransactionRequest, TransactionResult)
GRANT = Method("grant", GrantRequest, LeaseReply)
KEEP_ALIVE = Method("keep_alive", LeaseRequest, LeaseReply)
REVOKE = Method("revoke", LeaseRequest, LeaseReply)
WATCH = Method("watch", WatchRequest, WatchBatch, is_streaming=True)
