"""A leader with agents simulated in a few processes, over the real transport and the embedded store."""

import contextlib
import enum
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import psutil

from resilient_jax.cluster.progress_tree import FANOUT
from resilient_jax.errors import InternalError
from resilient_jax.protocol.generation import GenerationPhase
from tests.benchmarks.control.agent_messages import (
    AgentsMessage,
    AgentsOrder,
    AllRead,
    LoseLast,
    Lost,
    Register,
    Registered,
    Train,
)
from tests.benchmarks.control.figures import PartResult, Samples
from tests.benchmarks.control.line_process import LineProcess
from tests.benchmarks.control.simulated_agent import count_listening
from tests.benchmarks.paths import JOBS, TESTS

AGENT_PROCESSES: Final = 2
LIMIT_S: Final = 300.0
"""For each thing that is waited for."""
TRAIN_S: Final = 10.0
"""For how long the leader's share of a core is measured."""


class StoreKind(enum.StrEnum):
    """Which store the agents share."""

    EMBEDDED = "embedded"
    ETCD = "etcd"
    """A cluster of three members on this machine."""


ETCD_END_GRACE_S: Final = 20.0

_DECODER: msgspec.json.Decoder[AgentsMessage] = msgspec.json.Decoder(AgentsMessage)
MessageT = TypeVar("MessageT", Registered, Lost)


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What one job of some size took.

    Attributes:
        form_s: seconds from the registration of the last host until every agent has read that all train.
        shrink_s: from the return of a lease until every agent has read the generation without that host.
        shrink_active_s: the same until every agent has read that its members train.
        host_bytes: that each host has read of generations for it.
        leader_cpu: the share of a core of the leader's process while all make a step a second.
        store_cpu: the same of the store's process.
    """

    form_s: float
    shrink_s: float
    shrink_active_s: float
    host_bytes: float
    leader_cpu: float
    store_cpu: float


def measure_simulations(kind: StoreKind, sizes: Sequence[int], rounds: int, work: Path) -> PartResult:
    """Return the figures of jobs of these sizes, each formed, trained and shrunk `rounds` times."""
    suffix = "" if kind is StoreKind.EMBEDDED else f"_{kind}"
    samples: Samples = {}
    missing: dict[str, str] = {}
    for size in sizes:
        try:
            jobs = [run_simulation(kind, size, work / f"{size}-{number}") for number in range(rounds)]
        except InternalError as error:
            missing[f"{size} simulated agents, {kind} store"] = str(error)
            continue
        for name in ("form_s", "shrink_s", "shrink_active_s", "leader_cpu", "store_cpu"):
            samples[f"{name}{suffix}_{size}"] = [getattr(job, name) for job in jobs]
        samples[f"bytes_per_host_change{suffix}_{size}"] = [job.host_bytes for job in jobs]
    return PartResult(samples=samples, missing=missing)


def run_simulation(kind: StoreKind, num_hosts: int, work: Path) -> SimulatedJob:
    """Form a job, have it train, and lose a host.

    Raises:
        InternalError: a process failed, or something took longer than `LIMIT_S`.
    """
    with _start_processes(kind, num_hosts, work) as (store, leader, others):
        agents = (leader, *others)
        # The leader, then the agents to which the leader's children report, and so on: so they get these places.
        for up_to in (1, 1 + FANOUT, 1 + count_listening(num_hosts), num_hosts - 1):
            for process in agents:
                _send(process, Register(up_to=up_to))
            for process in agents:
                _wait_message(process, Registered)
        last = others[(num_hosts - 2) % AGENT_PROCESSES]
        _send(last, Register(up_to=num_hosts))
        began_s = _wait_message(last, Registered).at_s
        formed = [_wait_read(process, 0, GenerationPhase.ACTIVE) for process in agents]
        leader_cpu, store_cpu = _measure_training(agents, leader, store)
        _send(last, LoseLast())
        lost_s = _wait_message(last, Lost).at_s
        number = formed[0].number + 1
        first = [_wait_read(process, number) for process in agents]
        active = [_wait_read(process, number, GenerationPhase.ACTIVE) for process in agents]
        unhurt = next(index for index, process in enumerate(agents) if index and process is not last)
    return SimulatedJob(
        form_s=max(found.at_s for found in formed) - began_s,
        shrink_s=max(found.at_s for found in first) - lost_s,
        shrink_active_s=max(found.at_s for found in active) - lost_s,
        host_bytes=active[unhurt].bytes_read - first[unhurt].bytes_read + first[unhurt].newest_bytes,
        leader_cpu=leader_cpu,
        store_cpu=store_cpu,
    )


@contextlib.contextmanager
def _start_processes(
    kind: StoreKind, num_hosts: int, work: Path
) -> Iterator[tuple[LineProcess, LineProcess, Sequence[LineProcess]]]:
    """Start the store, the leader alone in a process, and the other agents."""
    work.mkdir(parents=True)
    with contextlib.ExitStack() as owned:
        store = owned.enter_context(_make_store_process(kind, work))
        address = store.read_line(time.monotonic() + LIMIT_S).decode().strip()

        def start(first: int, last: int) -> LineProcess:
            indices = first, last, AGENT_PROCESSES
            command = [str(JOBS / "control_agents.py"), address, *map(str, (num_hosts, *indices))]
            return owned.enter_context(LineProcess(command, work / f"agents-{first}"))

        yield store, start(0, 1), [start(1 + number, num_hosts) for number in range(AGENT_PROCESSES)]


def _make_store_process(kind: StoreKind, work: Path) -> LineProcess:
    if kind is StoreKind.EMBEDDED:
        return LineProcess(
            [str(TESTS / "support" / "scripts" / "serve_store.py"), "127.0.0.1:0"], work / "store"
        )
    data = work / "etcd"
    data.mkdir()
    # Its members are processes of its own, which it ends.
    return LineProcess([str(JOBS / "control_etcd_cluster.py"), str(data)], work / "store", ETCD_END_GRACE_S)


def _measure_training(
    agents: Sequence[LineProcess], leader: LineProcess, store: LineProcess
) -> tuple[float, float]:
    """Return the shares of a core of the leader and of the store while all hosts make a step a second."""
    for process in agents:
        _send(process, Train())
    time.sleep(TRAIN_S / 2)
    before = [_read_cpu_s(process.pid) for process in (leader, store)]
    began_s = time.monotonic()
    time.sleep(TRAIN_S)
    passed_s = time.monotonic() - began_s
    after = [_read_cpu_s(process.pid) for process in (leader, store)]
    leader_cpu, store_cpu = ((end - start) / passed_s for start, end in zip(before, after, strict=True))
    return leader_cpu, store_cpu


def _read_cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and of those that it has started."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


def _send(process: LineProcess, order: AgentsOrder) -> None:
    process.send_line(msgspec.json.encode(order).decode())


def _wait_message(process: LineProcess, kind: type[MessageT]) -> MessageT:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        message = _DECODER.decode(process.read_line(deadline_s))
        if isinstance(message, kind):
            return message


def _wait_read(process: LineProcess, number: int, phase: GenerationPhase | None = None) -> AllRead:
    """Return the first message that all agents have read this generation or a later one, in this phase or any."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        message = _DECODER.decode(process.read_line(deadline_s))
        if isinstance(message, AllRead) and message.number >= number and phase in (None, message.phase):
            return message
