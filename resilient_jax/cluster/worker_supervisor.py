"""Keeps one worker alive on this host: starts it, restarts it within a budget, reports its status.

The half of the agent that is independent of generations.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Final

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.child_process import read_resident_mib
from resilient_jax.cluster.host_zygote import HostZygote
from resilient_jax.cluster.run_directory import HostLog, make_log_path
from resilient_jax.cluster.seat_standby import SeatedStandby, SeatStandby
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.stacks_file import StacksFile, describe_process
from resilient_jax.cluster.worker_exit import (
    SIGNAL_EXIT_CODE_BASE,
    apply_exit_code,
    describe_end,
    find_error,
    find_reported_error,
    is_users_error,
)
from resilient_jax.cluster.worker_output import WorkerOutput
from resilient_jax.cluster.worker_process import WorkerProcess
from resilient_jax.cluster.worker_restarts import NotedErrors, WorkerRestarts
from resilient_jax.cluster.worker_starter import WorkerStarter
from resilient_jax.errors import (
    EXHAUSTION_ERRNOS,
    ExitCode,
    HostCorrupt,
    JoinRefused,
    PeerError,
    ScriptRefused,
)
from resilient_jax.events import Event, EventKind
from resilient_jax.health.error_texts import Blame, summarize_error
from resilient_jax.ids import HostName
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import WorkerStatus
from resilient_jax.protocol.worker_messages import (
    JOB_OVER_EXIT_CODE,
    RESTART_EXIT_CODE,
    AdmissionRequested,
    AgentRequest,
    EventOccurred,
    ImportsReported,
    LeaseRenewed,
    SnapshotServerReady,
    SnapshotServerRequested,
    StacksTaken,
    StepCommitted,
    StopWorker,
    WorkerAdmitted,
    WorkerOrder,
)
from resilient_jax.protocol.worker_report import TrainingProgress, WorkerState

STOP_GRACE_S = 2.0
"""Time until SIGKILL for a worker that was ordered to stop because the job failed."""
ADMISSION_RETRY_INTERVAL_S = 0.2
"""How soon to compare a worker's script again when the store did not answer."""
LAST_LINES_TIMEOUT_S = 1.0
"""For the last lines of a worker that has ended, and for the record of its error."""
STACKS_TIMEOUT_S = 2.0
"""For the stacks of a worker that is to be killed: one that holds the interpreter cannot send them."""
JOINING_STATES = (WorkerState.STARTING, WorkerState.PREPARING)
"""What a worker that is about to join does before it is idle."""
FINISH_REMINDER_INTERVAL_S = 60.0
"""How often to print that a script still works after training, for which it may take as long as it likes."""

LEAVING_EVENTS: Final[dict[EventKind, type[JoinRefused]]] = {
    EventKind.SCRIPT_REFUSED: ScriptRefused,
    EventKind.HOST_CORRUPT: HostCorrupt,
}
"""Events with which a worker takes its host out of the job, and the error with which the agent then ends."""
OnEvent = Callable[[Event], JoinRefused | None]


class WorkerSupervisor:
    """One host's worker, whichever incarnation of it runs.

    Attributes:
        worker: newest worker process; None before the first.
        status: status of the worker in the store.
        progress: last commit that the worker reported.
        on_event: called with each event of the worker; returns why the host must leave the job, or None.
        errors: errors of the host's workers that the leader has noted.
        on_suspicion: called when the error of a worker is one that a device causes.
        standby: the process that waits in a seat of the world to replace the worker.
    """

    def __init__(
        self,
        context: AgentContext,
        *,
        snapshots: SnapshotServerProcess,
        on_change: Callable[[], None],
        is_start_urgent: Callable[[], bool],
        is_over: Callable[[], bool],
    ) -> None:
        """Call `on_change` after every new status; `is_over` returns whether the job, or this host's part, has
        ended.
        """
        self._settings = settings = context.settings
        self._log = context.log
        self._devices = context.devices
        self.on_event: OnEvent = lambda event: None
        self.on_suspicion: Callable[[], None] = lambda: None
        self._print_line = context.print_line
        self._admission = context.admission
        self._admitting: asyncio.Task[None] | None = None
        self._refusal: JoinRefused | None = None
        directory = settings.run_directory
        self._snapshots = snapshots
        self._on_change = on_change
        self._is_over = is_over
        self._zygote = HostZygote(context)
        self._starter = WorkerStarter(context, snapshots, self._zygote, is_start_urgent)
        self._output = WorkerOutput(
            settings.host,
            make_log_path(directory, settings.host, HostLog.OUTPUT) if directory else None,
            show_all=settings.show_all_output,
            is_failing=lambda: self.worker is not None and bool(find_reported_error(self.worker)),
        )
        self.standby = SeatStandby(
            context,
            self._starter.start_standby,
            self._output,
            on_change=on_change,
            on_message=self._on_message,
            on_worker_change=self._on_changed,
        )
        self._promoted: SeatedStandby | None = None
        """The worker, if it took over from one whose end was not handled yet."""
        self._exit_recorded = asyncio.Event()
        self._is_job_failed = False
        """Whether the job has ended with an error of the user's, on whichever host."""
        self._restarts = WorkerRestarts(context)
        self.errors = NotedErrors(settings.host)
        self._stacks = StacksFile(directory, settings.host)
        self._wants_snapshots = False
        self.worker: WorkerProcess | None = None
        self.status: WorkerStatus | None = None
        self.progress = TrainingProgress()
        self._done_and_killed: int | None = None
        """Exit code of a worker that had trained to the end, and was to be started again for the others."""
        self._replaced: WorkerProcess | None = None
        """The newest worker that was killed for no fault of its own: its collectives cannot be aborted, say."""

    async def supervise(self) -> JobOutcome | None:
        """Start the worker, and start it again when it dies.

        Returns:
            The outcome of this host, if the worker died too often; None when the worker's own end stands.

        Raises:
            JoinRefused: other hosts of the job run another script.
        """
        while True:
            started = await self._start()
            if isinstance(started, JobOutcome):
                return started
            worker, watching = started
            try:
                code = await _wait_exited(worker, watching)
            finally:
                if self._admitting is not None:
                    self._admitting.cancel()
            if self._refusal is not None:
                raise self._refusal
            if isinstance(code, OSError):
                await self._restarts.wait_for_resources(code)
                continue
            self._log.record(
                EventKind.WORKER_EXITED,
                generation=worker.report.generation,
                step=worker.report.held.step,
                exit_code=code,
                incarnation=worker.incarnation,
            )
            self._settle_traceback(worker, code)
            self._on_changed(worker)
            if not await self._is_tried_again(worker, code):
                return None
            if worker.report.is_done:
                self._done_and_killed = code
            # One that was replaced has done nothing wrong: its replacement costs no restart.
            delay_s = 0.0 if worker is self._replaced else self._restarts.spend()
            if delay_s is None:
                return self._restarts.make_outcome(self._output.read_last_errors())
            then = "starting another" if self._promoted is None else "its standby is the worker now"
            self._print_line(f"{self._settings.host}: worker {describe_end(worker, code)}; {then}")
            if self._promoted is None:
                await asyncio.sleep(delay_s)

    async def _start(self) -> "tuple[WorkerProcess, asyncio.Task[int]] | JobOutcome":
        """Return the next worker and the wait for its end; the outcome of this host, if none could be started."""
        while True:
            try:
                return await self._start_once()
            except OSError as error:
                await self._restarts.wait_for_resources(error)
                # What no shortage explains, such as a Python that is away, may stay.
                if error.errno not in EXHAUSTION_ERRNOS and self._restarts.spend() is None:
                    return self._restarts.make_outcome(self._output.read_last_errors())

    async def _start_once(self) -> "tuple[WorkerProcess, asyncio.Task[int]]":
        """Return the next worker, which its predecessor's standby may be already, and the wait for its end."""
        self._output.clear_errors()
        self._exit_recorded.clear()
        promoted, self._promoted = self._promoted, None
        if promoted is not None:
            promoted.output.release()
            return promoted.process, promoted.watching
        self._wants_snapshots = False
        self.standby.replace_worker()
        worker = await self._starter.start()
        self.worker = worker
        watching = worker.watch_until_exit(
            self._output,
            self._settings.config.heartbeat_timeout_s,
            lambda: self._on_changed(worker),
            lambda message: self._on_message(worker, message),
        )
        self._on_changed(worker)
        if worker.is_outdated(self._devices.settings):
            self.kill("its host's devices changed while it was started", costs_restart=False)
        return worker, watching

    def take_over(self) -> None:
        """Have the standby in its seat be the worker: the present one has died, but its end may not be known yet."""
        died, promoted = self.worker, self.standby.take_over()
        if promoted is None or died is None:
            return
        self._promoted, self.worker = promoted, promoted.process
        self._wants_snapshots = False
        self._snapshots.serve_worker(promoted.snapshots)
        self._log.record(
            EventKind.WORKER_PROMOTED,
            pid=promoted.process.child.pid,
            incarnation=promoted.process.incarnation,
            seconds=0.0,
        )
        self._on_changed(promoted.process)

    async def _is_tried_again(self, ended: WorkerProcess, code: int) -> bool:
        """Return whether another worker follows this one; after an error of the script's once the leader has noted it.

        Until then its status stays, which another worker's would hide: that of a standby that has taken over, too.
        """
        # With its peers gone, JAX may end a process by a signal that is ending with its script's error.
        if not self._is_over() and not is_users_error(code) and not find_reported_error(ended):
            return True
        promoted, self._promoted = self._promoted, None
        if promoted is not None and not self._is_over():
            self.worker = ended
            self._on_changed(ended)
            await promoted.process.child.kill_and_wait()
        if not self._is_over():
            await self.errors.wait_noted(ended.incarnation)
        return not self._is_over()

    def _settle_traceback(self, worker: WorkerProcess, code: int) -> None:
        """Record the error of a script that failed; print it, unless `launch` shows one in its last lines."""
        is_failed = code not in (0, RESTART_EXIT_CODE, JOB_OVER_EXIT_CODE)
        error = (find_error(worker) or find_reported_error(worker)) if is_failed else ""
        if error:
            self._log.record(EventKind.SCRIPT_FAILED, exit_code=code, error=error)
            if (summary := summarize_error(error)).blame is Blame.DEVICE:
                self._log.record(EventKind.GPU_SUSPECTED, error=summary.message)
                self.on_suspicion()
        # A script that was killed while it ended with a traceback had most likely the error that the job ended with.
        if (error or self._is_job_failed) and self._settings.is_launched:
            self._output.forget_traceback()
        else:
            self._output.release()
        self._exit_recorded.set()

    def _on_changed(self, worker: WorkerProcess) -> None:
        if worker is not self.worker or self._is_over():
            return  # after the end of the job a worker exits by order, which is no error
        was_stopped = self.status is not None and self.status.is_unresponsive
        if worker.is_unresponsive and not was_stopped:
            self._log.record(
                EventKind.WORKER_UNRESPONSIVE, pid=worker.child.pid, step=worker.report.held.step
            )
            # Before the others go on without it, and it is killed. It does not answer, so from outside.
            self._stacks.append(worker.report, "it does not respond", describe_process(worker.child.pid))
        is_dying = worker.is_dying and worker.child.exit_code is None
        if is_dying and self.status is not None and not self.status.is_dying:
            self._log.record(EventKind.WORKER_DYING, pid=worker.child.pid, step=worker.report.held.step)
        self.status = WorkerStatus(
            incarnation=worker.incarnation,
            pid=worker.child.pid,
            report=worker.report,
            is_unresponsive=worker.is_unresponsive,
            is_dying=worker.is_dying,
            memory_mib=_measure_memory(worker, self.status),
            exit_code=worker.child.exit_code,
            error=find_error(worker),
        )
        self._on_change()

    def _on_message(self, worker: WorkerProcess, message: AgentRequest) -> None:
        match message:
            case AdmissionRequested() if worker is self.standby.process:
                worker.send_order(WorkerAdmitted())
                if difference := self._admission.find_difference(message.script):
                    self.standby.fail(difference, is_retried=False)
            case AdmissionRequested():
                self._admitting = asyncio.get_running_loop().create_task(self._admit(worker, message.script))
            case EventOccurred():
                self._log.append(message.event)
                worker.has_script_ended |= message.event.kind is EventKind.SCRIPT_ENDED
                if (why := _find_refusal(message.event, self._settings.host, self.on_event)) is not None:
                    self._refuse(why)
            case StepCommitted():
                self.progress = message.progress
                self._zygote.commit(worker.report.generation)
                self.standby.commit(worker.report.generation)
            case StacksTaken():
                self._stacks.append(worker.report, message.why, message.stacks)
            case ImportsReported():
                self._zygote.remember_imports(message)
            case SnapshotServerRequested():
                self._start_snapshot_server()

    def _start_snapshot_server(self) -> None:
        self._wants_snapshots = True
        try:
            self._snapshots.start()
        except OSError as error:
            pause_s = self._restarts.spend_shortage("snapshot server", error)
            asyncio.get_running_loop().call_later(
                pause_s,
                lambda: self._wants_snapshots and not self._is_over() and self._start_snapshot_server(),
            )
        self.on_snapshots_changed()

    async def _admit(self, worker: WorkerProcess, script: dict[str, str]) -> None:
        """Let a worker in once its script has been compared with the job's; end it if that differs."""
        while True:
            try:
                await self._admission.admit(script)
            except PeerError:  # an outage that is too long ends the registration, and with it this agent
                await asyncio.sleep(ADMISSION_RETRY_INTERVAL_S)
            except JoinRefused as error:
                self._log.record(EventKind.SCRIPT_REFUSED, why=str(error))
                self._refuse(error)
                return
            else:
                break
        self._on_change()
        worker.send_order(WorkerAdmitted())

    def _refuse(self, error: JoinRefused) -> None:
        """End the worker, and then `supervise` with this error."""
        self._refusal = error
        self.kill(f"this host leaves the job: {type(error).__name__}")

    def on_snapshots_changed(self) -> None:
        """Send the endpoint of the snapshot server to a worker that waits for it."""
        server = self._snapshots.server
        if self._wants_snapshots and server is not None:
            self._wants_snapshots = False
            self.send_order(SnapshotServerReady(endpoint=server.endpoint))

    def send_order(self, order: WorkerOrder) -> None:
        """Send the worker an order, if there is one; a lease is also that of the worker that its standby will be."""
        if self.worker is not None:
            self.worker.send_order(order)
        if isinstance(order, LeaseRenewed):
            self.standby.send_order(order)

    def set_urgency(self, *, is_urgent: bool) -> None:
        """Give normal priority to what brings redundancy back, a worker that starts and the snapshot server, or not."""
        self._snapshots.set_urgency(is_urgent=is_urgent)
        if is_urgent and self.worker is not None and self.worker.child.exit_code is None:
            self.worker.child.restore_priority()

    def kill(self, why: str, worker: WorkerProcess | None = None, *, costs_restart: bool = True) -> None:
        """Send SIGKILL to the worker, if it runs, and is still the one that is meant: `worker`; None: any.

        Unless it `costs_restart`, the next one is started at once, and the budget of restarts stays as it is.
        """
        if worker is not None and worker is not self.worker:
            return
        if not costs_restart:
            self._replaced = self.worker
        if self.worker is not None and self.worker.child.exit_code is None:
            self._log.record(EventKind.WORKER_KILLED, pid=self.worker.child.pid, why=why)
            self.worker.child.kill()

    def replace(self, why: str, *, takes_stacks: bool = False) -> None:
        """Kill the worker because the world that it is in has lost another; start one that takes its place at once.

        If so, once its stacks have arrived, or `STACKS_TIMEOUT_S` has passed.
        """
        self._replaced, reason = self.worker, f"its collectives cannot be aborted: {why}"
        if takes_stacks:
            kill = functools.partial(self.kill, reason, self.worker)
            self._stacks.call_when_next(kill, STACKS_TIMEOUT_S)
        else:
            self.kill(reason)

    async def wait_finished(self, outcome: JobOutcome) -> None:
        """Send the worker the job's end, and wait as long as its outcome allows."""
        self._is_job_failed = outcome.kind is JobOutcomeKind.USER_ERROR
        self.standby.dismiss()
        worker = self.worker
        if worker is None or worker.child.exit_code is not None:
            return
        worker.send_order(StopWorker(reason=str(outcome.kind)))
        exited = asyncio.create_task(worker.child.wait_exited())
        if outcome.kind is JobOutcomeKind.DONE:
            await _let_script_end(
                worker, exited, lambda line: self._print_line(f"{self._settings.host}: {line}")
            )
        elif outcome.exit_code != ExitCode.INTERRUPTED:
            await asyncio.wait((exited,), timeout=STOP_GRACE_S)
        if not exited.done():
            self.kill("the job is over")
            await exited
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_TIMEOUT_S):
                await self._exit_recorded.wait()

    def apply_exit_code(self, outcome: JobOutcome) -> JobOutcome:
        """Return the outcome with the exit code of a script that failed after training, or was killed then."""
        if self.worker is None:
            return outcome
        final, remark = apply_exit_code(outcome, self.worker, self._settings.host, self._done_and_killed)
        if final.message not in (outcome.message, find_error(self.worker)):
            # Killed: no error of the script's was recorded at its exit.
            code = SIGNAL_EXIT_CODE_BASE - final.exit_code
            self._log.record(EventKind.SCRIPT_FAILED, exit_code=code, error=final.message)
        if remark:
            self._print_line(f"{self._settings.host}: {remark}")
        return final

    async def close(self) -> None:
        """Kill the worker if it runs, end its standby and the zygote, and close the log of its output."""
        if self.worker is not None:
            await self.worker.child.kill_and_wait()
        await self.standby.close()
        await self._zygote.close()
        self._output.close()


async def _wait_exited(worker: WorkerProcess, watching: "asyncio.Task[int]") -> int | OSError:
    """Return the exit code of a worker, or why it was ended at its start: no descriptor was left to read its output."""
    try:
        return await watching
    except OSError as error:
        await worker.child.kill_and_wait()
        return error
    except asyncio.CancelledError:
        await worker.child.kill_and_wait()
        raise


async def _let_script_end(
    worker: WorkerProcess, exited: "asyncio.Task[int]", print_line: Callable[[str], None]
) -> None:
    """Wait while a script still saves and prints. A worker that was left out of training, or is stopped, is not waited
    for.
    """
    while not (await asyncio.wait((exited,), timeout=FINISH_REMINDER_INTERVAL_S))[0]:
        if worker.child.is_stopped() or not worker.report.is_done:
            return
        print_line("training is done, the script still works; Ctrl-C ends it")


def _find_refusal(event: Event, host: HostName, on_event: OnEvent) -> JoinRefused | None:
    """Return why a host must leave the job, if an event of its worker says that."""
    if (refusal := LEAVING_EVENTS.get(event.kind)) is not None:
        return refusal(f"host {host} leaves the job. {event.detail['why']}")
    return on_event(event)


def _measure_memory(worker: WorkerProcess, before: WorkerStatus | None) -> int:
    """Return the resident memory of the worker in MiB when it was last ready to join; 0 before."""
    is_same = before is not None and before.incarnation == worker.incarnation
    if before is not None and is_same and before.report.state not in JOINING_STATES:
        return before.memory_mib
    return read_resident_mib(worker.child.pid) if worker.report.state is WorkerState.IDLE else 0
