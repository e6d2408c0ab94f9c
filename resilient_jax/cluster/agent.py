"""The supervisor of a host: keeps one worker training in whatever generation the leader decides.

Data flow: the worker's messages and the kernel's signals change the host's status; `host_registration` writes the
status to the store; the leading agent answers with a generation; `generation_follower` turns the generation into orders
for the worker. An agent decides nothing about membership, not even when it leads: the machine does (membership.py).
"""

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.agent_service import serve_agent
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.device_watch import DeviceWatch
from resilient_jax.cluster.generation_follower import GenerationFollower
from resilient_jax.cluster.gpu_watch import GpuWatch
from resilient_jax.cluster.host_registration import HostRegistration
from resilient_jax.cluster.program_watch import ProgramWatch
from resilient_jax.cluster.progress_messages import HostProgress
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.cluster.quarantine import quarantine_host
from resilient_jax.cluster.reach_watch import ReachWatch
from resilient_jax.cluster.relay import serve_services
from resilient_jax.cluster.run_directory import EndedJob, HostLog, make_log_path, write_ended_job
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.status_changes import are_snapshots_due
from resilient_jax.cluster.status_combiner import StatusCombiner, StatusForwarder
from resilient_jax.cluster.worker_replacement import NO_SNAPSHOTS, is_only_holder
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.errors import ExitCode, PeerError
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.membership.facts import owes_answer
from resilient_jax.notices import list_handled_notices
from resilient_jax.protocol.generation import Generation, GenerationPhase, JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import (
    AgentStatus,
    CoordinationServiceStatus,
    HostStatus,
)
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.store.interface import Store
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport.server import Server
from resilient_jax.transport.server_address import parse_address

ANSWER_DELAY_S = 0.5
"""Time after the end of a generation in which a member's worker should stop; its report takes new snapshots along."""
QUARANTINE_TIMEOUT_S = 3.0
"""For the record of a host that gives up; without a store it has ended all the same."""
LEFT = "this host left after a notice; whether other hosts go on is not recorded here"
"""Message of the outcome of a host that has left after a notice; the job goes on, or has no leader left."""
INTERRUPTED = "this host's user pressed Ctrl-C; whether other hosts go on is not recorded here"
"""The same at Ctrl-C."""
END_RECORD_S = 1.0
"""Time for the leader to record the end of a job all of whose hosts must leave: when the grace of a notice is over, and
at Ctrl-C."""


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
        self._log = open_event_log(settings)
        self._context = AgentContext(
            settings=settings,
            store=store,
            clock=clock or SystemClock(),
            log=self._log,
            print_line=print_line,
        )
        self._ended: asyncio.Future[JobOutcome] = asyncio.get_running_loop().create_future()
        self._server = _make_server(self._context, self._make_status, lambda: self._services.running)
        self._early_outcome: JobOutcome | None = None  # of a notice, or an interrupt, after training
        self._is_out_of_time = False
        self._is_interrupted = False
        self._services = CoordinationServices(lambda: self._server.address, self._log, self._mark_changed)
        self._snapshots = SnapshotServerProcess(
            settings, self._log, on_change=self._on_snapshots_changed, on_end=self._on_snapshots_lost
        )
        self._supervisor = WorkerSupervisor(
            self._context,
            snapshots=self._snapshots,
            on_change=self._on_worker_changed,
            # Called only once a worker starts, when `_follower` below exists: the two need each other.
            is_start_urgent=lambda: self._follower.is_start_urgent(),
            is_over=self._ended.done,
        )
        self._follower = GenerationFollower(
            self._context,
            self._supervisor,
            self._services,
            on_end=self._end,
            on_leave=self._leave,
            on_generation=self._on_generation,
        )
        self._devices = DeviceWatch(self._context, self._supervisor)
        self._reach = ReachWatch(self._context, self._follower, self._supervisor, self._mark_changed)
        self._gpus = GpuWatch(self._context, self._supervisor, self._devices, self._mark_changed)
        self._program = ProgramWatch(self._context, self._mark_changed)
        self._relay = ProgressRelay(self._context, self._server, self._make_progress)
        self._combiner = StatusCombiner(self._context, self._server)
        self._forwarder = StatusForwarder(settings.credentials, self._relay)
        self._registration = HostRegistration(
            self._context,
            self._supervisor,
            self._services,
            self._follower,
            self._relay,
            self._make_status,
            self._forwarder,
        )

    async def run(self) -> JobOutcome:
        """Supervise until the job has ended, or this host leaves.

        Returns:
            The outcome of the job, or of this host.

        Raises:
            JoinRefused: the job does not let this host in, or not with its script, or a GPU of the host must not train.
            StoreUnreachable: the store did not answer for `JobConfig.store_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        for notice in list_handled_notices():
            loop.add_signal_handler(notice, self._on_notice, notice)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        self._log.record(EventKind.AGENT_STARTED, pid=os.getpid())
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._server.start()
            await self._gpus.begin()
            # Before the worker, so that a host which the job does not let in starts none.
            session = await self._registration.register("while it registered")
            await self._devices.begin()
            if self._settings.is_spare:
                self._context.print_line(
                    f"{self._settings.host}: a spare: its worker gets ready, and takes part when one of the job's "
                    f"{self._settings.num_hosts} hosts is missing"
                )
            tasks = [
                loop.create_task(self._supervise_worker()),
                loop.create_task(self._registration.stay_registered(session)),
                loop.create_task(self._relay.run()),
                loop.create_task(self._gpus.run()),
                loop.create_task(self._devices.run()),
                loop.create_task(self._program.run()),
                loop.create_task(self._reach.run()),
            ]
            for task in tasks:
                task.add_done_callback(self._end_if_failed)
            outcome = await self._ended
            await self._supervisor.wait_finished(outcome)
            outcome = self._early_outcome or self._supervisor.apply_exit_code(outcome)
            _keep_end(self._context, outcome, self._supervisor.progress)
            return outcome
        finally:
            await self._clean_up(tasks)

    # Signals.

    def _on_notice(self, notice: signal.Signals) -> None:
        """Leave between two steps; in a pipeline once blocks are copied, as far as there is time.

        Further notices change nothing: schedulers send several within a second. Who means now sends SIGINT.
        """
        if self._follower.is_leaving:
            return
        grace_s = self._settings.grace.find_s(notice, self._context.clock.wall_s())
        self._log.record(EventKind.HOST_DRAINING, signal=notice.name, seconds=grace_s)
        asyncio.get_running_loop().call_later(grace_s, self._end_grace)
        when = (
            f"the script has {grace_s:.0f} s to end"
            if self._is_done()
            else f"leaving between two steps, within {grace_s:.0f} s"
        )
        self._context.print_line(f"{self._settings.host}: got a notice to leave ({notice.name}); {when}")
        self._mark_changed()
        self._follower.leave_when_possible()

    def _end_grace(self) -> None:
        """Leave; first tell the leader that there is no time left: if all hosts leave, it says how the job ends."""
        if self._is_done():
            self._leave()
            return
        self._is_out_of_time = True
        self._mark_changed()
        asyncio.get_running_loop().call_later(END_RECORD_S, self._leave)

    def _leave(self) -> None:
        self._leave_with(ExitCode.DRAINED, LEFT)

    def _on_interrupt(self) -> None:
        """Leave; first tell the leader: if all hosts are interrupted, it records the end of the job.

        At once where nobody could record it, and when it comes again.
        """
        leave = functools.partial(self._leave_with, ExitCode.INTERRUPTED, INTERRUPTED)
        if self._is_interrupted or self._is_done() or self._registration.session is None:
            leave()
            return
        self._is_interrupted = True
        self._mark_changed()
        asyncio.get_running_loop().call_later(END_RECORD_S, leave)

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

    # The status.

    def _make_status(self) -> HostStatus:
        generation = self._follower.generation
        return HostStatus(
            host=self._settings.host,
            agent=AgentStatus(
                id=self._context.agent_id,
                pid=os.getpid(),
                address=self._settings.address,
                versions=self._settings.versions,
                port=parse_address(self._server.address)[1],
            ),
            generation=generation.number if generation is not None else GenerationNumber(0),
            is_draining=self._follower.is_leaving,
            is_out_of_time=self._is_out_of_time,
            is_interrupted=self._is_interrupted,
            is_spare=self._settings.is_spare,
            worker=self._supervisor.status,
            services=self._services.running,
            snapshot_server=self._snapshots.server,
            snapshots=self._snapshots.snapshots,
            standby=self._supervisor.standby.status,
            program=self._context.admission.program,
            changed_program=self._program.changed,
            devices=self._context.devices.describe(self._gpus.notes),
            progress=self._supervisor.progress,
            reach=self._reach.report,
        )

    def _mark_changed(self) -> None:
        self._registration.mark_changed()

    def _make_progress(self) -> HostProgress:
        return HostProgress(
            host=self._settings.host,
            agent_id=self._context.agent_id,
            progress=self._supervisor.progress,
            snapshots=self._snapshots.snapshots,
        )

    def _on_generation(self, generation: Generation) -> None:
        """Bring the status in the store up to date when a generation has ended, and note whose errors it names."""
        self._supervisor.errors.read(generation)
        self._reach.wake()
        session = self._registration.session
        if session is None or session.written is None:
            return
        if owes_answer(generation, session.written):
            self._mark_changed()
        elif generation.phase is not GenerationPhase.ACTIVE:
            asyncio.get_running_loop().call_later(ANSWER_DELAY_S, self._write_due_snapshots)

    def _write_due_snapshots(self) -> None:
        session = self._registration.session
        if session is None or session.written is None:
            return  # all is written when the host registers
        if are_snapshots_due(self._follower.generation, session.written, self._make_status()):
            self._mark_changed()

    # The worker.

    async def _supervise_worker(self) -> None:
        if (outcome := await self._supervisor.supervise()) is not None:
            # So that an agent that is started again, by a scheduler, does not begin with a new budget.
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                    await quarantine_host(
                        self._context, self._settings.host, outcome.message.partition(";")[0]
                    )
            self._end(outcome)

    def _on_worker_changed(self) -> None:
        self._mark_changed()
        self._follower.on_worker_changed()

    def _on_snapshots_changed(self) -> None:
        self._supervisor.on_snapshots_changed()
        self._write_due_snapshots()

    def _on_snapshots_lost(self) -> None:
        """End the worker: its connection to the snapshot server ended, and only a new worker gets another.

        One that has the only copy of the state goes on without snapshots until another host has one, too.
        """
        worker, host = self._supervisor.worker, self._settings.host
        if self._ended.done():
            return
        if worker is not None and is_only_holder(self._follower.generation, host, worker.report):
            worker.lacks_snapshots = True  # it is ended by `WorkerReplacement`
            return
        self._context.print_line(f"{host}: the snapshot server ended; starting it and the worker again")
        self._supervisor.kill(NO_SNAPSHOTS)

    # The end.

    async def _clean_up(self, tasks: "list[asyncio.Task[None]]") -> None:
        for task in tasks:
            task.cancel()
        self._follower.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # In this order: the worker before what it is connected to, and the lease last. Until the worker has
        # ended the others must not count this host as gone.
        await self._supervisor.close()
        await self._snapshots.close()
        await self._services.close()
        await self._follower.close()
        await self._registration.close()
        await self._gpus.close()
        await self._forwarder.close()
        await self._server.stop()
        await self._combiner.close()
        self._log.record(EventKind.AGENT_STOPPED)
        self._log.close()


def _make_server(
    context: AgentContext,
    make_status: Callable[[], HostStatus],
    list_services: Callable[[], tuple[CoordinationServiceStatus, ...]],
) -> Server:
    """Return the server for all that others ask this agent; it does not listen yet."""
    settings, log = context.settings, context.log
    server = Server(f"{settings.address}:0", credentials=settings.credentials, on_event=log.record_detail)
    serve_agent(server, context, make_status)
    serve_services(server, list_services)
    return server


def _keep_end(context: AgentContext, outcome: JobOutcome, progress: TrainingProgress) -> None:
    """Write for `status` what this host knows of the end, also if no store does; a launcher knows better."""
    settings = context.settings
    if settings.is_launched or settings.run_directory is None:
        return
    ended = EndedJob(
        job=settings.job,
        outcome=outcome,
        step=progress.step,
        metrics=progress.metrics,
        wall_s=context.clock.wall_s(),
    )
    write_ended_job(settings.run_directory, ended, settings.host)


def open_event_log(settings: AgentSettings) -> EventLog:
    """Return a log that appends to the host's events in the run folder; without one it is in memory only."""
    directory = settings.run_directory
    path = make_log_path(directory, settings.host, HostLog.EVENTS) if directory is not None else None
    return EventLog(path, settings.host)
