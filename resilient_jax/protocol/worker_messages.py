"""What an agent and its worker say over their socket pair: tagged msgpack, one frame a message.

Orders are levels, too: a later order replaces an earlier one, and an order of an older generation
than the newest seen is refused by the worker.
"""

from typing import Literal

import msgspec

from resilient_jax.events import Event
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.records import Generation, WorkerReport


class Quiesce(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Abort collectives, unwind, report idle for this generation."""

    generation: GenerationNumber
    reason: str = ""


class Pause(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Say before which step you can stop, and do not start that step until told."""

    generation: GenerationNumber


class RunToBoundary(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Run up to this step, do not start it, unwind, report idle."""

    generation: GenerationNumber
    boundary_step: int


class FormWorld(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Build this generation's world and train in it.

    `relay` is where the worker reaches the coordination service of the world.
    """

    generation: Generation
    host: HostName
    relay_address: str


class HoldTraining(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The store is lost: stop training, keep the state, wait."""


class LeaseRenewed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Until this monotonic time of this machine the host may train. After it, without a newer word, hold.

    So an agent that is stopped or starved cannot let its worker train on beside the majority.
    """

    valid_until_s: float


class SnapshotServerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """This host's snapshot server runs, and listens there for other hosts."""

    endpoint: str


class StopWorker(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The job is over for this worker: return from `rj.run`."""

    reason: str = ""


class WorkerReported(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker's complete report of itself."""

    report: WorkerReport


class StepCommitted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A step was committed. Also a sign of life."""

    step: int
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Heartbeat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The guard thread runs."""


class SnapshotServerRequested(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Have a snapshot server run on this host. Answered by `SnapshotServerReady`, each time."""


class EventOccurred(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An event for the host's event log."""

    event: Event


WorkerOrder = (
    Quiesce
    | Pause
    | RunToBoundary
    | FormWorld
    | HoldTraining
    | LeaseRenewed
    | SnapshotServerReady
    | StopWorker
)
WorkerMessage = WorkerReported | StepCommitted | Heartbeat | SnapshotServerRequested | EventOccurred

WORKER_ORDER_DECODER: msgspec.msgpack.Decoder[WorkerOrder] = msgspec.msgpack.Decoder(WorkerOrder)
WORKER_MESSAGE_DECODER: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)

JOB_OVER_EXIT_CODE = 74
"""Of a worker that was not there at the end of its job, which failed or was done without it: the agent looks at the
job's outcome instead."""
RESTART_EXIT_CODE = 75
"""A worker that exits with this asks to be started again (sysexits' EX_TEMPFAIL); not a user's error."""

AGENT_CONNECTION_VARIABLE = "RESILIENT_JAX_LINK"
"""Environment variable with the worker's end of the socket pair, as a file descriptor."""
DEATH_PIPE_VARIABLE = "RESILIENT_JAX_TRIPWIRE"
"""Environment variable with the write end of a pipe whose closing means that the worker dies."""
SNAPSHOT_CONNECTION_VARIABLE = "RESILIENT_JAX_SNAPSHOT_LINK"
"""Environment variable with the worker's end of its socket pair with the snapshot server, as a file descriptor."""
WORKER_SETTINGS_VARIABLE = "RESILIENT_JAX_SETTINGS"
"""Environment variable with `WorkerSettings` as JSON."""


class SnapshotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a job takes snapshots; see the keys of the same names in `config.JobConfig`."""

    num_parity: int = 1
    interval_steps: int | Literal["auto"] = 1
    group_size: int = 8
    mean_time_between_failures_s: float = 10_800.0


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent tells its worker once, at start.

    Attributes:
        tls: paths of certificate, key and authority for the traffic between workers; None for plain TCP.
        failure_domain: of this host: what fails together, such as a rack; empty: the host itself.
        compile_cache_bytes: of compiled programs on this host.
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
