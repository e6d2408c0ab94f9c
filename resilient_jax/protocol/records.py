"""The records of a job in the store, which are the job's complete state.

A host's agent owns its `HostStatus` (bound to its lease: no lease, no status). The leader owns the `Generation`.
Nothing else is needed to continue, so any agent can take over as leader by reading them. Statuses are levels, not
changes: each is complete, and a later one replaces an earlier one.
"""

import enum
import functools

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat, WorldId
from resilient_jax.protocol.dropped_worker import DroppedWorker
from resilient_jax.protocol.plan_records import PlanAxes, PlanConstants, PlanOutlook
from resilient_jax.protocol.raised_error import RaisedError
from resilient_jax.protocol.reachability import ReachReport
from resilient_jax.protocol.recovery_records import JobHistory, RecoveryDecision
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost, SlownessRecord
from resilient_jax.protocol.snapshots import (
    Protection,
    SnapshotId,
    SnapshotPlan,
    SnapshotServerStatus,
    SnapshotStatus,
    VoidSnapshots,
)
from resilient_jax.protocol.state_records import NextMembers, StateLoss, StatePart, StateSource
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_tasks import OverdueTask


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


class Generation(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The agreed membership. Only the leader writes it, by a transaction that also fences old leaders.

    Attributes:
        number: the generation's number; the number grows with every change of membership.
        phase: how far the change of membership is.
        change: how the world is built from the one before.
        world: the number of the coordination service that the members share; unchanged by a change in place.
        num_seats: the seats of that world, taken or not.
        next_seat: the first seat that no worker was given; later seats are free, too.
        members: the workers that train, in order of their seats.
        max_members: how many hosts may be members, as of the last formation; other hosts are spares.
        stage_hosts: the hosts of a pipeline's replicas in their order, with those whose stages are kept for them while
            they are away. Empty: the members, in an order by which the fewest blocks move.
        earlier_stage_hosts: the hosts of replicas before, oldest first: those of the first generation in their order.
            Each order follows from the one before it. Empty: there were none, or `stage_hosts` are in theirs.
        plan_axes: names and sizes of the planned axes that every worker takes. Empty: each worker finds the best plan.
        plan_constants: constants of the cost model by which workers plan. Empty: those that each was given.
        newcomers: the workers, and standbys, that were given a seat while others train; newcomers join, or may.
        spares: the hosts for which there was no place when the last seat of a newcomer was given.
        service_address: address of the world's coordination service; empty: not known yet, or the service has ended.
        step: the newest step committed by any member when the generation was formed; the members resume from it.
        boundary_step: in a planned change, the first step that is not run before the change.
        ends_job: whether the job ends at the boundary, before which members save checkpoints: all got a notice.
        parts_stay: whether the members after the boundary have all of the state in parts: no snapshot is waited for.
        next_members: members after a planned change for which blocks are copied before; None: nothing is copied.
        sources: members that have the state of `step`; of thousands only some.
        receivers: the members that must fetch that state from a source first.
        is_state_in_parts: whether the members together have the state in memory, each a part: of `step`, or of one step
            more or less, as members find out. Receivers have no part yet; there are no sources.
        snapshot: the snapshot that has the state of `step`, if members do not have it; then there are no sources. With
            a state in parts, the snapshot to go back to. None again once all members have resumed from it.
        state_loss: why the members resume from a checkpoint, or restart; None again once all members have resumed.
        trusted_step: states of more steps are in doubt; None again once all members have resumed from another state.
        unreadable_snapshots: the snapshots that turned out to be corrupt beyond their parity.
        void_snapshots: the snapshots that hosts which computed wrongly may have touched.
        dropped_workers: the workers that were left out before these had answered.
        progress: the newest committed step that the leader saw, once a complete state was known; some seconds old.
        losses_left: how many more hosts may be lost before the state is. 0: redundancy is urgent. None: no state.
        keeps_workers: whether the workers of a world outlive the loss of one of them.
        protection: when the members take snapshots, as decided when the generation was formed.
        initial_generation: generation of the job's start with its initial state; snapshots of earlier ones are void.
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
        reason: why the membership changed.
        hang: what hung, for which all hosts keep the stacks of their workers before these unwind; empty: nothing.
        decision: the last choice at a change of members, which every leader obeys; None: there was none to make.
        history: what leaders have measured so far, on which the next decision rests.
        slowness: what leaders have done about slow hosts.
        outcome: how the job ended; None: the job has not ended.
    """

    number: GenerationNumber
    phase: GenerationPhase
    change: WorldChange = WorldChange.REFORM
    world: WorldId = WorldId(0)
    num_seats: int = 0
    next_seat: Seat = Seat(0)
    members: tuple[Member, ...] = ()
    max_members: int = 0
    stage_hosts: tuple[HostName, ...] = ()
    earlier_stage_hosts: tuple[tuple[HostName, ...], ...] = ()
    plan_axes: PlanAxes = ()
    plan_constants: PlanConstants = ()
    newcomers: tuple[Member, ...] = ()
    spares: tuple[HostName, ...] = ()
    service_address: str = ""
    step: int = 0
    boundary_step: int | None = None
    ends_job: bool = False
    parts_stay: bool = False
    next_members: NextMembers | None = None
    sources: tuple[StateSource, ...] = ()
    receivers: tuple[HostName, ...] = ()
    is_state_in_parts: bool = False
    snapshot: SnapshotPlan | None = None
    state_loss: StateLoss | None = None
    trusted_step: int | None = None
    unreadable_snapshots: tuple[SnapshotId, ...] = ()
    void_snapshots: tuple[VoidSnapshots, ...] = ()
    dropped_workers: tuple[DroppedWorker, ...] = ()
    progress: int = 0
    losses_left: int | None = None
    keeps_workers: bool = True
    protection: Protection = Protection()
    initial_generation: GenerationNumber = GenerationNumber(0)
    attempts: int = 0
    are_parts_doubtful: bool = False
    failed_host: HostName | None = None
    suspects: tuple[HostName, ...] = ()
    taken_out: HostName | None = None
    separated: tuple[HostName, ...] = ()
    failure_text: str = ""
    raised: tuple[RaisedError, ...] = ()
    reason: str = ""
    hang: str = ""
    decision: RecoveryDecision | None = None
    history: JobHistory = JobHistory()
    slowness: SlownessRecord = SlownessRecord()
    outcome: JobOutcome | None = None

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


class WorkerState(enum.StrEnum):
    """What a worker process is doing."""

    STARTING = "starting"
    """Imports and the user's own start-up; not yet in `rj.run`."""
    IDLE = "idle"
    """In the generation loop: unwound, waiting for a world or a seat."""
    PREPARING = "preparing"
    """Taking a seat of the world in which others train, and loading programs."""
    RUNNING = "running"
    """Building a world or inside the user's train function."""
    EXITED = "exited"


def is_busy(state: WorkerState) -> bool:
    """Return whether a worker's main thread must unwind before it can execute another order."""
    return state in (WorkerState.RUNNING, WorkerState.PREPARING)


class WorkerFailureKind(enum.StrEnum):
    """What a worker's error means."""

    COLLECTIVE = "collective"
    """A collective or the forming of a world failed: another host's death, or the network."""
    NO_SERVICE = "no_service"
    """A collective was needed in a world whose coordination service has ended."""
    SNAPSHOT = "snapshot"
    """The snapshot that the generation resumes from is corrupt beyond its parity."""
    CORRUPTION = "corruption"
    """A host has computed wrongly, and committed states are in doubt."""
    USER = "user"
    """The user's function raised although nothing was aborted."""
    LATE = "late"
    """It raised while it was interrupted: that counts only if another host has raised the same."""


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a worker's last attempt.

    Attributes:
        kind: what the error means.
        text: the traceback.
        trusted_step: where the error is a corruption: states of more steps are in doubt.
        corrupt_hosts: where the error is a corruption: the hosts that compute wrongly.
    """

    kind: WorkerFailureKind
    text: str
    trusted_step: int | None = None
    corrupt_hosts: tuple[HostName, ...] = ()


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's complete report of itself, sent whenever it changes.

    Attributes:
        state: what the process is doing.
        generation: the newest generation number that the worker has answered.
        world: the world that the worker is connected to; None: no world. A change in place needs a world.
        seat: the last seat that the worker took or tried to take; with `world` None the worker could not.
        step: steps committed, so also the index of the next step to run.
        holds_state: whether the worker has the complete state of `step` (on devices or in host memory).
        part: what the worker has of the committed state where no host has all of it, and hosts can go on with what they
            have; known once a step is finished. While idle it is that of `step`. None: nothing.
        snapshot: while idle after a planned change: the snapshot of `step`, which is committed on all hosts.
        copied: while idle: the newest snapshot of which this host's snapshot server has the part of this host.
        checkpoint_step: step of the newest finished checkpoint on storage when the worker last looked while idle:
            training would resume there without a state in memory. None: there is none, or training saves none.
        saves_on_notice: whether the training saves checkpoints: before the job ends after a notice, too.
        is_polling_checkpoints: whether `checkpoint_step` is outdated: the idle worker has not looked yet.
        earliest_stop_step: the answer to a pause: the worker can stop before this step.
        has_formed: whether the world of `generation` is built and the state is there.
        has_finished_step: whether a step has been finished in `generation`, so all cliques of the world exist.
        is_done: whether the train function has returned.
        is_compiling: whether the worker compiles, and cannot unwind now.
        endpoint: the address where the worker serves its state.
        failure: the error that ended the worker's last attempt; None: there was no error.
        overdue: the task that takes longer than its deadline; None: no task does.
        trusted_step: while idle: states of more steps are in doubt, as this worker found in its last attempt.
        corrupt_hosts: the hosts because of which these states are in doubt, and which must take no part any more.
        entered: the generation in which the worker has trained last, or trains.
        detached_from: world whose service the worker has found dead: no clique is formed there any more; None: none.
        slow_hosts: from the worker that is the first of its generation: hosts that are slow, and which of their parts.
        slowdown: from the same worker: what slow hosts cost, once that has lasted; None: not worth a change.
        plans: from the first nine workers and some others: what losses would make of planned axes; None: not known.
    """

    state: WorkerState = WorkerState.STARTING
    generation: GenerationNumber = GenerationNumber(0)
    world: WorldId | None = None
    seat: SeatId | None = None
    step: int = 0
    holds_state: bool = False
    part: StatePart | None = None
    snapshot: SnapshotId | None = None
    copied: SnapshotId | None = None
    checkpoint_step: int | None = None
    saves_on_notice: bool = False
    is_polling_checkpoints: bool = False
    earliest_stop_step: int | None = None
    has_formed: bool = False
    has_finished_step: bool = False
    is_done: bool = False
    is_compiling: bool = False
    failure: WorkerFailure | None = None
    overdue: OverdueTask | None = None
    trusted_step: int | None = None
    corrupt_hosts: tuple[HostName, ...] = ()
    entered: GenerationNumber = GenerationNumber(0)
    detached_from: WorldId | None = None
    slow_hosts: tuple[SlowHost, ...] = ()
    slowdown: Slowdown | None = None
    plans: PlanOutlook | None = None
    endpoint: str = ""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its agent sees it.

    Attributes:
        incarnation: the number of the worker's start; a later start on this host has a greater one.
        pid: the worker's process id.
        report: what the worker last reported.
        is_unresponsive: whether the process is stopped (SIGSTOP), or its guard thread was silent for too long.
        is_dying: whether the worker's threads have ended; the exit code follows when the kernel has freed the memory.
        memory_mib: resident memory of the worker when it was last ready to join, in MiB; 0 before.
        exit_code: the exit code as Python's subprocess gives it: negative for a signal. None while the worker runs.
        error: the end of what the worker wrote to standard error, when the worker exited by itself.
    """

    incarnation: Incarnation
    pid: int
    report: WorkerReport = msgspec.field(default_factory=WorkerReport)
    is_unresponsive: bool = False
    is_dying: bool = False
    memory_mib: int = 0
    exit_code: int | None = None
    error: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether the worker can take part: it runs, and is responsive."""
        return self.exit_code is None and not self.is_unresponsive and not self.is_dying


class CoordinationServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A running coordination service.

    Attributes:
        world: the number of the world that the service serves.
        num_processes: the processes that form that world.
        num_seats: the seats of that world, spare ones included.
        address: address of the host's agent, and port of the service on loopback there (see `service_address`).
        pid: the process id of the service.
    """

    world: WorldId
    num_processes: int
    num_seats: int
    address: str
    pid: int


class StandbyState(enum.StrEnum):
    """What a standby is doing."""

    STARTING = "starting"
    """It imports libraries, runs the script up to `rj.run`, or takes a seat and loads programs."""
    READY = "ready"
    """It waits to replace the worker."""


class StandbyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process that waits to replace its host's worker.

    Attributes:
        state: what the process is doing.
        pid: the process id of the standby.
        memory_mib: resident memory of the standby when it became ready, in MiB; 0 before.
        worker: report of a standby that is a complete worker (`standby = "seat"`); None for other kinds.
    """

    state: StandbyState
    pid: int
    memory_mib: int = 0
    worker: WorkerStatus | None = None


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host as its agent reports it; in the store exactly as long as the agent's lease is valid.

    Attributes:
        host: the host's name.
        agent_id: an id that is new with each start of the agent.
        agent_pid: the process id of the agent.
        address: the host's address for the others.
        port: port of the agent at that address, where commands ask for its logs, and order it to end processes.
        versions: the versions of what must be equal on all hosts.
        generation: the newest generation that the agent had read when it wrote this status.
        is_draining: whether the host leaves after a preemption notice.
        is_out_of_time: whether the time that such a notice leaves is over, so that the host leaves now.
        is_spare: whether the host was started as a spare: a spare takes part only in the place of another.
        worker: the host's worker; None: none was started yet.
        services: the coordination services that run on this host.
        snapshot_server: the host's snapshot server; None: none runs.
        snapshots: the snapshots that were complete on this host when this was written. While members train, newer ones
            of the same generation are in `HostProgress` only.
        standby: the process that waits to replace the worker; None: none runs.
        program: the id of the program that the host runs; empty before the host has asked the others for theirs.
        changed_program: files of the program that have changed on disk since its start, for people; empty: none.
        gpus: what is wrong with GPUs of the host now, a sentence each for people; empty: nothing, or not watched.
        num_devices: devices of the host, also those that are out; 0: only JAX knows.
        num_used: how many devices a worker uses that starts now; 0: all.
        standby_devices: how many devices are sound and stand by: the host's worker uses others.
        ended_for_return: last worker that the agent ended because a device was back, which is no failure; 0: none.
        gpu_uuids: ids of the host's GPUs, in order of the GPUs' numbers; empty if not known.
        reach: which members this host reaches; None: the members go on, or the host has not looked yet.
        metrics: the metrics that the worker had last reported, by name.
        step: steps that the worker had committed when this was written; a newer number is in `HostProgress`.
        num_steps: steps that the worker will have committed in the end; 0: not known.
    """

    host: HostName
    agent_id: str
    agent_pid: int
    address: str
    versions: Versions
    port: int = 0
    generation: GenerationNumber = GenerationNumber(0)
    is_draining: bool = False
    is_out_of_time: bool = False
    is_spare: bool = False
    worker: WorkerStatus | None = None
    services: tuple[CoordinationServiceStatus, ...] = ()
    snapshot_server: SnapshotServerStatus | None = None
    snapshots: tuple[SnapshotStatus, ...] = ()
    standby: StandbyStatus | None = None
    program: str = ""
    changed_program: str = ""
    gpus: tuple[str, ...] = ()
    num_devices: int = 0
    num_used: int = 0
    standby_devices: int = 0
    ended_for_return: Incarnation = Incarnation(0)
    gpu_uuids: tuple[str, ...] = ()
    reach: ReachReport | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    step: int = 0
    num_steps: int = 0

    @property
    def devices(self) -> str:
        """A text such as "2 of 3 devices"; empty: all."""
        return f"{self.num_used} of {self.num_devices} devices" if self.num_used else ""

    @property
    def agent_endpoint(self) -> str:
        """Where the agent listens, as host:port."""
        return f"{self.address}:{self.port}"
