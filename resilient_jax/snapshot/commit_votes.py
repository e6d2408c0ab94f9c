"""What the root counts: which hosts are complete, and with the last of them that a snapshot is committed.

The first outcome stands. A host that says it is complete never drops the snapshot, so no drop can come after all have
said so.
"""

import collections
from collections.abc import Collection
from typing import Any, Final

from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.messages import CommitOutcome, CompleteReply

MAX_SNAPSHOTS_KEPT: Final = 64
"""Snapshots whose outcome is kept, for hosts that ask late."""


class CommitVotes:
    """State only: the caller guards it with a lock."""

    def __init__(self) -> None:
        self._complete: collections.OrderedDict[SnapshotId, set[HostName]] = collections.OrderedDict()
        self._outcomes: collections.OrderedDict[SnapshotId, CompleteReply] = collections.OrderedDict()

    def record_complete(self, id: SnapshotId, host: HostName) -> None:
        """A host has its part and its parity."""
        self._complete.setdefault(id, set()).add(host)
        _forget_oldest(self._complete)

    def record_dropped(self, id: SnapshotId, reason: str) -> None:
        """A host never will."""
        self._decide(id, CompleteReply(outcome=CommitOutcome.DROPPED, reason=reason))

    def is_complete(self, id: SnapshotId, hosts: Collection[HostName]) -> bool:
        """Whether all of them have said so."""
        return self._complete.get(id, set()).issuperset(hosts)

    def commit(self, id: SnapshotId) -> CompleteReply:
        """Decides, unless it was decided before; gives the outcome."""
        self._decide(id, CompleteReply(outcome=CommitOutcome.COMMITTED))
        return self.outcome(id)

    def outcome(self, id: SnapshotId) -> CompleteReply:
        """What is known."""
        return self._outcomes.get(id, CompleteReply(outcome=CommitOutcome.WAITING))

    def _decide(self, id: SnapshotId, outcome: CompleteReply) -> None:
        self._outcomes.setdefault(id, outcome)
        _forget_oldest(self._outcomes)


def _forget_oldest(table: collections.OrderedDict[SnapshotId, Any]) -> None:  # whatever is kept
    while len(table) > MAX_SNAPSHOTS_KEPT:
        table.popitem(last=False)
