"""A bound on the bytes that the coroutines of one event loop use at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ByteBudget:
    """A budget of bytes; a request for more than the limit gets all of it, and runs alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._left = limit_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def spend(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` are left, and reserve them in the body of the context manager."""
        share = min(nbytes, self._limit)
        async with self._changed:
            await self._changed.wait_for(lambda: self._left >= share)
            self._left -= share
        try:
            yield
        finally:
            async with self._changed:
                self._left += share
                self._changed.notify_all()
