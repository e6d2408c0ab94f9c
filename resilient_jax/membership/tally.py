"""What the rules count over all hosts, kept up to date host by host. Pure.

The rules read the statuses of all hosts. Of most changes of one status, these counts already say that no rule can
decide anything new by it, at the same cost with any number of hosts: `machine` asks them first.
"""

import collections
import enum

from resilient_jax.ids import HostName
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.disruptions import find_disruption_by
from resilient_jax.membership.facts import (
    MembershipState,
    awaits_snapshot_report,
    find_worker,
    has_taken_seat,
    is_cut_off,
    is_idle,
    is_joiner,
    is_unreplaced,
    owes_answer,
)
from resilient_jax.membership.hangs import HANGING_PHASES
from resilient_jax.membership.next_members import is_wait_too_long_for
from resilient_jax.membership.reachability import find_reach_report
from resilient_jax.membership.redundancy import RedundancyTally
from resilient_jax.membership.spare_hosts import count_missing_places
from resilient_jax.membership.worker_errors import find_error
from resilient_jax.protocol.generation import GenerationPhase, Member
from resilient_jax.protocol.host_status import HostStatus, WorkerStatus
from resilient_jax.protocol.snapshots import SnapshotPhase


class Fact(enum.Enum):
    """Something that is true of a host in the present generation."""

    __hash__ = object.__hash__  # several times faster than that of an enum, and called for each status

    LOST = enum.auto()
    """It is a member's host, and the member is dead or stopped."""
    LIVE = enum.auto()
    """It is a member's host, and the member lives; so for all facts up to DONE."""
    OVERDUE = enum.auto()
    """The member reports a task that takes longer than its deadline."""
    DISRUPTIVE = enum.auto()
    """The member reports what ends the generation."""
    WAITED_FOR = enum.auto()
    """The member has not reported for this number that it is idle."""
    COMPILING = enum.auto()
    """The member is waited for, and compiles: it cannot unwind now."""
    IDLE = enum.auto()
    MUST_LEAVE = enum.auto()
    """The member cannot wait for copies that others make."""
    OUT_OF_TIME = enum.auto()
    """The member's host got a notice, and must leave now."""
    INTERRUPTED = enum.auto()
    """Its user pressed Ctrl-C."""
    PAUSED = enum.auto()
    """The member has answered the pause of this number."""
    FORMED = enum.auto()
    """The member has joined the world of this number."""
    STEPPED = enum.auto()
    """The member has finished a step, or its training."""
    DONE = enum.auto()
    HOLDS_COPY = enum.auto()
    """A live member has the complete state."""
    OWES_REPORT = enum.auto()
    """The host may have a snapshot that its status does not have yet."""
    HAS_NEW_SNAPSHOT = enum.auto()
    """It is a member's host, with a committed snapshot of this generation."""
    IS_LEFT_SOURCE = enum.auto()
    """It has a part of the snapshot that the members resumed from, and is no member's."""
    HOLDS_STATE = enum.auto()
    """Its worker has reported that it has the complete state, whether it lives or not."""
    RAISED = enum.auto()
    """Its worker reports an error of the script's that the leader has not noted yet."""
    JOINER = enum.auto()
    """Its worker is ready to join."""
    REGULAR_JOINER = enum.auto()
    """The same, and it is no spare."""
    SEATED_JOINER = enum.auto()
    """The same, with a seat of the present world that it has taken."""
    UNREPLACED = enum.auto()
    """Its worker lives, and is of a world that was left."""
    SEPARATED = enum.auto()
    """It is a member's host, and reports that it does not reach another."""
    SERVES_WORLD = enum.auto()
    """It runs the coordination service of the present world."""


class MembershipTally:
    """The counts for one generation."""

    def __init__(self, state: MembershipState) -> None:
        """Count all hosts; needed again for each new generation. `state.hosts` may change afterwards."""
        generation = state.generation
        self._state = state
        self._dropped = {d.host: d for d in generation.membership.dropped_workers}
        snapshot = generation.state.snapshot
        self._sources = {source.host for source in snapshot.sources} if snapshot is not None else set()
        self._facts: dict[HostName, frozenset[Fact]] = {}
        self._counts: collections.Counter[Fact] = collections.Counter()
        self._steps: dict[HostName, int] = {}
        self._step_counts: collections.Counter[int] = collections.Counter()
        """How many hosts have reported each step as their newest."""
        self._redundancy = RedundancyTally(state)
        for host in state.hosts.keys() | {member.host for member in generation.membership.members}:
            self._count(host)

    def look_at(self, host: HostName) -> None:
        """Count a host again, after its status has changed, appeared or disappeared."""
        self._count(host)
        self._redundancy.look_at(host)

    def _count(self, host: HostName) -> None:
        status = self._state.hosts.get(host)
        before, facts = self._facts.get(host, frozenset()), self._find_facts(host, status)
        self._facts[host] = facts
        for fact in before - facts:
            self._counts[fact] -= 1
        for fact in facts - before:
            self._counts[fact] += 1
        self._count_step(host, status)

    def _count_step(self, host: HostName, status: HostStatus | None) -> None:
        if (before := self._steps.pop(host, None)) is not None:
            self._step_counts[before] -= 1
            if not self._step_counts[before]:
                del self._step_counts[before]
        if status is None:
            return
        member = self._state.generation.membership.find_member(host)
        worker = find_worker(self._state, member) if member is not None else None
        step = self._steps[host] = max(
            status.progress.step, worker.report.held.step if worker is not None else 0
        )
        self._step_counts[step] += 1

    def _find_facts(self, host: HostName, status: HostStatus | None) -> frozenset[Fact]:
        member = self._state.generation.membership.find_member(host)
        worker = find_worker(self._state, member) if member is not None else None
        found: list[Fact] = []
        if member is not None and worker is None:
            found.append(Fact.LOST)
        if member is not None and worker is not None:
            found += self._find_member_facts(member, worker)
        if status is not None:
            found += self._find_host_facts(status, is_member=member is not None)
        return frozenset(found)

    def _find_member_facts(self, member: Member, worker: WorkerStatus) -> list[Fact]:
        generation, report = self._state.generation, worker.report
        is_current = report.generation == generation.number
        is_waited_for = not is_idle(worker) or report.generation < generation.number
        facts = {
            Fact.LIVE: True,
            Fact.DISRUPTIVE: find_disruption_by(generation, member, worker) is not None,
            Fact.OVERDUE: report.overdue is not None,
            Fact.WAITED_FOR: is_waited_for,
            Fact.COMPILING: is_waited_for and report.is_compiling,
            Fact.IDLE: is_idle(worker),
            Fact.PAUSED: is_current and report.earliest_stop_step is not None,
            Fact.FORMED: is_current and report.place.has_formed,
            Fact.STEPPED: report.place.has_finished_step or report.is_done,
            Fact.DONE: report.is_done,
            Fact.HOLDS_COPY: report.held.holds_state,
        }
        return [fact for fact, is_true in facts.items() if is_true]

    def _find_host_facts(self, status: HostStatus, *, is_member: bool) -> list[Fact]:
        generation, host = self._state.generation, status.host
        joins = host not in self._state.quarantined and is_joiner(generation, status, self._dropped.get(host))
        facts = {
            Fact.OWES_REPORT: owes_answer(generation, status)
            or (is_member and awaits_snapshot_report(status)),
            Fact.HAS_NEW_SNAPSHOT: is_member
            and any(
                s.id.generation == generation.number and s.phase is SnapshotPhase.COMMITTED
                for s in status.snapshots
            ),
            Fact.MUST_LEAVE: is_member and is_wait_too_long_for(self._state, host),
            Fact.OUT_OF_TIME: is_member and status.is_out_of_time,
            Fact.INTERRUPTED: status.is_interrupted,
            Fact.IS_LEFT_SOURCE: not is_member and host in self._sources,
            Fact.HOLDS_STATE: status.worker is not None and status.worker.report.held.holds_state,
            Fact.RAISED: find_error(generation, status) is not None,
            Fact.JOINER: joins,
            Fact.REGULAR_JOINER: joins and not status.is_spare,
            Fact.SEATED_JOINER: joins and has_taken_seat(generation, status),
            Fact.UNREPLACED: is_unreplaced(status, self._dropped.get(host)),
            Fact.SEPARATED: find_reach_report(generation, status) is not None,
            Fact.SERVES_WORLD: not is_cut_off(self._state, host)
            and any(
                (s.world, s.address) == (generation.membership.world, generation.membership.service_address)
                for s in status.services
            ),
        }
        return [fact for fact, is_true in facts.items() if is_true]

    # What the counts say.

    def may_decide(self, waited_s: float, config: MembershipConfig) -> bool:
        """Return whether the rules may decide something that they have not decided before.

        Wrong only in one direction: False means that they decide nothing as long as these hosts and counts stay.

        Args:
            waited_s: time since the last decision.
        """
        if self.is_over():
            return True
        counts, num_members = self._counts, len(self._state.generation.membership.members)
        match self._state.generation.phase:
            case GenerationPhase.QUIESCE:
                if counts[Fact.WAITED_FOR]:
                    return self._may_leave_out_late(waited_s, config)
                return self._may_settle(waited_s, config)
            case GenerationPhase.PAUSE:
                return counts[Fact.PAUSED] == num_members or bool(counts[Fact.MUST_LEAVE])
            case GenerationPhase.BOUNDARY:
                return counts[Fact.IDLE] == num_members and self._may_settle(waited_s, config)
            case GenerationPhase.FORM:
                return counts[Fact.FORMED] == num_members or waited_s > config.forming_timeout_s
            case GenerationPhase.ACTIVE:
                return counts[Fact.STEPPED] == num_members
            case GenerationPhase.FINISHED:
                return False

    def is_over(self) -> bool:
        """Return whether the generation, or the job, must end now."""
        generation, counts = self._state.generation, self._counts
        if any(counts[fact] for fact in (Fact.RAISED, Fact.LOST, Fact.OUT_OF_TIME, Fact.SEPARATED)):
            return True
        if counts[Fact.INTERRUPTED] and counts[Fact.INTERRUPTED] == len(self._state.hosts):
            return True
        # While members unwind, their reports still have the failure that they unwind because of.
        if generation.phase is GenerationPhase.QUIESCE:
            return False
        if counts[Fact.OVERDUE] and generation.phase in HANGING_PHASES:
            return True
        is_done = generation.phase is GenerationPhase.ACTIVE and counts[Fact.DONE] == len(
            generation.membership.members
        )
        return is_done or bool(counts[Fact.DISRUPTIVE]) or self._lacks_service()

    def _lacks_service(self) -> bool:
        generation, counts = self._state.generation, self._counts
        if counts[Fact.SERVES_WORLD] or not generation.membership.service_address:
            return False
        return generation.phase is GenerationPhase.FORM or (
            generation.phase is GenerationPhase.ACTIVE
            and counts[Fact.STEPPED] < len(generation.membership.members)
        )

    def _may_leave_out_late(self, waited_s: float, config: MembershipConfig) -> bool:
        if self._counts[Fact.COMPILING] and waited_s <= config.compile_timeout_s:
            return False
        return waited_s > min(config.quiesce_timeout_s, config.compile_timeout_s)

    def _may_settle(self, waited_s: float, config: MembershipConfig) -> bool:
        """Return whether the members, which are all idle, and those that join may be enough to go on."""
        generation, counts = self._state.generation, self._counts
        if generation.failures.attempts > config.max_collective_retries:
            return True
        if counts[Fact.OWES_REPORT]:
            return False
        # Where the state is in doubt, no host is waited for that may bring one back.
        is_in_doubt = generation.state.trusted_step is not None
        if generation.membership.members or is_in_doubt or waited_s > config.start_timeout_s:
            return True
        if generation.membership.world == 0 and not self._exists_state():
            return counts[Fact.REGULAR_JOINER] >= max(config.num_hosts, config.min_hosts, 1)
        if waited_s > config.regroup_grace_s:
            return True
        # All are waited for that are expected to come; standbys that all are in the world already wait for each other.
        hosts, quarantined = self._state.hosts, self._state.quarantined
        expected = config.num_hosts - count_missing_places(self._state)
        if config.replaces_workers and generation.record.progress > 0:
            expected = min(config.num_hosts, len(hosts) - sum(host in hosts for host in quarantined))
        can_go_on_in_place = counts[Fact.SEATED_JOINER] > 0 and not counts[Fact.UNREPLACED]
        return counts[Fact.JOINER] >= expected or (config.replaces_workers and can_go_on_in_place)

    def _exists_state(self) -> bool:
        return bool(self._counts[Fact.HOLDS_STATE]) or self._redundancy.is_any_rebuildable

    def is_snapshot_released(self) -> bool:
        """Return whether the snapshot that the members resumed from is not needed any more; as
        `facts.is_snapshot_needed`.
        """
        counts = self._counts
        is_safe = counts[Fact.HAS_NEW_SNAPSHOT] or counts[Fact.HOLDS_COPY]
        return bool(is_safe) or not counts[Fact.IS_LEFT_SOURCE]

    def count_losses_left(self) -> int | None:
        """Return how many more hosts may be lost before the state is; None if there is no state."""
        redundancy = self._redundancy.measure()
        return redundancy.losses if redundancy is not None else None

    def find_recoverable_step(self) -> int:
        """Return what `facts.find_recoverable_step` does."""
        progress = self._state.generation.record.progress
        if progress > 0 or self._redundancy.is_any_committed or self._exists_state():
            return max(progress, max(self._step_counts, default=0))
        return 0
