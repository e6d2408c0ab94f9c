"""The host's snapshot server as its agent sees it: started when a worker first asks, then watched and ended.

Each worker starts with one end of a socket pair. The agent keeps the other end until a server runs, and hands it over
then; so a server may start after the worker, and outlives any number of workers.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.child_process import SpawnedProcess
from resilient_jax.events import EventKind
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.snapshots import SnapshotServerStatus, SnapshotStatus
from resilient_jax.snapshot.messages import (
    SERVER_TO_AGENT_DECODER,
    SETTINGS_ENV_VARIABLE,
    EventOccurred,
    NewWorker,
    ServerReady,
    ServerSettings,
    ServerToAgent,
)
from resilient_jax.snapshot.process_priority import lower_priority, raise_priority
from resilient_jax.telemetry.event_log import EventLog

SERVER_MODULE = "resilient_jax.snapshot.server"


class SnapshotServerProcess:
    """At most one server at a time.

    Attributes:
        server: status of the server that listens for other hosts; None while no server does.
        snapshots: snapshots that the server has complete.
    """

    def __init__(
        self,
        settings: AgentSettings,
        log: EventLog,
        *,
        on_change: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Call `on_change` after every change of the attributes, and `on_end` after a server ended by itself."""
        self._settings = settings
        self._log = log
        self._on_change = on_change
        self._on_end = on_end
        self._child: SpawnedProcess | None = None
        self._connection: AsyncConnection[NewWorker, ServerToAgent] | None = None
        self._pending: socket.socket | None = None
        """The server's end of the newest worker's socket pair, until it is handed over."""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_urgent = False
        self.server: SnapshotServerStatus | None = None
        self.snapshots: tuple[SnapshotStatus, ...] = ()

    def connect_worker(self) -> socket.socket:
        """Return the worker's end of a new socket pair; the server serves the other end from now on."""
        ours, theirs = socket.socketpair()
        self.serve_worker(ours)
        return theirs

    def serve_worker(self, connection: socket.socket) -> None:
        """Have the server serve this end of a worker's socket pair; it is closed here."""
        if self._pending is not None:
            self._pending.close()
        self._pending = connection
        self._hand_over()

    def start(self) -> None:
        """Start a server, in the background. Idempotent."""
        if self._child is not None:
            return
        settings = self._settings
        ours, theirs = socket.socketpair()
        # The server gets a copy of its end; one that stayed open here would hide the server's death.
        with contextlib.ExitStack() as unless_started, theirs:
            unless_started.enter_context(ours)
            message = ServerSettings(
                host=settings.host,
                address=settings.address,
                token=settings.credentials.token,
                tls=settings.credentials.tls_paths,
                connection_fd=theirs.fileno(),
            )
            self._child = SpawnedProcess(
                [sys.executable, "-m", SERVER_MODULE],
                env={**os.environ, SETTINGS_ENV_VARIABLE: msgspec.json.encode(message).decode()},
                stdout=subprocess.DEVNULL,
                stderr=None,
                pass_fds=(theirs.fileno(),),
            )
            unless_started.pop_all()
        self._connection = AsyncConnection(ours, SERVER_TO_AGENT_DECODER)
        self._log.record(EventKind.SNAPSHOT_SERVER_STARTED, pid=self._child.pid)
        self._tasks = [
            asyncio.create_task(self._listen(self._connection, self._child)),
            asyncio.create_task(self._watch(self._child)),
        ]

    def set_urgency(self, *, is_urgent: bool) -> None:
        """Have the server compete with training for the processor, or yield to it."""
        if is_urgent == self._is_urgent:
            return
        self._is_urgent = is_urgent
        if self.server is not None:
            (raise_priority if is_urgent else lower_priority)(self.server.pid)

    async def close(self) -> None:
        """End the server, and with it every snapshot of this host."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child is not None:
            await self._child.kill_and_wait()
        self._forget()
        # It belonged to a worker that ended before there was a server to serve it.
        if self._pending is not None:
            self._pending.close()

    def _hand_over(self) -> None:
        """Give the server the newest worker's socket, if both are there."""
        if self._connection is None or self._pending is None or self.server is None:
            return
        # Closed here afterwards: a copy that stays open would hide the server's end from the worker.
        self._connection.send(NewWorker(), [self._pending.fileno()])
        self._pending.close()
        self._pending = None

    async def _listen(
        self, connection: AsyncConnection[NewWorker, ServerToAgent], child: SpawnedProcess
    ) -> None:
        async for message in connection:
            if isinstance(message, EventOccurred):
                self._log.append(message.event)
                continue
            if isinstance(message, ServerReady):
                self.server = SnapshotServerStatus(endpoint=message.endpoint, pid=child.pid)
                if self._is_urgent:
                    raise_priority(child.pid)
                self._hand_over()
            else:
                self.snapshots = message.snapshots
            self._on_change()

    async def _watch(self, child: SpawnedProcess) -> None:
        code = await child.wait_exited_or_stopped()
        self._log.record(EventKind.SNAPSHOT_SERVER_EXITED, pid=child.pid, exit_code=code)
        # Before `on_end`, which ends the worker: the next worker's request must find no server, and start one.
        self._forget()
        self._on_end()
        self._on_change()

    def _forget(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._connection is not None:
            self._connection.close()
        self._child = self._connection = None
        self.server = None
        self.snapshots = ()
