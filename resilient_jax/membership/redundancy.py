"""How many more hosts may be lost before the committed state is. Pure.

The state outlives the loss of a set of hosts if a member outside of the set has a complete copy, or if what the other
hosts have of a snapshot is enough to rebuild it. The measure is the largest n such that the state outlives the loss of
any n hosts, each with its agent, worker and snapshot server:

    n = copies + min over groups of max(0, spare + 1 - copies in the group) - 1

Copies are the members with a complete state, and `spare` is how many of a group's hosts that have the snapshot may be
lost. The state is lost with the fewest hosts when all copies are, and with them one more of a group than it can spare.
Without a snapshot the minimum is 0, without copies `copies` is. Of several snapshots the safest counts.

Where all workers are replaced after a loss, copies in them do not count. But if there is nothing else they are the
state, and n is 0.

Where members have the state in parts, such as blocks of a pipeline, it is lost with all that have some unit: in place
of the copies stand the holders of a unit, and the unit for which n is smallest counts.

Each of thousands of hosts reports each snapshot, so `RedundancyTally` keeps counts by group: a report costs the same
with any number of hosts.
"""

import collections
from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.doubt import is_newest, is_part_trusted
from resilient_jax.membership.facts import MembershipState, find_worker, list_counted_snapshots
from resilient_jax.protocol.generation import GenerationPhase, Member
from resilient_jax.protocol.host_status import HostStatus, WorkerStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPhase, SnapshotStatus
from resilient_jax.protocol.state_records import StatePart, are_parts_complete


class Redundancy(msgspec.Struct, frozen=True, kw_only=True):
    """What stands between a job's committed state and its loss.

    Attributes:
        losses: how many more hosts may be lost, whichever they are. 0: the next loss may be that of the state.
        step: the number of committed steps in that state.
        copies: how many members have a complete state; with a state in parts, each unit of it.
        is_in_parts: whether members have the state in parts.
        snapshot: the safest snapshot that can be rebuilt from the hosts' memory; None: there is none.
    """

    losses: int
    step: int
    copies: int
    is_in_parts: bool = False
    snapshot: SnapshotId | None = None


def measure_redundancy(state: MembershipState) -> Redundancy | None:
    """Return the redundancy of the committed state; None if no host has a state, or enough of one."""
    return RedundancyTally(state).measure()


def count_losses_left(state: MembershipState) -> int | None:
    """Return how many more hosts may be lost before the state is; None if there is no state."""
    redundancy = measure_redundancy(state)
    return redundancy.losses if redundancy is not None else None


def is_last_copy_without(state: MembershipState, members: tuple[Member, ...]) -> bool:
    """Return whether the next loss may be that of the state if only `members` of the generation are left."""
    left = change_fields(state.generation, members=members)
    return not count_losses_left(
        MembershipState(generation=left, hosts=state.hosts, phase_since_s=state.phase_since_s)
    )


class _HostShare(msgspec.Struct, frozen=True):
    """What one host has of the state: its snapshots, and after how many steps it has a complete copy, or a part.

    Attributes:
        step: steps of the copy or part; None: the host has neither.
        part: the part; None: the host has the whole state, or nothing.
        snapshots: snapshots that the host's server reports.
        is_replaced: whether the host's worker is ended, and so its copy or part lost, with the loss of any other
            member.
    """

    step: int | None = None
    part: StatePart | None = None
    snapshots: tuple[SnapshotStatus, ...] = ()
    is_replaced: bool = False


_NOTHING = _HostShare()


class _Coverage:
    """Which hosts of which groups have one snapshot, counted by group."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, ParityGroup], int] = {}
        """The number of holders of each group of which there is one."""
        self._copies: dict[tuple[int, ParityGroup], int] = {}
        """How many of them have a complete copy of the state, too."""
        self._spares: collections.Counter[int] = collections.Counter()
        """How many groups can spare so many further hosts; below 0: cannot be rebuilt."""
        self._spares_beside_copies: collections.Counter[int] = collections.Counter()
        """The same if all holders that have a complete copy were lost."""
        self._num_groups: collections.Counter[int] = collections.Counter()
        """How many holders report that the snapshot has so many groups."""

    @property
    def is_rebuildable(self) -> bool:
        """Whether every group has enough of its hosts."""
        return self._num_groups.keys() == {len(self._holders)} and min(self._spares) >= 0

    @property
    def smallest_spare(self) -> int:
        """How many hosts of the weakest group may be lost beside all that have a copy; below 0: these are too many."""
        return min(self._spares_beside_copies)

    def find_smallest_spare_beside(self, holders: Collection[SnapshotStatus]) -> int:
        """Return how many hosts of the weakest group may be lost beside these ones of its holders."""
        lost = collections.Counter((status.group_index, status.group) for status in holders)
        return min(
            group.parity - (len(group.hosts) - count) - lost[index, group]
            for (index, group), count in self._holders.items()
        )

    def count(self, status: SnapshotStatus, *, has_copy: bool, change: int) -> None:
        """Count a host in (`change` is 1) or out (-1)."""
        key = (status.group_index, status.group)
        _add(self._num_groups, status.num_groups, change)
        holders, copies = self._holders.pop(key, 0), self._copies.pop(key, 0)
        if holders:
            self._count_group(status.group, holders, copies, -1)
        holders += change
        copies += change if has_copy else 0
        if holders:
            self._holders[key], self._copies[key] = holders, copies
            self._count_group(status.group, holders, copies, 1)

    def _count_group(self, group: ParityGroup, holders: int, copies: int, change: int) -> None:
        spare = group.parity - (len(group.hosts) - holders)
        _add(self._spares, spare, change)
        _add(self._spares_beside_copies, spare - copies, change)


K = TypeVar("K")


def _add(counter: "collections.Counter[K]", key: K, change: int) -> None:
    counter[key] += change
    if not counter[key]:
        del counter[key]


class RedundancyTally:
    """The redundancy of a generation's state, kept up to date as hosts change."""

    def __init__(self, state: MembershipState) -> None:
        """Count all hosts; once more for each new generation, whose members the copies are."""
        self._state = state
        self._members = {member.host: member for member in state.generation.membership.members}
        self._receivers = set(state.generation.state.receivers)
        self._shares: dict[HostName, _HostShare] = {}
        self._copies: collections.Counter[int] = collections.Counter()
        """How many hosts have a complete state of each step."""
        self._by_part: dict[StatePart, dict[HostName, int]] = collections.defaultdict(dict)
        """The hosts that have the same part of the state, and the step of each."""
        self._replaced: collections.Counter[tuple[int, StatePart | None]] = collections.Counter()
        """How many hosts have each copy or part that is lost with the loss of any member."""
        self._kept: dict[SnapshotId, _Coverage] = collections.defaultdict(_Coverage)
        """By snapshot, the hosts that report it."""
        self._present: dict[GenerationNumber, _Coverage] = collections.defaultdict(_Coverage)
        """By generation, the hosts that report any snapshot of it."""
        self._reports: collections.Counter[SnapshotId] = collections.Counter()
        self._committed: collections.Counter[SnapshotId] = collections.Counter()
        """How many hosts report each snapshot, and how many as committed."""
        for host in state.hosts:
            self.look_at(host)

    @property
    def is_any_committed(self) -> bool:
        """Whether a host reports a committed snapshot."""
        return bool(self._committed)

    @property
    def is_any_rebuildable(self) -> bool:
        """Whether a snapshot can be rebuilt from the hosts that have reported it."""
        return any(coverage.is_rebuildable for coverage in self._kept.values())

    def look_at(self, host: HostName) -> None:
        """Count a host again, after its status has changed, appeared or disappeared."""
        status = self._state.hosts.get(host)
        share = self._describe(host, status) if status is not None else _NOTHING
        before = self._shares.pop(host, _NOTHING)
        if share != before:
            self._count(before, -1)
            self._count(share, 1)
            self._sort_by_part(host, before, share)
        if share != _NOTHING:
            self._shares[host] = share

    def _describe(self, host: HostName, status: HostStatus) -> _HostShare:
        snapshots = tuple(
            snapshot
            for snapshot in list_counted_snapshots(self._state.generation, status)
            if host in snapshot.group.hosts
        )
        member = self._members.get(host)
        worker = find_worker(self._state, member) if member is not None else None
        if worker is None or not self._has_newest(host, worker):
            return _HostShare(snapshots=snapshots)
        report, is_replaced = worker.report, not self._state.generation.membership.keeps_workers
        if report.held.holds_state:
            return _HostShare(report.held.step, None, snapshots, is_replaced)
        part = report.held.part if is_part_trusted(self._state.generation, report) else None
        return _HostShare(report.held.step if part is not None else None, part, snapshots, is_replaced)

    def _has_newest(self, host: HostName, worker: WorkerStatus) -> bool:
        """Return whether a member's worker has what the generation resumed from, or that of a later step."""
        generation, report = self._state.generation, worker.report
        if not is_newest(generation, report):
            return False
        # A receiver gives up what it has for the state that it fetches now.
        is_receiving = generation.phase is GenerationPhase.FORM and host in self._receivers
        return not is_receiving or (report.place.has_formed and report.generation == generation.number)

    def _count(self, share: _HostShare, change: int) -> None:
        has_copy = share.step is not None and share.part is None and not share.is_replaced
        if share.step is not None and has_copy:
            _add(self._copies, share.step, change)
        if share.step is not None and share.is_replaced:
            _add(self._replaced, (share.step, share.part), change)
        for status in share.snapshots:
            self._kept[status.id].count(status, has_copy=has_copy, change=change)
            self._reports[status.id] += change
            if status.phase is SnapshotPhase.COMMITTED:
                self._committed[status.id] += change
            if not self._committed[status.id]:
                del self._committed[status.id]
            if not self._reports[status.id]:
                del self._kept[status.id], self._reports[status.id]
        for generation, status in {status.id.generation: status for status in share.snapshots}.items():
            self._present[generation].count(status, has_copy=has_copy, change=change)

    def _sort_by_part(self, host: HostName, before: _HostShare, share: _HostShare) -> None:
        if before.part is not None and not before.is_replaced:
            del self._by_part[before.part][host]
            if not self._by_part[before.part]:
                del self._by_part[before.part]
        if share.part is not None and share.step is not None and not share.is_replaced:
            self._by_part[share.part][host] = share.step

    def measure(self) -> Redundancy | None:
        """Return the redundancy of the committed state; None if no host has a state, or enough of one."""
        copies = self._copies.total()
        found = self._list_candidates()
        if not copies and are_parts_complete(self._by_part):
            return self._measure_parts(found)
        if not copies and not found:
            return self._measure_replaced()
        # The hosts to be lost beside all copies until one group cannot be rebuilt.
        more, snapshot = max(
            ((max(0, coverage.smallest_spare + 1), id) for id, coverage in found.items()), default=(0, None)
        )
        return Redundancy(
            losses=copies + more - 1,
            step=max(self._copies) if copies else snapshot.step if snapshot is not None else 0,
            copies=copies,
            snapshot=snapshot,
        )

    def _measure_replaced(self) -> Redundancy | None:
        """Return the redundancy of a state that workers alone have, all of which are ended with any of them."""
        complete = {step: count for (step, part), count in self._replaced.items() if part is None}
        if complete:
            return Redundancy(losses=0, step=max(complete), copies=sum(complete.values()))
        parts = [part for _, part in self._replaced if part is not None]
        if not are_parts_complete(parts):
            return None
        return Redundancy(losses=0, step=max(step for step, _ in self._replaced), copies=1, is_in_parts=True)

    def _measure_parts(self, found: Mapping[SnapshotId, _Coverage]) -> Redundancy:
        """Return the redundancy of a state of which each unit is on some member."""
        holders = self._list_unit_holders()

        def count_fatal(id: SnapshotId, coverage: _Coverage) -> int:
            """Return with how many hosts both some unit and the snapshot may be lost."""
            return min(
                len(hosts) + max(0, 1 + coverage.find_smallest_spare_beside(self._list_statuses(hosts, id)))
                for hosts in holders
            )

        fewest = min(map(len, holders))
        fatal, snapshot = max(
            ((count_fatal(id, coverage), id) for id, coverage in found.items()), default=(fewest, None)
        )
        return Redundancy(
            losses=fatal - 1,
            step=max(max(steps.values()) for steps in self._by_part.values()),
            copies=fewest,
            is_in_parts=True,
            snapshot=snapshot,
        )

    def _list_unit_holders(self) -> set[frozenset[HostName]]:
        """Return the sets of hosts that have the same units, for all units."""
        # From one end of a run to the next all units are on the same hosts.
        ends = {end for part in self._by_part for run in part.runs for end in run}
        num_units = max(ends)
        return {
            frozenset(
                host
                for part, hosts in self._by_part.items()
                if any(first <= unit < end for first, end in part.runs)
                for host in hosts
            )
            for unit in ends - {num_units}
        }

    def _list_statuses(self, hosts: Collection[HostName], id: SnapshotId) -> list[SnapshotStatus]:
        """Return what these hosts have of a snapshot, one status each, by what `_list_candidates` goes by."""
        is_newest = id == max(self._committed, default=None)

        def fits(other: SnapshotId) -> bool:
            return other.generation == id.generation if is_newest else other == id

        by_host = (
            next((status for status in self._shares[host].snapshots if fits(status.id)), None)
            for host in hosts
        )
        return [status for status in by_host if status is not None]

    def _list_candidates(self) -> Mapping[SnapshotId, _Coverage]:
        """Return the snapshots that training may resume from, newest first, down to one that is committed.

        Hosts report one after the other, and a snapshot is committed only once all hosts of its groups have it; a host
        that reports another snapshot of that generation has been there all the time. Else the measure would fall and
        rise with every snapshot.
        """
        newest = max(self._committed, default=None)
        found: dict[SnapshotId, _Coverage] = {}
        for id in sorted(self._kept, reverse=True):
            coverage = self._present[id.generation] if id == newest else self._kept[id]
            if coverage.is_rebuildable:
                found[id] = coverage
            if found and id in self._committed:
                break
        return found
