"""A running job seen from outside: its records, and the processes that it consists of."""

import enum
from collections.abc import Iterator
from pathlib import Path

import msgspec

from resilient_jax.cluster.device_quarantine import read_device_quarantine
from resilient_jax.cluster.progress_reader import add_progress, read_progress
from resilient_jax.cluster.quarantine import read_quarantine
from resilient_jax.cluster.run_directory import JobContact
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName, JobName
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.redundancy import Redundancy, measure_redundancy
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.leader_record import LeaderRecord
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord, QuarantineRecord
from resilient_jax.protocol.store_keys import make_generation_key, make_hosts_prefix, make_leader_key
from resilient_jax.store.store_access import make_store_access
from resilient_jax.transport.credentials import Credentials, TlsFiles

CONNECT_TIMEOUT_S = 5.0


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment: its records in the store, with the newer progress that its leader knows.

    Attributes:
        job: the job's name.
        generation: the agreed membership; None: no membership was written yet.
        leader: the host whose agent leads; None: no agent leads at the moment.
        hosts: the hosts whose agents have a valid lease.
        quarantine: the hosts that take no part for a while.
        device_quarantine: the devices that compute nothing for a while.
        redundancy: how many more hosts may be lost before the committed state is lost; None: no host has a committed
            state.
    """

    job: str
    generation: Generation | None
    leader: HostName | None
    hosts: tuple[HostStatus, ...]
    quarantine: tuple[QuarantineRecord, ...] = ()
    device_quarantine: tuple[DeviceQuarantineRecord, ...] = ()
    redundancy: Redundancy | None = None


class JobComponent(enum.StrEnum):
    """A part of a job that can be killed."""

    WORKER = "worker"
    AGENT = "agent"
    COORDINATION_SERVICE = "service"
    SNAPSHOT_SERVER = "snapshots"
    HOST = "host"


def make_credentials(contact: JobContact) -> Credentials:
    """Return what a command presents to the processes of a job."""
    return Credentials(contact.token, TlsFiles.in_folder(Path(contact.tls)) if contact.tls else None)


async def read_job_report(contact: JobContact) -> JobReport:
    """Read a job's records in the store, and how far its hosts are from its leader, if that answers.

    Raises:
        StoreUnreachable: the store does not answer.
    """
    job = JobName(contact.job)
    store_tls = Path(contact.store_tls) if contact.store_tls else None
    access = make_store_access(contact.store, make_credentials(contact), store_tls)
    async with await access.connect(CONNECT_TIMEOUT_S) as store:
        generation = await store.get(make_generation_key(job))
        leader = await store.get(make_leader_key(job))
        _, hosts = await store.range(make_hosts_prefix(job))
        quarantine = await read_quarantine(store, job)
        device_quarantine = await read_device_quarantine(store, job)
    decode = msgspec.msgpack.decode
    membership = decode(generation.value, type=Generation) if generation else None
    leading = decode(leader.value, type=LeaderRecord) if leader else None
    statuses = tuple(decode(record.value, type=HostStatus) for record in hosts)
    if leading is not None:
        progress = await read_progress(leading.endpoint, make_credentials(contact))
        newest = {report.host: report for report in progress}
        statuses = tuple(add_progress(status, newest.get(status.host)) for status in statuses)
    return JobReport(
        job=contact.job,
        generation=membership,
        leader=leading.host if leading is not None else None,
        hosts=statuses,
        quarantine=quarantine,
        device_quarantine=device_quarantine,
        redundancy=find_redundancy(membership, statuses),
    )


def find_redundancy(generation: Generation | None, hosts: tuple[HostStatus, ...]) -> Redundancy | None:
    """Return how many more hosts may be lost before the committed state is, with the newest step that all have."""
    if generation is None:
        return None
    by_name = {status.host: status for status in hosts}
    redundancy = measure_redundancy(MembershipState(generation=generation, hosts=by_name, phase_since_s=0.0))
    if redundancy is None or not redundancy.copies or generation.phase is not GenerationPhase.ACTIVE:
        return redundancy
    # A worker reports the first commit of a generation; of those since then its host's progress tells.
    members = [by_name[member.host] for member in generation.membership.members if member.host in by_name]
    committed = min((status.progress.step for status in members), default=0)
    return msgspec.structs.replace(redundancy, step=max(redundancy.step, committed))


def find_pids(report: JobReport, component: JobComponent, host: str) -> Iterator[int]:
    """Yield the processes of a component, see `find_hosts` and `list_pids`.

    Raises:
        CallerError: the job has no such host.
    """
    for status in find_hosts(report, component, host):
        yield from list_pids(status, component)


def find_hosts(report: JobReport, component: JobComponent, host: str) -> list[HostStatus]:
    """Return the hosts that a command means by `host` when it is about a component.

    That is one, or for `leader` the host of the leading agent; but for the coordination services of `leader` all hosts
    that run one.

    Raises:
        CallerError: the job has no such host.
    """
    if component is JobComponent.COORDINATION_SERVICE and host == "leader":
        return [h for h in report.hosts if h.services]
    name = report.leader if host == "leader" else host
    found = [h for h in report.hosts if h.host == name]
    if not found:
        known = ", ".join(h.host for h in report.hosts) or "none"
        raise CallerError(f"host {host}: found no such host in the job, expected one of: {known}, or leader")
    return found


def list_pids(status: HostStatus, component: JobComponent) -> list[int]:
    """Return the processes of a component on one host; of a host the agent first, then all that the agent runs."""
    services = [service.pid for service in status.services]
    worker = [status.worker.pid] if status.worker is not None and status.worker.exit_code is None else []
    standby = [status.standby.pid] if status.standby is not None else []
    server = [status.snapshot_server.pid] if status.snapshot_server is not None else []
    match component:
        case JobComponent.WORKER:
            return worker
        case JobComponent.AGENT:
            return [status.agent.pid]
        case JobComponent.COORDINATION_SERVICE:
            return services
        case JobComponent.SNAPSHOT_SERVER:
            return server
        case JobComponent.HOST:
            return [status.agent.pid, *worker, *standby, *server, *services]
