"""Hosts whose workers do at once what a generation asks for: the statuses that their agents report. Pure."""

from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation, GenerationPhase, Member, SeatId
from resilient_jax.protocol.host_status import (
    AgentStatus,
    CoordinationServiceStatus,
    HostStatus,
    WorkerStatus,
)
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.snapshots import (
    ParityGroup,
    SnapshotId,
    SnapshotPhase,
    SnapshotServerStatus,
    SnapshotStatus,
)
from resilient_jax.protocol.versions import Versions
from resilient_jax.protocol.worker_report import WorkerReport, WorkerState

VERSIONS: Final = Versions(python="3.11.7", resilient_jax="0.1.0", jax="0.9.0", jaxlib="0.9.0")
GROUP_HOSTS: Final = 8
"""Hosts of a parity group."""
SNAPSHOT_BYTES: Final = 1 << 30


def make_host_name(index: int) -> HostName:
    """Return the name of a host."""
    return HostName(f"host-{index:04d}")


def make_idle_status(index: int, port: int = 0) -> HostStatus:
    """Return the status of a host whose worker is ready to join; its agent listens at `port`."""
    host = make_host_name(index)
    report = WorkerReport(state=WorkerState.IDLE, endpoint=f"127.0.0.1:{40_000 + index}")
    return HostStatus(
        host=host,
        agent=AgentStatus(
            id=f"{index:032x}", pid=1000 + index, address="127.0.0.1", port=port, versions=VERSIONS
        ),
        worker=WorkerStatus(incarnation=Incarnation(1), pid=2000 + index, report=report),
        snapshot_server=SnapshotServerStatus(endpoint=f"127.0.0.1:{50_000 + index}", pid=3000 + index),
        program="0" * 16,
    )


def change_report(status: HostStatus, **changes: object) -> HostStatus:
    """Return the status with these fields of the worker's report changed."""
    worker = status.worker
    assert worker is not None, "every stub host has a worker"
    report = change_fields(worker.report, **changes)
    return change_fields(status, worker=msgspec.structs.replace(worker, report=report))


def answer_generation(status: HostStatus, generation: Generation) -> HostStatus:
    """Return the status of a host whose worker has done what this generation asks for; the same if it is nothing."""
    status = change_fields(status, generation=generation.number)
    member, number = generation.membership.find_member(status.host), generation.number
    if member is None:
        return status
    match generation.phase:
        case GenerationPhase.QUIESCE:
            return change_report(status, state=WorkerState.IDLE, generation=number, has_formed=False)
        case GenerationPhase.PAUSE:
            return change_report(status, generation=number, earliest_stop_step=status.progress.step)
        case GenerationPhase.BOUNDARY:
            return change_report(status, state=WorkerState.IDLE, generation=number, has_formed=False)
        case GenerationPhase.FORM:
            return _form(status, generation, member)
        case GenerationPhase.ACTIVE:
            return _finish_first_step(status, generation)
        case _:
            return status


def _form(status: HostStatus, generation: Generation, member: Member) -> HostStatus:
    return change_report(
        status,
        state=WorkerState.RUNNING,
        generation=generation.number,
        has_formed=True,
        has_finished_step=False,
        world=generation.membership.world,
        seat=SeatId(generation.membership.world, member.seat),
        step=generation.state.step,
    )


def _finish_first_step(status: HostStatus, generation: Generation) -> HostStatus:
    if status.worker is not None and status.worker.report.place.has_finished_step:
        return status
    step = max(status.progress.step, generation.state.step) + 1
    status = change_report(status, has_finished_step=True, holds_state=True, step=step)
    return change_fields(status, step=step)


def serve_world(status: HostStatus, asked: StartCoordinationService) -> HostStatus:
    """Return the status of a host that also runs this coordination service."""
    service = CoordinationServiceStatus(
        world=asked.world,
        num_processes=asked.num_processes,
        num_seats=asked.num_seats,
        address=f"127.0.0.1:{60_000 + asked.world}",
        pid=1,
    )
    return change_fields(status, services=(*status.services, service))


def make_snapshot(index: int, num_hosts: int, step: int, generation: int) -> SnapshotStatus:
    """Return a committed snapshot of host `index`, in groups of `GROUP_HOSTS` hosts with one parity shard."""
    group = index // GROUP_HOSTS
    members = range(group * GROUP_HOSTS, min(num_hosts, (group + 1) * GROUP_HOSTS))
    return SnapshotStatus(
        id=SnapshotId(step, GenerationNumber(generation)),
        phase=SnapshotPhase.COMMITTED,
        group=ParityGroup(hosts=tuple(map(make_host_name, members)), parity=1),
        group_index=group,
        num_groups=-(-num_hosts // GROUP_HOSTS),
        nbytes=SNAPSHOT_BYTES,
        wall_s=0.0,
    )
