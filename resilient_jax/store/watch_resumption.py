"""Watches that resume: what clients of a store in another process have in common."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

from resilient_jax.clock import Clock
from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import Revision
from resilient_jax.store.interface import WatchEvent

RETRY_INTERVAL_S: Final = 0.1

WatchProgress = AsyncGenerator[tuple[list[WatchEvent], Revision], None]
"""The events of one stream, perhaps none, each time with the revision to go on from."""
OpenStream = Callable[[Revision, float], WatchProgress]
"""Opens a stream that begins with a revision, whose first answer must arrive before a time of the clock; raises
PeerUnreachable where it breaks."""


async def resume_watch(
    open_stream: OpenStream,
    from_revision: Revision,
    *,
    what: str,
    resume_timeout_s: float,
    is_closed: Callable[[], bool],
    clock: Clock,
) -> AsyncGenerator[list[WatchEvent], None]:
    """Yield the events of streams that follow each other, each from where the one before it broke.

    Args:
        what: the watch in error messages, such as "a watch of 'a/' at 10.0.0.1:7000".
        resume_timeout_s: time after which a watch that does not answer is given up.
        is_closed: whether the store was closed, so that nothing is to be resumed.
        clock: clock that measures the time without an answer.

    Raises:
        PeerUnreachable: the stream broke, and could not be resumed in time.
    """
    next_revision = from_revision
    broken_since_s = clock.monotonic_s()
    while True:
        has_answered = False
        try:
            async with contextlib.aclosing(
                open_stream(next_revision, broken_since_s + resume_timeout_s)
            ) as stream:
                async for events, following in stream:
                    next_revision, has_answered = following, True
                    if events:
                        yield events
            failure = PeerUnreachable(f"{what} was ended by the store")
        except PeerUnreachable as error:
            failure = error
        now_s = clock.monotonic_s()
        if has_answered:
            broken_since_s = now_s  # the stream has worked: the time to resume begins only now
        if is_closed() or now_s - broken_since_s >= resume_timeout_s:
            raise PeerUnreachable(
                f"{what} broke at revision {next_revision}, and there was no answer for "
                f"{now_s - broken_since_s:.1f} s: {failure}",
                is_refused=failure.is_refused,
            ) from failure
        await asyncio.sleep(RETRY_INTERVAL_S)
