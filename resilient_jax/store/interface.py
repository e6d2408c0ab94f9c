"""The interface of a store, in the terms and with the limits of etcd.

Rules (https://etcd.io/docs/v3.6/learning/api/):
- The revision is the store's logical time. Each put, delete or transaction that changes a key increments it, and
  everything that it changed carries the new number. Other users of an etcd cluster increment it, too.
- A key has `create_revision` (of its creation), `mod_revision` (of its last change) and `version` (the number of
  changes since its creation, from 1). An absent key compares as 0 in all three; its value compares false with any.
- A lease expires when no keep-alive arrives within its time to live; its keys are deleted with it, in one revision.
  etcd counts in whole seconds and has a shortest lease, so a lease may last longer than asked for.
- A change that raised PeerUnreachable may be made later, even after newer ones. One whose order matters must be a
  transaction that compares the key's `mod_revision`.
- A watch yields each change of its prefix from its first revision on: once, in order, never part of a revision.
- Keys are non-empty strings; the prefix "" matches every key.
"""

import abc
import enum
import math
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, cast

import msgspec

from resilient_jax.errors import CallerError
from resilient_jax.ids import LeaseId, Revision

NO_LEASE = LeaseId(0)

MAX_KEY_BYTES = 4 * 1024
MAX_TRANSACTION_BYTES = 1024 * 1024
"""The limit of all keys and values of one branch: an etcd with default settings takes requests of 1.5 MiB."""
MAX_TRANSACTION_OPERATIONS = 128
"""The limit of one branch, that of an etcd with default settings."""


class KeyValue(msgspec.Struct, frozen=True, kw_only=True):
    """One key as of a revision; `lease` is 0 where the key has no lease."""

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
        """The key that was written."""
        return self.key_value.key

    @property
    def mod_revision(self) -> Revision:
        """The revision of the change."""
        return self.key_value.mod_revision


class DeleteEvent(msgspec.Struct, frozen=True, kw_only=True, tag="delete"):
    """A key was deleted, by request or because its lease ended."""

    key: str
    mod_revision: Revision


WatchEvent = PutEvent | DeleteEvent


class CompareTarget(enum.StrEnum):
    """The attribute of a key that a comparison reads."""

    VALUE = "value"
    VERSION = "version"
    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"


class CompareOperator(enum.StrEnum):
    """The relation that a comparison tests; values compare lexicographically, as bytes do."""

    EQUAL = "equal"
    GREATER = "greater"
    LESS = "less"
    NOT_EQUAL = "not_equal"


class Compare(msgspec.Struct, frozen=True):
    """One condition of a transaction: `target` of `key` is in relation `op` to `value`.

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
    """Return the condition that `key` does not exist."""
    return Compare(key, CompareTarget.VERSION, CompareOperator.EQUAL, 0)


def require_unchanged(key_value: KeyValue) -> Compare:
    """Return the condition that the key was not written or deleted since `key_value` was read."""
    return Compare(key_value.key, CompareTarget.MOD_REVISION, CompareOperator.EQUAL, key_value.mod_revision)


class PutOp(msgspec.Struct, frozen=True, tag="put"):
    """Write one key; a lease other than 0 deletes the key when the lease ends."""

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
    """The key that a PutOp wrote."""

    key_value: KeyValue


class DeleteResponse(msgspec.Struct, frozen=True, kw_only=True, tag="delete"):
    """The number of keys that a DeleteOp deleted."""

    deleted: int


class RangeResponse(msgspec.Struct, frozen=True, kw_only=True, tag="range"):
    """The keys that a RangeOp read, sorted."""

    key_values: tuple[KeyValue, ...]


OperationResponse = PutResponse | DeleteResponse | RangeResponse


class TransactionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a transaction.

    Attributes:
        succeeded: whether all comparisons held, so that the success operations ran; else the failure operations did.
        revision: the store's revision afterwards.
        responses: one response for each operation that ran, in order.
    """

    succeeded: bool
    revision: Revision
    responses: tuple[OperationResponse, ...]


class Store(abc.ABC):
    """A store; enter it (`async with`) to close it at the end. Its contract: `tests/conformance/store_conformance.py`.

    Every method may raise PeerUnreachable where the store is in another process; a change may then have been made or
    not. Invalid arguments raise CallerError and change nothing. Reads and changes of one key are transactions.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> Revision:
        """Write one key; return the revision.

        Raises:
            LeaseExpired: the lease is gone; nothing was written.
        """
        operation = PutOp(key, value, NO_LEASE if lease is None else lease)
        return (await self.transaction((), (operation,))).revision

    async def get(self, key: str) -> KeyValue | None:
        """Return one key, or None where it does not exist."""
        result = await self.transaction((), (RangeOp(key),))
        found = cast(RangeResponse, result.responses[0]).key_values
        return found[0] if found else None

    async def range(self, prefix: str) -> tuple[Revision, list[KeyValue]]:
        """Return the revision, and all keys that begin with `prefix` as of that revision, sorted.

        To continue without a gap, watch from that revision + 1.
        """
        result = await self.transaction((), (RangeOp(prefix, is_prefix=True),))
        return result.revision, list(cast(RangeResponse, result.responses[0]).key_values)

    async def delete(self, key: str) -> bool:
        """Delete one key; return whether it existed."""
        result = await self.transaction((), (DeleteOp(key),))
        return cast(DeleteResponse, result.responses[0]).deleted > 0

    async def delete_prefix(self, prefix: str) -> int:
        """Delete all keys that begin with `prefix`, in one revision; return their number."""
        result = await self.transaction((), (DeleteOp(prefix, is_prefix=True),))
        return cast(DeleteResponse, result.responses[0]).deleted

    @abc.abstractmethod
    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        """Run one of two lists of operations atomically, in one revision.

        Args:
            compares: the conditions of success, all of which must hold; an empty list always succeeds.
            success_ops: operations that run where all conditions hold. No key may be written twice, as in etcd.
            failure_ops: operations that run where a condition does not hold.

        Raises:
            LeaseExpired: an operation of the branch puts with a lease that is gone; nothing was done.
        """

    @abc.abstractmethod
    async def grant(self, ttl_s: float) -> LeaseId:
        """Return a new lease, which expires after `ttl_s` without a `keep_alive`, or somewhat later."""

    @abc.abstractmethod
    async def keep_alive(self, lease: LeaseId) -> float:
        """Restart the lease's time to live; return the seconds until it expires.

        Raises:
            LeaseExpired: the lease is gone, and its keys are deleted.
        """

    @abc.abstractmethod
    async def revoke(self, lease: LeaseId) -> None:
        """End a lease now and delete its keys.

        Raises:
            LeaseExpired: the lease is gone already.
        """

    @abc.abstractmethod
    def watch(self, prefix: str, from_revision: Revision) -> AsyncGenerator[list[WatchEvent], None]:
        """Yield the changes of keys that begin with `prefix`, from `from_revision` on, past and future.

        Each list has complete revisions, in order. The iterator never ends, it raises; close it (`aclose`,
        `contextlib.aclosing`) to stop before.

        Raises:
            CompactedRevision: the history no longer has `from_revision`, or the reader fell that far behind: read
                with `range`, then watch from its revision + 1.
            PeerUnreachable: the store was closed or lost.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """End all watches and release the resources of this store; closing twice is allowed."""


def check_key(key: str) -> None:
    """Check that every store can hold a key.

    Raises:
        CallerError: the key is empty, too long, or not encodable as UTF-8.
    """
    if not key:
        raise CallerError("a key must not be empty")
    check_prefix(key)


def check_prefix(prefix: str) -> None:
    """Check a prefix as `check_key` does, but allow the empty one.

    Raises:
        CallerError: the prefix is too long or not encodable as UTF-8.
    """
    try:
        size = len(prefix.encode())
    except UnicodeEncodeError as error:
        raise CallerError(f"key {prefix!r} cannot be encoded as UTF-8: {error.reason}") from error
    if size > MAX_KEY_BYTES:
        raise CallerError(f"a key has at most {MAX_KEY_BYTES} bytes, found {size}: {prefix[:40]!r}...")


def check_ttl(ttl_s: float) -> None:
    """Check the time to live of a lease.

    Raises:
        CallerError: `ttl_s` is not a positive number.
    """
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        raise CallerError(f"found a time to live of {ttl_s} s, expected a positive number")


def check_operations(operations: Sequence[Operation]) -> None:
    """Check that operations can form one revision.

    Raises:
        CallerError: the operations are too many or too large, a key is invalid, or one key is changed twice.
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
            "the store is for small facts; send large data between the workers"
        )


def _covers(operation: DeleteOp, key: str) -> bool:
    return key.startswith(operation.key) if operation.is_prefix else key == operation.key
