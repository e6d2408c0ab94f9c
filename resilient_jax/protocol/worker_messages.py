"""The messages between an agent and its worker (see `connection`).

Orders are levels, too: a later order replaces an earlier one, and the worker refuses an order of an older generation
than the newest that it has received.
"""

from typing import Literal

import msgspec

from resilient_jax.events import Event
from resilient_jax.ids import GenerationNumber, HostName, Seat
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.state_records import NextMembers
from resilient_jax.protocol.worker_report import TrainingProgress, WorkerReport


class Quiesce(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: abort collectives, unwind, report idle for this generation."""

    generation: GenerationNumber
    reason: str = ""


class Pause(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: report before which step you can stop, and do not start that step until the next order.

    Attributes:
        next_members: members that blocks are copied for before the pause; None: nothing is copied.
        ends_job: whether the job ends at that step; a training that saves checkpoints gets one more step to save one.
    """

    generation: GenerationNumber
    next_members: NextMembers | None = None
    ends_job: bool = False


class RunToBoundary(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: run up to this step, do not start it, unwind, report idle.

    Attributes:
        takes_snapshot: whether to wait for a snapshot of the state before the boundary, where no host has the whole
            state.
    """

    generation: GenerationNumber
    boundary_step: int
    takes_snapshot: bool = True


class FormWorld(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: build this generation's world and train in it.

    Attributes:
        relay_address: where the worker reaches the coordination service of the world.
    """

    generation: Generation
    host: HostName
    relay_address: str


class TakeSeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: connect to a spare seat of the world in which others train, load programs, report idle.

    Attributes:
        generation: generation in which the others train, which names this worker as a newcomer.
        host: host of this worker. If the host has a member, this worker is the standby that is to replace that member.
        relay_address: where the worker reaches the coordination service of the world.
    """

    generation: Generation
    host: HostName
    seat: Seat
    relay_address: str


class HoldTraining(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: the store is lost; stop training, keep the state, wait."""


class TakeStacks(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: send the stacks of all threads, before anything is interrupted."""

    why: str


class LeaseRenewed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The host may train until this monotonic time of this machine; after it, without a newer message, the worker
    holds.

    So the worker of an agent that is stopped or starved cannot continue to train beside the majority.
    """

    valid_until_s: float


class SnapshotServerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """This host's snapshot server runs, and listens there for other hosts."""

    endpoint: str


class WorkerAdmitted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to `AdmissionRequested`: the worker may report that it is ready."""


class StopWorker(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: the job is over for this worker; return from `rj.run`."""

    reason: str = ""


class WorkerReported(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker's complete report of itself."""

    report: WorkerReport


class StepCommitted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker committed a step."""

    progress: TrainingProgress


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent by the guard thread at intervals, also while the main thread computes: the worker is not stopped."""


class SnapshotServerRequested(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request for a snapshot server on this host; each is answered by `SnapshotServerReady`."""


class AdmissionRequested(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request to be let into the job with this script, as `describe_script` returns it.

    Answered by `WorkerAdmitted`; an agent that may not let it in ends.
    """

    script: dict[str, str]


class EventOccurred(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An event for the host's event log."""

    event: Event


class StacksTaken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The stacks of all threads, for a file of the run folder."""

    why: str
    stacks: str


class ImportsReported(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the script has imported, and in which surroundings, for a zygote to do the same before it is needed.

    Attributes:
        modules: the file of each installed module, by name, in the order in which their imports ended.
        search_path: `sys.path` without the script's folder.
        environment: variables of the worker: libraries read their settings from the environment when they are imported,
            and the script may have changed it before.
    """

    modules: dict[str, str]
    search_path: tuple[str, ...]
    environment: dict[bytes, bytes]


WorkerOrder = (
    Quiesce
    | Pause
    | RunToBoundary
    | FormWorld
    | TakeSeat
    | HoldTraining
    | TakeStacks
    | LeaseRenewed
    | SnapshotServerReady
    | WorkerAdmitted
    | StopWorker
)
AgentRequest = (
    StepCommitted
    | SnapshotServerRequested
    | AdmissionRequested
    | EventOccurred
    | StacksTaken
    | ImportsReported
)
"""What an agent handles itself, beside the report that it passes on."""
WorkerMessage = WorkerReported | Heartbeat | AgentRequest

WORKER_ORDER_DECODER: msgspec.msgpack.Decoder[WorkerOrder] = msgspec.msgpack.Decoder(WorkerOrder)
WORKER_MESSAGE_DECODER: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)

JOB_OVER_EXIT_CODE = 74
"""Exit code of a worker that was absent at the end of its job, which failed or was done without it: the agent uses the
job's outcome instead."""
RESTART_EXIT_CODE = 75
"""Exit code with which a worker asks to be started again (sysexits' EX_TEMPFAIL); not a user's error."""

AGENT_CONNECTION_VARIABLE = "RESILIENT_JAX_AGENT_CONNECTION"
"""Environment variable with the worker's end of the connection to its agent, as a file descriptor."""
DEATH_PIPE_VARIABLE = "RESILIENT_JAX_DEATH_PIPE"
"""Environment variable with the write end of a pipe whose closing means that the worker dies."""
SNAPSHOT_CONNECTION_VARIABLE = "RESILIENT_JAX_SNAPSHOT_CONNECTION"
"""Environment variable with the worker's end of the connection to the snapshot server, as a file descriptor."""
WORKER_SETTINGS_VARIABLE = "RESILIENT_JAX_SETTINGS"
"""Environment variable with `WorkerSettings` as JSON."""


class SnapshotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a job takes snapshots; see the keys of similar names in `config.JobConfig`."""

    num_parity: int = 1
    interval_steps: int | Literal["auto"] = 1
    replicated_interval_steps: int | Literal["auto", "off"] = "auto"
    group_size: int = 8


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an agent gives its worker once, at start.

    Attributes:
        tls: paths of certificate, key and authority for the traffic between workers; None for plain TCP.
        failure_domain: what fails together with this host, such as a rack; empty: the host itself.
        compile_cache_bytes: limit of the compiled programs on this host.
        collective_timeout_s: the longest time that a step waits for a peer's message.
        hang_timeout_s: the least deadline of a task that every step has; as in `JobConfig`.
        user_code_timeout_s: the least deadline of all other tasks.
        stall_dump_s: time after which a process whose threads cannot run Python prints their stacks.
        live_nodes: whether members meet in the coordination service before their first collective.
        is_standby: whether this worker keeps the low priority that the agent gave the worker, until the worker replaces
            another.
        digest_log: the file for digests of steps; "" for none.
        digest_interval_steps: steps between two entries of that file.
        audit_share: part of the microbatches that two hosts compute.
        devices: the numbers, on the host, of the devices that the worker sees, in their order; (): all, or not known.
        devices_after_loss: what hosts do with the devices that are left when others are taken out; see `JobConfig`.
        program: the folder in which the program of the job is kept; "": in no folder, and the program is read where it
            is.
    """

    job: str
    host: HostName
    address: str
    token: str
    tls: tuple[str, str, str] | None = None
    devices_per_host: int | None = None
    forming_timeout_s: float = 30.0
    snapshots: SnapshotSettings = SnapshotSettings()
    failure_domain: str = ""
    compile_cache_bytes: int = 2**32
    collective_timeout_s: float = 300.0
    hang_timeout_s: float = 60.0
    user_code_timeout_s: float = 240.0
    stall_dump_s: float = 30.0
    live_nodes: bool = False
    is_standby: bool = False
    digest_log: str = ""
    digest_interval_steps: int = 0
    audit_share: float = 0.0
    devices: tuple[int, ...] = ()
    devices_after_loss: Literal["even", "all", "host"] = "even"
    program: str = ""


WORKER_SETTINGS_DECODER: msgspec.json.Decoder[WorkerSettings] = msgspec.json.Decoder(WorkerSettings)


def encode_settings(settings: WorkerSettings) -> str:
    """Return the value of `WORKER_SETTINGS_VARIABLE`."""
    return msgspec.json.encode(settings).decode()
