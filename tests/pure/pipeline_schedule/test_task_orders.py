"""Orders of tasks: every task once, after what it needs; known makespans; memory as in 1F1B; no deadlock."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.errors import RouteError
from resilient_jax.pipeline_schedule.routes import Hop, make_routes
from resilient_jax.pipeline_schedule.task_orders import order_tasks
from resilient_jax.pipeline_schedule.tasks import (
    Boundary,
    BoundaryKind,
    PipelineSchedule,
    Task,
    TaskKind,
    list_needs,
    list_tasks,
)
from tests.pure.pipeline_schedule.pipeline_layouts import (
    layouts,
    make_team,
    name_host,
    run_in_order,
    take_unequal_time,
)

WHOLE, FIRST, ZERO = (
    PipelineSchedule.WHOLE_BACKWARD,
    PipelineSchedule.GRADIENT_FIRST,
    PipelineSchedule.ZERO_BUBBLE,
)
schedules = st.sampled_from(PipelineSchedule)
times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.25])


def take_equal_time(host: HostName, kind: TaskKind, block: int) -> float:
    """F, B and W take one second each."""
    return 2.0 if kind is TaskKind.BACKWARD else 1.0


def order_one_team(stages: int, microbatches: int, schedule: PipelineSchedule, **options):
    return order_tasks(
        make_routes([make_team(0, [1] * stages)], [microbatches]),
        take_equal_time,
        schedule=schedule,
        **options,
    )


@given(layouts(), schedules)
def test_every_task_is_once_in_the_order_of_its_host(layout, schedule):
    routes = make_routes(*layout)
    found = order_tasks(routes, take_unequal_time, schedule=schedule)
    listed = [task for tasks in found.orders.values() for task in tasks]
    assert sorted(listed) == sorted(list_tasks(routes, schedule))
    assert all(task.hop.host == host for host, tasks in found.orders.items() for task in tasks)


@given(layouts(), schedules, st.integers(0, 99))
def test_hosts_that_run_their_orders_strictly_never_deadlock_at_any_relative_speed(layout, schedule, seed):
    routes = make_routes(*layout)
    found = order_tasks(routes, take_unequal_time, schedule=schedule)
    ran = run_in_order(routes, found, seed=seed)
    assert len(ran) == sum(map(len, found.orders.values()))


@given(layouts(), schedules, st.data())
def test_a_step_done_in_part_goes_on_with_the_tasks_that_are_left(layout, schedule, data):
    routes = make_routes(*layout)
    ran = run_in_order(routes, order_tasks(routes, take_unequal_time, schedule=schedule))
    done = frozenset(ran[: data.draw(st.integers(0, len(ran)))])
    found = order_tasks(routes, take_unequal_time, schedule=schedule, done=done)
    rest = run_in_order(routes, found, done=done)
    assert sorted([*done, *rest]) == sorted(ran)


@given(layouts(), schedules)
def test_the_makespan_is_the_longest_path_through_the_orders(layout, schedule):
    routes = make_routes(*layout)
    found = order_tasks(routes, take_unequal_time, schedule=schedule, transfer_s=lambda a, b: 0.75)
    by_microbatch = {route.microbatch: route for route in routes}
    ends: dict[Task, float] = {}
    free: dict[str, float] = collections.defaultdict(float)
    for task in run_in_order(routes, found):
        host = task.hop.host
        ready = [
            ends[need] + 0.75 * (need.hop.host != host)
            for need in list_needs(task, by_microbatch[task.microbatch])
        ]
        took = sum(take_unequal_time(host, task.kind, block) for block in task.hop.blocks)
        ends[task] = free[host] = max([*ready, free[host]]) + took
    assert found.makespan_s == max(ends.values(), default=0.0)


@given(st.integers(1, 7), st.integers(1, 20), times, times)
def test_whole_backward_passes_of_equal_stages_take_the_time_of_1f1b(
    stages, microbatches, forward_s, backward_s
):
    found = order_tasks(
        make_routes([make_team(0, [1] * stages)], [microbatches]),
        lambda host, kind, block: forward_s if kind is TaskKind.FORWARD else backward_s,
        schedule=WHOLE,
    )
    assert found.makespan_s == (microbatches + stages - 1) * (forward_s + backward_s)


@given(st.integers(1, 7), st.integers(1, 20))
def test_sending_the_gradient_first_saves_its_weight_gradients_in_draining(stages, microbatches):
    found = order_one_team(stages, microbatches, FIRST)
    assert found.makespan_s == 3 * microbatches + 2 * (stages - 1)


@given(st.integers(1, 8), st.integers(0, 24))
def test_weight_gradients_in_gaps_take_the_time_of_zb_h1_in_its_memory(stages, more):
    microbatches = 2 * stages - 1 + more
    found = order_one_team(stages, microbatches, ZERO)
    assert found.makespan_s == 3 * microbatches + stages - 1
    assert max(found.peak_in_flight.values()) <= stages


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_no_order_of_unequal_stages_is_slower_than_1f1b_of_the_slowest(stages, microbatches, data):
    stage_s = data.draw(st.lists(times, min_size=stages, max_size=stages))
    found = order_tasks(
        make_routes([make_team(0, [1] * stages)], [microbatches]),
        lambda host, kind, block: stage_s[block] / 3 * (1 if kind is TaskKind.FORWARD else 2),
        schedule=WHOLE,
    )
    assert microbatches * max(stage_s) <= found.makespan_s + 1e-9
    assert found.makespan_s <= (microbatches + stages - 1) * max(stage_s) + 1e-9


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from([WHOLE, FIRST]))
def test_a_stage_keeps_one_microbatch_for_itself_and_each_stage_after_it(stages, microbatches, schedule):
    found = order_one_team(stages, microbatches, schedule)
    expected = [min(stages - stage, microbatches) for stage in range(stages)]
    assert [found.peak_in_flight[name_host(0, stage)] for stage in range(stages)] == expected


@given(layouts(), schedules)
def test_memory_of_unequal_stages_is_bounded_as_in_1f1b(layout, schedule):
    teams, quotas = layout
    found = order_tasks(make_routes(teams, quotas), take_unequal_time, schedule=schedule)
    for team, quota in zip(teams, quotas, strict=True):
        for stage, (host, _) in enumerate(team):
            most = len(team) - (0 if schedule is ZERO else stage)
            assert found.peak_in_flight.get(host, 0) <= min(most, quota)


@given(layouts(), schedules)
def test_busy_time_is_the_sum_of_a_hosts_tasks_and_no_longer_than_the_step(layout, schedule):
    found = order_tasks(make_routes(*layout), take_unequal_time, schedule=schedule)
    for host, tasks in found.orders.items():
        took = (take_unequal_time(host, task.kind, block) for task in tasks for block in task.hop.blocks)
        assert found.busy_s[host] == sum(took) <= found.makespan_s


def test_a_host_that_is_in_two_teams_takes_turns_between_their_microbatches():
    shared, ends = name_host(9, 9), [name_host(0, 1), name_host(1, 1)]
    found = order_tasks(
        make_routes([[(shared, 1), (ends[0], 1)], [(shared, 1), (ends[1], 1)]], [4, 4]),
        take_equal_time,
        schedule=FIRST,
    )
    forward = [task.microbatch for task in found.orders[shared] if task.kind is TaskKind.FORWARD]
    assert forward == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_route_that_comes_back_to_a_host_does_not_block_itself():
    a, b = name_host(0, 0), name_host(0, 1)
    routes = make_routes([[(a, 1), (b, 1), (a, 1), (b, 1), (a, 1)]], [9])
    for schedule in PipelineSchedule:
        found = order_tasks(routes, take_unequal_time, schedule=schedule)
        assert sum(map(len, found.orders.values())) == len(list(list_tasks(routes, schedule)))


def test_a_value_that_has_arrived_is_not_waited_for():
    routes = make_routes([make_team(0, [1, 1])], [1])
    first, last = routes[0].hops
    done = [Task(TaskKind.FORWARD, 0, first)]
    gradient = Boundary(BoundaryKind.GRADIENT, 0, 1)
    found = order_tasks(routes, take_equal_time, schedule=FIRST, done=done, arrived=[gradient])
    assert found.makespan_s == 3.0
    assert found.busy_s == {first.host: 2.0, last.host: 3.0}


@given(layouts(), st.sampled_from([FIRST, ZERO]), st.data())
def test_hops_that_have_their_weight_gradients_may_run_again_for_a_value_that_is_gone(layout, schedule, data):
    routes = make_routes(*layout)
    ran = run_in_order(routes, order_tasks(routes, take_unequal_time, schedule=schedule))
    again = data.draw(st.sets(st.sampled_from(ran))) if ran else set()
    redone = {
        Task(kind, task.microbatch, task.hop)
        for task in again
        for kind in (TaskKind.FORWARD, TaskKind.INPUT_GRADIENT)
    }
    done = frozenset(ran) - redone
    found = order_tasks(routes, take_unequal_time, schedule=schedule, done=done)
    assert sorted(run_in_order(routes, found, done=done)) == sorted(redone)
    for team in layout[0]:
        for stage, (host, _) in enumerate(team):
            most = len(team) - (0 if schedule is ZERO else stage)
            assert bool(found.orders.get(host)) <= found.peak_in_flight.get(host, 0) <= most


def test_a_finished_task_of_a_hop_that_no_route_has_is_refused():
    routes = make_routes([make_team(0, [2])], [1])
    task = Task(TaskKind.FORWARD, 0, Hop(name_host(5, 5), 0, 2))
    with pytest.raises(RouteError, match="tasks of a dead host are not done"):
        order_tasks(routes, take_equal_time, schedule=WHOLE, done=[task])


def test_a_backward_pass_without_its_forward_pass_is_refused():
    routes = make_routes([make_team(0, [2])], [1])
    task = Task(TaskKind.BACKWARD, 0, routes[0].hops[0])
    with pytest.raises(RouteError, match="without forward of the same hop"):
        order_tasks(routes, take_equal_time, schedule=WHOLE, done=[task])


def test_a_step_without_microbatches_takes_no_time():
    found = order_tasks((), take_equal_time, schedule=ZERO)
    assert (found.orders, found.makespan_s) == ({}, 0.0)
