"""Rerouting: what is on living hosts stays, what was on dead ones goes to holders, and the step can be finished."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.errors import HoldersLost
from resilient_jax.pipeline_schedule.rerouting import Resend, find_resends, reroute
from resilient_jax.pipeline_schedule.routes import Hop, Routes, Team, find_holders, make_routes
from resilient_jax.pipeline_schedule.task_orders import order_tasks
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
from tests.pure.pipeline_schedule.pipeline_layouts import (
    layouts,
    make_team,
    name_host,
    run_in_order,
    take_unequal_time,
)

ZERO = PipelineSchedule.ZERO_BUBBLE
A, B, C, D = map(HostName, "abcd")


def take_equal_time(host: HostName, kind: TaskKind, block: int) -> float:
    """F, B and W take one second each."""
    return 2.0 if kind is TaskKind.BACKWARD else 1.0


@st.composite
def failures(draw: st.DrawFn):
    """A step of several teams, done in part, in which a host dies whose blocks others hold."""
    teams, quotas = draw(layouts(min_teams=2))
    schedule = draw(st.sampled_from(PipelineSchedule))
    routes = make_routes(teams, quotas)
    ran = run_in_order(routes, order_tasks(routes, take_unequal_time, schedule=schedule))
    done = frozenset(ran[: draw(st.integers(0, len(ran)))])
    hosts = sorted(host for team in teams for host, _ in team)
    dead = draw(st.sets(st.sampled_from(hosts), min_size=1, max_size=2))
    holders = find_holders(teams)
    assume(all(hosts_of_block - dead for hosts_of_block in holders))
    return routes, schedule, done, holders, dead


@given(failures())
def test_every_block_is_on_a_living_holder(failure):
    routes, schedule, done, holders, dead = failure
    found = reroute(routes, done, holders, dead, schedule=schedule)
    assert [route.microbatch for route in found.routes] == [route.microbatch for route in routes]
    for route in found.routes:
        for hop in route.hops:
            assert hop.host not in dead
            assert all(hop.host in holders[block] for block in hop.blocks)


@given(failures())
def test_no_hop_of_a_living_host_is_moved_and_its_finished_tasks_are_kept(failure):
    routes, schedule, done, holders, dead = failure
    found = reroute(routes, done, holders, dead, schedule=schedule)
    for before, after in zip(routes, found.routes, strict=True):
        assert {hop for hop in before.hops if hop.host not in dead} <= set(after.hops)
    assert found.done == {task for task in done if task.hop.host not in dead}
    assert found.done <= set(list_tasks(found.routes, schedule))


@given(failures(), st.integers(0, 99))
def test_the_step_can_be_finished_and_only_tasks_of_dead_hosts_are_run_again(failure, seed):
    routes, schedule, done, holders, dead = failure
    found = reroute(routes, done, holders, dead, schedule=schedule)
    orders = order_tasks(found.routes, take_unequal_time, schedule=schedule, done=found.done)
    ran = run_in_order(found.routes, orders, seed=seed, done=found.done)
    assert sorted([*found.done, *ran]) == sorted(list_tasks(found.routes, schedule))
    assert not set(ran) & done


@given(failures(), st.integers(0, 99))
def test_what_the_dead_had_sent_before_is_not_waited_for(failure, seed):
    routes, schedule, done, holders, dead = failure
    found = reroute(routes, done, holders, dead, schedule=schedule)
    arrived = set()
    for task in done - found.done:
        route = next(route for route in routes if route.microbatch == task.microbatch)
        boundary = find_output(task, route.num_blocks)
        if boundary is not None and find_ends(boundary, route)[1].host not in dead:
            arrived.add(boundary)
    orders = order_tasks(found.routes, take_unequal_time, schedule=schedule, done=found.done, arrived=arrived)
    ran = run_in_order(found.routes, orders, seed=seed, done=found.done, arrived=frozenset(arrived))
    assert sorted([*found.done, *ran]) == sorted(list_tasks(found.routes, schedule))


@given(failures(), st.data())
def test_a_second_failure_in_the_same_step_is_survived_likewise(failure, data):
    routes, schedule, done, holders, dead = failure
    found = reroute(routes, done, holders, dead, schedule=schedule)
    orders = order_tasks(found.routes, take_unequal_time, schedule=schedule, done=found.done)
    ran = run_in_order(found.routes, orders, done=found.done)
    more = found.done | set(ran[: data.draw(st.integers(0, len(ran)))])
    living = sorted(set().union(*holders) - dead)
    dead = {*dead, data.draw(st.sampled_from(living))}
    assume(all(hosts - dead for hosts in holders))
    again = reroute(found.routes, more, holders, dead, schedule=schedule)
    orders = order_tasks(again.routes, take_unequal_time, schedule=schedule, done=again.done)
    ran = run_in_order(again.routes, orders, done=again.done)
    assert sorted([*again.done, *ran]) == sorted(list_tasks(again.routes, schedule))


@given(failures())
def test_every_input_that_is_still_needed_is_sent_again_or_computed_again(failure):
    routes, schedule, done, holders, dead = failure
    found = reroute(routes, done, holders, dead, schedule=schedule)
    by_microbatch = {route.microbatch: route for route in found.routes}
    expected = set()
    for task in set(list_tasks(found.routes, schedule)) - found.done:
        route = by_microbatch[task.microbatch]
        boundary = find_input(task, route.num_blocks)
        if boundary is None:
            continue
        sender, receiver = find_ends(boundary, route)
        sent = next(need for need in list_needs(task, route) if need.hop == sender)
        if sent in found.done:
            expected.add(Resend(boundary, sender.host, receiver.host))
    resends = find_resends(found.routes, found.done).values()
    assert set(resends) == expected
    assert len(resends) == len(expected)


def test_what_was_sent_to_the_dead_host_is_sent_again_by_both_neighbours():
    teams: list[Team] = [[(A, 1), (B, 1), (C, 1)], [(D, 3)]]
    routes = make_routes(teams, [1, 0])
    a, b, c = routes[0].hops
    done = [Task(TaskKind.FORWARD, 0, hop) for hop in (a, b, c)]
    done.append(Task(TaskKind.INPUT_GRADIENT, 0, c))
    found = reroute(routes, done, find_holders(teams), [B], schedule=ZERO)
    assert found.routes[0].hops == (a, Hop(D, 1, 2), c)
    assert tuple(sorted(find_resends(found.routes, found.done).values())) == (
        Resend(Boundary(BoundaryKind.ACTIVATION, 0, 1), A, D),
        Resend(Boundary(BoundaryKind.GRADIENT, 0, 2), C, D),
    )


def test_finished_weight_gradients_of_a_dead_host_are_computed_again():
    teams: list[Team] = [[(A, 2)], [(B, 2)]]
    routes = make_routes(teams, [1, 0])
    done = list(list_tasks(routes, ZERO))
    found = reroute(routes, done, find_holders(teams), [A], schedule=ZERO)
    assert found.done == frozenset()
    assert found.routes[0].hops == (Hop(B, 0, 2),)


def test_a_dead_hop_goes_to_its_peers_in_as_few_pieces_as_possible():
    holders = [{A, B}, {A, B}, {A, B}, {A, C}, {A, B, C}, {A, C}]
    routes = make_routes([[(A, 6)]], [1])
    found = reroute(routes, [], holders, [A], schedule=ZERO)
    assert found.routes[0].hops == (Hop(B, 0, 3), Hop(C, 3, 6))


def test_a_holder_of_the_whole_hop_takes_it_even_if_holders_of_parts_have_less_to_do():
    holders = [{A, B, C}, {A, B, D}]
    routes = make_routes([[(A, 2)], [(B, 2)]], [1, 3])
    found = reroute(routes, [], holders, [A], schedule=ZERO)
    assert found.routes[0].hops == (Hop(B, 0, 2),)


def test_neighbouring_dead_hops_go_to_one_holder_as_one_hop():
    teams: list[Team] = [[(A, 2), (B, 2)], [(C, 4)]]
    found = reroute(make_routes(teams, [1, 0]), [], find_holders(teams), [A, B], schedule=ZERO)
    assert found.routes[0].hops == (Hop(C, 0, 4),)


def test_microbatches_of_a_dead_host_go_to_the_peers_that_are_done_first():
    teams: list[Team] = [[(A, 2)], [(B, 2)], [(C, 2)]]

    def take_time(host: HostName, kind: TaskKind, block: int) -> float:
        return 3.0 if host == C else 1.0

    routes = make_routes(teams, [4, 2, 2])
    found = reroute(routes, [], find_holders(teams), [A], schedule=ZERO, seconds=take_time)
    taken = [route.hops[0].host for route in found.routes]
    assert (taken.count(B), taken.count(C)) == (6, 2)


def test_blocks_without_a_living_holder_are_an_error_that_names_them():
    teams: list[Team] = [[(A, 2), (B, 2)], [(C, 3), (D, 1)]]
    routes = make_routes(teams, [1, 1])
    with pytest.raises(HoldersLost, match=r"blocks 2: found no living holder.*Dead: b, c") as caught:
        reroute(routes, [], find_holders(teams), [B, C], schedule=ZERO)
    assert caught.value.blocks == (2,)


def lose_a_host(replicas: int, stage: int) -> Routes:
    """4 stages, 8 microbatches in each replica; one host is lost before the step."""
    teams = [make_team(team, [1] * 4) for team in range(replicas)]
    routes = make_routes(teams, [8] * replicas)
    return reroute(routes, [], find_holders(teams), [name_host(0, stage)], schedule=ZERO).routes


@pytest.mark.parametrize(("replicas", "expected_s"), [(3, 39), (4, 36), (8, 33)])
def test_peers_of_the_lost_last_stage_take_the_time_of_all_their_microbatches(replicas, expected_s):
    """(3 (N + ceil(N / (D - 1))) + P - 1) t, with weight gradients in gaps, as without a failure (3 N + P - 1) t."""
    found = order_tasks(lose_a_host(replicas, stage=3), take_equal_time, schedule=ZERO)
    assert found.makespan_s == expected_s
    assert max(found.peak_in_flight.values()) <= 4
