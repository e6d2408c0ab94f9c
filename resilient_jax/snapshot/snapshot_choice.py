"""The choice of the snapshot that training resumes from, or the reason why none can be rebuilt; pure.

A snapshot can be rebuilt if in every group of n hosts with m parity at least n - m have it complete, that is their
part and the parity that they keep: each stripe then has n - m of its shards, from which the others can be decoded.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import (
    ParityGroup,
    SnapshotId,
    SnapshotPhase,
    SnapshotPlan,
    SnapshotSource,
    SnapshotStatus,
)
from resilient_jax.snapshot.slot_choice import format_snapshot_id

ReportedStatuses = Mapping[HostName, tuple[str, tuple[SnapshotStatus, ...]]]
"""For every host that answers: the endpoint of its snapshot server, and its complete snapshots."""

MAX_EXPLAINED = 2
"""Snapshots that `explain_loss` describes: as many as a host has slots."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Reported:
    """A snapshot, the hosts that have it complete, and whether one of them reports it as committed."""

    id: SnapshotId
    groups: tuple[ParityGroup, ...]
    holders: set[HostName]
    is_committed: bool = False

    @property
    def spare(self) -> int:
        """Number of further hosts, any of them, that may be lost; negative if the snapshot cannot be rebuilt."""
        return min(
            group.parity - sum(host not in self.holders for host in group.hosts) for group in self.groups
        )

    def short(self) -> list[ParityGroup]:
        """Return the groups that have lost more hosts than they have parity."""
        return [
            group
            for group in self.groups
            if sum(host not in self.holders for host in group.hosts) > group.parity
        ]


def choose_snapshot(statuses: ReportedStatuses) -> SnapshotPlan | None:
    """Return the newest snapshot that can be rebuilt, with all hosts that have it complete, or None.

    A snapshot that was never complete on all its hosts may tolerate fewer further losses than the one before, which is
    then the better choice, since training has no other snapshot until the next one is committed.

    A host that reports a snapshot but is in none of its groups is ignored.
    """
    chosen: _Reported | None = None
    for reported in _newest_first(statuses):
        # An older one must be strictly safer.
        if reported.spare >= 0 and (chosen is None or reported.spare > chosen.spare):
            chosen = reported
        # It was complete on all of its hosts, so no older one tolerates more losses.
        if chosen is not None and reported.is_committed:
            break
    if chosen is None:
        return None
    sources = [
        SnapshotSource(host=host, endpoint=statuses[host][0])
        for group in chosen.groups
        for host in group.hosts
        if host in chosen.holders
    ]
    return SnapshotPlan(id=chosen.id, groups=chosen.groups, sources=tuple(sources))


def explain_loss(statuses: ReportedStatuses) -> str:
    """Explain why `choose_snapshot` finds nothing: what is lost and what survives of the newest snapshots."""
    found = [reported for reported in _newest_first(statuses) if reported.short()]
    if not found:
        hosts = f"none of the {len(statuses)} hosts that answer has one" if statuses else "no host answers"
        return f"there is no complete snapshot in host memory: {hosts}; training can only resume from a checkpoint"
    sentences = [_explain(reported) for reported in found[:MAX_EXPLAINED]]
    if len(found) > MAX_EXPLAINED:
        older = len(found) - MAX_EXPLAINED
        sentences.append(f"{older} older one{'s are' if older > 1 else ' is'} incomplete as well")
    return "no snapshot in host memory can be rebuilt. " + ". ".join(sentences)


def _explain(reported: _Reported) -> str:
    sentences, short = [], reported.short()
    for group in short:
        lost = [host for host in group.hosts if host not in reported.holders]
        left = [host for host in group.hosts if host in reported.holders]
        sentences.append(
            f"of a group of {len(group.hosts)} hosts {_count(group.parity)} may be lost, and "
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'}; {', '.join(left) or 'none'} survive"
            f"{'s' if len(left) < 2 else ''}"
        )
    num_intact = len(reported.groups) - len(short)
    rest = (
        f"; {num_intact} of its {len(reported.groups)} groups can be rebuilt"
        if len(reported.groups) > 1
        else ""
    )
    return f"the {format_snapshot_id(reported.id)}: {'; '.join(sentences)}{rest}"


def _count(hosts: int) -> str:
    return "none" if hosts == 0 else str(hosts)


def _newest_first(statuses: ReportedStatuses) -> list[_Reported]:
    # One layout has one id. Should hosts report an id with different groups, they count as different snapshots.
    found: dict[tuple[SnapshotId, tuple[ParityGroup, ...]], _Reported] = {}
    for host, status in _list_reports(statuses):
        reported = found.setdefault(
            (status.id, status.groups), _Reported(id=status.id, groups=status.groups, holders=set())
        )
        reported.holders.add(host)
        reported.is_committed |= status.phase is SnapshotPhase.COMMITTED
    return sorted(found.values(), key=lambda reported: reported.id, reverse=True)


def _list_reports(statuses: ReportedStatuses) -> Iterable[tuple[HostName, SnapshotStatus]]:
    return ((host, status) for host, (_, held) in statuses.items() for status in held)
