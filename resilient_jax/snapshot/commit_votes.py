"""The votes of all hosts on each snapshot, counted by the root, which commits a snapshot once all hosts are complete.

The first outcome stands. A host that has voted complete never drops the snapshot, so no drop can follow a commit.
"""

import collections
from collections.abc import Collection
from typing import Any, Final

from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.messages import CommitOutcome, CompleteReply

MAX_SNAPSHOTS_KEPT: Final = 64
"""Snapshots whose votes and outcome are kept, for late requests."""


class CommitVotes:
    """Votes and outcomes of the newest snapshots. The caller guards them with a lock."""

    def __init__(self) -> None:
        """Start without votes."""
        self._complete: collections.OrderedDict[SnapshotId, set[HostName]] = collections.OrderedDict()
        self._outcomes: collections.OrderedDict[SnapshotId, CompleteReply] = collections.OrderedDict()

    def record_complete(self, id: SnapshotId, host: HostName) -> None:
        """Record that a host has its part and its parity."""
        self._complete.setdefault(id, set()).add(host)
        _evict_oldest(self._complete)

    def record_dropped(self, id: SnapshotId, reason: str) -> None:
        """Record that a host will never complete the snapshot, which drops it unless it is committed."""
        self._decide(id, CompleteReply(outcome=CommitOutcome.DROPPED, reason=reason))

    def is_complete(self, id: SnapshotId, hosts: Collection[HostName]) -> bool:
        """Return whether all of these hosts have voted complete."""
        return self._complete.get(id, set()).issuperset(hosts)

    def commit(self, id: SnapshotId) -> CompleteReply:
        """Commit the snapshot unless its outcome is decided; return the outcome."""
        self._decide(id, CompleteReply(outcome=CommitOutcome.COMMITTED))
        return self.outcome(id)

    def outcome(self, id: SnapshotId) -> CompleteReply:
        """Return the outcome, WAITING if it is undecided or forgotten."""
        return self._outcomes.get(id, CompleteReply(outcome=CommitOutcome.WAITING))

    def _decide(self, id: SnapshotId, outcome: CompleteReply) -> None:
        self._outcomes.setdefault(id, outcome)
        _evict_oldest(self._outcomes)


def _evict_oldest(table: collections.OrderedDict[SnapshotId, Any]) -> None:
    while len(table) > MAX_SNAPSHOTS_KEPT:
        table.popitem(last=False)
