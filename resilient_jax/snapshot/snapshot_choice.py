"""The choice of the snapshot that training resumes from, or the reason why none can be rebuilt; pure.

A snapshot can be rebuilt if in every group of n hosts with m parity at least n - m have it complete, that is their
part and the parity that they keep: each stripe then has n - m of its shards, from which the others can be decoded.
"""

import dataclasses
from collections.abc import Mapping

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
    num_groups: int
    groups: dict[int, ParityGroup] = dataclasses.field(default_factory=dict)
    """By index; without those of which no host is left."""
    holders: set[HostName] = dataclasses.field(default_factory=set)
    is_committed: bool = False

    @property
    def num_lost_groups(self) -> int:
        """Number of groups of which no host is left."""
        return self.num_groups - len(self.groups)

    @property
    def spare(self) -> int:
        """Number of further hosts, any of them, that may be lost; negative if the snapshot cannot be rebuilt."""
        if self.num_lost_groups:
            return -1
        return min(
            group.parity - sum(host not in self.holders for host in group.hosts)
            for group in self.groups.values()
        )

    def add(self, host: HostName, status: SnapshotStatus) -> None:
        """Count a host that has the snapshot complete."""
        if host not in status.group.hosts:
            return
        # All hosts compute the same layout. Should one report another, its part fits to none of the others.
        known = self.groups.setdefault(status.group_index, status.group)
        if status.group == known and status.num_groups == self.num_groups:
            self.holders.add(host)
            self.is_committed |= status.phase is SnapshotPhase.COMMITTED

    def short(self) -> list[ParityGroup]:
        """Return the groups that have lost more hosts than they have parity, and not all."""
        return [
            group
            for _, group in sorted(self.groups.items())
            if sum(host not in self.holders for host in group.hosts) > group.parity
        ]


def choose_snapshot(statuses: ReportedStatuses) -> SnapshotPlan | None:
    """Return the newest snapshot that can be rebuilt, with all hosts that have it complete, or None.

    A snapshot that was never complete on all its hosts may tolerate fewer further losses than the one before, which is
    then the better choice, since training has no other snapshot until the next one is committed.

    A host that reports a snapshot with a group that it is not in is ignored.
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
    groups = tuple(group for _, group in sorted(chosen.groups.items()))
    sources = tuple(
        SnapshotSource(host=host, endpoint=statuses[host][0])
        for group in groups
        for host in group.hosts
        if host in chosen.holders
    )
    return SnapshotPlan(id=chosen.id, groups=groups, sources=sources)


def explain_loss(statuses: ReportedStatuses) -> str:
    """Explain why `choose_snapshot` finds nothing: what is lost and what survives of the newest snapshots."""
    found = [reported for reported in _newest_first(statuses) if reported.spare < 0]
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
    if reported.num_lost_groups:
        sentences.append(f"of {reported.num_lost_groups} of its {reported.num_groups} groups no host is left")
    num_intact = len(reported.groups) - len(short)
    rest = (
        f"; {num_intact} of its {reported.num_groups} groups can be rebuilt"
        if reported.num_groups > 1
        else ""
    )
    return f"the {format_snapshot_id(reported.id)}: {'; '.join(sentences)}{rest}"


def _count(hosts: int) -> str:
    return "none" if hosts == 0 else str(hosts)


def _newest_first(statuses: ReportedStatuses) -> list[_Reported]:
    found: dict[SnapshotId, _Reported] = {}
    for host, (_, held) in statuses.items():
        for status in held:
            if status.id not in found:
                found[status.id] = _Reported(id=status.id, num_groups=status.num_groups)
            found[status.id].add(host, status)
    return sorted(found.values(), key=lambda reported: reported.id, reverse=True)
