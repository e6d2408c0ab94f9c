"""Resolves the targets of faults in the present records of a job. Pure."""

from collections.abc import Collection

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from tests.chaos.manifest import STORE_MEMBERS, FaultTarget, TargetPart

PARTS = {
    TargetPart.WORKER: JobComponent.WORKER,
    TargetPart.AGENT: JobComponent.AGENT,
    TargetPart.SNAPSHOTS: JobComponent.SNAPSHOT_SERVER,
    TargetPart.SERVICE: JobComponent.COORDINATION_SERVICE,
    TargetPart.HOST: JobComponent.HOST,
}


def resolve_hosts(names: Collection[str], report: JobReport) -> tuple[str, ...]:
    """Return the hosts that the names stand for, each once; without a leader, 'leader' stands for none."""
    found: list[str] = []
    for name in names:
        if name == "all":
            found += [host.host for host in report.hosts]
        elif name == "leader":
            found += [report.leader] if report.leader is not None else []
        elif name == "follower":
            found += sorted(h.host for h in report.hosts if h.host != report.leader)[-1:]
        else:
            found.append(name)
    return tuple(dict.fromkeys(found))


def resolve_members(names: Collection[str], leader: str) -> tuple[str, ...]:
    """Return the members of the store that the names stand for, each once; `leader` leads them."""
    found: list[str] = []
    for name in names:
        if name == "all":
            found += STORE_MEMBERS
        elif name == "follower":
            found.append(max(member for member in STORE_MEMBERS if member != leader))
        else:
            found.append(leader if name == "leader" else name)
    return tuple(dict.fromkeys(found))


def find_target_pids(target: FaultTarget, host: str, report: JobReport) -> tuple[int, ...]:
    """Return the pids of the target on one host; none if the host does not run the target now."""
    part = PARTS.get(target.part)
    if part is None or all(h.host != host for h in report.hosts):
        return ()
    return tuple(find_pids(report, part, host))


def find_service_host(report: JobReport) -> str | None:
    """Return the host that runs the coordination service of the present world."""
    world = report.generation.membership.world if report.generation is not None else None
    running = [
        (s.world, h.host) for h in report.hosts for s in h.services if world is None or s.world == world
    ]
    return max(running)[1] if running else None


def list_pids(report: JobReport) -> frozenset[int]:
    """Return the pids of all processes in the store's records."""
    found: set[int] = set()
    for host in report.hosts:
        found |= set(find_pids(report, JobComponent.HOST, host.host))
    return frozenset(found)
