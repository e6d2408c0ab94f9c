"""Which members keep the others waiting, from the tasks that their workers report as overdue. Pure.

A collective makes all hosts equally late, so that a worker which waits in a sum is not the one that hangs: it is one
that has not entered the sum, and is overdue in another task. As long as any worker is at work on something that may
last, such as an evaluation, it is not overdue, and nothing follows: the others may wait for it, or hang for the same
reason as the first. If all have entered the sum, the network hangs, or the collective itself.
"""

import dataclasses
from collections.abc import Iterable
from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.membership.facts import MembershipState, find_worker, is_idle
from resilient_jax.membership.severities import Evidence
from resilient_jax.protocol.generation import GenerationPhase, Member
from resilient_jax.protocol.host_status import WorkerStatus
from resilient_jax.protocol.worker_tasks import OverdueTask, WorkerTask

PATIENCE: Final = 2.0
"""How many deadlines all workers may be silent together before they are restarted: what all of them wait for, such as
their storage, is likely to come back, and with them the state in their memory would go."""
MAX_DESCRIBED: Final = 5
"""Hosts of which a reason says where they are: a record names it in the store, of a job of thousands of hosts, too."""
HANGING_PHASES = frozenset({GenerationPhase.ACTIVE, GenerationPhase.PAUSE, GenerationPhase.BOUNDARY})
"""In which members train. In the others a member that is late is left out at a fixed time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hang:
    """What hangs.

    Attributes:
        hosts: the hosts to act on; none if all have entered the same collective.
        reason: text for people.
    """

    evidence: Evidence
    hosts: tuple[HostName, ...]
    reason: str


def find_hang(state: MembershipState) -> Hang | None:
    """Return what hangs, once no member is at work any more: each waits, or is overdue. None: training may go on."""
    generation = state.generation
    if generation.phase not in HANGING_PHASES:
        return None
    overdue: dict[HostName, OverdueTask] = {}
    num_idle = 0
    for member in generation.membership.members:
        worker = find_worker(state, member)
        if worker is None:
            return None
        if is_idle(worker):  # at the boundary, or its training is done
            num_idle += 1
        elif worker.report.overdue is None:
            return None
        else:
            overdue[member.host] = worker.report.overdue
    late = {host: task for host, task in overdue.items() if task.task is not WorkerTask.SUM}
    if not overdue:
        return None
    if not late:
        is_certain = all(task.silent_s > task.deadline_s for task in overdue.values())
        return Hang(Evidence.COLLECTIVE_HANGS, (), _describe_collective(overdue)) if is_certain else None
    reason = describe_late(late, overdue)
    if len(late) < len(overdue) + num_idle:
        return Hang(Evidence.WORKER_HANGS, tuple(late), reason)
    if any(task.silent_s < PATIENCE * task.deadline_s for task in late.values()):
        return None
    return Hang(Evidence.ALL_WORKERS_HANG, tuple(late), f"no host makes progress: {reason}")


def describe_late(late: dict[HostName, OverdueTask], overdue: dict[HostName, OverdueTask]) -> str:
    """Return a text such as "host-2 has not entered the sum of step 118: its main thread is in ..." for each host."""
    waits_in = {task.step for task in overdue.values() if task.task is WorkerTask.SUM}
    described = [
        f"{host} has not entered the sum of step {task.step}: {task.describe()}"
        if not waits_in or task.step in waits_in
        else f"{host} is still in step {task.step}, others wait in that of step {max(waits_in)}: {task.describe()}"
        for host, task in tuple(late.items())[:MAX_DESCRIBED]
    ]
    return "; ".join([*described, *_count_rest(len(late))])


def describe_places(workers: Iterable[tuple[Member, WorkerStatus]]) -> str:
    """Return where those workers are that have reported it, as the end of a sentence; empty: none has."""
    described = [
        f"; {member.host}: {worker.report.overdue.describe()}"
        for member, worker in workers
        if worker.report.overdue is not None
    ]
    return "".join([*described[:MAX_DESCRIBED], *(f"; {rest}" for rest in _count_rest(len(described)))])


def _count_rest(num_hosts: int) -> list[str]:
    return [f"{num_hosts - MAX_DESCRIBED} more hosts, too"] if num_hosts > MAX_DESCRIBED else []


def _describe_collective(overdue: dict[HostName, OverdueTask]) -> str:
    steps = sorted({task.step for task in overdue.values()})
    step = ", ".join(map(str, steps))
    silent_s = min(task.silent_s for task in overdue.values())
    return f"all {len(overdue)} hosts have entered the sum of step {step}, and none has left it for {silent_s:.0f} s"
