"""What a worker says of itself. A report is a level, not a change: it is complete, and a later one replaces it."""

import enum

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.protocol.generation import SeatId
from resilient_jax.protocol.plan_records import PlanOutlook
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
