"""Starts the worker of a host: as a fork of a zygote, or as a new process."""

import functools
import socket
from collections.abc import Callable

import msgspec

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.child_process import ChildProcess
from resilient_jax.cluster.host_zygote import HostZygote
from resilient_jax.cluster.run_directory import HostLog, make_log_path
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.worker_process import WorkerDescriptors, WorkerProcess, launch_script
from resilient_jax.events import EventKind
from resilient_jax.ids import Incarnation
from resilient_jax.protocol.worker_messages import SnapshotSettings, WorkerSettings

STALL_DUMP_SHARE = 0.5
"""Of `JobConfig.heartbeat_timeout_s`: a process from which nothing is heard prints its stacks before it is killed."""


class WorkerStarter:
    """Starts one worker after the other, each with an incarnation number of its own."""

    def __init__(
        self,
        context: AgentContext,
        snapshots: SnapshotServerProcess,
        zygote: HostZygote,
        is_start_urgent: Callable[[], bool],
    ) -> None:
        """Start workers for this host; a new process gets low priority unless `is_start_urgent`."""
        self._devices = context.devices
        self._admission = context.admission
        self._log = context.log
        self._clock = context.clock
        self._snapshots = snapshots
        self._zygote = zygote
        self._is_start_urgent = is_start_urgent
        self._incarnation = Incarnation(0)

    async def start(self) -> WorkerProcess:
        """Return a worker that has just been started.

        Raises:
            KeptFileDamaged: the worker's program is gone from the run folder, and from the disk.
            OSError: there is no descriptor, process or memory left for the worker.
        """
        if self._admission.kept is not None:
            self._admission.kept.restore()
        self._incarnation = self._choose_incarnation()
        settings = self._devices.settings
        launch = functools.partial(self._launch, settings)
        worker = await WorkerProcess.start(
            self._incarnation, launch, self._clock, self._snapshots.connect_worker()
        )
        worker.started_with = settings
        self._log.record(EventKind.WORKER_STARTED, pid=worker.child.pid, incarnation=worker.incarnation)
        return worker

    async def start_standby(self) -> tuple[WorkerProcess, socket.socket]:
        """Return a worker that has just been started as a standby, at the lowest priority.

        Also returns the end of its connection to the snapshot server that is to be served once it is the worker.

        Raises:
            OSError: there is no descriptor, process or memory left for the standby.
        """
        self._incarnation = self._choose_incarnation()
        settings = self._devices.settings
        launch = functools.partial(self._launch_standby, settings)
        ours, theirs = socket.socketpair()
        try:
            standby = await WorkerProcess.start(self._incarnation, launch, self._clock, theirs)
        except BaseException:
            ours.close()
            raise
        standby.started_with = settings
        return standby, ours

    def _choose_incarnation(self) -> Incarnation:
        # From the clock, so that it differs from those of an earlier agent of this host, too.
        return Incarnation(max(self._incarnation + 1, int(self._clock.wall_s() * 1000)))

    async def _launch_standby(self, host: AgentSettings, descriptors: WorkerDescriptors) -> ChildProcess:
        settings = msgspec.structs.replace(_make_settings(host, self._admission.folder), is_standby=True)
        child = await self._start_process(host, settings, descriptors, is_urgent=False)
        child.lower_priority()
        return child

    async def _launch(self, host: AgentSettings, descriptors: WorkerDescriptors) -> ChildProcess:
        """Return the process that is the worker."""
        settings = _make_settings(host, self._admission.folder)
        is_urgent = self._is_start_urgent()
        child = await self._start_process(host, settings, descriptors, is_urgent=is_urgent)
        if not is_urgent:
            child.lower_priority()
        return child

    async def _start_process(
        self,
        host: AgentSettings,
        settings: WorkerSettings,
        descriptors: WorkerDescriptors,
        *,
        is_urgent: bool,
    ) -> ChildProcess:
        """Return a new process that runs the script, forked if there is a zygote that can do it."""
        forked = await self._zygote.fork(host, settings, descriptors, is_urgent=is_urgent)
        return forked or launch_script(host.command, host.environment, settings, descriptors)


def _make_settings(settings: AgentSettings, program: str) -> WorkerSettings:
    """Return what a worker of this host is told at its start; `program` is the folder of what it runs."""
    config, directory = settings.config, settings.run_directory
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
        ),
        failure_domain=settings.failure_domain,
        compile_cache_bytes=config.compile_cache_mib * 2**20,
        collective_timeout_s=config.collective_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
        user_code_timeout_s=config.user_code_timeout_s,
        stall_dump_s=config.heartbeat_timeout_s * STALL_DUMP_SHARE,
        live_nodes=settings.uses_live_nodes,
        digest_log=str(make_log_path(directory.absolute(), settings.host, HostLog.DIGESTS))
        if directory
        else "",
        digest_interval_steps=config.digest_interval_steps,
        audit_share=config.audit_share,
        devices=settings.devices,
        devices_after_loss=config.devices_after_loss,
        program=program,
    )
