"""Replicas and cuts for any number of hosts."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import find_holders, make_routes
from resilient_jax.pipeline_schedule.teams import cut_by_speed, make_teams, share_microbatches

COSTS = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9)


@given(COSTS, st.integers(1, 20), st.integers(1, 5), st.integers(1, 40))
def test_every_host_has_blocks_and_every_microbatch_a_route(costs, num_hosts, num_stages, num_microbatches):
    hosts = [HostName(f"h{number}") for number in range(num_hosts)]
    teams = make_teams(hosts, costs, num_stages)
    assert [host for team in teams for host, _ in team] == hosts
    assert all(sum(count for _, count in team) == len(costs) for team in teams)
    assert all(count >= 1 for team in teams for _, count in team)
    assert max(map(len, teams)) - min(map(len, teams)) <= 1
    if num_hosts >= num_stages and len(costs) >= num_stages:
        num_replicas = num_hosts // num_stages
        would_fit = num_hosts <= num_replicas * len(costs)
        assert min(map(len, teams)) >= num_stages or not would_fit
    quotas = share_microbatches(teams, num_microbatches)
    assert sum(quotas) == num_microbatches
    assert len(make_routes(teams, quotas)) == num_microbatches
    assert set().union(*find_holders(teams)) == set(hosts)


def cost_of(costs, cut):
    ends = list(itertools.accumulate(cut))
    return max(sum(costs[end - count : end]) for count, end in zip(cut, ends, strict=True))


@given(COSTS, st.data())
def test_no_other_cut_has_a_less_costly_part(costs, data):
    num_parts = data.draw(st.integers(1, len(costs)))
    cut = cut_by_speed(costs, [1.0] * num_parts)
    assert sum(cut) == len(costs)
    assert min(cut) >= 1
    others = (
        [b - a for a, b in itertools.pairwise([0, *inner, len(costs)])]
        for inner in itertools.combinations(range(1, len(costs)), num_parts - 1)
    )
    assert cost_of(costs, cut) == min(cost_of(costs, other) for other in others)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 50))
def test_microbatches_are_shared_by_hosts(sizes, num_microbatches):
    teams = [[(HostName(str(number)), 1)] * size for number, size in enumerate(sizes)]
    for size, quota in zip(sizes, share_microbatches(teams, num_microbatches), strict=True):
        assert abs(quota - num_microbatches * size / sum(sizes)) < 1
