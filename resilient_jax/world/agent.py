"""A host's supervisor: keeps one worker training in whatever generation the leader decides.

Data flow: the worker's words and the kernel's news change the host's status; the session writes it to the
store; some agent leads and answers with a generation; this agent turns it into orders for its worker. The
agent decides nothing about membership, not even when it leads: the machine does (membership.py).
"""

import asyncio
import contextlib
import dataclasses
import enum
import os
import signal
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.config import JobConfig
from resilient_jax.errors import ExitCode, PeerError, StoreUnreachable
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, JobName, Revision
from resilient_jax.protocol.keys import generation_key
from resilient_jax.protocol.records import (
    Change,
    FailureKind,
    Generation,
    HostStatus,
    LeaderRecord,
    Outcome,
    OutcomeKind,
    Phase,
    Versions,
    WorkerState,
    WorkerStatus,
)
from resilient_jax.protocol.worker import (
    RESTART_EXIT_CODE,
    Boundary,
    Form,
    Happened,
    Hold,
    Leased,
    Pause,
    Progressed,
    Quiesce,
    Stop,
    WorkerSettings,
)
from resilient_jax.store.interface import Put, Store
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport.credentials import Credentials
from resilient_jax.world.coordination import CoordinationServices
from resilient_jax.world.leader import GENERATION_DECODER, Leader
from resilient_jax.world.membership import AfterStateLoss, Rules
from resilient_jax.world.output import WorkerOutput
from resilient_jax.world.relay import Relay
from resilient_jax.world.restart_budget import RestartBudget
from resilient_jax.world.session import Session, SessionLost
from resilient_jax.world.worker_process import WorkerProcess

PROGRESS_INTERVAL_S = 0.25
"""How often step and metrics go to the store, for people to look at."""
STOP_GRACE_S = 2.0
"""A worker that was told to stop because the job failed gets this long before SIGKILL."""
FINISH_GRACE_S = 60.0
"""After the job is done the script may still save or print; this bounds it."""
RELAY_GRACE_S = 10.0
"""JAX's client takes up to 5 s more than its own deadline to give up."""
DRAIN_DEADLINE_S = 25.0
"""Schedulers kill 30 s after their notice; leaving later than this saves nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent is started with.

    Attributes:
        address: the address of this host under which the others reach it.
        command: the script and its arguments.
        environment: for the worker: what makes jax find its devices and survive.
        run_directory: for logs and events; None writes none.
    """

    job: JobName
    host: HostName
    address: str
    command: tuple[str, ...]
    environment: dict[str, str]
    devices_per_host: int | None
    expected_hosts: int
    versions: Versions
    credentials: Credentials
    config: JobConfig
    run_directory: Path | None
    show_everything: bool = False


class _Leaving(enum.Enum):
    """How far a notice to leave has come."""

    NO = enum.auto()
    ASKED = enum.auto()


class Agent:
    """One host's supervisor. `run` is its whole life."""

    def __init__(
        self, settings: AgentSettings, store: Store, say: Callable[[str], None], clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._store = store
        self._say = say
        self._clock = clock or SystemClock()
        directory = settings.run_directory
        self._log = EventLog(
            directory / f"{settings.host}.events.jsonl" if directory else None, settings.host
        )
        self._output = WorkerOutput(
            settings.host,
            directory / f"{settings.host}.log" if directory else None,
            everything=settings.show_everything,
        )
        self._agent_id = uuid.uuid4().hex
        self._services = CoordinationServices(settings.address, self._log, self._touch)
        self._worker: WorkerProcess | None = None
        self._worker_status: WorkerStatus | None = None
        self._relay: Relay | None = None
        self._generation: Generation | None = None
        self._session: Session | None = None
        self._leaving = _Leaving.NO
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._progress: tuple[int, dict[str, float]] = (0, {})
        self._budget = RestartBudget(
            limit=settings.config.restart_limit,
            window_s=settings.config.restart_window_s,
            backoff_s=settings.config.restart_backoff_s,
        )
        self._killing: asyncio.Task[None] | None = None
        self._void: GenerationNumber | None = None

    async def run(self) -> Outcome:
        """Supervises until the job has ended, this host leaves, or the store is lost for good.

        Raises:
            Refused: the job does not let this host in.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_notice)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        self._log.record(EventKind.AGENT_STARTED, pid=os.getpid())
        tasks: list[asyncio.Task[None]] = []
        try:
            session = self._new_session()
            await session.open()
            self._session = session
            self._generation = await self._read_generation()
            tasks = [
                loop.create_task(self._supervise_worker()),
                loop.create_task(self._stay_registered(session)),
                loop.create_task(self._publish_progress()),
            ]
            for task in tasks:
                task.add_done_callback(self._end_if_failed)
            outcome = await self._ended
            await self._let_worker_finish(outcome)
            return self._with_workers_code(outcome)
        finally:
            await self._clean_up(tasks)

    # Signals.

    def _on_notice(self) -> None:
        """SIGTERM: leave at the next step boundary."""
        if self._leaving is not _Leaving.NO:
            self._on_interrupt()
            return
        self._leaving = _Leaving.ASKED
        self._log.record(EventKind.HOST_DRAINING)
        self._say(f"{self._settings.host}: got a notice to leave; leaving at the next step boundary")
        asyncio.get_running_loop().call_later(DRAIN_DEADLINE_S, self._leave)
        self._touch()
        if self._generation is None or self._generation.member(self._settings.host) is None:
            self._leave()

    def _leave(self) -> None:
        self._end(Outcome(kind=OutcomeKind.INTERRUPTED, exit_code=int(ExitCode.DRAINED), message="drained"))

    def _on_interrupt(self) -> None:
        self._end(
            Outcome(kind=OutcomeKind.INTERRUPTED, exit_code=int(ExitCode.INTERRUPTED), message="interrupted")
        )

    def _end_if_failed(self, task: "asyncio.Task[None]") -> None:
        """An error of the agent itself ends it; `run` raises it."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _end(self, outcome: Outcome) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)

    # The store.

    def _new_session(self) -> Session:
        return Session(
            self._store,
            self._settings.job,
            self._settings.config.lease_ttl_s,
            self._clock,
            self._status,
            self._on_lease_renewed,
        )

    def _on_lease_renewed(self, until_s: float) -> None:
        if self._worker is not None:
            self._worker.order(Leased(until_s=until_s))

    async def _stay_registered(self, session: Session) -> None:
        """Holds a session; when one is lost, stops training first and then comes back with a new one."""
        while True:
            self._session = session
            session.touch()
            why = await self._use_session(session)
            self._session = None
            self._log.record(EventKind.STORE_LOST, why=why)
            self._say(f"{self._settings.host}: {why}; training stops here until the store is back")
            if self._worker is not None:
                self._worker.order(Hold())
            session = await self._reopen(why)
            self._log.record(EventKind.STORE_REGAINED)
            self._say(f"{self._settings.host}: the store is back")

    async def _use_session(self, session: Session) -> str:
        """Lives with a session; gives the reason for its end."""
        loop = asyncio.get_running_loop()
        leader = self._leader()
        tasks = [
            loop.create_task(session.keep_alive()),
            loop.create_task(session.publish_changes()),
            loop.create_task(self._retrying(lambda: self._watch_generation())),
            loop.create_task(self._retrying(lambda: leader.campaign(session.lease))),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                error = task.exception()
                if isinstance(error, SessionLost):
                    return str(error)
                if error is not None:
                    raise error
            raise AssertionError("a session's tasks end only by an error")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _retrying(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Does `work` again when the store was away for a moment; the lease decides when that is too long."""
        while True:
            try:
                await work()
            except PeerError:
                await asyncio.sleep(0.1)

    async def _reopen(self, why: str) -> Session:
        deadline_s = self._clock.monotonic_s() + self._settings.config.store_deadline_s
        while True:
            session = self._new_session()
            try:
                known = await self._read_generation()
                self._void = known.number if known is not None else None
                await session.open()
                return session
            except PeerError as error:
                if self._clock.monotonic_s() > deadline_s:
                    raise StoreUnreachable(
                        f"host {self._settings.host} lost the store ({why}) and could not reach it again within "
                        f"{self._settings.config.store_deadline_s:g} s; training stopped here, its state is given "
                        "up. Start the store again, then this agent"
                    ) from error
                await asyncio.sleep(0.2)

    async def _read_generation(self) -> Generation | None:
        """The generation that stands when this host comes (back): a seat that it has there is void."""
        record = await self._store.get(generation_key(self._settings.job))
        return GENERATION_DECODER.decode(record.value) if record is not None else None

    def _leader(self) -> Leader:
        config = self._settings.config
        return Leader(
            store=self._store,
            job=self._settings.job,
            record=LeaderRecord(host=self._settings.host, agent_id=self._agent_id),
            rules=Rules(
                expected_hosts=self._settings.expected_hosts,
                min_hosts=config.min_hosts,
                start_deadline_s=config.start_deadline_s,
                regroup_s=config.lease_ttl_s + 2.0,
                quiesce_deadline_s=config.quiesce_deadline_s,
                forming_deadline_s=config.forming_deadline_s,
                collective_retry_limit=config.collective_retry_limit,
                after_state_loss=AfterStateLoss(config.on_state_lost),
            ),
            services=self._services,
            log=self._log,
            clock=self._clock,
        )

    def _status(self) -> HostStatus:
        step, metrics = self._progress
        return HostStatus(
            host=self._settings.host,
            agent_id=self._agent_id,
            agent_pid=os.getpid(),
            address=self._settings.address,
            versions=self._settings.versions,
            draining=self._leaving is not _Leaving.NO,
            worker=self._worker_status,
            services=self._services.running,
            step=step,
            metrics=metrics,
        )

    def _touch(self) -> None:
        if self._session is not None:
            self._session.touch()

    async def _publish_progress(self) -> None:
        published = self._progress
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            if self._progress != published:
                published = self._progress
                self._touch()

    # Generations.

    async def _watch_generation(self) -> None:
        key = generation_key(self._settings.job)
        record = await self._store.get(key)
        revision = record.mod_revision if record else Revision(0)
        if record is not None:
            await self._obey(GENERATION_DECODER.decode(record.value))
        async with contextlib.aclosing(self._store.watch(key, Revision(revision + 1))) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Put):
                        await self._obey(GENERATION_DECODER.decode(event.key_value.value))

    async def _obey(self, generation: Generation) -> None:
        """Turns the leader's decision into an order for the worker."""
        known = self._generation
        if known is not None and generation.number < known.number:
            self._log.record(EventKind.GENERATION_REFUSED, generation=generation.number, newest=known.number)
            return
        self._generation = generation
        if generation.phase is Phase.FINISHED:
            assert generation.outcome is not None, "a finished generation has an outcome"
            self._end(generation.outcome)
            return
        worker = self._worker
        member = generation.member(self._settings.host)
        seated = member is not None and worker is not None and member.incarnation == worker.incarnation
        if worker is None or not seated or generation.number == self._void:
            await self._obey_from_outside(generation)
            return
        match generation.phase:
            case Phase.QUIESCE:
                worker.order(Quiesce(generation=generation.number, reason=generation.reason))
            case Phase.PAUSE:
                worker.order(Pause(generation=generation.number))
            case Phase.BOUNDARY:
                assert generation.boundary is not None, "a boundary has a step"
                worker.order(Boundary(generation=generation.number, step=generation.boundary))
            case Phase.FORM:
                relay = await self._relay_to(generation)
                worker.order(Form(generation=generation, host=self._settings.host, relay=relay))
            case Phase.ACTIVE:
                self._services.retire_before(generation.world)

    async def _obey_from_outside(self, generation: Generation) -> None:
        """This host's worker is not a member: it must not train, and may ask to join."""
        if self._leaving is not _Leaving.NO and generation.phase in (Phase.FORM, Phase.ACTIVE):
            self._leave()
            return
        worker = self._worker
        if worker is None or worker.child.exit_code is not None:
            return
        if worker.stopped:
            self._kill_worker("it was stopped and the others went on without it")
            return
        # An idle one answers at once; that answer is what lets it join (Generation.dropped).
        worker.order(Quiesce(generation=generation.number, reason="left out of the generation"))
        running = worker.report.state is WorkerState.RUNNING
        if running and (self._killing is None or self._killing.done()):
            self._killing = asyncio.create_task(self._kill_unless_idle(worker))

    async def _kill_unless_idle(self, worker: WorkerProcess) -> None:
        deadline_s = self._clock.monotonic_s() + self._settings.config.quiesce_deadline_s
        while worker.report.state is WorkerState.RUNNING and worker.child.exit_code is None:
            if self._clock.monotonic_s() > deadline_s and not worker.report.busy:
                if worker is self._worker:
                    self._kill_worker("it was left out of the generation and did not stop training")
                return
            await asyncio.sleep(0.1)

    async def _relay_to(self, generation: Generation) -> str:
        if generation.change is Change.SHRINK and self._relay is not None:
            return self._relay.address
        if self._relay is None or self._relay.service != generation.service:
            old, self._relay = self._relay, Relay(generation.service)
            await self._relay.start(self._settings.address)
            if old is not None:
                # The worker hangs up itself when it leaves the old world; until then it must not be cut. An
                # attempt to connect that it abandoned lives as long as its deadline.
                lived_out_s = self._settings.config.forming_deadline_s + RELAY_GRACE_S
                asyncio.get_running_loop().call_later(lived_out_s, lambda: asyncio.ensure_future(old.close()))
        return self._relay.address

    # The worker.

    async def _supervise_worker(self) -> None:
        number = 0
        while True:
            # From the clock, so that it also differs from those of an agent that ran here before.
            number = max(number + 1, int(self._clock.wall_s() * 1000))
            worker = self._start_worker(Incarnation(number))
            try:
                code = await worker.follow(
                    self._output,
                    self._settings.config.silence_deadline_s,
                    lambda w=worker: self._on_worker_changed(w),
                    self._on_word,
                )
            except asyncio.CancelledError:
                await worker.child.end()
                raise
            self._log.record(
                EventKind.WORKER_EXITED,
                generation=worker.report.generation,
                step=worker.report.step,
                exit_code=code,
                incarnation=number,
            )
            self._on_worker_changed(worker)
            if self._ended.done() or worker.report.done or _is_users_error(code):
                # After the user's error its status stays, for the leader to end the job with: another
                # worker's status would hide it, and the error would be retried.
                return
            delay_s = self._spend_restart()
            if delay_s is None:
                return
            self._say(f"{self._settings.host}: worker {_how_it_ended(code)}; starting another")
            await asyncio.sleep(delay_s)

    def _start_worker(self, incarnation: Incarnation) -> WorkerProcess:
        settings = self._settings
        self._output.forget()
        worker = WorkerProcess.start(
            incarnation,
            settings.command,
            settings.environment,
            WorkerSettings(
                job=settings.job,
                host=settings.host,
                address=settings.address,
                token=settings.credentials.token,
                tls=_tls_paths(settings.credentials),
                devices_per_host=settings.devices_per_host,
                forming_timeout_s=settings.config.forming_deadline_s,
            ),
            self._clock,
        )
        if self._generation is not None and self._generation.members:
            worker.child.run_in_the_background()  # others train already
        self._worker = worker
        self._log.record(EventKind.WORKER_STARTED, pid=worker.child.pid, incarnation=incarnation)
        self._on_worker_changed(worker)
        return worker

    def _spend_restart(self) -> float | None:
        """Seconds to wait before the next start; None, and the end of this host, if none is left."""
        self._budget, delay_s = self._budget.spend(self._clock.monotonic_s())
        if delay_s is None:
            config = self._settings.config
            self._log.record(EventKind.BUDGET_EXHAUSTED, limit=config.restart_limit)
            message = (
                f"the worker on {self._settings.host} died {config.restart_limit + 1} times within "
                f"{config.restart_window_s:g} s, more often than restart_limit = {config.restart_limit} allows; "
                f"its last words:\n{self._output.last_errors()}"
            )
            self._end(
                Outcome(
                    kind=OutcomeKind.TOO_FEW_HOSTS,
                    exit_code=int(ExitCode.BUDGET_EXHAUSTED),
                    host=self._settings.host,
                    message=message,
                )
            )
        elif delay_s:
            self._log.record(EventKind.RESTART_DELAYED, seconds=delay_s)
        return delay_s

    def _on_worker_changed(self, worker: WorkerProcess) -> None:
        if worker is not self._worker or self._ended.done():
            return  # after the end it exits because it was told to, which is nobody's error
        was_stopped = self._worker_status is not None and self._worker_status.stopped
        if worker.stopped and not was_stopped:
            self._log.record(EventKind.WORKER_STOPPED, pid=worker.child.pid, step=worker.report.step)
        if worker.dying and self._worker_status is not None and not self._worker_status.dying:
            self._log.record(EventKind.WORKER_DYING, pid=worker.child.pid, step=worker.report.step)
        self._worker_status = WorkerStatus(
            incarnation=worker.incarnation,
            pid=worker.child.pid,
            report=worker.report,
            stopped=worker.stopped,
            dying=worker.dying,
            exit_code=worker.child.exit_code,
            error=_error_of(worker),
        )
        self._touch()
        generation = self._generation
        if worker.stopped and generation is not None and generation.member(self._settings.host) is None:
            self._kill_worker("it was stopped")

    def _on_word(self, word: Progressed | Happened) -> None:
        if isinstance(word, Happened):
            self._log.append(word.event)
        else:
            self._progress = (word.step, word.metrics)

    def _kill_worker(self, why: str) -> None:
        if self._worker is not None and self._worker.child.exit_code is None:
            self._log.record(EventKind.WORKER_KILLED, pid=self._worker.child.pid, why=why)
            self._worker.child.kill()

    # The end.

    async def _let_worker_finish(self, outcome: Outcome) -> None:
        worker = self._worker
        if worker is None or worker.child.exit_code is not None:
            return
        worker.order(Stop(reason=str(outcome.kind)))
        grace_s = FINISH_GRACE_S if outcome.kind is OutcomeKind.DONE else STOP_GRACE_S
        if outcome.exit_code == ExitCode.INTERRUPTED:
            grace_s = 0.0
        try:
            async with asyncio.timeout(grace_s):
                await worker.child.exited()
                await asyncio.sleep(0.2)  # its last lines
        except TimeoutError:
            self._kill_worker("the job is over")

    def _with_workers_code(self, outcome: Outcome) -> Outcome:
        """A script that fails after training is done has failed."""
        code = self._worker.child.exit_code if self._worker is not None else 0
        if outcome.kind is OutcomeKind.DONE and code is not None and code > 0:
            return Outcome(
                kind=OutcomeKind.USER_ERROR,
                exit_code=code,
                host=self._settings.host,
                message=_error_of(self._worker) if self._worker is not None else "",
            )
        return outcome

    async def _clean_up(self, tasks: "list[asyncio.Task[None]]") -> None:
        session = self._session
        for task in (*tasks, *([self._killing] if self._killing else [])):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._worker is not None:
            await self._worker.child.end()
        await self._services.close()
        if self._relay is not None:
            await self._relay.close()
        if session is not None:
            with contextlib.suppress(PeerError, TimeoutError):
                await session.close()
        self._log.record(EventKind.AGENT_STOPPED)
        self._log.close()
        self._output.close()


def _tls_paths(credentials: Credentials) -> tuple[str, str, str] | None:
    tls = credentials.tls
    return None if tls is None else (str(tls.certificate), str(tls.key), str(tls.authority))


def _is_users_error(code: int) -> bool:
    """Whether the script ended by itself without asking to be started again; a signal is not its doing."""
    return code >= 0 and code != RESTART_EXIT_CODE


def _error_of(worker: WorkerProcess) -> str:
    """What the user has to know of a script that failed; empty if it did not, or was killed."""
    code, failure = worker.child.exit_code, worker.report.failure
    if code is None or code <= 0:
        return ""
    if failure is not None and failure.kind is FailureKind.USER:
        return failure.text  # whole, with what caused it, however long
    if not worker.error:
        return f"the script exited with code {code} and wrote nothing to standard error"
    if worker.error.startswith("Traceback"):
        return worker.error
    return f"the script exited with code {code}; the end of its standard error:\n{worker.error}"


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"
