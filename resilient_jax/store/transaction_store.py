"""What every implementation of `Store` does with its transactions alone."""

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import Self, cast

from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.interface import (
    NO_LEASE,
    Compare,
    DeleteOp,
    DeleteResponse,
    KeyValue,
    Operation,
    PutOp,
    RangeOp,
    RangeResponse,
    TransactionResult,
)


class TransactionStore(abc.ABC):
    """Reads and changes keys by transactions of one operation; closes the store at the end of an `async with`."""

    @abc.abstractmethod
    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        """Run a transaction; see `Store.transaction`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close the store; see `Store.close`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> Revision:
        """Write one key; see `Store.put`."""
        operation = PutOp(key, value, NO_LEASE if lease is None else lease)
        return (await self.transaction((), (operation,))).revision

    async def get(self, key: str) -> KeyValue | None:
        """Return one key; see `Store.get`."""
        result = await self.transaction((), (RangeOp(key),))
        found = cast(RangeResponse, result.responses[0]).key_values
        return found[0] if found else None

    async def range(self, prefix: str) -> tuple[Revision, list[KeyValue]]:
        """Return all keys with a prefix; see `Store.range`."""
        result = await self.transaction((), (RangeOp(prefix, is_prefix=True),))
        return result.revision, list(cast(RangeResponse, result.responses[0]).key_values)

    async def delete(self, key: str) -> bool:
        """Delete one key; see `Store.delete`."""
        result = await self.transaction((), (DeleteOp(key),))
        return cast(DeleteResponse, result.responses[0]).deleted > 0

    async def delete_prefix(self, prefix: str) -> int:
        """Delete all keys with a prefix; see `Store.delete_prefix`."""
        result = await self.transaction((), (DeleteOp(prefix, is_prefix=True),))
        return cast(DeleteResponse, result.responses[0]).deleted
