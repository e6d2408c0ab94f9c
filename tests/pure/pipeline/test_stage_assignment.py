"""Hosts keep their stages after a change of hosts, as far as that is possible."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline.stage_assignment import assign_stages, follow_stages
from resilient_jax.pipeline_schedule.teams import make_teams

HOSTS = [HostName(f"h{number}") for number in range(9)]


def list_blocks(order, costs, num_stages):
    """Return the blocks of each host."""
    found = {}
    for team in make_teams(order, costs, num_stages):
        first = 0
        for host, count in team:
            found[host] = frozenset(range(first, first + count))
            first += count
    return found


def count_moved(order, before, costs, num_stages):
    """Return how many blocks hosts get that they have not."""
    held = list_blocks(before, costs, num_stages) if before else {}
    return sum(
        len(blocks - held.get(host, frozenset()))
        for host, blocks in list_blocks(order, costs, num_stages).items()
    )


@st.composite
def changes(draw, most=6):
    before = draw(st.permutations(HOSTS).map(lambda order: order[: draw(st.integers(1, most))]))
    hosts = draw(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=most, unique=True))
    costs = draw(st.lists(st.integers(1, 4).map(float), min_size=1, max_size=12))
    return before, hosts, costs, draw(st.integers(1, 4))


@given(changes())
def test_no_order_of_the_hosts_moves_fewer_blocks(change):
    before, hosts, costs, num_stages = change
    order = assign_stages(hosts, before, costs, num_stages)
    assert sorted(order) == sorted(hosts)
    fewest = min(count_moved(other, before, costs, num_stages) for other in itertools.permutations(hosts))
    assert count_moved(order, before, costs, num_stages) == fewest


@given(changes(most=9))
def test_as_many_hosts_as_possible_keep_just_the_blocks_that_they_have(change):
    before, hosts, costs, num_stages = change
    held = list_blocks(before, costs, num_stages)
    now = list_blocks(assign_stages(hosts, before, costs, num_stages), costs, num_stages)
    wanted = list(now.values())
    for blocks in set(wanted):
        able = sum(held.get(host) == blocks for host in hosts)
        assert sum(held.get(host) == of == blocks for host, of in now.items()) == min(
            able, wanted.count(blocks)
        )


@given(changes(most=9), st.randoms())
def test_nothing_moves_that_has_a_place_whatever_the_order_in_which_hosts_are_named(change, chance):
    before, _, costs, num_stages = change
    shuffled = chance.sample(before, len(before))
    order = assign_stages(shuffled, before, costs, num_stages)
    assert count_moved(order, before, costs, num_stages) == 0


def test_replicas_that_have_lost_no_host_stay_together():
    before = [HostName(name) for name in "abcdefgh"]
    order = assign_stages(before[1:], before, [1.0] * 12, 2)
    teams = [[host for host, _ in team] for team in make_teams(order, [1.0] * 12, 2)]
    assert sorted(map(len, teams)) == [2, 2, 3]
    assert ["c", "d"] in teams
    assert ["e", "f"] in teams


@pytest.mark.parametrize("lost", "abcd")
def test_a_host_that_is_back_gets_its_stage_and_no_other_host_moves(lost):
    """In the order of seats it would be the last, and all others would be one stage further."""
    order = [HostName(name) for name in "abcd"]
    left = [host for host in order if host != lost]
    found = follow_stages([order, left, [*left, HostName(lost)]], [1.0] * 12, 2)
    alone = follow_stages([order, left], [1.0] * 12, 2)
    assert count_moved(found, alone, [1.0] * 12, 2) <= 12 + 6  # its own blocks, and what three hosts had less
    assert assign_stages([*left, HostName(lost)], order, [1.0] * 12, 2) == tuple(order)


def test_without_an_order_before_hosts_are_as_given():
    assert follow_stages([(), HOSTS[::-1]], [1.0] * 6, 3) == tuple(HOSTS[::-1])
