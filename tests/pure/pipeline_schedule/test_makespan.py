"""Equal tasks on unequal machines: the makespan against a greedy oracle and published vectors."""

import heapq
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.pipeline_schedule.makespan import (
    MachineClass,
    MachineTeam,
    assign_tasks,
    divide_work,
    share_tasks,
)
from tests.support.properties import examples

times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.25])
classes = st.lists(
    st.builds(
        MachineClass, count=st.integers(1, 4), start_s=st.sampled_from([0.0, 1.0, 2.5, 9.0]), task_s=times
    ),
    min_size=1,
    max_size=4,
)


@given(st.integers(0, 60), classes, st.data())
def test_a_machine_class_limits_its_tasks_and_no_other_assignment_has_a_smaller_makespan(
    tasks, machines, data
):
    machines = [msgspec.structs.replace(kind, max_tasks=data.draw(st.integers(0, 6))) for kind in machines]
    tasks = min(tasks, sum(kind.count * kind.max_tasks for kind in machines))
    done = sorted(
        kind.start_s + number * kind.task_s
        for kind in machines
        for _ in range(kind.count)
        for number in range(1, kind.max_tasks + 1)
    )
    found = assign_tasks(tasks, machines)
    assert found.makespan_s == pytest.approx(done[tasks - 1] if tasks else 0.0)
    assert sum(count * number for shares in found.task_counts for count, number in shares) == tasks
    assert [sum(count for count, _ in shares) for shares in found.task_counts] == [
        kind.count for kind in machines
    ]
    for kind, shares in zip(machines, found.task_counts, strict=True):
        assert max(number for _, number in shares) <= kind.max_tasks


@given(st.integers(0, 60), classes)
def test_no_other_assignment_has_a_smaller_makespan_and_every_task_is_assigned(tasks, machines):
    queue = [(kind.start_s + kind.task_s, i) for i, kind in enumerate(machines) for _ in range(kind.count)]
    heapq.heapify(queue)
    finish = 0.0
    for _ in range(tasks):
        finish, i = queue[0]
        heapq.heapreplace(queue, (finish + machines[i].task_s, i))
    found = assign_tasks(tasks, machines)
    assert found.makespan_s == pytest.approx(finish)
    assert sum(count * number for shares in found.task_counts for count, number in shares) == tasks
    assert [sum(count for count, _ in shares) for shares in found.task_counts] == [
        kind.count for kind in machines
    ]


def test_microbatches_of_recover_31_survivors_of_32():
    """ReCoVer, arXiv 2605.11215: B = 256; eight replicas with 9, 23 with 8, without lock step."""
    assert assign_tasks(256, [MachineClass(count=31, start_s=0, task_s=1)]).task_counts == (
        ((8, 9), (23, 8)),
    )


def test_a_hundred_thousand_equal_machines_cost_as_much_as_one():
    found = assign_tasks(
        10**9, [MachineClass(count=10**5, start_s=0, task_s=1), MachineClass(count=1, start_s=0, task_s=2)]
    )
    assert found.makespan_s == 10_000


@given(st.integers(0, 200), st.integers(1, 40))
def test_equal_machines_differ_by_one_at_most(count: int, machines: int) -> None:
    shares = share_tasks(count, [1.0] * machines)
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 12), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=3))
def test_no_other_way_finishes_sooner(count: int, speeds: list[float]) -> None:
    def makespan(shares: tuple[int, ...]) -> float:
        return max(n / s for n, s in zip(shares, speeds, strict=True))

    def ways(left: int, machines: int) -> list[tuple[int, ...]]:
        if machines == 1:
            return [(left,)]
        return [(n, *rest) for n in range(left + 1) for rest in ways(left - n, machines - 1)]

    best = min(map(makespan, ways(count, len(speeds))))
    assert makespan(share_tasks(count, speeds)) <= best * (1 + 1e-9)


@pytest.mark.parametrize("speeds", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(CallerError, match="expected a positive number"):
        share_tasks(3, speeds)


team_machines = st.builds(
    MachineClass,
    count=st.integers(1, 3),
    start_s=st.sampled_from([0.0, 0.5, 2.0]),
    task_s=st.sampled_from([0.5, 1.0, 1.75]),
)
machine_teams = st.lists(
    st.builds(
        MachineTeam,
        task_size=st.integers(1, 4),
        machines=st.lists(team_machines, min_size=1, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=3,
)


def team_makespan_s(team, number):
    return assign_tasks(number, team.machines).makespan_s


@examples(few=5)
@given(st.integers(1, 14), machine_teams)
def test_the_tasks_of_teams_are_the_best_numbers_that_add_up(work, teams):
    choices = itertools.product(*(range(work // team.task_size + 1) for team in teams))
    able = [
        max(team_makespan_s(team, number) for team, number in zip(teams, numbers, strict=True))
        for numbers in choices
        if sum(n * team.task_size for n, team in zip(numbers, teams, strict=True)) == work
    ]
    found = divide_work(work, teams)
    if not able:
        assert found is None
        return
    assert found is not None
    assert sum(n * team.task_size for n, team in zip(found, teams, strict=True)) == work
    longest = max(team_makespan_s(team, number) for team, number in zip(teams, found, strict=True))
    assert longest == pytest.approx(min(able), rel=1e-6)
