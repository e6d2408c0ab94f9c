"""The membership machine with hosts that answer at once; a test makes some of them misbehave."""

import dataclasses

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation
from resilient_jax.membership.commands import (
    MembershipCommand,
    PublishGeneration,
    QuarantineDevice,
    QuarantineHost,
)
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, owes_answer, owes_reach_report
from resilient_jax.membership.job_history import add_time
from resilient_jax.membership.job_start import make_initial_state
from resilient_jax.membership.machine import HostChanged, Tick
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation, GenerationPhase, SeatId
from resilient_jax.protocol.host_status import (
    AgentStatus,
    CoordinationServiceStatus,
    HostStatus,
    WorkerStatus,
)
from resilient_jax.protocol.reachability import ReachReport
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import TimedChange
from resilient_jax.protocol.snapshots import (
    ParityGroup,
    SnapshotId,
    SnapshotPhase,
    SnapshotServerStatus,
    SnapshotStatus,
)
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_report import WorkerReport, WorkerState
from tests.support.checked_membership import CheckedMachine

VERSIONS = Versions(python="3", resilient_jax="0", jax="0", jaxlib="0")


class Job:
    """The machine with hosts that answer at once; tests make some of them misbehave."""

    def __init__(self, *names: str, do_agents_answer: bool = True, **config) -> None:
        self.do_agents_answer = do_agents_answer
        self.config = MembershipConfig(**{"num_hosts": len(names), "start_timeout_s": 300.0, **config})
        self.state = make_initial_state(None, (), 0.0)
        self.now_s = 0.0
        self.published: list[Generation] = []
        self.quarantined: list[HostName] = []
        self.quarantined_devices: list[QuarantineDevice] = []
        self.taken_out_before: list[int] = []
        """By quarantine, how often the host was taken out before as a slow one."""
        self.asked: list[StartCoordinationService] = []
        self.cut: set[frozenset[str]] = set()
        """Pairs of hosts that cannot reach each other."""
        self.commands: list[MembershipCommand] = []
        """All that the machine commanded."""
        for name in names:
            self.report(name, state=WorkerState.IDLE)

    @property
    def state(self) -> MembershipState:
        return self.machine.state

    @state.setter
    def state(self, state: MembershipState) -> None:
        self.machine = CheckedMachine(state, self.config)

    @property
    def generation(self) -> Generation:
        return self.state.generation

    @property
    def phase(self) -> GenerationPhase:
        return self.generation.phase

    @property
    def members(self) -> list[str]:
        return [m.host for m in self.generation.membership.members]

    @property
    def phases(self) -> list[tuple[int, GenerationPhase]]:
        return [(g.number, g.phase) for g in self.published]

    def give(self, event) -> None:
        for command in self.machine.handle(event, self.now_s):
            self.commands.append(command)
            match command:
                case PublishGeneration(generation):
                    self.published.append(generation)
                case QuarantineHost(host, _, num_before):
                    self.quarantined.append(host)
                    self.taken_out_before.append(num_before)
                case QuarantineDevice():
                    self.quarantined_devices.append(command)
                case StartCoordinationService():
                    self.asked.append(command)
        if self.do_agents_answer:
            self.answer()

    def answer(self) -> None:
        """Have agents answer the generation: those of hosts that do not train, and after a failure members' agents."""
        for status in list(self.state.hosts.values()):
            if owes_answer(self.generation, status):
                self.change(status.host, generation=self.generation.number)
        for name in self.members:
            if self.phase is GenerationPhase.QUIESCE and owes_reach_report(
                self.generation, self.status(name)
            ):
                self.look_around(name)

    def look_around(self, name: str, *, is_lasting: bool = False) -> None:
        """Have a member's agent report which of the others it does not reach."""
        unreached = tuple(HostName(other) for other in self.members if frozenset((name, other)) in self.cut)
        report = ReachReport(
            generation=self.generation.number,
            unreached=unreached,
            lasting=unreached if is_lasting else (),
        )
        self.change(name, reach=report)

    def status(self, name: str) -> HostStatus:
        worker = WorkerStatus(incarnation=Incarnation(1), pid=1)
        new = HostStatus(
            host=HostName(name),
            agent=AgentStatus(id=name, pid=1, address=name, versions=VERSIONS),
            worker=worker,
        )
        return self.state.hosts.get(HostName(name), new)

    def change(self, name: str, **changes) -> None:
        self.give(HostChanged(change_fields(self.status(name), **changes)))

    def worker_of(self, name: str) -> WorkerStatus:
        worker = self.status(name).worker
        assert worker is not None
        return worker

    def worker(self, name: str, **changes) -> None:
        self.change(name, worker=msgspec.structs.replace(self.worker_of(name), **changes))

    def report(self, name: str, **changes) -> None:
        self.worker(name, report=change_fields(self.worker_of(name).report, **changes))

    def spare(self, name: str) -> None:
        """Have a host appear that was started as a spare, and its worker be ready; it is no member yet."""
        new = change_fields(self.status(name), is_spare=True)
        assert new.worker is not None
        worker = msgspec.structs.replace(new.worker, report=WorkerReport(state=WorkerState.IDLE))
        self.give(HostChanged(change_fields(new, worker=worker)))
        if self.generation.membership.find_newcomer(HostName(name), worker.incarnation) is not None:
            self.take_seat(name)

    def take_seat(self, name: str) -> None:
        """Have a worker report that it is connected through the seat that it was given."""
        seat = self.find_seat(name)
        self.report(name, state=WorkerState.PREPARING, seat=seat)
        self.report(name, state=WorkerState.IDLE, seat=seat, world=seat.world)

    def restart(self, name: str, incarnation: int = 2) -> None:
        report = WorkerReport(state=WorkerState.IDLE)
        self.change(name, worker=WorkerStatus(incarnation=Incarnation(incarnation), pid=2, report=report))

    def serve(self, name: str = "a") -> None:
        """Run the service that was requested last on this host."""
        asked = self.asked[-1]
        address = f"{name}:{asked.world}:{asked.num_processes}"
        service = CoordinationServiceStatus(
            world=asked.world,
            num_processes=asked.num_processes,
            num_seats=asked.num_seats,
            address=address,
            pid=1,
        )
        self.change(name, services=(*self.status(name).services, service))

    def form(self, *names: str) -> None:
        for name in names or self.members:
            self.report(
                name,
                state=WorkerState.RUNNING,
                generation=self.generation.number,
                has_formed=True,
                has_finished_step=False,
                failure=None,
                trusted_step=None,
                entered=self.generation.number,
                world=self.generation.membership.world,
                seat=self.find_seat(name),
                step=self.generation.state.step,
            )

    def find_seat(self, name: str) -> SeatId:
        """Return the seat of a member or newcomer."""
        host = HostName(name)
        member = self.generation.membership.find_member(host) or self.generation.membership.find_newcomer(
            host, self.worker_of(name).incarnation
        )
        assert member is not None
        return SeatId(self.generation.membership.world, member.seat)

    def train(self, step: int) -> None:
        for name in self.members:
            self.report(name, has_finished_step=True, holds_state=True, step=step)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.give(Tick())

    def acknowledge(self, *names: str, **changes) -> None:
        for name in names:
            self.report(
                name,
                **{
                    "state": WorkerState.IDLE,
                    "generation": self.generation.number,
                    "failure": None,
                    "has_formed": False,
                    **changes,
                },
            )


def training(*names: str, step: int = 5, **config) -> Job:
    """Return a job whose hosts have all committed `step`."""
    job = Job(*names, **config)
    job.serve()
    job.form()
    job.train(step)
    assert job.phase is GenerationPhase.ACTIVE
    return job


def know(job: Job, **seconds: float) -> None:
    """Have the job know the times of changes, as a leader that has measured them."""
    memory = job.state.memory
    history = memory.unwritten or job.generation.record.history
    for change, value in seconds.items():
        history = add_time(history, TimedChange(change), value)
    generation = change_fields(job.generation, history=history)
    if memory.unwritten is not None:
        memory = dataclasses.replace(memory, unwritten=history)
    job.state = dataclasses.replace(job.state, generation=generation, memory=memory)


def change_leader(job: Job) -> None:
    """Have another leader go on from what is in the store."""
    stored = msgspec.msgpack.encode(job.generation)
    generation = msgspec.msgpack.decode(stored, type=type(job.generation))
    job.state = make_initial_state(generation, job.state.hosts.values(), job.now_s)


def stop_at_boundary(job: Job, step: int) -> None:
    """Have all members answer the pause and stop before `step`."""
    for name in job.members:
        job.report(name, generation=job.generation.number, earliest_stop_step=step)
    assert job.phase is GenerationPhase.BOUNDARY
    assert job.generation.planned.boundary_step == step
    for name in job.members:
        job.report(name, state=WorkerState.IDLE, step=step, earliest_stop_step=step, has_formed=False)


def snapshot(step: int, hosts: str, *, generation: int = 1, parity: int = 1) -> SnapshotStatus:
    return SnapshotStatus(
        id=SnapshotId(step, GenerationNumber(generation)),
        phase=SnapshotPhase.COMPLETE,
        group=ParityGroup(hosts=tuple(HostName(host) for host in hosts), parity=parity),
        group_index=0,
        num_groups=1,
        nbytes=1,
        wall_s=0.0,
    )


def server(host: str) -> SnapshotServerStatus:
    return SnapshotServerStatus(endpoint=f"{host}:1", pid=1)


def keep(job: Job, hosts: str, *snapshots: SnapshotStatus) -> None:
    for host in hosts:
        job.change(host, snapshot_server=server(host), snapshots=snapshots)


def sharded(names: str, *, step: int = 5, parity: int = 1, **config) -> Job:
    """Return a job in which no host holds the complete state, with a snapshot of its newest step on all hosts."""
    job = training(*names, step=step, **config)
    for name in names:
        job.report(name, holds_state=False)
    keep(job, names, snapshot(step, names, parity=parity))
    return job
