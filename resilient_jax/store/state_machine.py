"""The state machine of a store, without I/O: keys, revisions, leases and history. Time is an argument.

Invariants:
- `revision` grows by exactly one with each change, and each event in the history carries its revision.
- The history holds every change after `compacted_revision`, and nothing else.
- Every key with a lease is in that lease's set, and the lease exists.
- A request that raises has changed nothing.

It is mutable, unlike our other state machines: a copy of all keys for each change would be slow, and no caller needs
two states at once. It is still deterministic: the same calls give the same state.
"""

import bisect
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, assert_never

from resilient_jax.errors import LeaseExpired
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.change_history import KEEP_BYTES, KEEP_REVISIONS, ChangeHistory
from resilient_jax.store.interface import (
    NO_LEASE,
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteEvent,
    DeleteOp,
    DeleteResponse,
    KeyValue,
    Operation,
    OperationResponse,
    PutEvent,
    PutOp,
    PutResponse,
    RangeOp,
    RangeResponse,
    TransactionResult,
    WatchEvent,
    check_key,
    check_operations,
    check_ttl,
)
from resilient_jax.store.journal import (
    Changed,
    JournalRecord,
    LeaseEnded,
    LeaseGranted,
    StoreImage,
)

FIRST_REVISION = Revision(1)
"""Of an empty store, as in etcd."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _LeaseState:
    ttl_s: float
    deadline_s: float
    keys: set[str] = dataclasses.field(default_factory=set)


class StoreStateMachine:
    """Keys, leases and history of one store."""

    def __init__(
        self,
        *,
        first_lease: LeaseId,
        keep_revisions: int = KEEP_REVISIONS,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        """Create an empty store.

        Args:
            first_lease: the first lease number; `MemoryStore` passes a random one, so that a lease of a store that
                died is not mistaken for one of its successor.
            keep_revisions: number of the last revisions that the history keeps.
        """
        assert first_lease > 0, first_lease
        self.history = ChangeHistory(FIRST_REVISION, keep_revisions=keep_revisions, keep_bytes=keep_bytes)
        self._keys: dict[str, KeyValue] = {}
        self._sorted_keys: list[str] = []
        self._leases: dict[LeaseId, _LeaseState] = {}
        self._earliest_deadline_s = math.inf
        """No lease ends before it; which does first is looked up only then, since with each request time passes."""
        self._next_lease = first_lease

    @property
    def revision(self) -> Revision:
        """The revision of the last change."""
        return self.history.revision

    # Leases

    def grant(self, ttl_s: float, now_s: float) -> LeaseId:
        """Return a new lease, which expires at `now_s + ttl_s`.

        Raises:
            CallerError: `ttl_s` is not a positive number.
        """
        check_ttl(ttl_s)
        lease = self._next_lease
        self._next_lease = LeaseId(lease + 1)
        self._add_lease(lease, ttl_s, now_s)
        return lease

    def _add_lease(self, lease: LeaseId, ttl_s: float, now_s: float) -> None:
        self._leases[lease] = _LeaseState(ttl_s=ttl_s, deadline_s=now_s + ttl_s)
        self._earliest_deadline_s = min(self._earliest_deadline_s, now_s + ttl_s)

    def keep_alive(self, lease: LeaseId, now_s: float) -> float:
        """Extend the lease to `now_s` + its time to live, and return that time to live.

        Raises:
            LeaseExpired: the lease is gone.
        """
        state = self._live_lease(lease)
        state.deadline_s = now_s + state.ttl_s
        return state.ttl_s

    def revoke(self, lease: LeaseId) -> None:
        """End the lease and delete its keys, in one revision.

        Raises:
            LeaseExpired: the lease is gone.
        """
        # Sorted, since a set has another order in each process, and the events of a revision have an order.
        keys = sorted(self._live_lease(lease).keys)
        revision = Revision(self.history.revision + 1)
        self.history.append(revision, [self._delete(key, revision) for key in keys])
        del self._leases[lease]

    def expire(self, now_s: float) -> list[LeaseId]:
        """Revoke the leases whose deadline has passed, the earliest first, and return them."""
        if now_s < self._earliest_deadline_s:
            return []
        due = [
            (state.deadline_s, lease) for lease, state in self._leases.items() if state.deadline_s <= now_s
        ]
        # By deadline, so that the revisions have the order in which the leases ended.
        expired = [lease for _, lease in sorted(due)]
        for lease in expired:
            self.revoke(lease)
        deadlines = (state.deadline_s for state in self._leases.values())
        self._earliest_deadline_s = min(deadlines, default=math.inf)
        return expired

    def extend_leases(self, seconds: float) -> None:
        """Extend every lease by `seconds`, during which no host could reach the store."""
        assert seconds >= 0, seconds
        for state in self._leases.values():
            state.deadline_s += seconds

    def next_deadline_s(self) -> float | None:
        """Return when the next lease expires; None without leases."""
        return min((state.deadline_s for state in self._leases.values()), default=None)

    def _live_lease(self, lease: LeaseId) -> _LeaseState:
        state = self._leases.get(lease)
        if state is None:
            raise LeaseExpired(
                f"lease {lease} does not exist: it expired, was revoked, or belongs to another store"
            )
        return state

    # Keys

    def get(self, key: str) -> KeyValue | None:
        """Return one key; None where it does not exist."""
        return self._keys.get(key)

    def range(self, prefix: str) -> list[KeyValue]:
        """Return all keys that begin with `prefix`, sorted."""
        return [self._keys[key] for key in self._list_keys(prefix, is_prefix=True)]

    def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        """Run one branch atomically, in one revision; see `Store.transaction`.

        Raises:
            CallerError: the operations cannot form one revision.
            LeaseExpired: a put names a lease that is gone.
        """
        for compare in compares:
            check_key(compare.key)
        check_operations(success_ops)
        check_operations(failure_ops)
        succeeded = all(_holds(compare, self._keys.get(compare.key)) for compare in compares)
        operations = success_ops if succeeded else failure_ops
        for operation in operations:
            # All checks before the first change: a request that raises has changed nothing.
            if isinstance(operation, PutOp) and operation.lease != NO_LEASE:
                self._live_lease(operation.lease)
        responses = self._run(operations)
        return TransactionResult(succeeded=succeeded, revision=self.history.revision, responses=responses)

    def _run(self, operations: Iterable[Operation]) -> tuple[OperationResponse, ...]:
        revision = Revision(self.history.revision + 1)
        events: list[WatchEvent] = []
        responses: list[OperationResponse] = []
        for operation in operations:
            match operation:
                case PutOp():
                    written = self._put(operation, revision)
                    events.append(PutEvent(key_value=written))
                    responses.append(PutResponse(key_value=written))
                case DeleteOp():
                    deleted = [
                        self._delete(key, revision)
                        for key in self._list_keys(operation.key, is_prefix=operation.is_prefix)
                    ]
                    events += deleted
                    responses.append(DeleteResponse(deleted=len(deleted)))
                case RangeOp():
                    found = tuple(
                        self._keys[key]
                        for key in self._list_keys(operation.key, is_prefix=operation.is_prefix)
                    )
                    responses.append(RangeResponse(key_values=found))
                case _:
                    assert_never(operation)
        self.history.append(revision, events)
        return tuple(responses)

    def _list_keys(self, prefix: str, *, is_prefix: bool) -> list[str]:
        if not is_prefix:
            return [prefix] if prefix in self._keys else []
        # In sorted order the keys with a prefix follow each other, from where the prefix itself would stand.
        start = bisect.bisect_left(self._sorted_keys, prefix)
        end = start
        while end < len(self._sorted_keys) and self._sorted_keys[end].startswith(prefix):
            end += 1
        return self._sorted_keys[start:end]

    def _put(self, operation: PutOp, revision: Revision) -> KeyValue:
        before = self._keys.get(operation.key)
        if before is None:
            bisect.insort(self._sorted_keys, operation.key)
        # A key has one lease at most: that of its last put, or none.
        elif before.lease != NO_LEASE:
            self._leases[before.lease].keys.discard(operation.key)
        if operation.lease != NO_LEASE:
            self._leases[operation.lease].keys.add(operation.key)
        written = KeyValue(
            key=operation.key,
            value=operation.value,
            create_revision=before.create_revision if before else revision,
            mod_revision=revision,
            version=before.version + 1 if before else 1,
            lease=operation.lease,
        )
        self._keys[operation.key] = written
        return written

    def _delete(self, key: str, revision: Revision) -> DeleteEvent:
        before = self._keys.pop(key)
        del self._sorted_keys[bisect.bisect_left(self._sorted_keys, key)]
        if before.lease != NO_LEASE:
            self._leases[before.lease].keys.discard(key)
        return DeleteEvent(key=key, mod_revision=revision)

    # Journal

    def make_image(self, store_id: str) -> StoreImage:
        """Return everything but the history."""
        return StoreImage(
            store_id=store_id,
            revision=self.revision,
            key_values=list(self._keys.values()),
            leases={lease: state.ttl_s for lease, state in self._leases.items()},
            next_lease=self._next_lease,
        )

    def replay(self, record: JournalRecord, now_s: float) -> None:
        """Take in a record of the journal. Leases have all of their time again: until now no host could renew them."""
        match record:
            case StoreImage():
                self.history.begin(record.revision)
                self._keys = {found.key: found for found in record.key_values}
                self._sorted_keys = sorted(self._keys)
                self._leases = {}
                for lease, ttl_s in record.leases.items():
                    self._add_lease(lease, ttl_s, now_s)
                for found in record.key_values:
                    if found.lease != NO_LEASE:
                        self._leases[found.lease].keys.add(found.key)
                self._next_lease = record.next_lease
            case LeaseGranted(lease=lease, ttl_s=ttl_s):
                self._add_lease(lease, ttl_s, now_s)
                self._next_lease = LeaseId(lease + 1)
            case LeaseEnded(lease=lease):
                del self._leases[lease]
            case Changed(revision=revision, events=events):
                for event in events:
                    if isinstance(event, PutEvent):
                        written = event.key_value
                        self._put(PutOp(written.key, written.value, written.lease), revision)
                    else:
                        self._delete(event.key, revision)
                self.history.append(revision, events)
            case _:
                assert_never(record)


def _holds(compare: Compare, found: KeyValue | None) -> bool:
    if found is None:  # compares as 0, its value as nothing
        return compare.target is not CompareTarget.VALUE and _RELATIONS[compare.op](0, compare.value)
    return _RELATIONS[compare.op](getattr(found, compare.target.value), compare.value)


_RELATIONS: Final[Mapping[CompareOperator, Callable[[Any, Any], bool]]] = {
    CompareOperator.EQUAL: operator.eq,
    CompareOperator.NOT_EQUAL: operator.ne,
    CompareOperator.GREATER: operator.gt,
    CompareOperator.LESS: operator.lt,
}
"""`Compare` checks that both sides are of one type."""
