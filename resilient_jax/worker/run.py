"""The generation loop: `run(train)` calls the user's function once in every generation."""

import contextlib
import dataclasses
import gc
import os
import time
import traceback
from collections.abc import Callable
from typing import Final

import jax
import msgspec

from resilient_jax.compile.ahead_of_time import LEAVE_TIMEOUT_S, AheadOfTimeCompiler
from resilient_jax.compile.compilation_monitor import CompilationMonitor, open_program_directory
from resilient_jax.errors import CallerError, PeerError, SnapshotLost, StateError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.jax_runtime.abort import abort_collectives
from resilient_jax.jax_runtime.compile_cache import share_compilation_cache
from resilient_jax.jax_runtime.distributed import (
    WorldConnection,
    close_backend_gate,
    connect,
    disconnect,
    is_backend_initialized,
)
from resilient_jax.jax_runtime.failures import is_collective_failure
from resilient_jax.jax_runtime.local_clique import form_local_clique
from resilient_jax.jax_runtime.world_forming import interrupt_forming, is_detached
from resilient_jax.protocol.failpoints import ANY_STEP, FailPoint, FailPoints
from resilient_jax.protocol.records import (
    Generation,
    StateSource,
    WorkerFailure,
    WorkerFailureKind,
    WorldChange,
)
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.worker_messages import (
    AGENT_CONNECTION_VARIABLE,
    DEATH_PIPE_VARIABLE,
    JOB_OVER_EXIT_CODE,
    SNAPSHOT_CONNECTION_VARIABLE,
    WORKER_SETTINGS_VARIABLE,
    FormWorld,
    StopWorker,
    WorkerSettings,
)
from resilient_jax.state.flat_state import FlatState, copy_to_host
from resilient_jax.state.snapshotter import Snapshotter
from resilient_jax.state.transfer import CancellableTransfer, StateServer, fetch_state
from resilient_jax.step import reduction
from resilient_jax.transport.credentials import Credentials
from resilient_jax.worker.agent_connection import AgentConnection, GenerationEnded
from resilient_jax.worker.checkpoint_poller import CheckpointPoller, FindLatestCheckpoint
from resilient_jax.worker.death_pipe import isolate_death_pipe
from resilient_jax.worker.ledger import Ledger
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.world import CommittedState, World

TrainFunction = Callable[[World], None]

LOCAL_CLIQUE_GRACE_S: Final = 1.5
"""gloo gives up within 0.5 s, with large arrays in flight; a main thread that is not out by then waits for something
else."""
_has_run = False


def run(train_fn: TrainFunction, *, find_latest_checkpoint: FindLatestCheckpoint | None = None) -> None:
    """Trains until `train` has returned on every host; survives the death of any of them.

    Started by an agent (`resilient-jax launch`, `resilient-jax agent`), this calls `train(world)` anew in
    every generation, in the same process, and returns when the job is done; where training was done without this
    process, because it came too late, it ends the process instead (SystemExit). Started by hand
    (`python script.py`), it calls `train` once, with this machine as the only host.

    Args:
        train: takes a `World`; loops over `world.steps(...)`, restores with `world.restore_or_init` and
            commits with `world.commit`. It may be unwound at any call into JAX or `world`, by an exception.
        newest_checkpoint: for a `train` that keeps checkpoints: gives the step of the newest finished one on storage,
            None if there is none. If the state is lost in the memory of all hosts, the job then goes on by itself
            where `world.is_fresh`: `train` must load a checkpoint there and call `world.resume_at(step)`. Called on
            another thread while the worker waits; must look at storage only, and touch no device.

    Raises:
        Exception: whatever `train` raises by its own fault, once; the job ends with it.
        CallerError: under an agent: a second call, or JAX's devices are in use already.

    Example:
        >>> import resilient_jax as rj
        >>> def train(world):
        ...     state = world.restore_or_init(init_state)
        ...     for step in world.steps(1000):
        ...         state = step_fn(state, batch_at(step))
        ...         world.commit(state)
        >>> rj.run(train)  # doctest: +SKIP
    """
    global _has_run
    if _has_run:
        raise CallerError(
            "run: found a second call in a process that an agent started, expected one: the job is over for its agent "
            "when the first returns. Do everything in one call (a Trainer's fit is one, too), or launch another job"
        )
    descriptor = os.environ.pop(AGENT_CONNECTION_VARIABLE, None)
    settings_text = os.environ.pop(WORKER_SETTINGS_VARIABLE, None)
    if descriptor is None or settings_text is None:
        _run_alone(train_fn)  # there is nobody else who might hold the state
        return
    _has_run = True
    if is_backend_initialized():
        raise CallerError(
            "run: found that this script has used JAX's devices already, expected none in use: they come with a world, "
            "and go with it. Make arrays inside `train`, or in the function that `restore_or_init` or the trainer "
            "calls; a jax.random.key or a Flax model at the top of a script is arrays, too"
        )
    settings = msgspec.json.decode(settings_text, type=WorkerSettings)
    tripwire = os.environ.pop(DEATH_PIPE_VARIABLE, None)
    with contextlib.closing(_Worker(int(descriptor), settings, find_latest_checkpoint)) as worker:
        worker.run(train_fn, int(tripwire) if tripwire is not None else None)


def _run_alone(train: TrainFunction) -> None:
    host = HostName("localhost")
    train(
        World(
            generation=GenerationNumber(1),
            hosts={ProcessIndex(0): host},
            process_index=ProcessIndex(0),
            holder=CommittedState(),
            link=StandaloneControl(host),
            change=str(WorldChange.REFORM),
            reason="started without an agent",
            ledger=Ledger.from_environment(host),
        )
    )


class _Worker:
    """One worker's life between its agent's orders."""

    def __init__(
        self, descriptor: int, settings: WorkerSettings, newest_checkpoint: FindLatestCheckpoint | None
    ) -> None:
        self._settings = settings
        self._credentials = Credentials.from_paths(settings.token, settings.tls)
        self._holder = CommittedState()
        self._connection: WorldConnection | None = None
        self._events: list[Event] = []
        self._fault_points = FailPoints.from_environment(settings.host)
        self._ledger = Ledger.from_environment(settings.host)
        self._interrupting_since_s: float | None = None
        self._local_clique_broken = False
        self._replicas_span_hosts = False
        self._server = StateServer(settings.address, self._credentials, open_program_directory())
        self._transfer = CancellableTransfer()
        self._link = AgentConnection(descriptor, settings.host, self._interrupt)
        self._lookout = CheckpointPoller(
            newest_checkpoint, self._link.report_checkpoint, self._link.record_event
        )
        if newest_checkpoint is not None:
            self._link.announce_checkpoint_polling()
        self._snapshots = Snapshotter(
            int(os.environ.pop(SNAPSHOT_CONNECTION_VARIABLE)),
            settings.host,
            settings.snapshots,
            settings.failure_domain,
            self._credentials,
            self._link,
            self._reach,
        )
        self._compiling = CompilationMonitor(settings.host, self._credentials, self._link.record_event)
        self._ahead = AheadOfTimeCompiler(
            self._compiling.record_compiled_ahead, self._compiling.record_failed_ahead
        )
        if (warning := share_compilation_cache(self._compiling, settings.compile_cache_bytes)) is not None:
            self._link.record_event(EventKind.COMPILE_CACHE_DISABLED, why=warning)

    def run(self, train: TrainFunction, tripwire: int | None) -> None:
        restore_normal_priority()
        if tripwire is not None and (problem := isolate_death_pipe(tripwire)) is not None:
            self._link.record_event(EventKind.DEATH_PIPE_DISABLED, why=problem)
        gc.collect()
        gc.freeze()  # what was imported stays; leaving a world then collects in a fifth of the time
        self._link.report_ready(self._server.endpoint)
        done = False
        while True:
            self._lookout.resume()
            order = self._link.wait_for_order()
            self._lookout.pause()
            if isinstance(order, StopWorker):
                if order.reason != "done" or not done:  # what follows `run` in the script counts on `train`
                    raise SystemExit(JOB_OVER_EXIT_CODE)
                return
            done, failure = self._live_through(order, train)
            self._note(EventKind.WORKER_IDLE, done=done)
            snapshot = self._finish_snapshots(order) if failure is None and not done else None
            self._snapshots.end_generation()
            if self._local_clique_broken or is_detached() or (self._replicas_span_hosts and not done):
                # A clique that the next generation needs is broken, the local one or that of a whole replica: no
                # shrink in place.
                self._link.report_world_left()
            self._link.report_idle(
                step=self._holder.step,
                holds_state=self._holder.holds_state,
                snapshot=snapshot,
                done=done,
                failure=failure,
            )

    def close(self) -> None:
        """Ends what would disturb the end of this process."""
        self._ahead.close()
        close_backend_gate()

    def _live_through(self, order: FormWorld, train: TrainFunction) -> tuple[bool, WorkerFailure | None]:
        """One generation. Leaves no reference to its arrays or exceptions behind."""
        try:
            world = self._form(order)
            try:
                train(world)
            finally:
                self._ahead.cancel()
                self._replicas_span_hosts = world.replicas_span_hosts
            return True, None
        except GenerationEnded:
            return False, None
        except Exception as error:
            if self._link.is_interrupted:
                return False, None
            text = "".join(traceback.format_exception(error))
            if isinstance(error, SnapshotLost):
                self._note(EventKind.SNAPSHOT_UNREADABLE, error=_first_line(error))
                return False, WorkerFailure(kind=WorkerFailureKind.SNAPSHOT, text=text)
            if is_collective_failure(error) or isinstance(error, PeerError):
                self._note(EventKind.COLLECTIVE_FAILED, error=_first_line(error))
                return False, WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text=text)
            self._note(EventKind.USER_ERROR, error=_first_line(error))
            self._link.report_failure(
                WorkerFailure(kind=WorkerFailureKind.USER, text=text), step=self._holder.step
            )
            raise

    def _finish_snapshots(self, order: FormWorld) -> SnapshotId | None:
        """At a planned change: the committed state in a snapshot, if no host has it whole."""
        if self._link.is_interrupted or self._holder.holds_state:
            return None
        try:
            return self._snapshots.flush(order.generation.number, self._holder.state)
        except GenerationEnded:
            return None  # an unplanned change came in between
        except PeerError as error:  # the server is gone; the agent notices
            self._note(EventKind.SNAPSHOT_DROPPED, step=self._holder.step, reason=_first_line(error))
            return None

    def _interrupt(self) -> None:
        """For the guard thread: breaks the main thread out of forming or of a collective.

        The clique of the local devices is spared at first, for it survives a shrink. But if one device's part
        of a program failed, the other may wait for it in that very clique: so it is broken, too, when the
        main thread is not out soon; the next world must then be a new one.
        """
        now_s = time.monotonic()
        if self._interrupting_since_s is None:
            self._interrupting_since_s = now_s
        interrupt_forming()
        self._transfer.cancel()
        connection = self._connection
        if connection is None:
            return
        gloo = connection.gloo
        if gloo.local_clique and now_s - self._interrupting_since_s > LOCAL_CLIQUE_GRACE_S:
            gloo = dataclasses.replace(gloo, local_clique=frozenset())
            self._local_clique_broken = True
        abort_collectives(gloo)

    # Forming.

    def _form(self, order: FormWorld) -> World:
        generation = order.generation
        self._interrupting_since_s = None
        self._events.clear()
        self._compiling.begin_generation(generation.members)
        started_s = time.monotonic()
        if generation.change is WorldChange.REFORM:
            self._reform(order)
        else:
            self._hand_over(generation, in_place=True)
        self._link.raise_if_ended()
        self._note(
            EventKind.WORLD_FORMED,
            change=str(generation.change),
            hosts=len(generation.members),
            seconds=time.monotonic() - started_s,
        )
        self._link.report_formed(generation.world, self._holder.step, holds_state=self._holder.holds_state)
        member = generation.find_member(order.host)
        assert member is not None, "the agent sends a form only to members"
        return World(
            generation=generation.number,
            hosts={m.process_index: m.host for m in generation.members},
            process_index=member.process_index,
            holder=self._holder,
            link=self._link,
            change=str(generation.change),
            reason=generation.reason,
            lost=generation.state_loss,
            events=self._events,
            fault_points=self._fault_points,
            ledger=self._ledger,
            snapshots=self._snapshots,
            on_commit=self._on_commit,
            ahead=self._ahead,
        )

    def _reform(self, order: FormWorld) -> None:
        """Leaves the old world with the state in host memory, and joins the new one."""
        generation = order.generation
        self._hand_over(generation, in_place=False)
        self._leave_world()
        self._link.raise_if_ended()
        member = generation.find_member(order.host)
        assert member is not None, "the agent sends a form only to members"
        self._reach(FailPoint.BEFORE_CONNECT)
        connection = connect(
            order.relay_address,
            member.process_index,
            len(generation.members),
            timeout_s=self._settings.forming_timeout_s,
            bind_host=self._settings.address,
        )
        self._connection = connection
        self._connection = dataclasses.replace(connection, gloo=form_local_clique(connection.gloo))
        self._local_clique_broken = False
        self._check_devices()

    def _hand_over(self, generation: Generation, *, in_place: bool) -> None:
        """Ends with the state of `generation.step` here: kept, or fetched from a host that has it."""
        host = self._settings.host
        if generation.snapshot is not None:
            self._holder.set_snapshot_plan(generation.snapshot)
            if not in_place:
                self._move_contributions_to_host()
            return
        if host in generation.receivers:
            self._holder.clear()  # an older state is of no use, and its arrays are in the way
            self._holder.state = self._fetch(generation)
            return
        if not generation.sources:
            self._holder.clear()  # the job begins, again if it must: nobody's state counts
            return
        held = self._holder.state
        assert held is not None, "whoever is not behind holds the state"
        if generation.receivers or not in_place:
            started_s = time.monotonic()
            copy = copy_to_host(held)
            self._note(EventKind.STATE_COPIED, bytes=copy.nbytes, seconds=time.monotonic() - started_s)
            if generation.receivers:
                self._server.offer(generation.number, copy)
            if not in_place:
                self._holder.state = copy
                self._move_contributions_to_host()

    def _move_contributions_to_host(self) -> None:
        for kept in self._holder.contributions.values():
            kept.move_to_host()

    def _fetch(self, generation: Generation) -> FlatState:
        started_s = time.monotonic()
        position = [m.host for m in generation.members].index(self._settings.host)
        held = fetch_state(
            generation.number,
            generation.sources,
            position,
            self._credentials,
            self._transfer,
            self._link.raise_if_ended,
            self._on_source_refused,
        )
        if held.step != generation.step:
            raise StateError(
                f"state of step {held.step} arrived where generation {generation.number} goes on from step "
                f"{generation.step}"
            )
        self._note(EventKind.STATE_FETCHED, bytes=held.nbytes, seconds=time.monotonic() - started_s)
        return held

    def _on_commit(self) -> None:
        self._compiling.report_once()
        self._server.withdraw()  # nobody commits before all have the state: the copy may go

    def _on_source_refused(self, source: StateSource, error: PeerError) -> None:
        self._note(EventKind.STATE_SOURCE_FAILED, source=source.host, error=str(error))

    def _leave_world(self) -> None:
        reduction.clear_caches()
        connection, self._connection = self._connection, None
        if connection is None:
            return
        started_s = time.monotonic()
        is_idle = self._ahead.wait_until_idle(LEAVE_TIMEOUT_S)
        leftovers = disconnect(connection.gloo, is_backend_in_use=not is_idle)
        self._link.report_world_left()
        self._note(
            EventKind.WORLD_LEFT,
            seconds=time.monotonic() - started_s,
            leaked_backends=leftovers.backends,
            leaked_clients=leftovers.clients,
        )

    def _check_devices(self) -> None:
        wanted = self._settings.devices_per_host
        found = jax.local_device_count()
        if wanted is not None and found < wanted:
            raise StateError(
                f"host {self._settings.host} has {found} devices, but --devices-per-host asks for {wanted}; ask "
                "for fewer, or start it where there are more"
            )

    def _reach(self, place: FailPoint, step: int = ANY_STEP) -> None:
        if self._fault_points is not None:
            self._fault_points.hit(place, step)

    def _note(self, kind: EventKind, **detail: str | float | bool) -> None:
        self._events.append(self._link.record_event(kind, **detail))


def restore_normal_priority() -> None:
    """Gives all threads of this process normal priority: its agent may have started it with the lowest."""
    for _ in range(2):  # a thread that was born while the first turn ran is found by the second
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
