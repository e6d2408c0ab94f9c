"""What the leader's decisions cost: a machine is given the events of a job, and only its own time is counted."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.errors import InternalError
from resilient_jax.ids import HostName
from resilient_jax.membership.commands import (
    MembershipCommand,
    PublishGeneration,
    QuarantineDevice,
    QuarantineHost,
)
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.job_start import FIRST_GENERATION, make_initial_state
from resilient_jax.membership.machine import HostChanged, HostLeft, HostProgressed, MembershipEvent
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from tests.support.stub_hosts import (
    answer_generation,
    change_report,
    make_host_name,
    make_idle_status,
    make_snapshot,
    serve_world,
)

ROUND_S: Final = 1.0
"""Time between two rounds of events while all train: a step a second."""


class Machine(Protocol):
    """What a leader feeds with events."""

    def handle(self, event: MembershipEvent, now: float, /) -> tuple[MembershipCommand, ...]:
        """Take in one event; return the commands."""
        ...


MakeMachine = Callable[[MembershipState, MembershipConfig], Machine]


class MachineCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one job of some size.

    Attributes:
        form_s: processor seconds of all events from the first registration until the job trains.
        shrink_s: the same from the loss of a host until the others train; None: it was not measured.
        event_us: microseconds of single events while all train, by kind.
        generation_bytes: of the record of a generation in which all train.
        status_bytes: of the record of a host.
    """

    form_s: float
    shrink_s: float | None
    event_us: Mapping[str, Sequence[float]]
    generation_bytes: int
    status_bytes: int


class MachineMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the script that measures: one cost for each round, by the number of hosts.

    Attributes:
        ours: of the machine that leaders run.
        plain: of the rules applied to all hosts after each event.
    """

    ours: dict[int, list[MachineCost]]
    plain: dict[int, list[MachineCost]]


class _TimedJob:
    """A machine with stub hosts, which answer each generation in turn."""

    def __init__(self, num_hosts: int, make_machine: MakeMachine) -> None:
        config = MembershipConfig(num_hosts=num_hosts)
        self._machine = make_machine(make_initial_state(None, (), 0.0), config)
        self.now_s = 0.0
        self.busy_s = 0.0
        self.hosts: dict[HostName, HostStatus] = {}
        self.generation: Generation = FIRST_GENERATION

    def give(self, events: Iterable[MembershipEvent]) -> None:
        """Give the machine these events; the hosts answer once it has all of them."""
        asked: list[StartCoordinationService] = []
        events = list(events)
        began_s = time.process_time()
        commands = [command for event in events for command in self._machine.handle(event, self.now_s)]
        self.busy_s += time.process_time() - began_s
        for command in commands:
            match command:
                case PublishGeneration(generation):
                    self.generation = generation
                case StartCoordinationService():
                    asked.append(command)
                case QuarantineHost(host=host) | QuarantineDevice(host=host):
                    raise AssertionError(f"{host} is put into quarantine, though nothing has hung")
        if asked:
            name = min(self.hosts)
            self.give([self.change(serve_world(self.hosts[name], asked[-1]))])

    def change(self, status: HostStatus) -> HostChanged:
        """Return the event that a host has this status now."""
        self.hosts[status.host] = status
        return HostChanged(status)

    def answer_until_active(self) -> None:
        """Have all hosts answer each generation until they train and have made a step."""
        for _ in GenerationPhase:
            generation = self.generation
            self.give([self.change(answer_generation(status, generation)) for status in self.hosts.values()])
            if generation.phase is GenerationPhase.ACTIVE:
                return
        raise InternalError(f"the job is in {self.generation.phase}, expected it to train")

    def time_each(self, events: Sequence[MembershipEvent]) -> list[float]:
        """Return the microseconds that the machine takes for each of these events."""
        found: list[float] = []
        self.now_s += ROUND_S
        for event in events:
            began_ns = time.perf_counter_ns()
            commands = self._machine.handle(event, self.now_s)
            found.append((time.perf_counter_ns() - began_ns) / 1e3)
            for command in commands:
                if isinstance(command, PublishGeneration):
                    self.generation = command.generation
        return found


def measure_machine(
    num_hosts: int, rounds: int, make_machine: MakeMachine, num_events: int | None = None
) -> MachineCost:
    """Return what a job costs the leader that forms it, trains for some rounds, and loses a host.

    Args:
        num_hosts: of the job.
        rounds: of one event of each kind from every host.
        make_machine: makes the machine.
        num_events: how many hosts send an event in a round, where more would take too long; then no host is lost.
    """
    job = _TimedJob(num_hosts, make_machine)
    job.give([job.change(make_idle_status(index)) for index in range(num_hosts)])
    job.answer_until_active()
    formed_s, job.busy_s = job.busy_s, 0.0
    event_us: dict[str, list[float]] = {"step": [], "snapshot": [], "report": []}
    for number in range(rounds):
        for kind, events in _make_round(job, num_hosts, number).items():
            event_us[kind] += job.time_each(events[:num_events])
    lost = make_host_name(num_hosts - 1)
    if num_events is None:
        del job.hosts[lost]
        job.give([HostLeft(lost)])
        job.answer_until_active()
    return MachineCost(
        form_s=formed_s,
        shrink_s=job.busy_s if num_events is None else None,
        event_us=event_us,
        generation_bytes=len(ENCODER.encode(job.generation)),
        status_bytes=len(ENCODER.encode(job.hosts[make_host_name(0)])),
    )


def _make_round(job: _TimedJob, num_hosts: int, number: int) -> dict[str, list[MembershipEvent]]:
    """Return one event of each kind for every host: a step beside the store, a snapshot, and a worker's report."""
    step, generation = number + 2, job.generation.number
    found: dict[str, list[MembershipEvent]] = {"step": [], "snapshot": [], "report": []}
    for index, status in enumerate(list(job.hosts.values())):
        found["step"].append(HostProgressed(status.host, status.agent.id, step))
        taken = make_snapshot(index, num_hosts, step, generation)
        with_snapshot = change_fields(status, step=step, snapshots=(taken,))
        found["snapshot"].append(job.change(with_snapshot))
        found["report"].append(job.change(change_report(with_snapshot, step=step)))
    return found
