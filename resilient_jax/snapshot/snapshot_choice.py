"""Which snapshot training can go on from, and why none, in words: pure, from what the servers report.

A snapshot can be rebuilt if in every group of n hosts with m parity at least n - m have it complete, that is their
part and the parity that they keep: each stripe then has n - m of its shards, which give the rest.
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

ReportedStatuses = Mapping[HostName, tuple[str, tuple[SnapshotStatus, ...]]]
"""Of every host that answers: where its snapshot server listens, and what is complete there."""

MAX_EXPLAINED = 2
"""As many as a host has slots: the newest snapshots that there can be."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Reported:
    """A snapshot, who has it complete, and whether one of them knows that all had."""

    id: SnapshotId
    groups: tuple[ParityGroup, ...]
    holders: set[HostName]
    is_committed: bool = False

    @property
    def spare(self) -> int:
        """So many more hosts may be lost, whichever; negative: it cannot be rebuilt."""
        return min(
            group.parity - sum(host not in self.holders for host in group.hosts) for group in self.groups
        )

    def short(self) -> list[ParityGroup]:
        """The groups that have lost more hosts than they have parity."""
        return [
            group
            for group in self.groups
            if sum(host not in self.holders for host in group.hosts) > group.parity
        ]


def choose_snapshot(statuses: ReportedStatuses) -> SnapshotPlan | None:
    """The newest snapshot that can be rebuilt, with everyone who has it complete; None if there is none.

    One that was never complete on all its hosts may stand fewer further losses than the one before, which is the better
    choice then: what training goes on from is all there is until the next one is safe.

    A host that reports it and is in none of its groups counts for nothing.
    """
    chosen: _Reported | None = None
    for reported in _newest_first(statuses):
        if reported.spare >= 0 and (chosen is None or reported.spare > chosen.spare):
            chosen = reported
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
    """Why `choose_snapshot` finds nothing: what is lost and what survives, of the newest snapshots, for the user."""
    found = [reported for reported in _newest_first(statuses) if reported.short()]
    if not found:
        hosts = f"none of the {len(statuses)} hosts that answer has one" if statuses else "no host answers"
        return f"there is no complete snapshot in host memory: {hosts}; training can go on from a checkpoint only"
    sentences = [_explain(reported) for reported in found[:MAX_EXPLAINED]]
    if len(found) > MAX_EXPLAINED:
        older = len(found) - MAX_EXPLAINED
        sentences.append(f"{older} older one{'s are' if older > 1 else ' is'} incomplete as well")
    return "no snapshot in host memory can be rebuilt. " + ". ".join(sentences)


def _explain(reported: _Reported) -> str:
    texts, short = [], reported.short()
    for group in short:
        lost = [host for host in group.hosts if host not in reported.holders]
        left = [host for host in group.hosts if host in reported.holders]
        texts.append(
            f"of a group of {len(group.hosts)} hosts {_count(group.parity)} may be lost, and "
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'}; {', '.join(left) or 'none'} survive"
            f"{'s' if len(left) < 2 else ''}"
        )
    whole = len(reported.groups) - len(short)
    rest = (
        f"; {whole} of its {len(reported.groups)} groups can be rebuilt" if len(reported.groups) > 1 else ""
    )
    return f"{name_snapshot(reported.id)}: {'; '.join(texts)}{rest}"


def name_snapshot(snapshot_id: SnapshotId) -> str:
    """A snapshot in a message for people.

    >>> name_snapshot(SnapshotId(step=12, generation=GenerationNumber(3)))
    'the snapshot of step 12 (generation 3)'
    """
    return f"the snapshot of step {snapshot_id.step} (generation {snapshot_id.generation})"


def _count(hosts: int) -> str:
    return "none" if hosts == 0 else str(hosts)


def _newest_first(statuses: ReportedStatuses) -> list[_Reported]:
    # One layout has one id; should hosts report an id with different groups, none counts for the other's.
    found: dict[tuple[SnapshotId, tuple[ParityGroup, ...]], _Reported] = {}
    for host, status in _each(statuses):
        reported = found.setdefault(
            (status.id, status.groups), _Reported(id=status.id, groups=status.groups, holders=set())
        )
        reported.holders.add(host)
        reported.is_committed |= status.phase is SnapshotPhase.COMMITTED
    return sorted(found.values(), key=lambda reported: reported.id, reverse=True)


def _each(statuses: ReportedStatuses) -> Iterable[tuple[HostName, SnapshotStatus]]:
    return ((host, status) for host, (_, held) in statuses.items() for status in held)
