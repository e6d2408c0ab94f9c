"""What an agent forks its workers from: the zygote of `launch`, or one of its own.

1. An agent that was given no connection to a zygote starts one of its own with itself, for its first worker.
2. A zygote that is gone, has refused a worker, or lacks much of what the worker has imported, is replaced: when
   `standby_schedule` says so, the agent starts another at the lowest priority, which imports what the worker has.
3. The present one is asked until the other is ready. Without one, workers are started as processes of their own.
"""

import asyncio
import os
import socket

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.child_process import ChildProcess
from resilient_jax.cluster.run_directory import HostLog, make_log_path
from resilient_jax.cluster.standby_schedule import StandbySchedule
from resilient_jax.cluster.worker_process import WorkerDescriptors
from resilient_jax.cluster.zygote_connection import ZygoteConnection, encode_environment
from resilient_jax.cluster.zygote_process import ZygoteProcess
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.worker_messages import ImportsReported, WorkerSettings
from resilient_jax.protocol.zygote_messages import PrepareZygote

START_VARIABLES = ("PYTHON", "LD_", "GLIBC_", "MALLOC_")
"""How the names of variables begin that the interpreter, the linker and malloc read: a script sets them for others."""
MAX_MISSING_MODULES = 200
"""Of a worker, which the zygote has not imported: to import so many takes a tenth of a second or two."""


class HostZygote:
    """At most one zygote that is asked, and one that is to replace it."""

    def __init__(self, context: AgentContext) -> None:
        """Connect to the launcher's zygote, or start one, unless the settings say that workers are not forked."""
        settings = context.settings
        self._settings = settings
        self._devices = context.devices
        self._log = context.log
        self._clock = context.clock
        self._is_possible = settings.forks_workers
        self._schedule = StandbySchedule()
        self._imports: ImportsReported | None = None
        self._connection: ZygoteConnection | None = None
        self._own: ZygoteProcess | None = None
        """The one that is asked, if it is this agent's."""
        self._importing: ZygoteProcess | None = None
        """The one that is to replace it."""
        self._starting: asyncio.Task[None] | None = None
        if settings.zygote is not None:
            self._connection = ZygoteConnection(socket.socket(fileno=settings.zygote))
        elif self._is_possible:
            self._start_first()

    def remember_imports(self, imports: ImportsReported) -> None:
        """Have the next zygote import what the worker has imported."""
        self._imports = imports

    def commit(self, generation: GenerationNumber) -> None:
        """Start a better zygote if one is due at this commit of the worker."""
        now_s = self._clock.monotonic_s()
        self._schedule = self._schedule.commit(generation, now_s)
        is_due = self._is_possible and self._starting is None and self._schedule.is_due(now_s)
        if is_due and self._imports is not None and not self._is_fork_fast(self._imports):
            self._starting = asyncio.create_task(self._replace(self._imports))

    async def fork(
        self,
        host: AgentSettings,
        settings: WorkerSettings,
        descriptors: WorkerDescriptors,
        *,
        is_urgent: bool,
    ) -> ChildProcess | None:
        """Return a worker that has just been forked; None if it must be started as a process of its own.

        Args:
            host: settings of the agent at this start, which say which devices the worker sees.
            descriptors: descriptors of the worker; the caller closes its copies.
            is_urgent: whether imports that the worker waits for may slow down others.

        Raises:
            OSError: there is no descriptor left for the worker's pipes.
        """
        self._schedule = self._schedule.replace_worker(is_promoted=False)
        connection, own = self._connection, self._own
        if connection is None:
            return None
        if is_urgent and own is not None:
            own.restore_priority()
        child = await connection.fork(host.command, host.environment, settings, descriptors)
        if child is None:
            self._log.record(EventKind.WORKER_NOT_FORKED, why=connection.refusal)
            if own is not None and own is self._own:  # else another one has taken its place meanwhile
                self._own = None
                await own.close()  # it would refuse the next one, too
        else:
            self._schedule = self._schedule.replace_worker(is_promoted=True)
        return child

    async def close(self) -> None:
        """End the agent's own zygotes; workers live on."""
        self._is_possible = False
        own = [process for process in (self._own, self._importing) if process is not None]
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()
        for process in own:
            await process.close()

    def _is_fork_fast(self, imports: ImportsReported) -> bool:
        """Return whether a worker is forked with most of what it imports."""
        zygote = self._connection
        if zygote is None or not zygote.is_open or zygote.refusal:
            return False
        return len(imports.modules) - zygote.num_modules <= MAX_MISSING_MODULES

    def _start_first(self) -> None:
        """Start the zygote of the first worker, which waits for it."""
        try:
            self._own = self._start(None)
            self._ask(self._own, num_modules=0)
        except OSError as error:  # no descriptor, process or memory left: perhaps later
            self._record_failure(f"it could not be started: {error}", is_killed=True)

    async def _replace(self, imports: ImportsReported) -> None:
        """Start a zygote that imports these modules, and ask it once it is ready."""
        try:
            self._importing = self._start(imports)
            if obstacle := await self._importing.wait_ready():
                self._record_failure(obstacle, is_killed=self._importing.was_killed)
            else:
                self._ask(self._importing, num_modules=len(imports.modules))
                self._own, self._importing = self._importing, self._own
        except OSError as error:
            self._record_failure(f"it could not be started: {error}", is_killed=True)
        finally:
            # The one that is not asked, or no more: workers that were forked from it live on.
            not_asked, self._starting, self._importing = self._importing, None, None
            if not_asked is not None:
                await not_asked.close()

    def _start(self, imports: ImportsReported | None) -> ZygoteProcess:
        # With the worker's environment at its imports, since libraries read settings there when they are imported; the
        # script gets that of a worker's start.
        given = environment = self._devices.settings.environment
        if imports is not None:
            theirs = {os.fsdecode(name): os.fsdecode(value) for name, value in imports.environment.items()}
            environment = _select(given, of_process=True) | _select(theirs, of_process=False)
        order = PrepareZygote(
            script=self._settings.command[0], environment=encode_environment(given), imports=imports
        )
        directory, host = self._settings.run_directory, self._settings.host
        output = make_log_path(directory, host, HostLog.ZYGOTE) if directory is not None else None
        process = ZygoteProcess(order, environment, self._log, self._clock, output)
        process.lower_priority()
        return process

    def _ask(self, process: ZygoteProcess, *, num_modules: int) -> None:
        """Have workers forked from this zygote, which has imported so many modules of theirs, from now on."""
        if (connected := process.connect_agent()) is not None:
            if self._connection is not None:
                self._connection.close()
            self._connection = ZygoteConnection(connected)
            self._connection.num_modules = num_modules

    def _record_failure(self, reason: str, *, is_killed: bool) -> None:
        self._schedule = self._schedule.lose_standby(self._clock.monotonic_s(), is_killed=is_killed)
        self._log.record(EventKind.ZYGOTE_FAILED, reason=reason, retried=is_killed)


def _select(environment: dict[str, str], *, of_process: bool) -> dict[str, str]:
    """Return the variables that a process reads at its start, or the others."""
    return {k: v for k, v in environment.items() if k.startswith(START_VARIABLES) is of_process}
