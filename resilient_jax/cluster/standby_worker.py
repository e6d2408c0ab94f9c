"""The standby of a host's worker as its agent sees it: a process that becomes the worker when the worker dies.

At most one at a time; `standby_schedule` says when it starts. Until its promotion it runs at the lowest priority and
belongs to no generation. What it prints stays in its pipes, and is the worker's output after the promotion. A standby
that is not ready when it is needed, or does not answer, is killed: then the worker is started as without a standby.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.child_process import ChildProcess, SpawnedProcess, get_signal_name
from resilient_jax.cluster.standby_schedule import StandbySchedule
from resilient_jax.cluster.worker_process import WorkerDescriptors
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.host_status import StandbyState, StandbyStatus
from resilient_jax.protocol.standby_messages import (
    STANDBY_CONNECTION_VARIABLE,
    STANDBY_MESSAGE_DECODER,
    PrepareStandby,
    PromoteStandby,
    StandbyMessage,
    StandbyOrder,
    StandbyReady,
    StandbyUnfit,
)
from resilient_jax.protocol.worker_messages import ImportsReported, WorkerSettings

STANDBY_MODULE = "resilient_jax.worker.standby_process"
PROMOTION_TIMEOUT_S = 2.0
"""Time for a standby to answer, which takes some milliseconds; an ordinary start costs less than a longer wait."""
PIPE_BYTES = 2**20
"""Room for what a standby prints before its promotion; it waits when the room is used up."""
LAST_MESSAGE_TIMEOUT_S = 0.2
"""Time for a message that a standby sent just before its end."""
START_VARIABLES = ("PYTHON", "LD_", "GLIBC_", "MALLOC_")
"""How the names of variables begin that the interpreter, the linker and malloc read: a script sets them for others."""
KILLING_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
MAX_MISSING_MODULES = 200
"""Of a worker, which the fork server has not imported: to import so many takes a tenth of a second or two."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Standby:
    """A running standby.

    Attributes:
        environment: environment of a worker when the standby was started.
        answer: answer to the order of promotion: why the standby cannot be promoted; empty: the standby is the worker.
        attending: task that receives the standby's messages and waits for its end.
    """

    child: ChildProcess
    connection: AsyncConnection[StandbyOrder, StandbyMessage]
    environment: dict[str, str]
    started_s: float
    answer: asyncio.Future[str]
    attending: asyncio.Task[None] | None = None


class StandbyWorker:
    """At most one standby, whichever process it is.

    Attributes:
        status: status of the standby in the store; None while there is no standby.
    """

    def __init__(self, context: AgentContext, on_change: Callable[[], None]) -> None:
        """Call `on_change` after every change of `status`."""
        self._settings = context.settings
        self._devices = context.devices
        self._admission = context.admission
        self._log = context.log
        self._clock = context.clock
        self._fork_server = context.fork_server
        self._on_change = on_change
        # Where a standby with a seat fails, this one is less, and better than none.
        self._is_possible = context.settings.config.standby != "off"
        self._schedule = StandbySchedule()
        self._imports: ImportsReported | None = None
        self._standby: _Standby | None = None
        self._ending: set[asyncio.Task[int]] = set()
        self.status: StandbyStatus | None = None

    def remember_imports(self, imports: ImportsReported) -> None:
        """Have the next standby import what the worker has imported."""
        self._imports = imports

    def commit(self, generation: GenerationNumber) -> None:
        """Start a standby if one is due at this commit of the worker."""
        now_s = self._clock.monotonic_s()
        self._schedule = self._schedule.commit(generation, now_s)
        if not self._is_possible or self._standby is not None or not self._schedule.is_due(now_s):
            return
        if self._imports is None or self._is_fork_as_fast(self._imports):
            return
        try:
            self._start(self._imports)
        except OSError as error:  # no descriptor, process or memory left: perhaps later
            self._record_failure(0, f"could not be started: {error}", is_killed=True)

    async def promote(self, descriptors: WorkerDescriptors, settings: WorkerSettings) -> ChildProcess | None:
        """Return the standby's process, which is the worker from now on; None if none can be.

        Args:
            descriptors: descriptors of the worker; the caller closes its copies.
        """
        standby, is_ready = self._standby, self.status is not None and self.status.state is StandbyState.READY
        self._forget()
        self._schedule = self._schedule.replace_worker(is_promoted=False)
        if standby is None:
            return None
        # One that is not ready would take processor time from the worker that is started in its place; one that was
        # started for other devices may have read which.
        if not is_ready or standby.environment != self._devices.settings.environment:
            self._end(standby)
            return None
        problem = "its promotion was cancelled"
        try:
            problem = await self._order_promotion(standby, descriptors, settings)
        finally:
            if problem:
                self._end(standby)
        if problem:
            self._record_failure(standby.child.pid, problem, is_killed=True)
            return None
        self._stop_attending(standby)
        self._schedule = self._schedule.replace_worker(is_promoted=True)
        return standby.child

    async def close(self) -> None:
        """End the standby."""
        self._is_possible = False
        if (standby := self._standby) is not None:
            self._forget()
            self._end(standby)
        await asyncio.gather(*self._ending)

    def _is_fork_as_fast(self, imports: ImportsReported) -> bool:
        """Return whether a worker is forked with most of what it imports, so that no standby would be faster."""
        server = self._fork_server
        if server is None or not server.is_open or server.refusal:
            return False
        return len(imports.modules) - server.num_modules <= MAX_MISSING_MODULES

    def _start(self, imports: ImportsReported) -> None:
        # With the worker's environment at its imports, since libraries read settings there when they are imported; the
        # script gets that of a worker's start.
        given_environment = self._devices.settings.environment
        theirs = {os.fsdecode(name): os.fsdecode(value) for name, value in imports.environment.items()}
        environment = _select(given_environment, of_process=True) | _select(theirs, of_process=False)
        ours, given = socket.socketpair()
        with contextlib.ExitStack() as unless_started, given:
            unless_started.enter_context(ours)
            child = SpawnedProcess(
                [sys.executable, "-u", "-m", STANDBY_MODULE],
                env={**environment, STANDBY_CONNECTION_VARIABLE: str(given.fileno())},
                pass_fds=(given.fileno(),),
            )
            unless_started.pop_all()
        child.lower_priority()
        for pipe in (child.stdout, child.stderr):
            assert pipe is not None, "started with pipes"
            with contextlib.suppress(OSError):  # the user's pipes have taken all that a user may have
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        standby = _Standby(
            child=child,
            connection=AsyncConnection(ours, STANDBY_MESSAGE_DECODER),
            environment=given_environment,
            started_s=self._clock.monotonic_s(),
            answer=asyncio.get_running_loop().create_future(),
        )
        order = PrepareStandby(
            command=self._settings.command, imports=imports, program=self._admission.folder
        )
        standby.connection.send(order)
        standby.attending = asyncio.create_task(self._attend(standby))
        self._standby = standby
        self._log.record(EventKind.STANDBY_STARTED, pid=child.pid, mode="imports")
        self._set_status(StandbyStatus(state=StandbyState.STARTING, pid=child.pid))

    async def _order_promotion(
        self, standby: _Standby, descriptors: WorkerDescriptors, settings: WorkerSettings
    ) -> str:
        """Return why the standby cannot be the worker; empty: it is."""
        standby.child.restore_priority()  # before it reads the order: on a busy machine it would read that late
        order = PromoteStandby(settings=settings, environment=self._encode_environment())
        standby.connection.send(order, descriptors)
        try:
            async with asyncio.timeout(PROMOTION_TIMEOUT_S):
                return await standby.answer
        except TimeoutError:
            return f"it did not answer its promotion within {PROMOTION_TIMEOUT_S:g} s"

    async def _attend(self, standby: _Standby) -> None:
        """Receive a standby's messages until it ends, which it should not."""
        listening = asyncio.create_task(self._listen(standby))
        try:
            code = await standby.child.wait_exited()
            await asyncio.wait((listening,), timeout=LAST_MESSAGE_TIMEOUT_S)
        finally:
            listening.cancel()
        reason = _describe_end(standby.child, code)
        if not standby.answer.done():
            standby.answer.set_result(reason)
        if standby is not self._standby:
            return  # it was being promoted
        self._forget()
        _close_descriptors(standby)
        reason = standby.answer.result() or reason
        self._record_failure(standby.child.pid, reason, is_killed=-code in KILLING_SIGNALS)

    async def _listen(self, standby: _Standby) -> None:
        async for message in standby.connection:
            match message:
                case StandbyReady():
                    self._on_ready(standby, message)
                case StandbyUnfit() if not standby.answer.done():
                    standby.answer.set_result(message.reason)
                case _ if not standby.answer.done():
                    standby.answer.set_result("")

    def _on_ready(self, standby: _Standby, message: StandbyReady) -> None:
        if standby is not self._standby:
            return
        pid = standby.child.pid
        memory_mib = read_resident_mib(pid)
        self._log.record(
            EventKind.STANDBY_READY,
            pid=pid,
            seconds=self._clock.monotonic_s() - standby.started_s,
            memory_mib=memory_mib,
            failed_imports=message.failed_imports,
        )
        self._set_status(StandbyStatus(state=StandbyState.READY, pid=pid, memory_mib=memory_mib))

    def _record_failure(self, pid: int, reason: str, *, is_killed: bool) -> None:
        self._schedule = self._schedule.lose_standby(self._clock.monotonic_s(), is_killed=is_killed)
        self._log.record(EventKind.STANDBY_FAILED, pid=pid, reason=reason, retried=is_killed)

    def _end(self, standby: _Standby) -> None:
        """Kill a standby without a wait for its end."""
        self._stop_attending(standby)
        _close_descriptors(standby)
        ending = asyncio.create_task(standby.child.kill_and_wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _stop_attending(self, standby: _Standby) -> None:
        assert standby.attending is not None, "started"
        standby.attending.cancel()
        standby.connection.close()

    def _forget(self) -> None:
        self._standby = None
        self._set_status(None)

    def _set_status(self, status: StandbyStatus | None) -> None:
        if status != self.status:
            self.status = status
            self._on_change()

    def _encode_environment(self) -> dict[bytes, bytes]:
        return {
            os.fsencode(name): os.fsencode(value)
            for name, value in self._devices.settings.environment.items()
        }


def _select(environment: dict[str, str], *, of_process: bool) -> dict[str, str]:
    """Return the variables that a process reads at its start, or the others."""
    return {k: v for k, v in environment.items() if k.startswith(START_VARIABLES) is of_process}


def _describe_end(child: ChildProcess, code: int) -> str:
    """Return how a standby ended, with the last line that it wrote to standard error."""
    if code < 0:
        return f"it was ended by {get_signal_name(-code)}"
    assert child.stderr is not None, "started with pipes"
    descriptor = child.stderr.fileno()
    os.set_blocking(descriptor, False)  # a process of its own may still have the other end
    with contextlib.suppress(BlockingIOError):
        lines = os.read(descriptor, PIPE_BYTES).decode(errors="replace").splitlines()
        if lines:
            return f"it exited with code {code}: {lines[-1]}"
    return f"it exited with code {code}"


def _close_descriptors(standby: _Standby) -> None:
    """Close what the agent has of a standby that has ended."""
    standby.connection.close()
    standby.child.close_pipes()


def read_resident_mib(pid: int) -> int:
    """Return the resident memory of a process in MiB; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES // 2**20
    return 0
