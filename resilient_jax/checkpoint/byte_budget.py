"""A bound on the bytes that the coroutines of one event loop hold at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ByteBudget:
    """So many bytes; a request for more than all of them gets all, and runs alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._left = limit_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def spend(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` are left, and hold them in the body of the context manager."""
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
