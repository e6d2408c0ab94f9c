"""What an agent says of its host, in the store exactly as long as the agent's lease is valid.

A status is a level, not a change: it is complete, and a later one replaces it.
"""

import enum

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation, WorldId
from resilient_jax.protocol.reachability import ReachReport
from resilient_jax.protocol.record_parts import RecordPart
from resilient_jax.protocol.snapshots import (
    SnapshotServerStatus,
    SnapshotStatus,
)
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_report import TrainingProgress, WorkerReport


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


class AgentStatus(RecordPart, frozen=True, kw_only=True):
    """An agent's process, and where it listens.

    Attributes:
        id: an id that is new with each start of the agent.
        pid: the process id of the agent.
        address: the host's address for the others.
        port: port of the agent at that address, where commands ask for its logs, and order it to end processes.
        versions: the versions of what must be equal on all hosts.
    """

    id: str
    pid: int
    address: str
    port: int = 0
    versions: Versions

    @property
    def endpoint(self) -> str:
        """Where the agent listens, as host:port."""
        return f"{self.address}:{self.port}"


class DevicesStatus(RecordPart, frozen=True, kw_only=True):
    """The devices of a host.

    Attributes:
        num_devices: devices of the host, also those that are out; 0: only JAX knows.
        num_used: how many devices a worker uses that starts now; 0: all.
        num_standby: how many devices are sound and stand by: the host's worker uses others.
        ended_for_return: last worker that the agent ended because a device was back, which is no failure; 0: none.
        gpus: what is wrong with GPUs of the host now, a sentence each for people; empty: nothing, or not watched.
        gpu_uuids: ids of the host's GPUs, in order of the GPUs' numbers; empty if not known.
    """

    num_devices: int = 0
    num_used: int = 0
    num_standby: int = 0
    ended_for_return: Incarnation = Incarnation(0)
    gpus: tuple[str, ...] = ()
    gpu_uuids: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return a text such as "2 of 3 devices"; empty: all."""
        return f"{self.num_used} of {self.num_devices} devices" if self.num_used else ""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host as its agent reports it; in the store exactly as long as the agent's lease is valid.

    Attributes:
        host: the host's name.
        agent: the agent that reports.
        generation: the newest generation that the agent had read when it wrote this status.
        is_draining: whether the host leaves after a preemption notice.
        is_out_of_time: whether the time that such a notice leaves is over, so that the host leaves now.
        is_interrupted: whether its user pressed Ctrl-C, so that the host leaves within a moment.
        is_spare: whether the host was started as a spare: a spare takes part only in the place of another.
        worker: the host's worker; None: none was started yet.
        standby: the process that waits to replace the worker; None: none runs.
        services: the coordination services that run on this host.
        snapshot_server: the host's snapshot server; None: none runs.
        snapshots: the snapshots that were complete on this host when this was written. While members train, newer ones
            of the same generation are in `HostProgress` only.
        program: the id of the program that the host runs; empty before the host has asked the others for theirs.
        changed_program: files of the program that have changed on disk since its start, for people; empty: none.
        reach: which members this host reaches; None: the members go on, or the host has not looked yet.
        progress: how far the worker was when this was written; newer numbers are in `HostProgress`.
    """

    host: HostName
    agent: AgentStatus
    generation: GenerationNumber = GenerationNumber(0)
    is_draining: bool = False
    is_out_of_time: bool = False
    is_interrupted: bool = False
    is_spare: bool = False
    worker: WorkerStatus | None = None
    standby: StandbyStatus | None = None
    services: tuple[CoordinationServiceStatus, ...] = ()
    snapshot_server: SnapshotServerStatus | None = None
    snapshots: tuple[SnapshotStatus, ...] = ()
    program: str = ""
    changed_program: str = ""
    devices: DevicesStatus = DevicesStatus()
    reach: ReachReport | None = None
    progress: TrainingProgress = TrainingProgress()
