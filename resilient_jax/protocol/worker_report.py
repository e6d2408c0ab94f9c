"""What a worker says of itself. A report is a level, not a change: it is complete, and a later one replaces it."""

import enum

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.protocol.generation import SeatId
from resilient_jax.protocol.plan_records import PlanOutlook
from resilient_jax.protocol.record_parts import RecordPart
from resilient_jax.protocol.recovery_records import NeededHosts
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.snapshots import (
    SnapshotId,
)
from resilient_jax.protocol.state_records import StatePart
from resilient_jax.protocol.worker_tasks import OverdueTask


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
    NO_CLIQUE = "no_clique"
    """A collective was needed for which its world forms no clique any more: the coordination service has ended, or the
    clique was aborted earlier. Nothing else is wrong."""
    TOO_FEW_HOSTS = "too_few_hosts"
    """Training needs more hosts, and waits for them: no try has failed."""
    SNAPSHOT = "snapshot"
    """The snapshot that the generation resumes from is corrupt beyond its parity."""
    CORRUPTION = "corruption"
    """A host has computed wrongly, and committed states are in doubt."""
    USER = "user"
    """The user's function raised although nothing was aborted."""
    LATE = "late"
    """It raised while it was interrupted: that counts only if another host has raised the same."""


class StateDoubt(RecordPart, frozen=True, kw_only=True):
    """What a worker has found about states that a host which computes wrongly may have touched.

    Attributes:
        trusted_step: states of more steps are in doubt; None: no state is.
        corrupt_hosts: the hosts that compute wrongly, and must take no part any more.
    """

    trusted_step: int | None = None
    corrupt_hosts: tuple[HostName, ...] = ()


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a worker's last attempt.

    Attributes:
        kind: what the error means.
        text: the traceback.
        doubt: where the error is a corruption: what it puts in doubt.
    """

    kind: WorkerFailureKind
    text: str
    doubt: StateDoubt = StateDoubt()


class WorldPlace(RecordPart, frozen=True, kw_only=True):
    """Where a worker is among the others.

    Attributes:
        world: the world that the worker is connected to; None: no world. A change in place needs a world.
        seat: the last seat that the worker took or tried to take; with `world` None the worker could not.
        detached_from: world whose service the worker has found dead: no clique is formed there any more; None: none.
        has_formed: whether the world of the report's generation is built and the state is there.
        has_finished_step: whether a step has been finished in that generation, so all cliques of the world exist.
    """

    world: WorldId | None = None
    seat: SeatId | None = None
    detached_from: WorldId | None = None
    has_formed: bool = False
    has_finished_step: bool = False


class HeldState(RecordPart, frozen=True, kw_only=True):
    """What a worker has of the job's committed state.

    Attributes:
        step: steps committed, so also the index of the next step to run.
        holds_state: whether the worker has the complete state of `step` (on devices or in host memory).
        part: what the worker has of the committed state where no host has all of it, and hosts can go on with what they
            have; known once a step is finished. While idle it is that of `step`. None: nothing.
        snapshot: while idle after a planned change: the snapshot of `step`, which is committed on all hosts.
        copied: while idle: the newest snapshot of which this host's snapshot server has the part of this host.
    """

    step: int = 0
    holds_state: bool = False
    part: StatePart | None = None
    snapshot: SnapshotId | None = None
    copied: SnapshotId | None = None


class CheckpointReport(RecordPart, frozen=True, kw_only=True):
    """What a worker knows of checkpoints on storage.

    Attributes:
        checkpoint_step: step of the newest finished checkpoint on storage when the worker last looked while idle:
            training would resume there without a state in memory. None: there is none, or training saves none.
        is_polling_checkpoints: whether `checkpoint_step` is outdated: the idle worker has not looked yet.
        saves_on_notice: whether the training saves checkpoints: before the job ends after a notice, too.
    """

    checkpoint_step: int | None = None
    is_polling_checkpoints: bool = False
    saves_on_notice: bool = False


class WorkerFindings(RecordPart, frozen=True, kw_only=True):
    """What a worker has found out about the job, on which decisions rest.

    Attributes:
        slow_hosts: from the worker that is the first of its generation: hosts that are slow, and which of their parts.
        slowdown: from the same worker: what slow hosts cost, once that has lasted; None: not worth a change.
        plans: from the first nine workers and some others: what losses would make of planned axes; None: not known.
        needed_hosts: how many hosts training needs, as this worker has found where there were too few.
    """

    slow_hosts: tuple[SlowHost, ...] = ()
    slowdown: Slowdown | None = None
    plans: PlanOutlook | None = None
    needed_hosts: NeededHosts = NeededHosts()


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's complete report of itself, sent whenever it changes.

    Attributes:
        state: what the process is doing.
        generation: the newest generation number that the worker has answered.
        entered: the generation in which the worker has trained last, or trains.
        endpoint: the address where the worker serves its state.
        earliest_stop_step: the answer to a pause: the worker can stop before this step.
        is_done: whether the train function has returned.
        is_compiling: whether the worker compiles, and cannot unwind now.
        failure: the error that ended the worker's last attempt; None: there was no error.
        overdue: the task that takes longer than its deadline; None: no task does.
        doubt: while idle: which states are in doubt, as this worker found in its last attempt.
    """

    state: WorkerState = WorkerState.STARTING
    generation: GenerationNumber = GenerationNumber(0)
    entered: GenerationNumber = GenerationNumber(0)
    endpoint: str = ""
    earliest_stop_step: int | None = None
    is_done: bool = False
    is_compiling: bool = False
    failure: WorkerFailure | None = None
    overdue: OverdueTask | None = None
    doubt: StateDoubt = StateDoubt()
    place: WorldPlace = WorldPlace()
    held: HeldState = HeldState()
    checkpoints: CheckpointReport = CheckpointReport()
    findings: WorkerFindings = WorkerFindings()


class TrainingProgress(RecordPart, frozen=True, kw_only=True):
    """How far a worker is: agents pass it on as it is.

    Attributes:
        step: how many steps are committed.
        num_steps: how many will be in the end; 0: not known.
        metrics: the metrics that the worker last reported, by name.
    """

    step: int = 0
    num_steps: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
