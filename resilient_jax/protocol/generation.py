"""The generation: what a job's hosts have agreed on. With the statuses of hosts it is the job's complete state.

The leader owns the `Generation`, and a host's agent its `HostStatus`. Nothing else is needed to continue, so any agent
can take over as leader by reading them.
"""

import enum
import functools

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat, WorldId
from resilient_jax.protocol.dropped_worker import DroppedWorker
from resilient_jax.protocol.plan_records import PlanAxes, PlanConstants
from resilient_jax.protocol.raised_error import RaisedError
from resilient_jax.protocol.record_parts import RecordPart
from resilient_jax.protocol.recovery_records import JobHistory, NeededHosts, RecoveryDecision
from resilient_jax.protocol.slow_hosts import SlownessRecord
from resilient_jax.protocol.snapshots import (
    Protection,
    SnapshotId,
    SnapshotPlan,
    VoidSnapshots,
)
from resilient_jax.protocol.state_records import NextMembers, PartHolder, StateLoss, StateSource


class GenerationPhase(enum.StrEnum):
    """How far a generation is. Within one number phases only move down this list."""

    PAUSE = "pause"
    """Planned change: members report after which step they can stop."""
    BOUNDARY = "boundary"
    """Planned change: members run to the agreed step and stop before it."""
    QUIESCE = "quiesce"
    """Unplanned change: collectives are aborted, members unwind and acknowledge."""
    FORM = "form"
    """Membership is settled: members build the world and fetch the state."""
    ACTIVE = "active"
    """Members train."""
    FINISHED = "finished"
    """The job has ended; nothing follows."""


class WorldChange(enum.StrEnum):
    """How a generation's world is built from the one before."""

    SHRINK = "shrink"
    """In place: backend, device arrays and programs stay; the mesh gets smaller or stays."""
    GROW = "grow"
    """In place: as a shrink, and workers that have taken spare seats of the same world are members from now on."""
    REFORM = "reform"
    """A new coordination service; the backend is dropped and rebuilt in the same process."""


class SeatId(msgspec.Struct, frozen=True):
    """A seat of any world of a job.

    Attributes:
        world: the number of the world's coordination service.
        seat: the place in that world.
    """

    world: WorldId
    seat: Seat


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in a generation.

    Attributes:
        host: the worker's host.
        incarnation: the number of the worker's start; a later start on this host has a greater one.
        seat: the worker's place in the world, which no other worker ever takes.
        endpoint: the address where the worker serves state and programs; empty: not reported yet.
    """

    host: HostName
    incarnation: Incarnation
    seat: Seat
    endpoint: str = ""


class JobOutcomeKind(enum.StrEnum):
    """Why a job ended."""

    DONE = "done"
    USER_ERROR = "user_error"
    STATE_LOST = "state_lost"
    TOO_FEW_HOSTS = "too_few_hosts"
    INTERRUPTED = "interrupted"


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, for the last line that the user reads and the exit code.

    Attributes:
        kind: why the job ended.
        exit_code: the exit code of every agent; see `errors.ExitCode`.
        host: the host that reported the outcome; None: no single host did.
        message: what the user reads.
    """

    kind: JobOutcomeKind
    exit_code: int
    host: HostName | None = None
    message: str = ""


class Membership(RecordPart, frozen=True, kw_only=True, dict=True):
    """The workers that train, those that wait, and the world in which they meet.

    Attributes:
        change: how the world is built from the one before.
        world: the number of the coordination service that the members share; unchanged by a change in place.
        num_seats: the seats of that world, taken or not.
        next_seat: the first seat that no worker was given; later seats are free, too.
        service_address: address of the world's coordination service; empty: not known yet, or the service has ended.
        keeps_workers: whether the workers of a world outlive the loss of one of them.
        members: the workers that train, in order of their seats.
        max_members: how many hosts may be members, as of the last formation; other hosts are spares.
        newcomers: the workers, and standbys, that were given a seat while others train; newcomers join, or may.
        spares: the hosts for which there was no place when the last seat of a newcomer was given.
        dropped_workers: the workers that were left out before these had answered.
    """

    change: WorldChange = WorldChange.REFORM
    world: WorldId = WorldId(0)
    num_seats: int = 0
    next_seat: Seat = Seat(0)
    service_address: str = ""
    keeps_workers: bool = True
    members: tuple[Member, ...] = ()
    max_members: int = 0
    newcomers: tuple[Member, ...] = ()
    spares: tuple[HostName, ...] = ()
    dropped_workers: tuple[DroppedWorker, ...] = ()

    def find_member(self, host: HostName) -> Member | None:
        """Return this host's worker among the members, or None."""
        return self._members_by_host.get(host)

    def find_newcomer(self, host: HostName, incarnation: Incarnation) -> Member | None:
        """Return this worker, or standby, of the host among the newcomers, or None."""
        return self._newcomers_by_worker.get((host, incarnation))

    @functools.cached_property
    def _members_by_host(self) -> dict[HostName, Member]:
        return {m.host: m for m in self.members}

    @functools.cached_property
    def _newcomers_by_worker(self) -> dict[tuple[HostName, Incarnation], Member]:
        return {(m.host, m.incarnation): m for m in self.newcomers}


class JobShape(RecordPart, frozen=True, kw_only=True):
    """Who computes which part of the model. Empty fields are chosen by each worker, and are equal on all.

    Attributes:
        stage_hosts: the hosts of a pipeline's replicas in their order, with those whose stages are kept for them while
            they are away. Empty: the members, in an order by which the fewest blocks move.
        earlier_stage_hosts: the hosts of replicas before, oldest first: those of the first generation in their order.
            Each order follows from the one before it. Empty: there were none, or `stage_hosts` are in theirs.
        plan_axes: names and sizes of the planned axes that every worker takes. Empty: each worker finds the best plan.
        plan_constants: constants of the cost model by which workers plan. Empty: those that each was given.
    """

    stage_hosts: tuple[HostName, ...] = ()
    earlier_stage_hosts: tuple[tuple[HostName, ...], ...] = ()
    plan_axes: PlanAxes = ()
    plan_constants: PlanConstants = ()


class PlannedBoundary(RecordPart, frozen=True, kw_only=True):
    """A planned change of members, while they run to the step before which they stop.

    Attributes:
        boundary_step: in a planned change, the first step that is not run before the change.
        ends_job: whether the job ends at the boundary, before which members save checkpoints: all got a notice.
        parts_stay: whether the members after the boundary have all of the state in parts: no snapshot is waited for.
        next_members: members after a planned change for which blocks are copied before; None: nothing is copied.
    """

    boundary_step: int | None = None
    ends_job: bool = False
    parts_stay: bool = False
    next_members: NextMembers | None = None


class ResumedState(RecordPart, frozen=True, kw_only=True):
    """The state that the members resume from, and which states do not count.

    Attributes:
        step: the newest step committed by any member when the generation was formed; the members resume from it.
        sources: members that have the state of `step`; of thousands only some.
        receivers: the members that must fetch that state from a source first.
        part_holders: the members that together have the state in memory, each a part: of `step`, or of one step less,
            which they then finish first. Receivers have no part yet; there are no sources.
        snapshot: the snapshot that has the state of `step`, if members do not have it; then there are no sources. With
            a state in parts, the snapshot to go back to. None again once all members have resumed from it.
        state_loss: why the members resume from a checkpoint, or restart; None again once all members have resumed.
        trusted_step: states of more steps are in doubt; None again once all members have resumed from another state.
        unreadable_snapshots: the snapshots that turned out to be corrupt beyond their parity.
        void_snapshots: the snapshots that hosts which computed wrongly may have touched.
        protection: when the members take snapshots, as decided when the generation was formed.
        initial_generation: generation of the job's start with its initial state; snapshots of earlier ones are void.
    """

    step: int = 0
    sources: tuple[StateSource, ...] = ()
    receivers: tuple[HostName, ...] = ()
    part_holders: tuple[PartHolder, ...] = ()
    snapshot: SnapshotPlan | None = None
    state_loss: StateLoss | None = None
    trusted_step: int | None = None
    unreadable_snapshots: tuple[SnapshotId, ...] = ()
    void_snapshots: tuple[VoidSnapshots, ...] = ()
    protection: Protection = Protection()
    initial_generation: GenerationNumber = GenerationNumber(0)

    @property
    def is_in_parts(self) -> bool:
        """Whether members have the state in memory, each a part."""
        return bool(self.part_holders)


class FailedAttempts(RecordPart, frozen=True, kw_only=True):
    """What has failed since members last finished a step, and who is suspected.

    Attributes:
        attempts: how many times in a row a world was built at this step without finishing it.
        are_parts_doubtful: whether parts of the state may not fit together, after a failure that no death explains, and
            before all members have finished a step since.
        failed_host: the host that reported the last failed attempt; None: no attempt failed.
        suspects: the hosts that reported those failed attempts, one each; any of them may be the cause.
        taken_out: the host that is quarantined with this number, after failed attempts or as slow; None: no host.
        separated: the hosts that were taken out because they and other members cannot reach each other: their services
            are not used. None any more once all members have finished a step.
        failure_text: the error of the last failed attempt, for the user if no attempt succeeds.
        raised: errors of scripts that the leader has noted: the workers that raised them may be started again.
        hang: what hung, for which all hosts keep the stacks of their workers before these unwind; empty: nothing.
    """

    attempts: int = 0
    are_parts_doubtful: bool = False
    failed_host: HostName | None = None
    suspects: tuple[HostName, ...] = ()
    taken_out: HostName | None = None
    separated: tuple[HostName, ...] = ()
    failure_text: str = ""
    raised: tuple[RaisedError, ...] = ()
    hang: str = ""


class LeaderNotes(RecordPart, frozen=True, kw_only=True):
    """What leaders have measured and chosen. It changes while members train, without a new phase.

    Attributes:
        progress: the newest committed step that the leader saw, once a complete state was known; some seconds old.
        losses_left: how many more hosts may be lost before the state is. 0: redundancy is urgent. None: no state.
        decision: the last choice at a change of members, which every leader obeys; None: there was none to make.
        history: what leaders have measured so far, on which the next decision rests.
        slowness: what leaders have done about slow hosts.
        needed_hosts: how many hosts training needs, as members have found; with fewer the job waits for others.
    """

    progress: int = 0
    losses_left: int | None = None
    decision: RecoveryDecision | None = None
    history: JobHistory = JobHistory()
    slowness: SlownessRecord = SlownessRecord()
    needed_hosts: NeededHosts = NeededHosts()


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's hosts have agreed on. Only the leader writes it, by a transaction that also fences old leaders.

    Attributes:
        number: the generation's number; the number grows with every change of membership.
        phase: how far the change of membership is.
        reason: why the membership changed.
        outcome: how the job ended; None: the job has not ended.
    """

    number: GenerationNumber
    phase: GenerationPhase
    reason: str = ""
    outcome: JobOutcome | None = None
    membership: Membership = Membership()
    shape: JobShape = JobShape()
    planned: PlannedBoundary = PlannedBoundary()
    state: ResumedState = ResumedState()
    failures: FailedAttempts = FailedAttempts()
    record: LeaderNotes = LeaderNotes()
