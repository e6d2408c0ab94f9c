"""Routes and tasks: each block once, in order; what each task needs; which values cross from hop to hop."""

import pytest

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.errors import RouteError
from resilient_jax.pipeline_schedule.routes import (
    Hop,
    Route,
    find_holders,
    make_route,
    make_routes,
    validate_routes,
)
from resilient_jax.pipeline_schedule.tasks import (
    Boundary,
    BoundaryKind,
    PipelineSchedule,
    Task,
    TaskKind,
    find_ends,
    find_input,
    find_output,
    list_needs,
    list_tasks,
)

A, B, C, D = map(HostName, "abcd")
FIRST, SECOND = [(A, 4), (B, 4)], [(C, 3), (D, 5)]


def test_teams_of_unequal_cuts_give_routes_with_runs_of_microbatches():
    routes = make_routes([FIRST, SECOND], [1, 2])
    assert routes == (
        Route(0, (Hop(A, 0, 4), Hop(B, 4, 8))),
        Route(1, (Hop(C, 0, 3), Hop(D, 3, 8))),
        Route(2, (Hop(C, 0, 3), Hop(D, 3, 8))),
    )
    assert len({*routes, *make_routes([FIRST, SECOND], [1, 2])}) == 3


def test_a_route_with_a_gap_is_refused_with_the_block_that_was_expected():
    with pytest.raises(RouteError, match="found block 5 as the first on b, expected 4"):
        Route(3, (Hop(A, 0, 4), Hop(B, 5, 8)))


@pytest.mark.parametrize(("first_block", "end_block"), [(3, 3), (4, 3), (-1, 2)])
def test_a_hop_without_blocks_is_refused(first_block, end_block):
    with pytest.raises(RouteError, match="one block at least"):
        Hop(A, first_block, end_block)


def test_a_route_without_hops_is_refused():
    with pytest.raises(RouteError, match="one hop at least"):
        Route(0, ())


@pytest.mark.parametrize("quotas", [[1], [1, -1]])
def test_quotas_that_are_not_the_teams_are_refused(quotas):
    with pytest.raises(RouteError, match="for each of 2 teams"):
        make_routes([FIRST, SECOND], quotas)


def test_routes_over_models_of_different_sizes_are_refused():
    with pytest.raises(RouteError, match="8 blocks for microbatch 0 and 7 for microbatch 1"):
        make_routes([FIRST, [(C, 7)]], [1, 1])


def test_two_routes_of_a_microbatch_are_refused():
    with pytest.raises(RouteError, match="two of microbatch 4"):
        validate_routes([make_route(4, FIRST), make_route(4, SECOND)])


def test_the_hosts_of_all_teams_are_the_holders_of_their_blocks():
    assert find_holders([FIRST, SECOND]) == ({A, C},) * 3 + ({A, D},) + ({B, D},) * 4


def test_a_schedule_has_two_or_three_tasks_for_each_hop():
    routes = make_routes([FIRST, SECOND], [3, 2])
    assert len(list(list_tasks(routes, PipelineSchedule.WHOLE_BACKWARD))) == 5 * 2 * 2
    assert len(set(list_tasks(routes, PipelineSchedule.ZERO_BUBBLE))) == 5 * 2 * 3


def test_a_task_needs_its_own_hop_and_the_neighbour_that_sends_to_it():
    route = make_route(7, [(A, 2), (B, 3), (C, 1)])
    a, b, c = route.hops
    forward, gradient, weights, whole = (
        TaskKind.FORWARD,
        TaskKind.INPUT_GRADIENT,
        TaskKind.WEIGHT_GRADIENT,
        TaskKind.BACKWARD,
    )
    assert list_needs(Task(forward, 7, a), route) == ()
    assert list_needs(Task(forward, 7, b), route) == (Task(forward, 7, a),)
    assert list_needs(Task(gradient, 7, c), route) == (Task(forward, 7, c),)
    assert list_needs(Task(gradient, 7, b), route) == (Task(forward, 7, b), Task(gradient, 7, c))
    assert list_needs(Task(whole, 7, a), route) == (Task(forward, 7, a), Task(whole, 7, b))
    assert list_needs(Task(weights, 7, b), route) == (Task(gradient, 7, b),)


def test_what_a_task_sends_is_what_its_neighbour_gets():
    route = make_route(7, [(A, 2), (B, 3), (C, 1)])
    a, b, c = route.hops
    activation = Boundary(BoundaryKind.ACTIVATION, 7, 2)
    assert find_output(Task(TaskKind.FORWARD, 7, a), 6) == activation
    assert find_input(Task(TaskKind.FORWARD, 7, b), 6) == activation
    assert find_ends(activation, route) == (a, b)
    gradient = Boundary(BoundaryKind.GRADIENT, 7, 5)
    assert find_output(Task(TaskKind.INPUT_GRADIENT, 7, c), 6) == gradient
    assert find_input(Task(TaskKind.BACKWARD, 7, b), 6) == gradient
    assert find_ends(gradient, route) == (c, b)


def test_nothing_comes_before_the_first_block_or_after_the_last():
    first, last = make_route(0, FIRST).hops
    assert find_input(Task(TaskKind.FORWARD, 0, first), 8) is None
    assert find_output(Task(TaskKind.INPUT_GRADIENT, 0, first), 8) is None
    assert find_output(Task(TaskKind.FORWARD, 0, last), 8) is None
    assert find_input(Task(TaskKind.BACKWARD, 0, last), 8) is None


def test_weight_gradients_neither_get_nor_send_a_value():
    task = Task(TaskKind.WEIGHT_GRADIENT, 0, Hop(A, 2, 4))
    assert find_input(task, 8) is None
    assert find_output(task, 8) is None


def test_a_value_where_the_route_has_no_cut_is_refused():
    with pytest.raises(RouteError, match="found no hop that begins with block 3"):
        find_ends(Boundary(BoundaryKind.ACTIVATION, 0, 3), make_route(0, FIRST))
