"""The supervisor of a host: keeps one worker training in whatever generation the leader decides.

Data flow: the worker's messages and the kernel's signals change the host's status; the session writes the status to the
store; the leading agent answers with a generation; this agent turns the generation into orders for its worker. An agent
decides nothing about membership, not even when it leads: the machine does (membership.py).
"""

import asyncio
import contextlib
import enum
import os
import signal
import uuid
from collections.abc import Callable, Coroutine, Sequence

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.leader import GENERATION_DECODER, Leader
from resilient_jax.cluster.membership import MembershipConfig
from resilient_jax.cluster.relay import Relay
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.state_loss import StateLossPolicy
from resilient_jax.cluster.store_session import SessionLost, StoreSession
from resilient_jax.cluster.worker_process import WorkerProcess
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.errors import ExitCode, PeerError, StoreUnreachable
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, Revision
from resilient_jax.protocol.records import (
    Generation,
    GenerationPhase,
    HostStatus,
    JobOutcome,
    JobOutcomeKind,
    LeaderRecord,
    WorkerState,
    WorldChange,
)
from resilient_jax.protocol.store_keys import make_generation_key
from resilient_jax.protocol.worker_messages import (
    FormWorld,
    HoldTraining,
    LeaseRenewed,
    Pause,
    Quiesce,
    RunToBoundary,
)
from resilient_jax.store.interface import PutEvent, Store
from resilient_jax.telemetry.event_log import EventLog

PROGRESS_INTERVAL_S = 0.25
"""How often step and metrics are written to the store, for progress lines and tables."""
RELAY_GRACE_S = 10.0
"""JAX's client takes up to 5 s more than its own deadline to give up."""
CANCEL_INTERVAL_S = 1.0
DRAIN_GRACE_S = 25.0
"""Schedulers kill 30 s after their notice; leaving later than this saves nothing."""


class _Leaving(enum.Enum):
    """How far a notice to leave has come."""

    NO = enum.auto()
    ASKED = enum.auto()


class Agent:
    """One host's supervisor. `run` is its complete life."""

    def __init__(
        self,
        settings: AgentSettings,
        store: Store,
        print_line: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._print_line = print_line
        self._clock = clock or SystemClock()
        directory = settings.run_directory
        self._log = EventLog(
            directory / f"{settings.host}.events.jsonl" if directory else None, settings.host
        )
        self._agent_id = uuid.uuid4().hex
        self._services = CoordinationServices(settings.address, self._log, self._touch)
        self._relay: Relay | None = None
        self._generation: Generation | None = None
        self._session: StoreSession | None = None
        self._leaving = _Leaving.NO
        self._ended: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self._early_outcome: JobOutcome | None = None
        """The outcome of a notice or an interrupt that came after training was done and before the script ended."""
        self._killing: asyncio.Task[None] | None = None
        self._void_generation: GenerationNumber | None = None
        self._snapshots = SnapshotServerProcess(
            settings, self._log, on_change=self._on_snapshots_changed, on_end=self._on_snapshots_lost
        )
        self._supervisor = WorkerSupervisor(
            settings,
            self._log,
            self._clock,
            print_line,
            snapshots=self._snapshots,
            on_change=self._on_worker_changed,
            do_others_train=lambda: self._generation is not None and bool(self._generation.members),
            is_over=self._ended.done,
        )

    async def run(self) -> JobOutcome:
        """Supervise until the job has ended, or this host leaves.

        Returns:
            The outcome of the job, or of this host.

        Raises:
            JoinRefused: the job does not let this host in.
            StoreUnreachable: the store stayed away for `store_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_notice)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        self._log.record(EventKind.AGENT_STARTED, pid=os.getpid())
        tasks: list[asyncio.Task[None]] = []
        try:
            session = self._session = await self._register("while it registered")
            tasks = [
                loop.create_task(self._supervise_worker()),
                loop.create_task(self._stay_registered(session)),
                loop.create_task(self._publish_progress()),
            ]
            for task in tasks:
                task.add_done_callback(self._end_if_failed)
            outcome = await self._ended
            await self._supervisor.wait_finished(outcome)
            return self._early_outcome or self._supervisor.apply_exit_code(outcome)
        finally:
            await self._clean_up(tasks)

    # Signals.

    def _on_notice(self) -> None:
        """Leave at the next step boundary (SIGTERM)."""
        if self._leaving is not _Leaving.NO:
            self._on_interrupt()
            return
        self._leaving = _Leaving.ASKED
        self._log.record(EventKind.HOST_DRAINING)
        asyncio.get_running_loop().call_later(DRAIN_GRACE_S, self._leave)
        when = (
            f"the script has {DRAIN_GRACE_S:g} s to end"
            if self._is_done()
            else "leaving at the next step boundary"
        )
        self._print_line(f"{self._settings.host}: got a notice to leave; {when}")
        self._touch()
        generation = self._generation
        if generation is None or (
            generation.find_member(self._settings.host) is None and generation.snapshot is None
        ):
            self._leave()

    def _leave(self) -> None:
        self._leave_with(ExitCode.DRAINED, "drained")

    def _on_interrupt(self) -> None:
        self._leave_with(ExitCode.INTERRUPTED, "interrupted")

    def _leave_with(self, code: ExitCode, message: str) -> None:
        """End this host's part, and a script that still works after training."""
        outcome = JobOutcome(kind=JobOutcomeKind.INTERRUPTED, exit_code=int(code), message=message)
        if self._is_done():
            self._early_outcome = outcome
            self._supervisor.kill(message)
        self._end(outcome)

    def _is_done(self) -> bool:
        """Return whether training is done, so that only the script has work left."""
        ended = self._ended
        return ended.done() and ended.exception() is None and ended.result().kind is JobOutcomeKind.DONE

    def _end_if_failed(self, task: "asyncio.Task[None]") -> None:
        """End the agent with an error of its own, which `run` raises."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _end(self, outcome: JobOutcome) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)

    # The store.

    def _new_session(self) -> StoreSession:
        return StoreSession(
            self._store,
            self._settings.job,
            self._settings.config.lease_ttl_s,
            self._clock,
            self._status,
            self._on_lease_renewed,
        )

    def _on_lease_renewed(self, until_s: float) -> None:
        self._supervisor.send_order(LeaseRenewed(valid_until_s=until_s))

    async def _stay_registered(self, session: StoreSession) -> None:
        """Hold a session; when it is lost, stop training, then register again."""
        while True:
            self._session = session
            session.mark_changed()
            why = await self._use_session(session)
            self._session = None
            self._log.record(EventKind.STORE_LOST, why=why)
            self._print_line(f"{self._settings.host}: {why}; training stops here until the store is back")
            self._supervisor.send_order(HoldTraining())
            session = await self._register(why)
            self._log.record(EventKind.STORE_RECONNECTED)
            self._print_line(f"{self._settings.host}: the store is back")

    async def _use_session(self, session: StoreSession) -> str:
        """Run everything that needs a session; return the reason for the session's end."""
        loop = asyncio.get_running_loop()
        leader = self._leader()
        tasks = [
            loop.create_task(session.keep_alive()),
            loop.create_task(session.publish_changes()),
            loop.create_task(self._retry_after_faults(lambda: self._watch_generation())),
            loop.create_task(self._retry_after_faults(lambda: leader.campaign(session.lease))),
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
            await _end_all(tasks)

    async def _retry_after_faults(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` again after a fault of the store; the lease decides when an outage is too long."""
        while True:
            try:
                await work()
            except PeerError:
                await asyncio.sleep(0.1)

    async def _register(self, why: str) -> StoreSession:
        """Return a new session, the first one or after the loss of another; `why` is the reason of that loss.

        Raises:
            JoinRefused: the job does not let this host in.
            StoreUnreachable: no session could be opened within `store_timeout_s`.
        """
        deadline_s = self._clock.monotonic_s() + self._settings.config.store_timeout_s
        while True:
            session = self._new_session()
            try:
                known = await self._read_generation()
                self._void_generation = self._find_void_seat(known)
                await session.open()
                self._generation = self._generation or known
                return session
            except PeerError as error:
                if self._clock.monotonic_s() > deadline_s:
                    raise StoreUnreachable(
                        f"host {self._settings.host} lost the store ({why}) and could not reach it again within "
                        f"{self._settings.config.store_timeout_s:g} s; training stopped here, its state is given "
                        "up. Start the store again, then this agent"
                    ) from error
                await asyncio.sleep(0.2)

    async def _read_generation(self) -> Generation | None:
        """Return the generation that stands while this host registers."""
        record = await self._store.get(make_generation_key(self._settings.job))
        return GENERATION_DECODER.decode(record.value) if record is not None else None

    def _find_void_seat(self, known: Generation | None) -> GenerationNumber | None:
        """Return the generation in which this host has a seat from before it lost the store: that seat is void.

        Where the host has no seat, the generation may be changing just now, and take the host in.
        """
        if known is None or known.find_member(self._settings.host) is None:
            return None
        return known.number

    def _leader(self) -> Leader:
        config = self._settings.config
        return Leader(
            store=self._store,
            job=self._settings.job,
            record=LeaderRecord(host=self._settings.host, agent_id=self._agent_id),
            config=MembershipConfig(
                num_hosts=self._settings.num_hosts,
                min_hosts=config.min_hosts,
                start_timeout_s=config.start_timeout_s,
                regroup_grace_s=config.lease_ttl_s + 2.0,
                state_loss_grace_s=config.state_loss_grace_s,
                quiesce_timeout_s=config.quiesce_timeout_s,
                forming_timeout_s=config.forming_timeout_s,
                max_collective_retries=config.max_collective_retries,
                state_loss_policy=StateLossPolicy(config.state_loss_policy),
            ),
            services=self._services,
            log=self._log,
            print_line=self._print_line,
            clock=self._clock,
        )

    def _status(self) -> HostStatus:
        step, metrics = self._supervisor.progress
        return HostStatus(
            host=self._settings.host,
            agent_id=self._agent_id,
            agent_pid=os.getpid(),
            address=self._settings.address,
            versions=self._settings.versions,
            is_draining=self._leaving is not _Leaving.NO,
            worker=self._supervisor.status,
            services=self._services.running,
            snapshot_server=self._snapshots.server,
            snapshots=self._snapshots.snapshots,
            step=step,
            metrics=metrics,
        )

    def _touch(self) -> None:
        if self._session is not None:
            self._session.mark_changed()

    async def _publish_progress(self) -> None:
        published = self._supervisor.progress
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            if self._supervisor.progress != published:
                published = self._supervisor.progress
                self._touch()

    # The worker.

    async def _supervise_worker(self) -> None:
        if (outcome := await self._supervisor.supervise()) is not None:
            self._end(outcome)

    def _on_worker_changed(self) -> None:
        self._touch()
        worker, generation = self._supervisor.worker, self._generation
        is_member = generation is None or generation.find_member(self._settings.host) is not None
        if worker is not None and worker.is_unresponsive and not is_member:
            self._supervisor.kill("it was stopped")

    def _on_snapshots_changed(self) -> None:
        self._supervisor.on_snapshots_changed()
        self._touch()

    def _on_snapshots_lost(self) -> None:
        """End the worker: its connection to the snapshot server ended, and only a new worker gets another."""
        if not self._ended.done():
            self._print_line(
                f"{self._settings.host}: the snapshot server ended; starting it and the worker again"
            )
            self._supervisor.kill("its snapshot server ended")

    # Generations.

    async def _watch_generation(self) -> None:
        key = make_generation_key(self._settings.job)
        record = await self._store.get(key)
        revision = record.mod_revision if record else Revision(0)
        if record is not None:
            await self._obey(GENERATION_DECODER.decode(record.value))
        async with contextlib.aclosing(self._store.watch(key, Revision(revision + 1))) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, PutEvent):
                        await self._obey(GENERATION_DECODER.decode(event.key_value.value))

    async def _obey(self, generation: Generation) -> None:
        """Turn the leader's decision into an order for the worker."""
        known = self._generation
        if known is not None and generation.number < known.number:
            self._log.record(EventKind.GENERATION_STALE, generation=generation.number, newest=known.number)
            return
        self._generation = generation
        if generation.phase is GenerationPhase.FINISHED:
            assert generation.outcome is not None, "a finished generation has an outcome"
            self._end(generation.outcome)
            return
        worker = self._supervisor.worker
        member = generation.find_member(self._settings.host)
        seated = member is not None and worker is not None and member.incarnation == worker.incarnation
        if worker is None or not seated or generation.number == self._void_generation:
            await self._obey_as_outsider(generation)
            return
        match generation.phase:
            case GenerationPhase.QUIESCE:
                worker.send_order(Quiesce(generation=generation.number, reason=generation.reason))
            case GenerationPhase.PAUSE:
                worker.send_order(Pause(generation=generation.number))
            case GenerationPhase.BOUNDARY:
                assert generation.boundary_step is not None, "a boundary has a step"
                worker.send_order(
                    RunToBoundary(generation=generation.number, boundary_step=generation.boundary_step)
                )
            case GenerationPhase.FORM:
                relay = await self._relay_to(generation)
                worker.send_order(
                    FormWorld(generation=generation, host=self._settings.host, relay_address=relay)
                )
            case GenerationPhase.ACTIVE:
                self._services.stop_older(generation.world)

    async def _obey_as_outsider(self, generation: Generation) -> None:
        """Keep the worker of a host that is no member from training; it may ask to join."""
        if self._leaving is not _Leaving.NO and generation.phase in (
            GenerationPhase.FORM,
            GenerationPhase.ACTIVE,
        ):
            # While there is a snapshot the others still read what only this host's memory may have.
            if generation.snapshot is None:
                self._leave()
            return
        worker = self._supervisor.worker
        if worker is None or worker.child.exit_code is not None:
            return
        if worker.is_unresponsive:
            self._supervisor.kill("it was stopped and the others went on without it")
            return
        # An idle worker answers at once; only with that answer may it join (Generation.dropped_workers).
        worker.send_order(Quiesce(generation=generation.number, reason="left out of the generation"))
        running = worker.report.state is WorkerState.RUNNING
        if running and (self._killing is None or self._killing.done()):
            self._killing = asyncio.create_task(self._kill_unless_idle(worker))

    async def _kill_unless_idle(self, worker: WorkerProcess) -> None:
        deadline_s = self._clock.monotonic_s() + self._settings.config.quiesce_timeout_s
        while worker.report.state is WorkerState.RUNNING and worker.child.exit_code is None:
            if self._clock.monotonic_s() > deadline_s and not worker.report.is_compiling:
                if worker is self._supervisor.worker:
                    self._supervisor.kill("it was left out of the generation and did not stop training")
                return
            await asyncio.sleep(0.1)

    async def _relay_to(self, generation: Generation) -> str:
        if generation.change is WorldChange.SHRINK and self._relay is not None:
            return self._relay.address
        if self._relay is None or self._relay.service != generation.service_address:
            old, self._relay = self._relay, Relay(generation.service_address)
            await self._relay.start(self._settings.address)
            if old is not None:
                # The worker hangs up itself when it leaves the old world, and must not be disconnected before. An
                # attempt to connect that it abandoned lives as long as its timeout.
                close_after_s = self._settings.config.forming_timeout_s + RELAY_GRACE_S
                asyncio.get_running_loop().call_later(
                    close_after_s, lambda: asyncio.ensure_future(old.close())
                )
        return self._relay.address

    # The end.

    async def _clean_up(self, tasks: "list[asyncio.Task[None]]") -> None:
        session = self._session
        for task in (*tasks, *([self._killing] if self._killing else [])):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._supervisor.close()
        await self._snapshots.close()
        await self._services.close()
        if self._relay is not None:
            await self._relay.close()
        if session is not None:
            with contextlib.suppress(PeerError, TimeoutError):
                await session.close()
        self._log.record(EventKind.AGENT_STOPPED)
        self._log.close()


async def _end_all(tasks: "Sequence[asyncio.Task[None]]") -> None:
    """Cancel tasks until they are done: a task that swallowed a cancellation must not keep a host away for ever."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # their errors are known, or without effect by now
