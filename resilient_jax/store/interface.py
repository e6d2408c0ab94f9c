"""What every store offers, in etcd's words, so that etcd itself can stand behind it later.

Rules (https://etcd.io/docs/v3.6/learning/api/):
- The revision is the store's logical time. Each put, delete or transaction that changes something adds
  one, and everything it changed carries that number.
- A key has `create_revision` (of its birth), `mod_revision` (of its last change) and `version` (changes
  since birth, from 1). An absent key compares as 0 in all three; its value compares false with anything.
- A lease dies when nobody keeps it alive for its time to live; its keys are deleted with it, in one revision.
- A watch sees each change of its prefix from its first revision on: once, in order, never part of a revision.
- Keys are text, not empty; the prefix "" is every key.
"""

import enum
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from resilient_jax.errors import CallerError
from resilient_jax.ids import LeaseId, Revision

NO_LEASE = LeaseId(0)

MAX_KEY_BYTES = 4 * 1024
MAX_TRANSACTION_BYTES = 4 * 1024 * 1024
"""All keys and values of one request: whatever one revision changed fits in one message of a watch."""
MAX_TRANSACTION_OPERATIONS = 1024
"""Of one branch; bounds how long one request keeps the store busy."""


class KeyValue(msgspec.Struct, frozen=True, kw_only=True):
    """One key as it is at a revision; `lease` is 0 where no lease holds it."""

    key: str
    value: bytes
    create_revision: Revision
    mod_revision: Revision
    version: int
    lease: LeaseId = NO_LEASE


class PutEvent(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """A key was written, at `key_value.mod_revision`."""

    key_value: KeyValue

    @property
    def key(self) -> str:
        return self.key_value.key

    @property
    def mod_revision(self) -> Revision:
        return self.key_value.mod_revision


class DeleteEvent(msgspec.Struct, frozen=True, kw_only=True, tag="delete"):
    """A key was deleted, by request or because its lease ended."""

    key: str
    mod_revision: Revision


WatchEvent = PutEvent | DeleteEvent


class CompareTarget(enum.StrEnum):
    """What a comparison looks at."""

    VALUE = "value"
    VERSION = "version"
    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"


class CompareOperator(enum.StrEnum):
    """How a comparison compares; values compare as bytes do, lexicographically."""

    EQUAL = "equal"
    GREATER = "greater"
    LESS = "less"
    NOT_EQUAL = "not_equal"


class Compare(msgspec.Struct, frozen=True):
    """One condition of a transaction: `target` of `key` stands in relation `op` to `value`.

    Example:
        >>> Compare("leader", CompareTarget.VERSION, CompareOperator.EQUAL, 0)  # the key does not exist
        Compare(key='leader', target=<CompareTarget.VERSION: 'version'>, op=<CompareOperator.EQUAL: 'equal'>, value=0)
    """

    key: str
    target: CompareTarget
    op: CompareOperator
    value: bytes | int

    def __post_init__(self) -> None:
        if isinstance(self.value, bytes) != (self.target is CompareTarget.VALUE):
            raise ValueError(
                f"a comparison of {self.target} takes "
                f"{'bytes' if self.target is CompareTarget.VALUE else 'an int'}, found {type(self.value).__name__}"
            )


def require_absent(key: str) -> Compare:
    """The condition that `key` does not exist."""
    return Compare(key, CompareTarget.VERSION, CompareOperator.EQUAL, 0)


def require_unchanged(key_value: KeyValue) -> Compare:
    """The condition that nobody wrote or deleted the key since `key_value` was read."""
    return Compare(key_value.key, CompareTarget.MOD_REVISION, CompareOperator.EQUAL, key_value.mod_revision)


class PutOp(msgspec.Struct, frozen=True, tag="put"):
    """Write one key; a lease other than 0 deletes it when it ends."""

    key: str
    value: bytes
    lease: LeaseId = NO_LEASE


class DeleteOp(msgspec.Struct, frozen=True, tag="delete"):
    """Delete one key, or all keys that begin with it where `is_prefix`."""

    key: str
    is_prefix: bool = False


class RangeOp(msgspec.Struct, frozen=True, tag="range"):
    """Read one key, or all keys that begin with it where `is_prefix`; sees the operations before it."""

    key: str
    is_prefix: bool = False


Operation = PutOp | DeleteOp | RangeOp


class PutResponse(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """What a PutOp wrote."""

    key_value: KeyValue


class DeleteResponse(msgspec.Struct, frozen=True, kw_only=True, tag="delete"):
    """How many keys a DeleteOp deleted."""

    deleted: int


class RangeResponse(msgspec.Struct, frozen=True, kw_only=True, tag="range"):
    """What a RangeOp read, sorted by key."""

    key_values: tuple[KeyValue, ...]


OperationResponse = PutResponse | DeleteResponse | RangeResponse


class TransactionResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a transaction went.

    Attributes:
        succeeded: all comparisons held, so the success operations ran; else the failure operations.
        revision: the store's revision afterwards.
        responses: one per operation that ran, in order.
    """

    succeeded: bool
    revision: Revision
    responses: tuple[OperationResponse, ...]


class Store(Protocol):
    """The store. `testing/store_conformance.py` is its contract in executable form.

    Every method may raise PeerUnreachable where the store is elsewhere; a change may then have been made
    or not. Bad arguments raise CallerError, and nothing happens.
    """

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> Revision:
        """Writes one key; returns the revision.

        Raises:
            LeaseExpired: the lease is gone; nothing was written.
        """
        ...

    async def get(self, key: str) -> KeyValue | None:
        """One key, or None where it does not exist."""
        ...

    async def range(self, prefix: str) -> tuple[Revision, list[KeyValue]]:
        """All keys that begin with `prefix`, sorted, and the revision at which that was so.

        To go on from there without a gap, watch from that revision + 1.
        """
        ...

    async def delete(self, key: str) -> bool:
        """Deletes one key; whether there was one."""
        ...

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes all keys that begin with `prefix`, in one revision; returns how many."""
        ...

    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        """Runs one of two lists of operations, whole and alone, in one revision.

        Args:
            compares: must all hold for success; none always succeeds.
            success_ops: run when they hold. No key may be written twice, as in etcd.
            failure_ops: run when one does not.

        Raises:
            LeaseExpired: an operation to run puts with a lease that is gone; nothing was done.
        """
        ...

    async def grant(self, ttl_s: float) -> LeaseId:
        """A new lease, which ends after `ttl_s` without a keep_alive."""
        ...

    async def keep_alive(self, lease: LeaseId) -> float:
        """Lets the lease's time begin anew; returns the seconds it now has.

        Raises:
            LeaseExpired: it is gone, and its keys are deleted.
        """
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """Ends a lease now and deletes its keys.

        Raises:
            LeaseExpired: it is gone already.
        """
        ...

    def watch(self, prefix: str, from_revision: Revision) -> AsyncGenerator[list[WatchEvent], None]:
        """The changes of keys that begin with `prefix`, from `from_revision` on, past and future.

        Each list holds whole revisions, in order. The iterator never ends by itself: it raises. Close it
        (`aclose`, `contextlib.aclosing`) when you stop before.

        Raises:
            CompactedRevision: `from_revision` is forgotten, or the reader fell that far behind: read with
                `range`, then watch from its revision + 1.
            PeerUnreachable: the store was closed or lost.
        """
        ...

    async def close(self) -> None:
        """Ends all watches and frees what this store holds; twice is once."""
        ...


def check_key(key: str) -> None:
    """Refuses a key that not every store can hold.

    Raises:
        CallerError: it is empty, too long, or not encodable as UTF-8.
    """
    if not key:
        raise CallerError("a key must not be empty")
    check_prefix(key)


def check_prefix(prefix: str) -> None:
    """As `check_key`, but the empty prefix is allowed.

    Raises:
        CallerError: it is too long or not encodable as UTF-8.
    """
    try:
        size = len(prefix.encode())
    except UnicodeEncodeError as error:
        raise CallerError(f"key {prefix!r} cannot be encoded as UTF-8: {error.reason}") from error
    if size > MAX_KEY_BYTES:
        raise CallerError(f"a key has at most {MAX_KEY_BYTES} bytes, found {size}: {prefix[:40]!r}...")


def check_operations(operations: Sequence[Operation]) -> None:
    """Refuses operations that cannot be one revision.

    Raises:
        CallerError: too many, too large, a bad key, or one key changed twice.
    """
    if len(operations) > MAX_TRANSACTION_OPERATIONS:
        raise CallerError(
            f"a transaction has at most {MAX_TRANSACTION_OPERATIONS} operations, found {len(operations)}"
        )
    size = 0
    put_keys: set[str] = set()
    for operation in operations:
        if isinstance(operation, PutOp):
            check_key(operation.key)
            size += len(operation.key) + len(operation.value)
            if operation.key in put_keys:
                raise CallerError(
                    f"a transaction writes the key {operation.key!r} twice; one write wins: choose it"
                )
            put_keys.add(operation.key)
        elif operation.is_prefix:
            check_prefix(operation.key)
        else:
            check_key(operation.key)
    for operation in operations:
        if isinstance(operation, DeleteOp) and any(_covers(operation, key) for key in put_keys):
            raise CallerError(f"a transaction both writes and deletes {operation.key!r}; choose one")
    if size > MAX_TRANSACTION_BYTES:
        raise CallerError(
            f"a request to the store holds at most {MAX_TRANSACTION_BYTES} bytes, found {size}; "
            "the store is for small facts, bulk data goes between the workers"
        )


def _covers(operation: DeleteOp, key: str) -> bool:
    return key.startswith(operation.key) if operation.is_prefix else key == operation.key
