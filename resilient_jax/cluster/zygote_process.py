"""A zygote as its owner sees it, which is a launcher or an agent: started, connected to agents, ended.

When it ends, or is stopped and so ended, the workers that it has forked live on.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from resilient_jax.clock import Clock
from resilient_jax.cluster.child_process import KILLING_SIGNALS, SpawnedProcess, read_resident_mib
from resilient_jax.cluster.worker_exit import describe_exit
from resilient_jax.events import EventKind
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.zygote_messages import (
    ZYGOTE_READY_DECODER,
    PrepareZygote,
    ServeAgent,
    ZygoteOrder,
    ZygoteReady,
)
from resilient_jax.telemetry.event_log import EventLog

ZYGOTE_MODULE = "resilient_jax.worker.zygote"


class ZygoteProcess:
    """The process, and its owner's connection to it."""

    def __init__(
        self,
        order: PrepareZygote,
        environment: Mapping[str, str],
        log: EventLog,
        clock: Clock,
        output: Path | None,
    ) -> None:
        """Start the zygote.

        Args:
            environment: variables that the libraries find when they are imported.
            output: file that the zygote writes to; None: nothing is kept.

        Raises:
            OSError: there is no descriptor, process or memory left for the zygote.
        """
        self._log = log
        self._clock = clock
        self._started_s = clock.monotonic_s()
        ours, theirs = socket.socketpair()
        with theirs, open(output or os.devnull, "ab") as written:
            try:
                self._child = SpawnedProcess(
                    [sys.executable, "-u", "-m", ZYGOTE_MODULE, str(theirs.fileno())],
                    env=environment,
                    stdout=written.fileno(),
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError:
                ours.close()
                raise
        self._connection: AsyncConnection[ZygoteOrder, ZygoteReady] = AsyncConnection(
            ours, ZYGOTE_READY_DECODER
        )
        self._connection.send(order)
        self._ready: ZygoteReady | None = None
        log.record(EventKind.ZYGOTE_STARTED, pid=self._child.pid)
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    def connect_agent(self) -> socket.socket | None:
        """Return an agent's end of a new connection; None: the zygote has ended."""
        if self._child.exit_code is not None:
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection.send(ServeAgent(), [theirs.fileno()])
        return ours

    def lower_priority(self) -> None:
        """Have it import in processor time that no other process wants; afterwards it has normal priority again."""
        self._child.lower_priority()

    def restore_priority(self) -> None:
        """Have it import at normal priority."""
        self._child.restore_priority()

    @property
    def was_killed(self) -> bool:
        """Whether it was ended by the kernel, which needs its memory, or by a person."""
        code = self._child.exit_code
        return code is not None and -code in KILLING_SIGNALS

    async def wait_ready(self) -> str:
        """Wait until it has imported, and return why it forks no worker; empty: it does."""
        await asyncio.wait((self._listening,))  # until its connection is closed, at the latest
        if self._ready is not None:
            return self._ready.obstacle
        return f"it {describe_exit(await self._child.wait_exited())}"

    async def close(self) -> None:
        """End the zygote."""
        for task in (self._watching, self._listening):
            task.cancel()
        await asyncio.gather(self._watching, self._listening, return_exceptions=True)
        self._connection.close()
        await self._child.kill_and_wait()

    async def _watch(self) -> None:
        code = await self._child.wait_exited_or_stopped()
        self._log.record(EventKind.ZYGOTE_EXITED, pid=self._child.pid, exit_code=code)

    async def _listen(self) -> None:
        async for message in self._connection:
            self._ready = message
            self._log.record(
                EventKind.ZYGOTE_READY,
                pid=self._child.pid,
                seconds=self._clock.monotonic_s() - self._started_s,
                memory_mib=read_resident_mib(self._child.pid),
                failed_imports=message.failed_imports,
                obstacle=message.obstacle,
            )
            return
