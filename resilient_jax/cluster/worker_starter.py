"""Starts the worker of a host: by the promotion of its standby, or as a new process."""

import socket
from collections.abc import Callable

import msgspec

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.child_process import ChildProcess
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.standby_worker import StandbyWorker
from resilient_jax.cluster.worker_process import WorkerDescriptors, WorkerProcess, launch_script
from resilient_jax.events import EventKind
from resilient_jax.ids import Incarnation
from resilient_jax.protocol.worker_messages import SnapshotSettings, WorkerSettings


class WorkerStarter:
    """Starts one worker after the other, each with an incarnation number of its own."""

    def __init__(
        self,
        context: AgentContext,
        snapshots: SnapshotServerProcess,
        standby: StandbyWorker,
        is_start_urgent: Callable[[], bool],
    ) -> None:
        """Start workers for this host; a new process gets low priority unless `is_start_urgent`."""
        self._settings = context.settings
        self._log = context.log
        self._clock = context.clock
        self._snapshots = snapshots
        self._standby = standby
        self._is_start_urgent = is_start_urgent
        self._incarnation = Incarnation(0)

    async def start(self) -> WorkerProcess:
        """Return a worker that has just been started.

        Raises:
            OSError: there is no descriptor, process or memory left for it.
        """
        self._incarnation = self._choose_incarnation()
        worker = await WorkerProcess.start(
            self._incarnation, self._launch, self._clock, self._snapshots.connect_worker()
        )
        self._log.record(EventKind.WORKER_STARTED, pid=worker.child.pid, incarnation=worker.incarnation)
        return worker

    async def start_standby(self) -> tuple[WorkerProcess, socket.socket]:
        """Return a worker that has just been started as a standby, at the lowest priority.

        Also returns the end of its connection to the snapshot server that is to be served once it is the worker.

        Raises:
            OSError: there is no descriptor, process or memory left for it.
        """
        self._incarnation = self._choose_incarnation()
        ours, theirs = socket.socketpair()
        try:
            return await WorkerProcess.start(
                self._incarnation, self._launch_standby, self._clock, theirs
            ), ours
        except BaseException:
            ours.close()
            raise

    def _choose_incarnation(self) -> Incarnation:
        # From the clock, so that it differs from those of an earlier agent of this host, too.
        return Incarnation(max(self._incarnation + 1, int(self._clock.wall_s() * 1000)))

    async def _launch_standby(self, descriptors: WorkerDescriptors) -> ChildProcess:
        settings = msgspec.structs.replace(_make_settings(self._settings), is_standby=True)
        child = launch_script(self._settings.command, self._settings.environment, settings, descriptors)
        child.lower_priority()
        return child

    async def _launch(self, descriptors: WorkerDescriptors) -> ChildProcess:
        """Return the process that is the worker."""
        settings = _make_settings(self._settings)
        ordered_s = self._clock.monotonic_s()
        if (promoted := await self._standby.promote(descriptors, settings)) is not None:
            seconds = self._clock.monotonic_s() - ordered_s
            self._log.record(
                EventKind.WORKER_PROMOTED, pid=promoted.pid, incarnation=self._incarnation, seconds=seconds
            )
            return promoted
        child = launch_script(self._settings.command, self._settings.environment, settings, descriptors)
        if not self._is_start_urgent():
            child.lower_priority()
        return child


def _make_settings(settings: AgentSettings) -> WorkerSettings:
    """Return what a worker of this host is told at its start."""
    config = settings.config
    return WorkerSettings(
        job=settings.job,
        host=settings.host,
        address=settings.address,
        token=settings.credentials.token,
        tls=settings.credentials.tls_paths,
        devices_per_host=settings.devices_per_host,
        forming_timeout_s=config.forming_timeout_s,
        snapshots=SnapshotSettings(
            num_parity=config.snapshot_parity,
            interval_steps=config.snapshot_interval_steps,
            replicated_interval_steps=config.replicated_snapshot_interval_steps,
            group_size=config.snapshot_group_size,
            mean_time_between_failures_s=config.mean_time_between_failures_s,
        ),
        failure_domain=settings.failure_domain,
        compile_cache_bytes=config.compile_cache_mib * 2**20,
        live_nodes=settings.uses_live_nodes,
    )
