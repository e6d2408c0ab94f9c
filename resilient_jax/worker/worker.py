"""The worker's loop over generations: execute the agent's order, call the train function, report how it ended."""

import atexit
import faulthandler
import functools
import gc
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Final

import jax

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.child_process import restore_normal_priority
from resilient_jax.compile.ahead_of_time import AheadOfTimeCompiler
from resilient_jax.compile.compilation_monitor import CompilationMonitor, open_program_directory
from resilient_jax.compile.program_exchange import ProgramDirectory
from resilient_jax.errors import CallerError, PeerError, PeerUnreachable, SnapshotLost, TooFewHosts
from resilient_jax.events import EventKind
from resilient_jax.jax_runtime.compilation_state import watch_compiler
from resilient_jax.jax_runtime.compile_cache import share_compilation_cache
from resilient_jax.jax_runtime.distributed import close_backend_gate
from resilient_jax.jax_runtime.failures import CliqueAborted, ServiceEnded, is_collective_failure
from resilient_jax.jax_runtime.lowering_cache import keep_lowerings
from resilient_jax.jax_runtime.world_forming import is_detached
from resilient_jax.protocol.failpoints import ANY_STEP, FailPoint, FailPoints
from resilient_jax.protocol.generation import Generation, SeatId, WorldChange
from resilient_jax.protocol.generation_scoped import GenerationEnding, GenerationScoped
from resilient_jax.protocol.recovery_records import NeededHosts
from resilient_jax.protocol.worker_messages import (
    JOB_OVER_EXIT_CODE,
    RESTART_EXIT_CODE,
    SNAPSHOT_CONNECTION_VARIABLE,
    FormWorld,
    StopWorker,
    TakeSeat,
    WorkerSettings,
)
from resilient_jax.protocol.worker_report import WorkerFailure, WorkerFailureKind
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.snapshot.malloc_settings import release_freed_memory
from resilient_jax.state.flat_state import FlatState
from resilient_jax.state.peer_transfer import StateOffers, StateServer
from resilient_jax.state.snapshotter import Snapshotter
from resilient_jax.step.auditor import Auditor
from resilient_jax.step.device_speed import DeviceSpeed
from resilient_jax.step.device_throttle import make_throttle
from resilient_jax.step.reducer import Reducer
from resilient_jax.step.slow_host_watch import SlowHostWatch
from resilient_jax.telemetry.worker_activity import worker_activity
from resilient_jax.transport.credentials import Credentials
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.agent_connection import AgentConnection
from resilient_jax.worker.audit_response import AuditResponse, leave_as_corrupt
from resilient_jax.worker.checkpoint_poller import CheckpointPoller, FindLatestCheckpoint
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.death_pipe import isolate_death_pipe
from resilient_jax.worker.digest_log import DigestObserver, open_digest_log
from resilient_jax.worker.generation_info import describe_generation
from resilient_jax.worker.generation_parts import (
    GenerationParts,
    RecentEvents,
    SnapshotFlush,
    WorldExit,
    summarize,
)
from resilient_jax.worker.hang_detection import HangLimits
from resilient_jax.worker.host_comparison import HostComparison
from resilient_jax.worker.host_health import HostHealth, continue_record
from resilient_jax.worker.kept_imports import report_unkept_files
from resilient_jax.worker.ledger import Ledger
from resilient_jax.worker.mail_opening import MailOpener
from resilient_jax.worker.observers import FailPointObserver, LedgerObserver, Observer, ReductionPrecompiler
from resilient_jax.worker.rehearsal import rehearse
from resilient_jax.worker.script_fingerprint import describe_script
from resilient_jax.worker.session import Session
from resilient_jax.worker.shard_restore import StatePeers
from resilient_jax.worker.state_handover import StateHandover
from resilient_jax.worker.step_repetition import list_behind, repeat_step
from resilient_jax.worker.step_results import RESULTS_NUMBER
from resilient_jax.worker.training_control import CorruptionFound, ErrorSwallowed, GenerationEnded
from resilient_jax.worker.world import World
from resilient_jax.worker.world_connector import WorldConnector

TrainFunction = Callable[[World], None]


class _FirstCommitObserver(Observer):
    """Ends, at a commit, what only the first step of a generation needs."""

    def __init__(self, monitor: CompilationMonitor, offers: StateOffers) -> None:
        self._monitor = monitor
        self._offers = offers

    def on_commit(self, state: FlatState) -> None:
        """Report what the first step compiled; no host commits before all have the state, so the copy may go."""
        self._monitor.report_once()
        self._offers.withdraw()


REPORTING_S: Final = 1.0
"""Until a worker's last report is in the store, and the leader knows of it."""


class Worker:
    """One worker process under an agent.

    Args:
        descriptor: this worker's end of its socket pair with the agent.
        find_latest_checkpoint: as in `run`.
    """

    _before: FormWorld | None = None
    """The order for the last generation in which this worker has trained."""

    def __init__(
        self, descriptor: int, settings: WorkerSettings, find_latest_checkpoint: FindLatestCheckpoint | None
    ) -> None:
        self._settings = settings
        credentials = Credentials.from_paths(settings.token, settings.tls)
        self._committed = CommittedState()
        self._events = RecentEvents()
        self._offers = StateOffers()
        self._mail = MailOpener(settings.address, credentials, settings.collective_timeout_s, self._offers)
        self._failpoints = FailPoints.from_environment(settings.host)
        self._ledger = Ledger.from_environment(settings.host)
        self._digest_log = open_digest_log(settings.digest_log, settings.host, self._record_lost_digests)
        self._connector = WorldConnector(settings, self._record_event)
        programs = open_program_directory()
        self._server = StateServer(settings.address, credentials, self._offers, programs)
        self._agent = AgentConnection(
            descriptor,
            settings.host,
            self._connector.interrupt,  # breaks the main thread out of whatever C++ it waits in
            _make_limits(settings),
            polls_checkpoints=find_latest_checkpoint is not None,
            on_pause=lambda: self._poller.resume(),  # the job may end before this worker is idle
        )
        peers = StatePeers(
            host=settings.host,
            offers=self._offers,
            credentials=credentials,
            raise_if_ended=self._agent.raise_if_ended,
            record_event=self._record_event,
        )
        self._handover = StateHandover(self._committed, peers)
        self._poller = CheckpointPoller(
            find_latest_checkpoint,
            functools.partial(self._agent.report_found, worker_protocol.report_checkpoint),
            self._agent.record_event,
        )
        self._snapshotter = Snapshotter(
            int(os.environ.pop(SNAPSHOT_CONNECTION_VARIABLE)),
            settings.host,
            settings.snapshots,
            settings.failure_domain,
            credentials,
            self._agent,
            self._hit_failpoint,
        )
        self._monitor = monitor = CompilationMonitor(
            settings.host,
            credentials,
            programs,
            record_event=self._agent.record_event,
            raise_if_ended=self._agent.raise_if_ended,
            hit_failpoint=self._hit_failpoint,
        )
        self._compiler = AheadOfTimeCompiler(monitor.record_compiled_ahead, monitor.record_failed_ahead)
        self._parts = GenerationParts(self._list_parts(programs))
        watch_compiler()
        unshared_because = share_compilation_cache(self._monitor, settings.compile_cache_bytes)
        for why in filter(None, (unshared_because, keep_lowerings())):
            self._agent.record_event(EventKind.COMPILE_CACHE_DISABLED, why=why)

    def _list_parts(self, programs: ProgramDirectory | None) -> list[GenerationScoped]:
        return [
            worker_activity,
            self._connector,
            self._events,
            self._monitor.fetcher,
            *([programs] if programs is not None else []),
            self._monitor,
            WorldExit(self._compiler, self._connector, self._agent, self._record_event),
            self._handover,
            SnapshotFlush(self._committed, self._snapshotter, self._agent, self._record_event),
            self._snapshotter,
        ]

    def run(self, train_fn: TrainFunction, death_pipe: int | None) -> None:
        """Execute orders until the job is over.

        Args:
            train_fn: as in `run.run`.
            death_pipe: descriptor of the pipe's write end; None: the agent made none.

        Raises:
            SystemExit: the job ended without this worker.
        """
        if not self._settings.is_standby:
            restore_normal_priority(os.getpid())
        if not faulthandler.is_enabled():  # a crash in a library leaves its stack in the log of the host
            faulthandler.enable(file=2)  # `sys.stderr` may be an object of the user's
        if death_pipe is not None and (problem := isolate_death_pipe(death_pipe)) is not None:
            self._agent.record_event(EventKind.DEATH_PIPE_DISABLED, why=problem)
        gc.collect()
        gc.freeze()  # what was imported stays; leaving a world then collects in a fifth of the time
        report_unkept_files(
            lambda file, why: self._agent.record_event(EventKind.SCRIPT_NOT_KEPT, file=file, why=why)
        )
        self._agent.join_job(describe_script(), self._server.endpoint)
        is_done = False
        while True:
            self._poller.resume()
            order = self._agent.wait_for_order()
            self._poller.pause()
            if isinstance(order, StopWorker):
                if (
                    order.reason != "done" or not is_done
                ):  # the script after `run` relies on `train_fn` having run
                    raise SystemExit(JOB_OVER_EXIT_CODE)
                atexit.register(lambda: self._agent.record_event(EventKind.SCRIPT_ENDED))
                return
            if isinstance(order, TakeSeat):
                self._take_seat(order, train_fn)
                continue
            is_done, failure = self._run_generation(order, train_fn)
            self._record_event(EventKind.WORKER_IDLE, done=is_done)
            ending = GenerationEnding(
                generation=order.generation.number,
                is_intact=failure is None and not self._agent.is_interrupted,
                is_flushed=failure is None and not is_done,
                # Of a state that no host has all of, the next generation is to have the newest snapshot.
                is_copy_needed=not is_done and not self._committed.holds_state,
            )
            self._parts.end_generation(ending)
            if self._connector.is_broken:
                self._agent.report_found(worker_protocol.report_world, None)
            elif is_detached():
                self._agent.report_found(worker_protocol.report_detached, order.generation.membership.world)
            # Last of all: after this report the leader may order this worker into the next world.
            self._agent.report_idle(
                step=self._committed.step,
                holds_state=self._committed.holds_state,
                part=self._committed.part,
                snapshot=ending.flushed,
                copied=ending.copied,
                done=is_done,
                failure=failure,
            )

    def close(self) -> None:
        """End the threads that would keep this process from ending, and fetch no program from other hosts again."""
        self._compiler.close()
        self._monitor.end()
        self._connector.close()
        close_backend_gate()

    def _run_generation(self, order: FormWorld, train_fn: TrainFunction) -> tuple[bool, WorkerFailure | None]:
        """Return whether `train_fn` returned, and its failure. Leaves no reference to arrays or exceptions behind."""
        try:
            self._parts.begin_generation(order.generation)
            with worker_activity.task(WorkerTask.FORMING):
                self._finish_step(order.generation, train_fn)
                self._form_world(order)
            self._before = order
            world = self._make_world(order)
            try:
                train_fn(world)
            finally:
                self._parts.unwind()
            return True, None
        except CorruptionFound as found:
            # Also if this host is interrupted by now: its report is what others must not go on without.
            if found.is_this_host:
                self._report_failure(found.failure)
                time.sleep(REPORTING_S)
                leave_as_corrupt(self._agent, str(found))
            return False, found.failure
        except GenerationEnded:
            return False, None
        except (Exception, ErrorSwallowed) as error:
            text = _format_from_script(error)
            is_of_others = is_collective_failure(error) or isinstance(error, PeerError)
            # Whatever an interrupted call raises is no failure of this host's: the generation had ended before.
            if self._agent.is_interrupted:
                late = WorkerFailure(kind=WorkerFailureKind.LATE, text=text)
                return False, None if is_of_others else late
            if isinstance(error, TooFewHosts) and order.generation.membership.max_members >= error.needed > 0:
                needed = NeededHosts(  # there have been enough: the leader waits until there are again
                    generation=order.generation.number,
                    count=error.needed,
                    num_hosts=len(order.generation.membership.members),
                    step=max(self._committed.step, order.generation.record.progress),
                )
                self._agent.report_found(worker_protocol.report_needed_hosts, needed)
                return False, WorkerFailure(kind=WorkerFailureKind.TOO_FEW_HOSTS, text=text)
            if isinstance(error, SnapshotLost):
                self._record_event(EventKind.SNAPSHOT_UNREADABLE, error=summarize(error))
                return False, WorkerFailure(kind=WorkerFailureKind.SNAPSHOT, text=text)
            if is_of_others:
                self._record_event(EventKind.COLLECTIVE_FAILED, error=summarize(error))
                is_explained = isinstance(error, ServiceEnded | CliqueAborted)
                kind = WorkerFailureKind.NO_CLIQUE if is_explained else WorkerFailureKind.COLLECTIVE
                return False, WorkerFailure(kind=kind, text=text)
            self._record_event(EventKind.USER_ERROR, error=summarize(error))
            self._report_failure(WorkerFailure(kind=WorkerFailureKind.USER, text=text))
            raise

    def _report_failure(self, failure: WorkerFailure) -> None:
        self._agent.report_found(worker_protocol.report_failure, (failure, self._committed.step))

    # Forming.

    def _finish_step(self, generation: Generation, train_fn: TrainFunction) -> None:
        """Finish the step that others have committed, or tell others what they lack for that."""
        behind, state, host = list_behind(generation), generation.state, self._settings.host
        if not behind or host in state.receivers:
            return
        if all(holder.host != host for holder in behind):
            found = self._committed.results.offer(host, generation.number, state.step - 1)
            self._offers.offer(found, RESULTS_NUMBER)
            return
        if self._committed.step == state.step or self._before is None:
            return  # finished, for a generation that did not form
        # A program would wait behind a collective that was given up, and no one could interrupt it.
        if self._connector.has_given_up:
            raise PeerUnreachable(f"{host}: a collective was given up, so that no step can be finished here")
        started_s = time.monotonic()
        results = self._committed.results.make_repeated(self._handover.read_results(generation))
        repeat_step(train_fn, self._before, self._committed, results, self._agent, self._mail)
        self._record_event(EventKind.STEP_REPEATED, step=state.step - 1, seconds=time.monotonic() - started_s)

    def _form_world(self, order: FormWorld) -> None:
        """Bring this process into the generation's world, with the committed state."""
        generation = order.generation
        started_s = time.monotonic()
        if generation.membership.change is WorldChange.REFORM:
            self._reform(order)
        else:
            self._parts.keep_devices(generation)
        self._agent.raise_if_ended()
        self._connector.join_members(generation)
        self._hit_failpoint(FailPoint.BEFORE_FORMED)
        self._record_event(
            EventKind.WORLD_FORMED,
            change=str(generation.membership.change),
            hosts=len(generation.membership.members),
            seconds=time.monotonic() - started_s,
        )
        member = generation.membership.find_member(order.host)
        assert member is not None, "an agent orders only members to form a world"
        self._agent.report_formed(
            SeatId(generation.membership.world, member.seat),
            self._committed.step,
            holds_state=self._committed.holds_state,
        )

    def _reform(self, order: FormWorld) -> None:
        """Leave the old world with the state in host memory, and join the new one."""
        self._parts.leave_devices(order.generation)
        # Leaving may take a second or two: do not begin to join a world that is outdated by now.
        self._agent.raise_if_ended()
        self._hit_failpoint(FailPoint.BEFORE_CONNECT)
        self._connector.form_world(order)

    def _take_seat(self, order: TakeSeat, train_fn: TrainFunction) -> None:
        """Connect to a seat of the world in which others train, and report whether it worked."""
        failure, started_s = None, time.monotonic()
        try:
            self._parts.begin_generation(order.generation)
            self._parts.leave_devices(None)
            self._agent.raise_if_ended()
            self._hit_failpoint(FailPoint.BEFORE_CONNECT)
            self._connector.take_seat(order)
            self._record_event(EventKind.SEAT_TAKEN, seconds=time.monotonic() - started_s)
            self._hit_failpoint(FailPoint.BEFORE_REHEARSAL)
            self._rehearse(order, train_fn)
        except GenerationEnded:
            pass
        except Exception as error:
            if not self._agent.is_interrupted:
                self._record_event(EventKind.SEAT_NOT_TAKEN, error=summarize(error))
                text = "".join(traceback.format_exception(error))
                failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text=text)
        self._parts.end_generation(GenerationEnding(generation=order.generation.number, is_intact=True))
        world = order.generation.membership.world if self._connector.is_connected else None
        self._agent.report_seat(world, failure)

    def _rehearse(self, order: TakeSeat, train_fn: TrainFunction) -> None:
        """Load what a step needs; whatever fails in it fails again where it counts.

        Except for what the script's own call refuses, such as a host that is not in its topology: that would end the
        job for all, so this host leaves before it is a member.
        """
        started_s, problem = time.monotonic(), ""
        try:
            kept = self._committed.kept
            if not rehearse(train_fn, order, self._agent, self._connector.interrupt, self._mail, kept):
                problem = "the train function did not come to a commit"
        except CallerError as error:
            self._agent.raise_if_ended()
            self._agent.record_event(EventKind.SCRIPT_REFUSED, why=f"Its script cannot run here: {error}")
            os._exit(RESTART_EXIT_CODE)
        except Exception as error:
            self._agent.raise_if_ended()
            problem = summarize(error)
        if self._settings.is_standby:
            release_freed_memory()  # it may wait for days
        else:
            gc.collect()  # the state of the rehearsal, and tracebacks that refer to it
        self._record_event(EventKind.STEP_REHEARSED, seconds=time.monotonic() - started_s, problem=problem)

    def _make_world(self, order: FormWorld) -> World:
        info = describe_generation(order, tuple(self._events.found))
        observers: list[Observer] = [
            ReductionPrecompiler(self._compiler),
            _FirstCommitObserver(self._monitor, self._offers),
        ]
        if self._ledger is not None:
            observers.append(LedgerObserver(self._ledger, info))
        if self._digest_log is not None and info.process_index == 0:
            interval_steps = self._settings.digest_interval_steps
            observers.append(DigestObserver(self._digest_log, order.host, info, interval_steps))
        if self._failpoints is not None:
            # Last, so that what a failpoint then kills is in the ledger.
            observers.append(FailPointObserver(self._failpoints))
        share = self._settings.audit_share
        record = self._committed.audits
        audits = AuditResponse(info.number, info.hosts, order.host, self._agent, record) if share else None
        health = None
        if info.hosts[0] == order.host:
            self._committed.health = continue_record(self._committed.health, info.number)
            health = HostHealth(
                info.hosts,
                self._agent.record_event,
                functools.partial(self._agent.report_found, worker_protocol.report_slow_hosts),
                self._committed.health,
                SystemClock(),
                known=info.layer_speeds,
                after_loss=self._settings.devices_after_loss,
            )
        numbers = self._settings.devices
        throttle = make_throttle(self._failpoints, jax.local_devices, numbers)
        session = Session(
            self._committed,
            self._agent,
            state_loss=info.state_loss,
            snapshotter=self._snapshotter,
            observers=observers,
            comparison=HostComparison(info.hosts, order.host, self._agent),
            shard_restore=self._handover.make_shard_restore(order.generation),
        )
        self._committed.results.begin()
        reducer = Reducer(
            jax.devices,
            info.process_index,
            self._committed.contributions,
            session,
            measured_speeds=self._committed.measured_speeds,
            auditor=None if audits is None else Auditor(share, audits),
            watch=SlowHostWatch(health, DeviceSpeed(jax.local_devices, numbers, throttle).measure),
        )
        reducer.throttle, reducer.held_ranks = throttle, lambda _: info.held_ranks
        reducer.partners = self._connector.meet_partners(info, self._mail, self._agent.raise_if_ended)
        return World(info, session, self._agent, reducer, self._compiler, self._mail, audits=audits)

    def _hit_failpoint(self, place: FailPoint, step: int = ANY_STEP) -> None:
        if self._failpoints is not None:
            self._failpoints.hit(place, step)

    def _record_lost_digests(self, why: str) -> None:
        self._agent.record_event(EventKind.DIGESTS_UNWRITTEN, why=why)

    def _record_event(self, kind: EventKind, **detail: str | float | bool) -> None:
        self._events.found.append(self._agent.record_event(kind, **detail))


def _make_limits(settings: WorkerSettings) -> HangLimits:
    return HangLimits(
        regular_s=settings.hang_timeout_s,
        other_s=settings.user_code_timeout_s,
        forming_timeout_s=settings.forming_timeout_s,
        stall_dump_s=settings.stall_dump_s,
    )


def _format_from_script(error: BaseException) -> str:
    """Return the traceback from the script's first line on, as Python prints it if no code catches the error."""
    formatted = traceback.TracebackException.from_exception(error)
    callers = traceback.extract_stack()[:-2]  # without this function and the frame that caught the error
    script = getattr(sys.modules["__main__"], "__file__", None)
    # From the script on: of a worker that was forked, or a standby, what runs it comes before.
    callers = list(itertools.dropwhile(lambda frame: frame.filename != script, callers)) or callers
    formatted.stack = traceback.StackSummary.from_list([*callers, *formatted.stack])
    return "".join(formatted.format())
