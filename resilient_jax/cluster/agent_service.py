"""What an agent serves to commands that run anywhere: its host's logs, and signals to its host's processes.

The caller has shown the job's token, and under mutual TLS a certificate of the job's authority.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.agent_messages import (
    READ_LOG,
    SEND_SIGNAL,
    SERVICE,
    ReadLog,
    SendSignal,
    SignalReceivers,
)
from resilient_jax.cluster.job_report import list_pids
from resilient_jax.cluster.run_directory import make_log_path
from resilient_jax.errors import PeerError
from resilient_jax.events import EventKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.telemetry.log_reader import LogPart, read_appended, read_last_lines
from resilient_jax.transport.server import Server


def serve_agent(server: Server, context: AgentContext, make_status: Callable[[], HostStatus]) -> None:
    """Add the methods of an agent to its server; `make_status` returns the present status of its host."""
    service = _AgentService(context, make_status)
    server.add(SERVICE, {READ_LOG: service.read_log, SEND_SIGNAL: service.send_signal})


class _AgentService:
    def __init__(self, context: AgentContext, make_status: Callable[[], HostStatus]) -> None:
        self._context = context
        self._make_status = make_status

    async def read_log(self, request: ReadLog) -> LogPart:
        settings = self._context.settings
        if settings.run_directory is None:
            return LogPart()
        path = make_log_path(settings.run_directory, settings.host, request.log)
        # In a thread: a disk that is slow, or gone, must not keep the agent from renewing its lease.
        if request.offset is None:
            return await asyncio.to_thread(read_last_lines, path, request.lines)
        return await asyncio.to_thread(read_appended, path, request.offset)

    async def send_signal(self, request: SendSignal) -> AsyncGenerator[SignalReceivers, None]:
        status = self._make_status()
        if request.agent_id != status.agent.id:
            raise PeerError(
                f"host {status.host}: found another agent at this address than the one that is meant; expected the one "
                "that the store's record names. Try again: by now the store has the new record, or none"
            )
        number = signal.SIGSTOP if request.is_stop else signal.SIGKILL
        pids = list_pids(status, request.component)
        try:
            yield SignalReceivers(pids=tuple(pids))
            # Ended by the caller, which has the answer then, or by the caller's death or deadline.
            await asyncio.get_running_loop().create_future()
        finally:
            self._signal(pids, number, request)

    def _signal(self, pids: list[int], number: signal.Signals, request: SendSignal) -> None:
        if pids:
            self._context.log.record(
                EventKind.SIGNAL_ORDERED,
                component=request.component.value,
                signal=number.name,
                pids=", ".join(map(str, pids)),
            )
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):  # a dead agent signals no others
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
