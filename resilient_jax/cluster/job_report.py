"""A running job seen from outside: its records, and the processes that it consists of."""

import enum
from collections.abc import Iterator
from pathlib import Path

import msgspec

from resilient_jax.cluster.membership_state import MembershipState
from resilient_jax.cluster.redundancy import Redundancy, measure_redundancy
from resilient_jax.cluster.run_directory import JobContact
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.records import Generation, HostStatus, LeaderRecord
from resilient_jax.protocol.store_keys import make_generation_key, make_hosts_prefix, make_leader_key
from resilient_jax.store.store_access import make_store_access
from resilient_jax.transport.credentials import Credentials, TlsFiles

CONNECT_TIMEOUT_S = 5.0


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """All records of a job in the store, at one moment.

    Attributes:
        job: the job's name.
        generation: the agreed membership; None: none was written yet.
        leader: the host whose agent leads; None: none does at the moment.
        hosts: the hosts whose agents have a valid lease.
        redundancy: how many more hosts may be lost before the committed state is; None: no host has one.
    """

    job: str
    generation: Generation | None
    leader: HostName | None
    hosts: tuple[HostStatus, ...]
    redundancy: Redundancy | None = None


class JobComponent(enum.StrEnum):
    """A part of a job that can be killed."""

    WORKER = "worker"
    AGENT = "agent"
    COORDINATION_SERVICE = "service"
    SNAPSHOT_SERVER = "snapshots"
    HOST = "host"


async def read_job_report(contact: JobContact) -> JobReport:
    """Read a job's records.

    Raises:
        StoreUnreachable: the store does not answer.
    """
    job = JobName(contact.job)
    tls = TlsFiles.in_folder(Path(contact.tls)) if contact.tls else None
    store_tls = Path(contact.store_tls) if contact.store_tls else None
    access = make_store_access(contact.store, Credentials(contact.token, tls), store_tls)
    async with await access.connect(CONNECT_TIMEOUT_S) as store:
        generation = await store.get(make_generation_key(job))
        leader = await store.get(make_leader_key(job))
        _, hosts = await store.range(make_hosts_prefix(job))
    decode = msgspec.msgpack.decode
    membership = decode(generation.value, type=Generation) if generation else None
    statuses = tuple(decode(record.value, type=HostStatus) for record in hosts)
    return JobReport(
        job=contact.job,
        generation=membership,
        leader=decode(leader.value, type=LeaderRecord).host if leader else None,
        hosts=statuses,
        redundancy=_measure_redundancy(membership, statuses),
    )


def _measure_redundancy(generation: Generation | None, hosts: tuple[HostStatus, ...]) -> Redundancy | None:
    if generation is None:
        return None
    by_name = {status.host: status for status in hosts}
    return measure_redundancy(MembershipState(generation=generation, hosts=by_name, phase_since_s=0.0))


def find_pids(report: JobReport, component: JobComponent, host: str) -> Iterator[int]:
    """Yield the processes of a component; for a host the agent first, then all that the agent runs.

    Raises:
        CallerError: the job has no such host.
    """
    name = report.leader if host == "leader" else host
    found = next((h for h in report.hosts if h.host == name), None)
    if component is JobComponent.COORDINATION_SERVICE and host == "leader":
        yield from (service.pid for h in report.hosts for service in h.services)
        return
    if found is None:
        known = ", ".join(h.host for h in report.hosts) or "none"
        raise CallerError(f"host {host}: found no such host in the job, expected one of: {known}, or leader")
    worker = [found.worker.pid] if found.worker is not None and found.worker.exit_code is None else []
    standby = [found.standby.pid] if found.standby is not None else []
    server = [found.snapshot_server.pid] if found.snapshot_server is not None else []
    match component:
        case JobComponent.WORKER:
            yield from worker
        case JobComponent.AGENT:
            yield found.agent_pid
        case JobComponent.COORDINATION_SERVICE:
            yield from (service.pid for service in found.services)
        case JobComponent.SNAPSHOT_SERVER:
            yield from server
        case JobComponent.HOST:
            yield found.agent_pid
            yield from (*worker, *standby, *server)
            yield from (service.pid for service in found.services)
