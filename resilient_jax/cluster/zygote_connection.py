"""An agent's connection to a zygote, its own or that of its launcher, and the workers that were forked for it.

A zygote that does not answer in time is not asked again: workers are then started as processes of their own.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from typing import IO

from resilient_jax.cluster.child_process import ENDED, STOPPED, ChildProcess, read_process_state
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.worker_messages import WorkerSettings
from resilient_jax.protocol.zygote_messages import (
    ZYGOTE_ANSWER_DECODER,
    ForkRefused,
    ForkWorker,
    WorkerEnded,
    WorkerForked,
    ZygoteAnswer,
    ZygoteOrder,
)

ANSWER_TIMEOUT_S = 30.0
"""A zygote that still imports answers when it has, which takes some seconds on a busy machine."""

AnswerConnection = AsyncConnection[ZygoteOrder, ZygoteAnswer]


class ForkedProcess(ChildProcess):
    """A worker that a zygote has forked, and whose parent reports its end."""

    def __init__(
        self,
        forked: WorkerForked,
        stdout: IO[bytes],
        stderr: IO[bytes],
        parent: AnswerConnection,
        messages: AsyncIterator[ZygoteAnswer],
    ) -> None:
        """Watch the worker.

        Args:
            parent: connection to the worker's parent; closed when the worker has ended.
            messages: messages of the parent that have not been read.
        """
        super().__init__(stdout, stderr)
        self._pid, self._parent_pid = forked.pid, forked.parent
        self._exit_code: int | None = None
        self._listening = asyncio.get_running_loop().create_task(self._listen(parent, messages))

    @property
    def pid(self) -> int:
        """The id of the process, which no other process has before its end was noted here."""
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while the process runs."""
        return self._exit_code

    def is_stopped(self) -> bool:
        """Return whether the process got SIGSTOP, or has ended and its parent, which is stopped, does not report it."""
        return read_process_state(self._pid) in (STOPPED, ENDED)

    def kill(self) -> None:
        """Send SIGKILL to the process and to what is left of its process group, and to a parent that is stopped."""
        super().kill()
        if self._exit_code is None and read_process_state(self._parent_pid) == STOPPED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._parent_pid, signal.SIGKILL)

    async def _listen(self, parent: AnswerConnection, messages: AsyncIterator[ZygoteAnswer]) -> None:
        # Also when the agent ends and cancels this: then the parent ends the worker.
        with contextlib.closing(parent):
            message = await anext(messages, None)
            # A parent that has died has taken the worker with it.
            self._exit_code = message.exit_code if isinstance(message, WorkerEnded) else -signal.SIGKILL
            self._end()


class ZygoteConnection:
    """Forks workers as long as the zygote answers.

    Attributes:
        is_open: whether the zygote is asked.
        num_modules: modules that the worker which was forked last had imported already.
        refusal: why the last order was refused, or is not sent; empty: the last order was carried out.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take over the connected socket."""
        self._orders: AsyncConnection[ForkWorker, ZygoteAnswer] = AsyncConnection(
            connected, ZYGOTE_ANSWER_DECODER
        )
        self.is_open = True
        self.num_modules = 0
        self.refusal = ""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

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
        order = ForkWorker(command=command, settings=settings, environment=encode_environment(environment))
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as unless_forked:
            (stdout, output), (stderr, error) = (_open_pipe(theirs, unless_forked) for _ in range(2))
            ours, given = socket.socketpair()
            parent = AnswerConnection(ours, ZYGOTE_ANSWER_DECODER)
            # Closed, it tells the worker's parent to end a worker that comes too late.
            unless_forked.callback(parent.close)
            with given:
                self._orders.send(order, [given.fileno(), output, error, *descriptors])
            messages = aiter(parent)
            answer = await self._receive_answer(messages)
            if answer is None:
                return None
            self.num_modules, self.refusal = answer.num_modules, ""
            unless_forked.pop_all()
            return ForkedProcess(answer, stdout, stderr, parent, messages)

    def close(self) -> None:
        """Close the connection."""
        self._watching.cancel()
        self.is_open = False
        self._orders.close()

    async def _watch(self) -> None:
        """Note when the zygote has ended: it sends nothing on this connection."""
        async for _ in self._orders:
            pass
        self.is_open = False
        self.refusal = "the zygote has ended"

    async def _receive_answer(self, messages: AsyncIterator[ZygoteAnswer]) -> WorkerForked | None:
        """Return that a worker was forked; None: `refusal` says why not."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await anext(messages, None)
        except TimeoutError:
            self.is_open = False
            self.refusal = f"the zygote did not answer within {ANSWER_TIMEOUT_S:g} s"
            return None
        if isinstance(answer, WorkerForked):
            return answer
        if isinstance(answer, ForkRefused):
            self.refusal = answer.reason
        else:
            self.is_open = False
            self.refusal = "the zygote has ended"
        return None


def encode_environment(environment: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return variables as the kernel has them."""
    return {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}


def _open_pipe(theirs: contextlib.ExitStack, unless_forked: contextlib.ExitStack) -> tuple[IO[bytes], int]:
    """Return the read end of a new pipe and the descriptor of its write end, for the two stacks to close."""
    reader, writer = os.pipe()
    theirs.callback(os.close, writer)
    return unless_forked.enter_context(os.fdopen(reader, "rb", buffering=0)), writer
