"""An agent's connection to the fork server of its machine, and the workers that were forked for it.

The answers come in the order of the orders. A server that does not answer in time is not asked again: workers are then
started as processes of their own. When it is gone, the workers that it had forked are, too.
"""

import asyncio
import collections
import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from typing import IO

from resilient_jax.cluster.child_process import ChildProcess
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.fork_messages import (
    FORK_MESSAGE_DECODER,
    ForkMessage,
    ForkOrder,
    ForkRefused,
    ForkWorker,
    ReapWorker,
    WorkerEnded,
    WorkerForked,
)
from resilient_jax.protocol.worker_messages import WorkerSettings

ANSWER_TIMEOUT_S = 30.0
"""A server that still imports answers when it has, which takes some seconds on a busy machine."""


class ForkedProcess(ChildProcess):
    """A process that the fork server has forked, and reports the end of."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        super().__init__(stdout, stderr)
        self._pid = pid
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        """The id of the process, which no other process has before its end was noted here."""
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while the process runs."""
        return self._exit_code

    def note_end(self, exit_code: int) -> None:
        """Note that the process has ended with this code."""
        self._exit_code = exit_code
        self._end()


class ForkServerConnection:
    """Forks workers as long as the server answers.

    Attributes:
        is_open: whether the server is asked.
        refusal: why the last order was refused, or is not sent; empty: the last order was carried out.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over the connected socket."""
        self._connection: AsyncConnection[ForkOrder, ForkMessage] = AsyncConnection(
            connected, FORK_MESSAGE_DECODER
        )
        self._orders: collections.deque[_Order] = collections.deque()
        """Orders that the server has not answered, the oldest first."""
        self._processes: dict[int, ForkedProcess] = {}
        self._listening = asyncio.get_running_loop().create_task(self._listen())
        self.is_open = True
        self.num_modules = 0
        self.refusal = ""

    async def fork(
        self,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        settings: WorkerSettings,
        descriptors: tuple[int, ...],
    ) -> ForkedProcess | None:
        """Return a worker that has just been forked; None if it must be started in another way.

        Args:
            command: path of the script, and its arguments.
            environment: environment that a worker starts with.
            descriptors: descriptors of the worker; the caller closes its copies.

        Raises:
            OSError: there is no descriptor left for the worker's pipes.
        """
        if not self.is_open:
            return None
        message = ForkWorker(
            command=command,
            settings=settings,
            environment={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        )
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as unless_forked:
            (stdout, output), (stderr, error) = (_open_pipe(theirs, unless_forked) for _ in range(2))
            self._connection.send(message, [output, error, *descriptors])
            order = _Order(stdout, stderr)
            self._orders.append(order)
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    process = await order.answer
            except _Refused as refused:
                self.refusal = str(refused)
                return None
            except TimeoutError:
                self.is_open = False
                self.refusal = f"the fork server did not answer within {ANSWER_TIMEOUT_S:g} s"
                order.kill_forked()
                return None
            except asyncio.CancelledError:
                order.kill_forked()
                raise
            unless_forked.pop_all()
        self.refusal = ""
        return process

    def close(self) -> None:
        """Close the connection; the server ends what it has forked for this agent."""
        self._listening.cancel()
        self._give_up("the agent ends")

    async def _listen(self) -> None:
        async for message in self._connection:
            match message:
                case WorkerForked():
                    # Before the next message, which may be this worker's end.
                    process = self._orders.popleft().accept(message.pid)
                    self._processes[message.pid] = process
                    self.num_modules = message.num_modules
                case ForkRefused():
                    self._orders.popleft().refuse(message.reason)
                case WorkerEnded():
                    self._on_ended(message)
        self._give_up("it has ended")

    def _on_ended(self, message: WorkerEnded) -> None:
        if (process := self._processes.pop(message.pid, None)) is not None:
            process.note_end(message.exit_code)
        self._connection.send(ReapWorker(pid=message.pid))

    def _give_up(self, why: str) -> None:
        """Count all that the server has forked as ended: the kernel ends it with the server, and the server with us."""
        self.is_open = False
        self.refusal = f"the fork server: {why}"
        self._connection.close()
        while self._orders:
            self._orders.popleft().refuse(self.refusal)
        while self._processes:
            self._processes.popitem()[1].note_end(-signal.SIGKILL)


class _Refused(Exception):
    """The server forks no worker."""


class _Order:
    """An order that the server has not answered yet.

    Attributes:
        answer: future that gets the process, or the exception `_Refused`.
    """

    def __init__(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._pipes = stdout, stderr

    def accept(self, pid: int) -> ForkedProcess:
        """Answer with the process, which is killed if its start was given up meanwhile."""
        process = ForkedProcess(pid, *self._pipes)
        if self.answer.done():
            process.kill()
        else:
            self.answer.set_result(process)
        return process

    def refuse(self, reason: str) -> None:
        """Answer that there is no process."""
        if not self.answer.done():
            self.answer.set_exception(_Refused(reason))

    def kill_forked(self) -> None:
        """Kill the process of an answer that its caller does not take any more."""
        if self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None:
            self.answer.result().kill()


def connect_fork_server(descriptor: int) -> ForkServerConnection:
    """Return the connection that `launch` has given to this process."""
    return ForkServerConnection(socket.socket(fileno=descriptor))


def _open_pipe(theirs: contextlib.ExitStack, unless_forked: contextlib.ExitStack) -> tuple[IO[bytes], int]:
    """Return the read end of a new pipe and the descriptor of its write end, for the two stacks to close."""
    reader, writer = os.pipe()
    theirs.callback(os.close, writer)
    return unless_forked.enter_context(os.fdopen(reader, "rb", buffering=0)), writer
