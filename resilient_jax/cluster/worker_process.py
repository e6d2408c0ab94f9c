"""One host's worker process: start, messages, watch, end."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from resilient_jax.clock import Clock
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.child_process import ChildProcess, LineReader, SpawnedProcess, open_line_reader
from resilient_jax.errors import MessageError
from resilient_jax.ids import Incarnation
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.framing import FrameError
from resilient_jax.protocol.worker_messages import (
    AGENT_CONNECTION_VARIABLE,
    DEATH_PIPE_VARIABLE,
    SNAPSHOT_CONNECTION_VARIABLE,
    WORKER_MESSAGE_DECODER,
    WORKER_SETTINGS_VARIABLE,
    AgentRequest,
    Heartbeat,
    WorkerMessage,
    WorkerOrder,
    WorkerReported,
    WorkerSettings,
    encode_settings,
)
from resilient_jax.protocol.worker_report import WorkerReport
from resilient_jax.protocol.zygote_messages import ZYGOTE_VARIABLE

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
"""How often the process's state is read; a stop must be seen twice, so that a short one does not count."""
LAST_LINES_TIMEOUT_S = 0.2
"""For what a worker that has ended has printed and sent last."""

WORKER_VARIABLES = (
    AGENT_CONNECTION_VARIABLE,
    WORKER_SETTINGS_VARIABLE,
    SNAPSHOT_CONNECTION_VARIABLE,
    DEATH_PIPE_VARIABLE,
    ZYGOTE_VARIABLE,
)


RUN_SCRIPT = """import os, sys
if not sys.flags.safe_path: sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[2]))
from resilient_jax.worker.script_process import main
main()"""
"""Its arguments: the folder of the job's program, the script and the script's arguments. The search path is that of
`python SCRIPT` before anything is imported from there (Python has imported `os` itself)."""


class OutputReader(Protocol):
    """What reads a worker's output; `WorkerOutput` and `HeldOutput` do."""

    async def follow(self, reader: LineReader, *, is_error: bool) -> None:
        """Read lines until the stream ends."""
        ...

    def read_last_errors(self) -> str:
        """Return the end of what was written to standard error."""
        ...


class WorkerDescriptors(NamedTuple):
    """A worker's ends of what connects it, in the order in which a forked worker gets them.

    Attributes:
        agent: descriptor of the connection to the agent.
        snapshots: descriptor of the connection to the snapshot server.
        death_pipe: descriptor of the write end of the pipe that closes when the worker dies.
    """

    agent: int
    snapshots: int
    death_pipe: int


class WorkerProcess:
    """A worker, its connection, and the pipe that closes when it dies.

    Attributes:
        is_unresponsive: whether the process is stopped, or sent nothing for longer than the heartbeat timeout.
        has_script_ended: whether the script has come to its end after training.
        is_dying: whether the process's threads have ended; the exit code follows.
        started_with: settings of the agent when the worker was started, which say which devices the worker sees.
        lacks_snapshots: whether the worker's snapshot server has ended; only another worker is connected to the next
            server.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        child: ChildProcess,
        connection: AsyncConnection[WorkerOrder, WorkerMessage],
        death_pipe: int,
        clock: Clock,
    ) -> None:
        self.incarnation = incarnation
        self.child = child
        self.report = WorkerReport()
        self.is_unresponsive = False
        self.is_dying = False
        self.has_script_ended = False
        self.error = ""
        self.started_with: AgentSettings | None = None
        self.lacks_snapshots = False
        self._connection = connection
        self._death_pipe = death_pipe
        self._clock = clock
        self._last_message_s = clock.monotonic_s()

    @classmethod
    async def start(
        cls,
        incarnation: Incarnation,
        launch: "Callable[[WorkerDescriptors], Awaitable[ChildProcess]]",
        clock: Clock,
        snapshot_socket: socket.socket,
    ) -> "WorkerProcess":
        """Start a worker with its ends of a socket pair, of a pipe and of `snapshot_socket`.

        Args:
            launch: starts a process that has copies of the descriptors, such as `launch_script`.
            snapshot_socket: the worker's end of a connection to the snapshot server; closed by this function.

        Raises:
            OSError: there is no descriptor, process or memory left for the worker.
        """
        # The child's ends are closed here in any case: once it has its own copies, one that stayed open would hide the
        # child's death. Ours are closed only if it could not be started.
        with contextlib.ExitStack() as theirs_too, contextlib.ExitStack() as unless_started:
            theirs_too.enter_context(snapshot_socket)
            ours, theirs = socket.socketpair()
            unless_started.enter_context(ours)
            theirs_too.enter_context(theirs)
            death_pipe, held = os.pipe()
            unless_started.callback(os.close, death_pipe)
            theirs_too.callback(os.close, held)
            child = await launch(WorkerDescriptors(theirs.fileno(), snapshot_socket.fileno(), held))
            unless_started.pop_all()
        return cls(incarnation, child, AsyncConnection(ours, WORKER_MESSAGE_DECODER), death_pipe, clock)

    def watch_until_exit(
        self,
        output: OutputReader,
        heartbeat_timeout_s: float,
        on_change: Callable[[], None],
        on_message: Callable[[AgentRequest], None],
    ) -> asyncio.Task[int]:
        """Return a task that receives messages and watches until the process ends; its result is the exit code."""
        watching = asyncio.create_task(
            self._watch_until_exit(output, heartbeat_timeout_s, on_change, on_message)
        )
        # Not at the end of the task's own code: a task that is cancelled before its first turn runs none of it.
        watching.add_done_callback(lambda _: self._close())
        return watching

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._death_pipe)
        os.close(self._death_pipe)
        self._connection.close()
        self.child.close_pipes()

    async def _watch_until_exit(
        self,
        output: OutputReader,
        heartbeat_timeout_s: float,
        on_change: Callable[[], None],
        on_message: Callable[[AgentRequest], None],
    ) -> int:
        child, loop = self.child, asyncio.get_running_loop()
        assert child.stdout is not None, "started with pipes"
        assert child.stderr is not None, "started with pipes"
        tasks: list[asyncio.Task[None]] = []
        transports: list[asyncio.ReadTransport] = []
        # From the first wait on: an agent that ends may cancel this at any of them.
        try:
            with child.stdout, child.stderr:
                for pipe, is_error in ((child.stdout, False), (child.stderr, True)):
                    lines, transport = await open_line_reader(pipe.fileno())
                    transports.append(transport)
                    tasks.append(asyncio.create_task(output.follow(lines, is_error=is_error)))
            loop.add_reader(self._death_pipe, self._on_death_pipe, on_change)
            tasks.append(asyncio.create_task(self._listen(on_change, on_message)))
            last = tuple(tasks)
            tasks.append(asyncio.create_task(self._watch(heartbeat_timeout_s, on_change)))
            code = await child.wait_exited()
            # Its last lines may still be in the pipes; a process that inherited them must not delay the end.
            await asyncio.wait(last, timeout=LAST_LINES_TIMEOUT_S)
            self.error = output.read_last_errors()
            return code
        finally:
            for task in tasks:
                task.cancel()
            for transport in transports:
                transport.close()

    def _on_death_pipe(self, on_change: Callable[[], None]) -> None:
        # A pipe without a writer stays readable: the loop would call this without end.
        asyncio.get_running_loop().remove_reader(self._death_pipe)
        self.is_dying = True
        on_change()

    def is_outdated(self, settings: AgentSettings) -> bool:
        """Return whether it runs, and lacks what one that is started with these settings has: devices, or snapshots."""
        if self.report.is_done or self.child.exit_code is not None:
            return False
        if self.lacks_snapshots:
            return True
        return self.started_with is not None and self.started_with != settings

    def expect_messages(self) -> None:
        """Count the silence of this worker from now on: it was at the lowest priority."""
        self.is_unresponsive = False
        self._last_message_s = self._clock.monotonic_s()

    def send_order(self, order: WorkerOrder) -> None:
        """Send an order. A dead worker does not get it, as its exit will show."""
        self._connection.send(order)

    async def _listen(
        self,
        on_change: Callable[[], None],
        on_message: Callable[[AgentRequest], None],
    ) -> None:
        try:
            async for message in self._connection:
                self._last_message_s = self._clock.monotonic_s()
                if isinstance(message, WorkerReported):
                    self.report = message.report
                    on_change()
                elif not isinstance(message, Heartbeat):
                    on_message(message)
        except (FrameError, MessageError):
            # No task reads the connection from here on, so the worker would block on a full socket.
            logger.exception("a worker sent what cannot be read; it is ended")
            self.child.kill()

    async def _watch(self, heartbeat_timeout_s: float, on_change: Callable[[], None]) -> None:
        was_stopped = False
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            is_stopped_now = self.child.is_stopped()
            # A worker sends messages only from `rj.run` on: before that, silence means nothing.
            has_reported = self.report != WorkerReport()
            is_silent = (
                has_reported and self._clock.monotonic_s() - self._last_message_s > heartbeat_timeout_s
            )
            stopped = (is_stopped_now and was_stopped) or is_silent
            was_stopped = is_stopped_now
            if stopped != self.is_unresponsive:
                self.is_unresponsive = stopped
                on_change()


def launch_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    settings: WorkerSettings,
    descriptors: WorkerDescriptors,
) -> ChildProcess:
    """Start a process that runs the script as `python -u COMMAND...` would, from the job's program, as a worker.

    Raises:
        OSError: there is no descriptor, process or memory left for the process.
    """
    return SpawnedProcess(
        [sys.executable, "-u", "-c", RUN_SCRIPT, settings.program, *command],
        env={
            **environment,
            AGENT_CONNECTION_VARIABLE: str(descriptors.agent),
            DEATH_PIPE_VARIABLE: str(descriptors.death_pipe),
            SNAPSHOT_CONNECTION_VARIABLE: str(descriptors.snapshots),
            WORKER_SETTINGS_VARIABLE: encode_settings(settings),
        },
        pass_fds=descriptors,
    )
