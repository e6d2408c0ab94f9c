"""Wakes the watchers whose prefix has changed, and no others: each of thousands of hosts watches one key.

A watcher that waits has read all changes until then. So the first change that wakes it is the first that it has not
read, and it need not look through those before.
"""

import asyncio
from collections.abc import Iterable, Sequence

from resilient_jax.ids import Revision
from resilient_jax.store.interface import WatchEvent

QUIET_REVISIONS = 500
"""After so many all watchers are woken, so that those of quiet prefixes know from which revision to resume."""


class WatchChannel:
    """What the watchers of one prefix wait for, once.

    Attributes:
        resume_from: the first revision that they have not read; meaningful when they wake.
    """

    def __init__(self) -> None:
        self.resume_from = Revision(0)
        self._woken = asyncio.Event()

    async def wait(self) -> None:
        """Return when the prefix has changed, or might as well have."""
        await self._woken.wait()

    def wake(self, resume_from: Revision) -> None:
        """Have all return that wait."""
        self.resume_from = resume_from
        self._woken.set()


class WatchChannels:
    """The channels of all prefixes that are watched."""

    def __init__(self) -> None:
        self._channels: dict[str, WatchChannel] = {}
        self._all_woken_at = Revision(0)

    def get(self, prefix: str) -> WatchChannel:
        """Return the channel that the next change of a prefix wakes."""
        if prefix not in self._channels:
            self._channels[prefix] = WatchChannel()
        return self._channels[prefix]

    def tell(self, changes: Iterable[tuple[Revision, Sequence[WatchEvent]]], last: Revision) -> None:
        """Wake the watchers of what has changed since they were told before, until the revision `last`."""
        for revision, events in changes:
            for event in events:
                key = event.key
                for prefix in [prefix for prefix in self._channels if key.startswith(prefix)]:
                    self._channels.pop(prefix).wake(revision)
        if last >= self._all_woken_at + QUIET_REVISIONS:
            self._all_woken_at = last
            self.wake_all(Revision(last + 1))

    def wake_all(self, resume_from: Revision) -> None:
        """Wake all watchers, whose prefixes have not changed before `resume_from`."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.wake(resume_from)
