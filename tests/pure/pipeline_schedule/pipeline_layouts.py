"""Drawn pipelines, and a strict execution of orders: what tests of `pipeline_schedule` share."""

import itertools
import random

from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import Route, Routes, Team
from resilient_jax.pipeline_schedule.task_orders import TaskOrders
from resilient_jax.pipeline_schedule.tasks import Boundary, Task, TaskKind, find_input, list_needs


def name_host(team: int, stage: int) -> HostName:
    return HostName(f"host-{team}-{stage}")


def make_team(team: int, cuts: list[int]) -> Team:
    return [(name_host(team, stage), blocks) for stage, blocks in enumerate(cuts)]


@st.composite
def cuts(draw: st.DrawFn, num_blocks: int) -> list[int]:
    """Blocks of each stage of a team, one at least."""
    inner = draw(st.sets(st.integers(1, num_blocks - 1), max_size=3)) if num_blocks > 1 else set()
    ends = [0, *sorted(inner), num_blocks]
    return [end - first for first, end in itertools.pairwise(ends)]


@st.composite
def layouts(draw: st.DrawFn, min_teams: int = 1) -> tuple[list[Team], list[int]]:
    """Teams of unequal cuts, and their quotas."""
    num_blocks = draw(st.integers(1, 7))
    teams = [
        make_team(team, draw(cuts(num_blocks))) for team in range(draw(st.integers(min_teams, min_teams + 2)))
    ]
    return teams, [draw(st.integers(0, 5)) for _ in teams]


def take_unequal_time(host: HostName, kind: TaskKind, block: int) -> float:
    """Times that differ by host, kind and block; multiples of 1/4, so that sums are exact."""
    kinds = {
        TaskKind.FORWARD: 4,
        TaskKind.BACKWARD: 8,
        TaskKind.INPUT_GRADIENT: 5,
        TaskKind.WEIGHT_GRADIENT: 3,
    }
    return (kinds[kind] + block % 3 + sum(map(ord, host)) % 4) / 4


def run_in_order(
    routes: Routes,
    found: TaskOrders,
    *,
    seed: int = 0,
    done: frozenset[Task] = frozenset(),
    arrived: frozenset[Boundary] = frozenset(),
) -> list[Task]:
    """Run each host's tasks strictly in order, hosts at any relative speed; return them as they ended.

    A task begins when all that it needs is done or has arrived. Stops when no host can go on.
    """
    by_microbatch = {route.microbatch: route for route in routes}
    finished, ran = set(done), []
    left = {host: list(tasks) for host, tasks in found.orders.items()}
    shuffle = random.Random(seed)
    while hosts := [
        host for host, tasks in left.items() if tasks and _can_run(tasks[0], by_microbatch, finished, arrived)
    ]:
        task = left[shuffle.choice(hosts)].pop(0)
        finished.add(task)
        ran.append(task)
    return ran


def _can_run(
    task: Task, by_microbatch: dict[int, Route], finished: set[Task], arrived: frozenset[Boundary]
) -> bool:
    route = by_microbatch[task.microbatch]
    has_input = find_input(task, route.num_blocks) in arrived
    return all(need in finished or (has_input and need.hop != task.hop) for need in list_needs(task, route))
