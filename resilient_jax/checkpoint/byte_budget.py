"""A bound on bytes that are in the air at once, for coroutines of one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ByteBudget:
    """So many bytes; whoever needs more than all of them gets all, and is alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._left = limit_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def spend(self, nbytes: int) -> AsyncIterator[None]:
        """Waits until so much is left, and takes it while the block lasts."""
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
