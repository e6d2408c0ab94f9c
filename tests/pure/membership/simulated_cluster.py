"""A cluster in which the leader's, the agents' and the workers' machines are the real ones, and time is a number.

The machines and the store's core are those of the package (membership/machine.py, cluster/generation_orders.py,
worker/worker_protocol.py); their shells are small models. `Cluster.moves`, `time_moves` and `fault_moves` are what may
happen next; the caller chooses.

Assumptions of the model about the shells:
- a worker receives orders in the order in which they were sent;
- an agent that loses its lease stops its worker before the lease can expire in the store, and rejoins only when that
  worker has answered;
- a worker, or a standby, cannot always take its seat;
- a standby is started beside a worker that trains, and the store reads of a worker's death and of the standby that
  replaces it at once;
- a host never uses an incarnation twice;
- an agent that is connected reads what the leader wrote before a timeout that depends on it;
- the lease of one that is not connected, or suspended, ends before such a timeout;
- an agent calls a host that it does not reach lasting only if it would be in the store no more if it were dead;
- a world forms, and a step ends, only where all members reach each other;
- of a worker whose script raises, the report comes before its end; no standby takes its place.
"""

import collections
import dataclasses
import itertools

import msgspec

from resilient_jax.cluster import generation_orders
from resilient_jax.cluster.generation_orders import (
    CheckDue,
    CheckUnwound,
    GenerationRead,
    HostRegistered,
    KillWorker,
    LeaveJob,
    LeaveNoticed,
    OrdersCommand,
    OrdersConfig,
    OrdersEvent,
    OrdersState,
    RegistrationBegan,
    ReplaceWorker,
    SendIntoWorld,
    SendOrder,
    StopOtherServices,
    WorkerChanged,
)
from resilient_jax.cluster.reach_watch import must_look
from resilient_jax.cluster.standby_orders import (
    DismissStandby,
    FailStandby,
    OrderStandby,
    SendStandbyToSeat,
    TakeOver,
)
from resilient_jax.cluster.status_changes import are_snapshots_due
from resilient_jax.cluster.worker_view import WorkerView
from resilient_jax.ids import (
    GenerationNumber,
    HostName,
    Incarnation,
    JobName,
    LeaseId,
    Revision,
)
from resilient_jax.membership.commands import PublishGeneration, QuarantineDevice, QuarantineHost
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import find_worker, is_draining, owes_answer
from resilient_jax.membership.job_end import is_any_staying
from resilient_jax.membership.job_start import make_initial_state
from resilient_jax.membership.machine import HostChanged, HostLeft, MembershipEvent, QuarantineChanged, Tick
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import (
    Generation,
    GenerationPhase,
    JobOutcome,
    JobOutcomeKind,
    Member,
    SeatId,
    WorldChange,
)
from resilient_jax.protocol.host_status import (
    AgentStatus,
    CoordinationServiceStatus,
    DevicesStatus,
    HostStatus,
    StandbyState,
    StandbyStatus,
    WorkerStatus,
)
from resilient_jax.protocol.reachability import ReachReport
from resilient_jax.protocol.recovery_records import RecoveryAction
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.snapshots import (
    ParityGroup,
    SnapshotId,
    SnapshotPhase,
    SnapshotServerStatus,
    SnapshotStatus,
)
from resilient_jax.protocol.store_keys import (
    make_generation_key,
    make_host_key,
    make_hosts_prefix,
    make_leader_key,
)
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_messages import (
    FormWorld,
    HoldTraining,
    TakeSeat,
    TakeStacks,
    WorkerAdmitted,
    WorkerReported,
)
from resilient_jax.protocol.worker_report import WorkerFailure, WorkerFailureKind, WorkerReport, WorkerState
from resilient_jax.protocol.worker_tasks import OverdueTask, WorkerTask
from resilient_jax.store.interface import (
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteOp,
    PutEvent,
    PutOp,
    require_absent,
)
from resilient_jax.store.state_machine import StoreStateMachine
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.protocol_table import HandledOrder
from resilient_jax.worker.worker_protocol import (
    StepDecision,
    Transition,
    handle_order,
    make_initial_protocol,
    try_begin_step,
    try_take_order,
)
from tests.support.checked_membership import CheckedMachine

JOB = JobName("job")
NAMES = tuple(HostName(name) for name in "abcd")
VERSIONS = Versions(python="3", resilient_jax="0", jax="0", jaxlib="0")
CONFIG = MembershipConfig(
    num_hosts=len(NAMES),
    start_timeout_s=1e6,
    regroup_grace_s=5.0,
    quiesce_timeout_s=5.0,
    compile_timeout_s=20.0,
    forming_timeout_s=20.0,
    max_collective_retries=10**6,
    spare_seats=3,
)
FORWARD = {
    (GenerationPhase.QUIESCE, GenerationPhase.QUIESCE),  # a wait was decided, or an error noted
    (GenerationPhase.QUIESCE, GenerationPhase.FORM),
    (GenerationPhase.PAUSE, GenerationPhase.BOUNDARY),
    (GenerationPhase.BOUNDARY, GenerationPhase.FORM),
    (GenerationPhase.FORM, GenerationPhase.ACTIVE),
    (GenerationPhase.ACTIVE, GenerationPhase.ACTIVE),
}
ENDLESS = 10**9
DRAIN_DEADLINE_S = 25.0
CHECK_INTERVAL_S = 0.1
ROUND_S = 0.1
NO_TIME_S = 0.0
"""When orders come: a worker asks only for a pause that is held, and these have no parts of a state."""

OWN_ERRORS = {
    name: f"{kind}: bad"
    for name, kind in zip(NAMES, ("KeyError", "OSError", "IndexError", "EOFError"), strict=True)
}
COMMON_ERROR = "ValueError: bad"

encode = msgspec.msgpack.encode


class Worker:
    """A worker process: the real protocol, and a main thread that forms, trains and unwinds."""

    def __init__(self, host: HostName, incarnation: Incarnation) -> None:
        self.host = host
        self.incarnation = incarnation
        self.alive = True
        self.stopped = False
        self.hung = False
        self.error = ""
        """What its script has raised, which has ended it."""
        self.protocol = make_initial_protocol(polls_checkpoints=False)
        self.inbox: collections.deque[HandledOrder] = collections.deque()
        self.outbox: collections.deque[WorkerReport] = collections.deque()
        self.generation: Generation | None = None
        self.held: int | None = None
        self.begun = 0

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    @property
    def step(self) -> int:
        return self.held or 0

    @property
    def report(self) -> WorkerReport:
        return self.protocol.report

    @property
    def is_preparing(self) -> bool:
        return self.report.state is WorkerState.PREPARING

    def apply(self, transition: Transition) -> None:
        self.protocol, answers = transition
        for answer in answers:
            assert isinstance(answer, WorkerReported), "an agent sends orders of growing generations only"
            self.outbox.append(answer.report)

    def obey(self) -> None:
        self.apply(handle_order(self.protocol, self.inbox.popleft(), NO_TIME_S))

    def join(self) -> None:
        self.apply(handle_order(self.protocol, WorkerAdmitted(), NO_TIME_S))
        self.apply(worker_protocol.join_job(self.protocol, f"{self.host}:state"))

    def take_order(self) -> FormWorld | TakeSeat:
        assert self.generation is None
        assert self.report.state is WorkerState.IDLE
        protocol, order, answers = try_take_order(self.protocol)
        assert isinstance(order, FormWorld | TakeSeat)
        self.apply((protocol, answers))
        if isinstance(order, FormWorld):
            self.generation, self.begun = order.generation, self.step
            if order.generation.membership.change is WorldChange.REFORM:
                self.apply(worker_protocol.report_world(self.protocol, None))
        return order

    def end_preparing(self, *, is_seated: bool) -> None:
        seat = self.report.place.seat
        assert seat is not None
        world = seat.world if is_seated else None
        self.apply(worker_protocol.report_seat(self.protocol, world, None))

    def report_overdue(self, task: WorkerTask) -> None:
        """Report a task as overdue, for so long that the leader acts even if all workers hang."""
        overdue = OverdueTask(task=task, step=self.step, place="`f`, line 1", silent_s=9.0, deadline_s=4.0)
        self.apply(worker_protocol.report_overdue(self.protocol, overdue))

    def hang(self) -> None:
        """Let the main thread do nothing any more."""
        self.hung = True

    def end_with(self, error: str) -> None:
        """Have the script raise an error, which ends the process."""
        failure = WorkerFailure(kind=WorkerFailureKind.USER, text=error)
        self.apply(worker_protocol.report_failure(self.protocol, (failure, self.step)))
        self.error, self.alive, self.generation = error, False, None

    def go_idle(self, *, failure: WorkerFailure | None = None, done: bool = False) -> None:
        self.generation = None
        self.apply(
            worker_protocol.report_idle(
                self.protocol,
                step=self.step,
                holds_state=self.held is not None,
                part=None,
                snapshot=None,
                copied=None,
                done=done,
                failure=failure,
            )
        )


@dataclasses.dataclass
class Term:
    """An agent's term as leader, until the agent notices the end of the term."""

    token: Revision
    known: Revision
    machine: CheckedMachine
    read: Revision
    pending: collections.deque[Generation]
    looked_s: float = -1.0


class Host:
    """A machine that runs an agent."""

    def __init__(self, name: HostName, *, is_spare: bool) -> None:
        self.name = name
        self.is_spare = is_spare
        self.incarnations = 0
        self.noted = 0  # the newest worker whose error the leader has noted, as far as the agent has read
        self.lease: LeaseId | None = None
        self.registered = False  # according to the agent
        self.boot()

    def boot(self) -> None:
        self.alive = True
        self.connected = True
        self.suspended = False
        self.noticed_s = 0.0
        self.touched = False
        self.orders = OrdersState()
        self.check_s: float | None = None  # when the agent looks again at a worker that has to stop
        self.registers = False
        self.read = Revision(0)
        self.term: Term | None = None
        self.services: list[CoordinationServiceStatus] = []
        self.snapshots: tuple[SnapshotStatus, ...] = ()
        self.reach: ReachReport | None = None
        self.written: HostStatus | None = None  # what is in the store
        self.standby: Worker | None = None
        self.standby_seen: WorkerStatus | None = None
        self.start_worker()

    @property
    def draining(self) -> bool:
        return self.orders.is_leaving

    @property
    def acts(self) -> bool:
        return self.alive and not self.suspended

    @property
    def reaches_store(self) -> bool:
        return self.acts and self.connected

    def start_worker(self) -> None:
        self.incarnations += 1
        self.worker = Worker(self.name, Incarnation(self.incarnations))
        self.seen = WorkerStatus(incarnation=self.worker.incarnation, pid=1, report=self.worker.report)
        self.touched = True

    @property
    def has_due_snapshots(self) -> bool:
        if self.written is None or self.written.snapshots == self.snapshots:
            return False  # asked after every move; to make the status costs the most
        return are_snapshots_due(self.orders.generation, self.written, self.status())

    def status(self) -> HostStatus:
        generation = self.orders.generation
        return HostStatus(
            host=self.name,
            agent=AgentStatus(id=self.name, pid=1, address=self.name, versions=VERSIONS),
            is_draining=self.draining,
            generation=generation.number if generation is not None else GenerationNumber(0),
            is_spare=self.is_spare,
            worker=self.seen,
            standby=StandbyStatus(state=StandbyState.STARTING, pid=2, worker=self.standby_seen)
            if self.standby_seen is not None
            else None,
            services=tuple(self.services),
            snapshot_server=SnapshotServerStatus(endpoint=f"{self.name}:snapshots", pid=1),
            snapshots=self.snapshots,
            reach=self.reach,
            devices=DevicesStatus(num_devices=2),
        )


class Cluster:
    """All hosts, the store, and the invariants."""

    config = CONFIG
    spares: tuple[HostName, ...] = ()

    def __init__(self, *, are_collectives_fragile: bool = True, has_standbys: bool = False) -> None:
        self.are_collectives_fragile = are_collectives_fragile
        self.has_standbys = has_standbys
        self.now_s = 0.0
        self.store = StoreStateMachine(first_lease=LeaseId(1))
        self.hosts = {name: Host(name, is_spare=name in self.spares) for name in NAMES}
        self.workers = {(h.name, h.worker.incarnation): h.worker for h in self.hosts.values()}
        self.written: list[tuple[Generation, Revision]] = []  # accepted by the store, with the writer's token
        self.entered: dict[int, set[HostName]] = collections.defaultdict(set)
        self.complete: set[int] = set()  # generations whose members were all active at one time
        self.arrived: dict[int, dict[HostName, int]] = collections.defaultdict(dict)
        self.quarantined: set[HostName] = set()
        self.raised: set[tuple[HostName, int, str]] = set()
        """Errors of scripts, with the steps that were committed."""
        self.cut: set[frozenset[HostName]] = set()
        """Pairs of hosts that cannot reach each other."""
        self.total = ENDLESS
        self.seats: dict[tuple[int, int], tuple[HostName, Incarnation]] = {}

    @property
    def generation(self) -> Generation | None:
        return self.written[-1][0] if self.written else None

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    @property
    def outcome(self) -> JobOutcome | None:
        return self.generation.outcome if self.generation is not None else None

    @property
    def do_all_train(self) -> bool:
        """Return whether as many hosts as there are places train together."""
        now = self.generation
        if now is None or now.phase is not GenerationPhase.ACTIVE:
            return False
        workers = [self.workers[m.host, m.incarnation] for m in now.membership.members]
        return len(workers) == self.config.num_hosts and all(
            w.runs and w.report.place.has_finished_step and w.generation is not None for w in workers
        )

    def are_all_others_training(self, pair: frozenset[HostName]) -> bool:
        """Return whether all hosts but one of a pair train together, and have finished a step."""
        now = self.generation
        if now is None or now.phase is not GenerationPhase.ACTIVE:
            return False
        hosts = {member.host for member in now.membership.members}
        workers = [self.workers[m.host, m.incarnation] for m in now.membership.members]
        return (
            hosts >= set(NAMES) - pair
            and len(hosts & pair) == 1
            and all(w.runs and w.report.place.has_finished_step and w.generation is not None for w in workers)
        )

    # Possible actions, (weight, action): those of the shells, then time, then faults.

    def moves(self):
        for host in self.hosts.values():
            yield from self.agent_moves(host)
            for worker in (host.worker, host.standby):
                if worker is not None and worker.runs:
                    yield from self.worker_moves(worker)

    def agent_moves(self, host: Host):
        if not host.acts:
            return
        worker = host.worker
        status = look_at(worker, host.seen)
        if host.standby is not None:
            yield from self.standby_moves(host, host.standby)
        elif (
            self.has_standbys and worker.runs and worker.generation and worker.report.place.has_finished_step
        ):
            yield 1, lambda: self.start_standby(host)
        if worker.outbox:
            yield 2, lambda: self.hear(host)
        elif status != host.seen:
            yield 2, lambda: self.notice(host, status)
        elif not worker.alive and not host.draining and (not worker.error or self.is_noted(worker)):
            yield 1, lambda: self.restart_worker(host)
            yield 1, lambda: self.promote_standby(host)
        if host.draining and self.now_s - host.noticed_s > DRAIN_DEADLINE_S:
            yield 2, lambda: self.leave(host)
        if host.check_s is not None and self.now_s >= host.check_s:
            yield 2, lambda: self.check(host)
        if (reach := self.look_around(host)) != host.reach:
            yield 2, lambda: self.report_reach(host, reach)
        if not host.connected:
            return
        if not host.registered:
            quiet = not worker.outbox and not (worker.inbox and worker.alive)
            if not host.registers:
                yield 2, lambda: self.begin_registration(host)
            elif self.store.get(make_host_key(JOB, host.name)) is None and quiet:
                yield 2, lambda: self.register(host)
            return
        if self.store.get(make_host_key(JOB, host.name)) is None:
            yield 2, lambda: self.lose_session(host)
        elif host.touched or host.has_due_snapshots:
            yield 3, lambda: self.publish(host)
        if self.has_news(host):
            yield 3, lambda: self.read_generation(host)
        if host.term is not None:
            yield from self.leader_moves(host, host.term)
        elif (
            self.store.get(make_leader_key(JOB)) is None
            and self.store.get(make_host_key(JOB, host.name))
            and not self.must_let_lead(host)
        ):
            yield 2, lambda: self.lead(host)

    def standby_moves(self, host: Host, standby: Worker):
        assert host.standby_seen is not None
        status = look_at(standby, host.standby_seen)
        if standby.outbox:
            yield 2, lambda: self.hear_standby(host)
        elif status != host.standby_seen:
            yield 2, lambda: self.notice_standby(host, status)

    def leader_moves(self, host: Host, term: Term):
        if term.pending:
            yield 3, lambda: self.write(host, term)
        elif self.must_let_lead(host):
            yield 3, lambda: self.resign(host, term)
        elif self.store.history.read(make_hosts_prefix(JOB), term.read, 1, self.store.revision)[0]:
            yield 4, lambda: self.read_status(host, term)
        elif term.machine.state.quarantined != self.quarantined:
            change = QuarantineChanged(frozenset(self.quarantined))
            yield 3, lambda: self.decide(host, term, change)
        elif term.looked_s != self.now_s:
            yield 2, lambda: self.decide(host, term, Tick())

    def worker_moves(self, worker: Worker):
        if worker.inbox:
            yield 3, worker.obey
        if worker.hung:
            if worker.report.overdue is None:
                yield 2, lambda: worker.report_overdue(WorkerTask.INPUT)
            return
        generation = worker.generation
        if generation is None:
            if worker.report.state is WorkerState.STARTING:
                yield 1, worker.join
            elif worker.is_preparing:
                yield 3, lambda: worker.end_preparing(is_seated=not worker.protocol.is_interrupted)
                yield 1, lambda: worker.end_preparing(is_seated=False)
            elif worker.protocol.form is not None:
                yield 3, lambda: self.enter(worker)
            elif worker.protocol.take_seat is not None:
                yield 3, worker.take_order
            return
        if worker.protocol.is_interrupted:
            yield 3, worker.go_idle
        elif not worker.report.place.has_formed:
            if self.can_form(worker, generation):
                yield 4, lambda: self.form(worker, generation)
        else:
            yield from self.step_moves(worker, generation)

    def step_moves(self, worker: Worker, generation: Generation):
        if worker.step >= self.total:
            yield 3, lambda: worker.go_idle(done=True)
        elif worker.begun <= worker.step:
            _, decision = try_begin_step(worker.protocol, worker.step)
            if decision is StepDecision.END:
                yield 3, worker.go_idle
            elif decision is StepDecision.START:
                yield 2, lambda: self.begin_step(worker, generation)
            return
        arrived = self.arrived[generation.number]
        has_result = not self.is_cut(generation) and all(
            arrived.get(m.host, 0) >= worker.begun for m in generation.membership.members
        )
        if has_result:
            yield 2, lambda: self.commit(worker)
        elif worker.report.overdue is None and (
            self.is_cut(generation)
            or any(self.workers[m.host, m.incarnation].hung for m in generation.membership.members)
        ):
            yield 1, lambda: worker.report_overdue(WorkerTask.SUM)
        if any(
            self.breaks_collective(m, generation, has_result=has_result)
            for m in generation.membership.members
        ):
            yield (
                2,
                lambda: worker.go_idle(
                    failure=WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="reset")
                ),
            )

    def breaks_collective(self, member: Member, generation: Generation, *, has_result: bool) -> bool:
        """Return whether a collective may fail because of this member.

        By default because of any that is not in the generation. Else as gloo has it: a member that has not begun yet is
        waited for, and one that stops after the result is there does no harm; one that dies may.
        """
        worker = self.workers[member.host, member.incarnation]
        if worker.generation == generation:
            return False
        has_entered = member.host in self.entered[generation.number]
        return self.are_collectives_fragile or not worker.alive or (has_entered and not has_result)

    def time_moves(self):
        late = any(
            self.has_news(h) if h.reaches_store and h.registered else h.lease is not None
            for h in self.hosts.values()
        )
        yield 2, lambda: self.pass_time(0.5)
        if not late:
            yield 1, lambda: self.pass_time(6.0)

    def fault_moves(self):
        if self.cut:
            yield 3, self.cut.clear
        else:
            for pair in itertools.combinations(self.hosts, 2):
                yield 1, lambda p=frozenset(pair): self.cut.add(p)
        for host in self.hosts.values():
            if host.lease is not None and not (host.acts and host.registered):
                yield 2, lambda h=host: self.expire(h)
            if not host.alive:
                if host.lease is None:
                    yield 1, lambda h=host: self.boot(h)
                continue
            if host.name in self.quarantined:
                yield 3, lambda h=host: self.quarantined.remove(h.name)
            elif not self.quarantined:
                yield 1, lambda h=host: self.quarantined.add(h.name)
            yield from self.agent_faults(host)
            yield from self.worker_faults(host.worker)
            if host.standby is not None:
                yield from self.worker_faults(host.standby)

    def agent_faults(self, host: Host):
        if host.suspended:
            yield 3, lambda: self.resume(host)
            return
        yield 1, lambda: self.kill_host(host)
        yield 1, lambda: self.suspend(host)
        if host.reaches_store and host.registered and self.generation is not None:
            yield 1, lambda: self.watch_again(host)
        if host.connected:
            yield 1, lambda: self.disconnect(host)
        else:
            yield 3, lambda: self.connect(host)
            if host.registered:
                yield 3, lambda: self.lose_session(host)
        if host.services:
            yield 1, lambda: self.kill_service(host)
        if not host.draining and sum(h.alive and not h.draining for h in self.hosts.values()) > 1:
            yield 1, lambda: self.drain(host)

    def worker_faults(self, worker: Worker):
        if not worker.alive:
            return
        yield 2, lambda: self.kill(worker)
        yield 2 if worker.stopped else 1, lambda: self.stop_or_continue(worker)
        if (
            worker.runs
            and not worker.hung
            and worker.report.place.has_formed
            and worker.generation is not None
        ):
            failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="out of luck")
            yield 1, lambda: worker.go_idle(failure=failure)
            yield 1, worker.hang
            yield 1, lambda: self.report_slow(worker)
            if worker is self.hosts[worker.host].worker:
                yield 1, lambda: self.raise_error(worker, OWN_ERRORS[worker.host])
                yield 1, lambda: self.raise_error(worker, COMMON_ERROR)
            # Of a worker that is only slow, and of one that waits for another.
            yield 1, lambda: worker.report_overdue(WorkerTask.INPUT)
            yield 1, lambda: worker.report_overdue(WorkerTask.SUM)

    def raise_error(self, worker: Worker, error: str) -> None:
        self.raised.add((worker.host, worker.step, error))
        worker.end_with(error)

    def is_noted(self, worker: Worker) -> bool:
        """Return whether its agent may start another worker after this one, which has raised an error."""
        return self.hosts[worker.host].noted >= worker.incarnation

    def report_slow(self, worker: Worker) -> None:
        """Have a worker report that the host after its own is slow, or any other one that comes to the same place."""
        assert worker.generation is not None
        members = worker.generation.membership.members
        slow = members[(worker.step + 1) % len(members)].host
        found = SlowHost(host=slow, kind="compute", factor=2.0, since_step=100 * worker.step)
        slowdown = Slowdown(
            generation=worker.generation.number,
            host=slow,
            kept=0.5,
            replaced=1.0,
            without=0.8 * (worker.step % 2),
            redivided=0.7 * (worker.step % 3 == 0),
            speeds=((slow, 0.5),),
            devices=(1,),
            fewer_devices=0.9 * (worker.step % 5 == 0),
        )
        worker.apply(worker_protocol.report_slow_hosts(worker.protocol, ((found,), slowdown)))

    # The network between hosts.

    def is_cut(self, generation: Generation) -> bool:
        """Return whether two members cannot reach each other."""
        hosts = {member.host for member in generation.membership.members}
        return any(pair <= hosts for pair in self.cut)

    def look_around(self, host: Host) -> ReachReport | None:
        """Return what an agent reports of the hosts that it reaches."""
        generation = host.orders.generation
        if generation is None or not must_look(generation, host.name, host.seen.report, ENDLESS):
            return None if host.reach is None or host.reach.unreached else host.reach
        others = [self.hosts[m.host] for m in generation.membership.members if m.host != host.name]
        cut = [other for other in others if frozenset((host.name, other.name)) in self.cut]
        return ReachReport(
            generation=generation.number,
            unreached=tuple(sorted(other.name for other in others if other in cut or not other.alive)),
            lasting=tuple(sorted(other.name for other in cut if other.acts and other.connected)),
        )

    def report_reach(self, host: Host, reach: ReachReport | None) -> None:
        host.reach = reach
        host.touched = True

    # The agent.

    def has_news(self, host: Host) -> bool:
        found = self.store.get(make_generation_key(JOB))
        return found is not None and found.mod_revision >= host.read

    def tell(self, host: Host, event: OrdersEvent) -> None:
        """Have the agent's machine handle an event, and carry out what it commands."""
        if isinstance(event, GenerationRead):
            raised = event.generation.failures.raised
            host.noted = max([host.noted, *(one.incarnation for one in raised if one.host == host.name)])
        worker = view(host.seen)
        standby = view(host.standby_seen) if host.standby_seen is not None else None
        config = OrdersConfig(
            host=host.name,
            quiesce_timeout_s=self.config.quiesce_timeout_s,
            replaces_workers=self.config.replaces_workers,
            reports_lost_seats=True,
        )
        host.orders, commands = generation_orders.handle(
            host.orders, event, worker, standby, self.now_s, config
        )
        for command in commands:
            self.carry_out(host, command)

    def carry_out(self, host: Host, command: OrdersCommand) -> None:
        worker = host.worker
        match command:
            case SendOrder(order):
                if not isinstance(order, TakeStacks):  # that one is for the guard thread alone
                    worker.inbox.append(order)
            case SendIntoWorld(generation, is_newcomer):
                worker.inbox.append(order_into_world(generation, worker, is_newcomer=is_newcomer))
            case SendStandbyToSeat(generation):
                assert host.standby is not None
                host.standby.inbox.append(order_into_world(generation, host.standby, is_newcomer=True))
            case OrderStandby(order):
                assert host.standby is not None
                host.standby.inbox.append(order)
            case DismissStandby() | FailStandby():
                self.end_standby(host)
            case TakeOver():
                self.take_over(host)
            case KillWorker():
                assert self.is_outside(host) or host.seen.is_unresponsive, "an agent kills a member"
                self.check_kill(host)
                self.kill(worker)
            case ReplaceWorker():
                assert self.is_outside(host), "an agent replaces a member"
                self.check_kill(host)
                self.kill(worker)
            case CheckUnwound():
                host.check_s = self.now_s + CHECK_INTERVAL_S
            case LeaveJob():
                self.leave(host)
            case StopOtherServices(world, address):
                kept = [
                    s for s in host.services if (s.world == world and s.address == address) or s.world > world
                ]
                host.touched = host.touched or kept != host.services
                host.services = kept
            case _:
                pass

    def check(self, host: Host) -> None:
        host.check_s = None
        self.tell(host, CheckDue())

    def hear(self, host: Host) -> None:
        report = host.worker.outbox.popleft()
        host.seen = msgspec.structs.replace(host.seen, report=report)
        host.touched = True
        self.tell(host, WorkerChanged())

    def notice(self, host: Host, status: WorkerStatus) -> None:
        host.seen = status
        host.touched = True
        self.tell(host, WorkerChanged())

    def is_outside(self, host: Host) -> bool:
        """Return whether this host's worker is no member of the newest generation that the agent knows."""
        known = host.orders.generation
        if known is None:
            return False
        member = (
            known.membership.find_member(host.name) if known.number != host.orders.void_generation else None
        )
        return member is None or member.incarnation != host.worker.incarnation

    def start_standby(self, host: Host) -> None:
        host.incarnations += 1
        host.standby = Worker(host.name, Incarnation(host.incarnations))
        host.standby_seen = WorkerStatus(
            incarnation=host.standby.incarnation, pid=2, report=host.standby.report
        )
        self.workers[host.name, host.standby.incarnation] = host.standby
        host.touched = True

    def hear_standby(self, host: Host) -> None:
        assert host.standby is not None
        assert host.standby_seen is not None
        report = host.standby.outbox.popleft()
        host.standby_seen = msgspec.structs.replace(host.standby_seen, report=report)
        host.touched = True
        self.tell(host, WorkerChanged())

    def notice_standby(self, host: Host, status: WorkerStatus) -> None:
        if status.exit_code is not None:
            self.end_standby(host)
            return
        host.standby_seen = status
        host.touched = True
        self.tell(host, WorkerChanged())

    def end_standby(self, host: Host) -> None:
        if host.standby is not None:
            self.kill(host.standby)
        host.standby = host.standby_seen = None
        host.touched = True

    def take_over(self, host: Host) -> None:
        assert host.standby is not None
        assert host.standby_seen is not None
        assert not host.worker.alive
        assert host.worker.incarnation == host.seen.incarnation
        if host.worker.error:
            self.end_standby(host)
            return
        host.worker, host.seen = host.standby, host.standby_seen
        host.standby = host.standby_seen = None
        host.touched = True
        self.tell(host, WorkerChanged())

    def restart_worker(self, host: Host) -> None:
        self.end_standby(host)
        host.start_worker()
        self.workers[host.name, host.worker.incarnation] = host.worker
        self.tell(host, WorkerChanged())

    def promote_standby(self, host: Host) -> None:
        """Start a worker that asks to join before anything else happens."""
        self.restart_worker(host)
        host.worker.join()
        while host.worker.outbox:
            self.hear(host)

    def read_stored(self) -> Generation | None:
        found = self.store.get(make_generation_key(JOB))
        return msgspec.msgpack.decode(found.value, type=Generation) if found is not None else None

    def begin_registration(self, host: Host) -> None:
        host.registers = True
        self.tell(host, RegistrationBegan(self.read_stored()))

    def register(self, host: Host) -> None:
        host.registers = False
        host.lease = self.store.grant(1e9, self.now_s)
        host.registered = True
        self.publish(host)
        self.tell(host, HostRegistered(self.read_stored()))
        self.watch_again(host)

    def watch_again(self, host: Host) -> None:
        """Read what the store has now: again, or without what was stored in between."""
        host.read = Revision(self.store.revision + 1)
        if (stored := self.read_stored()) is not None:
            self.tell(host, GenerationRead(stored))
            host.touched |= host.written is not None and owes_answer(stored, host.written)

    def publish(self, host: Host) -> None:
        assert host.lease is not None
        host.written = host.status()
        self.store.transaction((), (PutOp(make_host_key(JOB, host.name), encode(host.written), host.lease),))
        host.touched = False

    def lose_session(self, host: Host) -> None:
        """End the lease by the agent's own clock: stop training, then count as dead."""
        host.registered, host.term = False, None
        worker = host.worker
        worker.inbox.append(HoldTraining())
        if worker.runs:
            self.obey_all(worker)

    def obey_all(self, worker: Worker) -> None:
        while worker.inbox:
            worker.obey()

    def read_generation(self, host: Host) -> None:
        (found, *_), host.read = self.store.history.read(
            make_generation_key(JOB), host.read, 1, self.store.revision
        )
        assert isinstance(found, PutEvent)
        generation = msgspec.msgpack.decode(found.key_value.value, type=Generation)
        self.tell(host, GenerationRead(generation))
        host.touched |= host.written is not None and owes_answer(generation, host.written)

    def leave(self, host: Host) -> None:
        self.kill_host(host)
        if host.lease is not None:
            self.expire(host)

    # The leader: as in leader.py.

    def lead(self, host: Host) -> None:
        key = make_leader_key(JOB)
        assert host.lease is not None
        result = self.store.transaction((require_absent(key),), (PutOp(key, b"", host.lease),))
        assert result.succeeded
        stored = self.store.get(make_generation_key(JOB))
        generation = msgspec.msgpack.decode(stored.value, type=Generation) if stored else None
        statuses = [
            msgspec.msgpack.decode(r.value, type=HostStatus) for r in self.store.range(make_hosts_prefix(JOB))
        ]
        initial = make_initial_state(
            generation, statuses, self.now_s, quarantined=frozenset(self.quarantined)
        )
        machine = CheckedMachine(initial, self.config)
        known = stored.mod_revision if stored else Revision(0)
        read = Revision(self.store.revision + 1)
        host.term = Term(result.revision, known, machine, read, collections.deque())
        self.decide(host, host.term, Tick())

    def must_let_lead(self, host: Host) -> bool:
        """Return whether a host in quarantine lets another lead, as far as it knows."""
        if host.name not in self.quarantined:
            return False
        stored = self.store.range(make_hosts_prefix(JOB))
        statuses = [msgspec.msgpack.decode(record.value, type=HostStatus) for record in stored]
        return is_any_staying(statuses, host.name, self.quarantined)

    def resign(self, host: Host, term: Term) -> None:
        key = make_leader_key(JOB)
        ours = Compare(key, CompareTarget.CREATE_REVISION, CompareOperator.EQUAL, term.token)
        self.store.transaction((ours,), (DeleteOp(key),))
        host.term = None

    def read_status(self, host: Host, term: Term) -> None:
        (found, *_), term.read = self.store.history.read(
            make_hosts_prefix(JOB), term.read, 1, self.store.revision
        )
        if isinstance(found, PutEvent):
            change = HostChanged(msgspec.msgpack.decode(found.key_value.value, type=HostStatus))
        else:
            change = HostLeft(HostName(found.key.removeprefix(make_hosts_prefix(JOB))))
        self.decide(host, term, change)

    def decide(self, host: Host, term: Term, change: MembershipEvent) -> None:
        term.looked_s = self.now_s
        for command in term.machine.handle(change, self.now_s):
            match command:
                case PublishGeneration(generation):
                    self.check_error(generation, term)
                    term.pending.append(generation)
                case QuarantineHost(suspect, _):
                    self.quarantined.add(suspect)
                case QuarantineDevice():
                    pass  # its agent ends the worker some time later, as workers may end at any
                case StartCoordinationService():
                    self.prepare(host, command)

    def prepare(self, host: Host, command: StartCoordinationService) -> None:
        if all((s.world, s.num_processes) != (command.world, command.num_processes) for s in host.services):
            address = f"{host.name}:{command.world}:{command.num_processes}:{self.store.revision}"
            host.services.append(
                CoordinationServiceStatus(
                    world=command.world,
                    num_processes=command.num_processes,
                    num_seats=command.num_seats,
                    address=address,
                    pid=1,
                )
            )
            host.touched = True

    def write(self, host: Host, term: Term) -> None:
        generation = term.pending.popleft()
        key = make_generation_key(JOB)
        result = self.store.transaction(
            (
                Compare(
                    make_leader_key(JOB), CompareTarget.CREATE_REVISION, CompareOperator.EQUAL, term.token
                ),
                Compare(key, CompareTarget.MOD_REVISION, CompareOperator.EQUAL, term.known),
            ),
            (PutOp(key, encode(generation)),),
        )
        if not result.succeeded:
            host.term = None
            return
        term.known = result.revision
        self.check_write(generation, term)
        self.written.append((generation, term.token))

    # The worker's main thread.

    def enter(self, worker: Worker) -> None:
        me = (worker.host, worker.incarnation)
        generation = worker.take_order().generation
        assert me in {(m.host, m.incarnation) for m in generation.membership.members}, (
            "a worker that trains is a member"
        )
        for later, _ in self.written:
            seated = any((m.host, m.incarnation) == me for m in later.membership.members)
            if later.phase is GenerationPhase.FORM and later.number > generation.number:
                assert not seated, f"{worker.host} enters an older generation than one it is a member of"
        self.entered[generation.number].add(worker.host)
        members = (self.workers[m.host, m.incarnation] for m in generation.membership.members)
        if all(w.runs and w.generation == generation for w in members):
            self.complete.add(generation.number)

    def can_form(self, worker: Worker, generation: Generation) -> bool:
        if worker.host in generation.state.receivers and not any(
            source.host in self.entered[generation.number] and self.hosts[source.host].worker.runs
            for source in generation.state.sources
        ):
            return False
        return generation.membership.change is not WorldChange.REFORM or (
            generation.number in self.complete and not self.is_cut(generation)
        )

    def form(self, worker: Worker, generation: Generation) -> None:
        if worker.host in generation.state.receivers or generation.state.snapshot is not None:
            worker.held = generation.state.step
        elif not generation.state.sources:
            worker.held = None
        assert worker.step == generation.state.step, "all go on from the same step"
        worker.begun = worker.step
        (member,) = (m for m in generation.membership.members if m.host == worker.host)
        seat = SeatId(generation.membership.world, member.seat)
        if generation.membership.change is not WorldChange.REFORM:
            assert worker.report.place.world == generation.membership.world, (
                "a change in place stays in its world"
            )
            assert worker.report.place.seat == seat, "and in its seat"
        worker.apply(
            worker_protocol.report_formed(
                worker.protocol, seat, worker.step, holds_state=worker.held is not None
            )
        )

    def begin_step(self, worker: Worker, generation: Generation) -> None:
        worker.protocol, _ = try_begin_step(worker.protocol, worker.step)
        worker.begun = worker.step + 1
        self.arrived[generation.number][worker.host] = worker.begun
        self.check_limit(worker)

    def commit(self, worker: Worker) -> None:
        worker.apply(worker_protocol.report_overdue(worker.protocol, None))
        worker.held = worker.begun
        worker.apply(worker_protocol.report_commit(worker.protocol, worker.held, holds_state=True, part=None))

    # Time and faults.

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def kill(self, worker: Worker) -> None:
        worker.alive = False
        worker.generation = None

    def stop_or_continue(self, worker: Worker) -> None:
        worker.stopped = not worker.stopped
        if not worker.stopped:
            self.obey_all(worker)

    def kill_host(self, host: Host) -> None:
        host.alive = host.registered = False
        host.term = None
        host.services = []
        self.kill(host.worker)
        self.end_standby(host)

    def boot(self, host: Host) -> None:
        host.boot()
        self.workers[host.name, host.worker.incarnation] = host.worker

    def expire(self, host: Host) -> None:
        assert host.lease is not None
        self.store.revoke(host.lease)
        host.lease = None

    def suspend(self, host: Host) -> None:
        host.suspended = True

    def resume(self, host: Host) -> None:
        host.suspended = False

    def disconnect(self, host: Host) -> None:
        host.connected = False

    def connect(self, host: Host) -> None:
        host.connected = True

    def drain(self, host: Host) -> None:
        host.touched = True
        host.noticed_s = self.now_s
        self.tell(host, LeaveNoticed())

    def kill_service(self, host: Host) -> None:
        host.services.pop()
        host.touched = True

    # Invariants.

    def check_write(self, new: Generation, term: Term) -> None:
        """Check the invariants of a generation that the store accepts in this term."""
        if not self.written:
            old = Generation(number=GenerationNumber(1), phase=GenerationPhase.QUIESCE)
        else:
            old, old_token = self.written[-1]
            assert term.token >= old_token, "a deposed leader wrote"
        assert old.phase is not GenerationPhase.FINISHED, "nothing follows the end"
        if new.phase is GenerationPhase.FINISHED:
            assert new.outcome is not None
            if new.outcome.kind is JobOutcomeKind.INTERRUPTED:
                hosts = [self.hosts[m.host] for m in old.membership.members]
                assert all(h.draining or not h.alive for h in hosts), "somebody could have gone on"
            return
        if new.number == old.number:
            assert (old.phase, new.phase) in FORWARD, f"{old.phase} -> {new.phase} under one number"
            if old.phase is GenerationPhase.QUIESCE and new.phase is old.phase:
                is_noted = new.failures.raised != old.failures.raised
                decision = new.record.decision
                assert is_noted or (decision is not None and decision.action is RecoveryAction.WAIT)
                assert new.membership.members == old.membership.members
            if old.phase in (GenerationPhase.PAUSE, GenerationPhase.FORM, GenerationPhase.ACTIVE):
                assert new.membership.members == old.membership.members, "other members under the same number"
        else:
            assert new.number == old.number + 1
            assert new.phase in (GenerationPhase.QUIESCE, GenerationPhase.PAUSE), (
                "a new number begins with an agreement to stop"
            )
            assert set(new.membership.members) <= set(old.membership.members), "nobody joins by a quiesce"
        self.check_seats(new)
        if new.phase is GenerationPhase.FORM:
            self.check_form(old, new, term.machine.state.quarantined)

    def check_error(self, new: Generation, term: Term) -> None:
        """Check that an error ends the job only if two hosts have raised it, or no host without one has the state."""
        if new.outcome is None or new.outcome.kind is not JobOutcomeKind.USER_ERROR:
            return
        number_by_error = collections.Counter((step, error) for _, step, error in self.raised)
        state = term.machine.state
        others = [
            worker
            for member in state.generation.membership.members
            if (worker := find_worker(state, member)) is not None
            and worker.report.failure is None
            and worker.report.held.holds_state
            and not is_draining(state, member.host)
        ]
        assert max(number_by_error.values()) > 1 or not others, new.outcome

    def check_seats(self, new: Generation) -> None:
        """Check that no seat of a world is ever given to two workers."""
        for member in (*new.membership.members, *new.membership.newcomers):
            who = (member.host, member.incarnation)
            assert self.seats.setdefault((new.membership.world, member.seat), who) == who, (
                "a seat is taken twice"
            )
            assert member.seat < new.membership.next_seat <= new.membership.num_seats

    def check_form(self, old: Generation, new: Generation, quarantined: frozenset[HostName]) -> None:
        """Check that no worker trains or can begin to, and that all resume from the former members' newest step."""
        assert new.membership.members
        assert len({m.seat for m in new.membership.members}) == len({m.host for m in new.membership.members})
        assert len(new.membership.members) == len({m.host for m in new.membership.members})
        before = {(m.host, m.incarnation) for m in old.membership.members}
        workers = {
            (m.host, m.incarnation): self.workers[m.host, m.incarnation] for m in new.membership.members
        }
        for who, worker in workers.items():
            assert worker.generation is None, f"{worker.host} still trains in {worker.report.generation}"
            if worker.alive:
                assert worker.report.state is WorkerState.IDLE
            if who in before and old.phase is GenerationPhase.QUIESCE:
                assert worker.report.generation >= new.number, "a member has not acknowledged"
        kept = [w.held for who, w in workers.items() if who in before and w.held is not None]
        joined = [w.held for who, w in workers.items() if who not in before and w.held is not None]
        assert new.state.step == max(kept or joined, default=0)
        for who, worker in workers.items():
            if who[0] not in new.state.receivers and new.state.sources:
                assert worker.held == new.state.step, "whoever is not behind holds the state"
        if new.membership.change is WorldChange.REFORM:
            assert {m.seat for m in new.membership.members} == set(range(len(new.membership.members)))
        if new.membership.change is WorldChange.GROW:
            assert set(new.membership.members) - set(old.membership.members) <= set(old.membership.newcomers)

    def check_kill(self, host: Host) -> None:
        """Check that no agent ends a worker that answers, and is the last to have the state, before it is copied."""
        worker = host.worker
        if not worker.runs or worker.hung or worker.held is None:
            return
        written = host.written.worker if host.written is not None else None
        is_told = written is not None and written.report.held.holds_state
        if self.generation is None or not self.generation.record.progress or not is_told:
            return  # the leader has not heard of its first commit: what it begins anew are steps of a moment
        others = [w for h in self.hosts.values() for w in (h.worker, h.standby) if w not in (worker, None)]
        has_copy = any(w.alive and w.held is not None for w in others if w is not None)
        # In the model each part has all of the state.
        has_snapshot = any(h.alive and h.snapshots for h in self.hosts.values())
        assert has_copy or has_snapshot, f"an agent ends {worker.host}, which has the last copy of the state"

    def check_one_world_trains(self) -> None:
        """Check that at most one generation has all of its members training.

        A worker whose agent is suspended, and its lease gone, does not count: no process can order it to stop.
        """
        training: list[tuple[Generation, set[tuple[HostName, Incarnation]]]] = []
        for host in self.hosts.values():
            worker = host.worker
            generation = worker.generation
            if generation is None or not worker.runs or not worker.report.place.has_formed:
                continue
            if worker.protocol.is_interrupted:
                continue
            if host.lease is not None or not host.registered:
                # Compared, by identity first: hashes of all members and their plans would cost the most here.
                who = next((who for one, who in training if one is generation or one == generation), None)
                if who is None:
                    training.append((generation, who := set()))
                who.add((worker.host, worker.incarnation))
        complete = [
            generation
            for generation, who in training
            if who == {(m.host, m.incarnation) for m in generation.membership.members}
        ]
        assert len(complete) <= 1, f"train at once: {[g.number for g in complete]}"

    def check_limit(self, worker: Worker) -> None:
        """Check a step that has just begun against what the leader may rely on, or has decided."""
        now = self.generation
        assert now is not None
        member = now.membership.find_member(worker.host)
        if member is None or member.incarnation != worker.incarnation:
            return
        if now.phase is GenerationPhase.PAUSE and worker.report.generation == now.number:
            assert worker.report.earliest_stop_step is not None
            assert worker.begun <= worker.report.earliest_stop_step, "beyond the limit that it reported"
        if now.phase is GenerationPhase.BOUNDARY:
            assert now.planned.boundary_step is not None
            assert worker.begun <= now.planned.boundary_step, "beyond the boundary"


class ReplacingCluster(Cluster):
    """A cluster whose collectives cannot be aborted: agents kill workers, which resume from snapshots."""

    config = dataclasses.replace(CONFIG, replaces_workers=True, state_loss_policy=StateLossPolicy.RESTART)
    first_snapshot = 1
    """After so many steps of the job hosts begin to have snapshots."""

    def commit(self, worker: Worker) -> None:
        generation = worker.generation
        assert generation is not None
        super().commit(worker)
        if worker.step < self.first_snapshot:
            return
        members = tuple(sorted(m.host for m in generation.membership.members))
        made = SnapshotStatus(
            id=SnapshotId(worker.step, generation.number),
            phase=SnapshotPhase.COMPLETE,
            group=ParityGroup(hosts=members, parity=len(members) - 1),
            group_index=0,
            num_groups=1,
            nbytes=1,
            wall_s=0.0,
        )
        host = self.hosts[worker.host]
        host.snapshots = (*host.snapshots[-1:], made)

    def check_form(self, old: Generation, new: Generation, quarantined: frozenset[HostName]) -> None:
        """Check that a world that was left by force passes no worker on to the next."""
        if new.membership.change is WorldChange.REFORM and not new.state.sources:
            workers = [self.workers[m.host, m.incarnation] for m in new.membership.members]
            assert not [w for w in workers if w.generation is not None], "trains in another world"
        if old.phase is GenerationPhase.QUIESCE and not old.membership.members:
            assert new.membership.change is WorldChange.REFORM or set(new.membership.members) <= set(
                old.membership.newcomers
            )
        if new.state.snapshot is not None:
            assert new.state.step == new.state.snapshot.id.step


class LateSnapshotCluster(ReplacingCluster):
    """The same, where no snapshot has the first steps of the job: until then only workers have the state."""

    first_snapshot = 4


class SpareCluster(Cluster):
    """A cluster with a spare host: three hosts are members at most, whichever they are."""

    config = dataclasses.replace(CONFIG, num_hosts=len(NAMES) - 1)
    spares = NAMES[-1:]

    @property
    def is_settled(self) -> bool:
        """Return whether all places are taken, and the host without one is ready: it has tried to take a seat."""
        now = self.generation
        if now is None or not self.do_all_train:
            return False
        waiting = [h for h in self.hosts.values() if now.membership.find_member(h.name) is None]
        workers = [h.worker for h in waiting if h.registered and h.worker.runs]
        tried = [
            w.report.place.seat is not None and w.report.place.seat.world == now.membership.world
            for w in workers
        ]
        is_ready = [w.report.state is WorkerState.IDLE and not w.inbox for w in workers]
        return (
            len(workers) == len(waiting)
            and all(is_ready)
            and (now.membership.next_seat == now.membership.num_seats or all(tried))
        )

    def check_form(self, old: Generation, new: Generation, quarantined: frozenset[HostName]) -> None:
        """Check that there is a place for each member, and that no member has lost its own to another host."""
        super().check_form(old, new, quarantined)
        assert new.membership.max_members == self.config.num_hosts
        leaving = {h.name for h in self.hosts.values() if h.draining} | quarantined
        staying = {m for m in old.membership.members if m.host not in leaving}
        lasting = [m for m in new.membership.members if self.workers[m.host, m.incarnation].runs]
        assert len([m for m in lasting if not self.hosts[m.host].draining]) <= new.membership.max_members
        if new.membership.change is not WorldChange.REFORM and old.phase is GenerationPhase.BOUNDARY:
            assert staying <= set(new.membership.members)


class ReplacingSpareCluster(SpareCluster, ReplacingCluster):
    """A cluster with a spare host whose worker is not in the world of the workers that are killed together."""

    config = dataclasses.replace(ReplacingCluster.config, num_hosts=len(NAMES) - 1)


class RoomyCluster(Cluster):
    """A cluster with more seats than its deaths use up, whose collectives break only because of a member's death."""

    config = dataclasses.replace(CONFIG, spare_seats=64)

    def __init__(self) -> None:
        super().__init__(are_collectives_fragile=False, has_standbys=True)

    @property
    def is_whole(self) -> bool:
        """Return whether all hosts train together, and each has a standby that is ready in a seat of their world."""
        return self.do_all_train and all(
            host.standby_seen is not None
            and host.standby_seen.report.place.world == self.generation.membership.world
            for host in self.hosts.values()
            if self.generation is not None
        )

    def is_past(self, number: int) -> bool:
        """Return whether all hosts train together in a later generation."""
        return self.generation is not None and self.generation.number > number and self.do_all_train


class RoomyReplacingCluster(RoomyCluster, ReplacingCluster):
    """The same where collectives cannot be aborted."""

    config = dataclasses.replace(ReplacingCluster.config, spare_seats=64)


def look_at(worker: Worker, seen: WorkerStatus) -> WorkerStatus:
    """Return what an agent finds when it looks at a worker's process."""
    return msgspec.structs.replace(
        seen,
        is_unresponsive=worker.stopped,
        exit_code=None if worker.alive else 1 if worker.error else -9,
        error=worker.error,
    )


def view(seen: WorkerStatus) -> WorkerView:
    return WorkerView(
        incarnation=seen.incarnation,
        report=seen.report,
        is_unresponsive=seen.is_unresponsive,
        has_exited=seen.exit_code is not None,
    )


def order_into_world(generation: Generation, worker: Worker, *, is_newcomer: bool) -> FormWorld | TakeSeat:
    if not is_newcomer:
        return FormWorld(generation=generation, host=worker.host, relay_address="")
    newcomer = generation.membership.find_newcomer(worker.host, worker.incarnation)
    assert newcomer is not None
    return TakeSeat(generation=generation, host=worker.host, seat=newcomer.seat, relay_address="")
