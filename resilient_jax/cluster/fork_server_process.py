"""The fork server of a launcher: started with the job, connected to each agent, ended with the job.

When it ends, the workers that it has forked end; agents start new ones as processes of their own, which go on from
memory.
"""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from resilient_jax.cluster.child_process import SpawnedProcess
from resilient_jax.events import EventKind
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.fork_messages import FORK_MESSAGE_DECODER, ForkMessage, ForkOrder, ServeAgent
from resilient_jax.telemetry.event_log import EventLog

SERVER_MODULE = "resilient_jax.worker.fork_server"


class ForkServerProcess:
    """The process, and the launcher's connection to it."""

    def __init__(self, script: str, environment: Mapping[str, str], log: EventLog, output: Path) -> None:
        """Start the server for workers of this script with this environment; it writes to the file `output`.

        Raises:
            OSError: there is no descriptor, process or memory left for the server.
        """
        ours, theirs = socket.socketpair()
        with theirs, output.open("ab") as written:
            try:
                self._child = SpawnedProcess(
                    [sys.executable, "-u", "-m", SERVER_MODULE, str(theirs.fileno()), script],
                    env=environment,
                    stdout=written.fileno(),
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError:
                ours.close()
                raise
        self._connection: AsyncConnection[ForkOrder, ForkMessage] = AsyncConnection(
            ours, FORK_MESSAGE_DECODER
        )
        self._log = log
        log.record(EventKind.FORK_SERVER_STARTED, pid=self._child.pid)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def connect_agent(self) -> socket.socket | None:
        """Return an agent's end of a new connection; None: the server has ended."""
        if self._child.exit_code is not None:
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection.send(ServeAgent(), [theirs.fileno()])
        return ours

    async def close(self) -> None:
        """End the server, and with it all workers that it has forked."""
        self._watching.cancel()
        self._connection.close()
        await self._child.kill_and_wait()

    def _continue(self) -> None:
        """Have the server go on that was stopped: its end would be that of all workers of this machine."""
        self._log.record(EventKind.FORK_SERVER_CONTINUED, pid=self._child.pid)
        self._child.send_signal(signal.SIGCONT)

    async def _watch(self) -> None:
        code = await self._child.wait_exited_or_stopped(self._continue)
        self._log.record(EventKind.FORK_SERVER_EXITED, pid=self._child.pid, exit_code=code)
