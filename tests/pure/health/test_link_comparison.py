"""Which link is slow, from exchanges between pairs of hosts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.health.link_comparison import (
    MAX_ROUNDS,
    Pairs,
    find_slow_link,
    keep_fastest,
    pair_hosts,
)

USUAL_S = 0.001


def measure(rounds: tuple[Pairs, ...], hosts: int, slow: dict[tuple[int, int], float]) -> list[list[float]]:
    """Return what each host measures in each round, 0 where it has no partner."""
    return [
        [sum(slow.get(pair, USUAL_S) for pair in pairs if host in pair) for pairs in rounds]
        for host in range(hosts)
    ]


@pytest.mark.parametrize("hosts", [*range(2, 14), 100, 101])
def test_pairs_of_a_round_are_disjoint_and_no_pair_comes_twice(hosts: int) -> None:
    rounds = pair_hosts(hosts)
    assert len(rounds) == min(hosts - 1 + hosts % 2, MAX_ROUNDS)
    for pairs in rounds:
        members = [host for pair in pairs for host in pair]
        assert len(set(members)) == len(members) == hosts - hosts % 2
    every_pair = list(itertools.chain.from_iterable(rounds))
    assert len(set(every_pair)) == len(every_pair)
    if hosts <= MAX_ROUNDS + 1:
        assert set(every_pair) == set(itertools.combinations(range(hosts), 2))


@pytest.mark.parametrize("hosts", range(3, 14))
def test_the_host_that_is_slow_with_all_is_found(hosts: int) -> None:
    rounds = pair_hosts(hosts)
    for slow in range(hosts):
        pairs = {pair: 5 * USUAL_S for pair in itertools.combinations(range(hosts), 2) if slow in pair}
        found = find_slow_link(rounds, measure(rounds, hosts, pairs), measure(rounds, hosts, {}), 1.5)
        assert found is not None
        assert (found.host, found.peer, found.ratio) == (slow, None, pytest.approx(5))


def test_the_slower_of_two_slow_hosts_is_found() -> None:
    rounds = pair_hosts(8)
    pairs = {
        pair: max(5.0 * (2 in pair), 9.0 * (6 in pair)) * USUAL_S
        for pair in itertools.combinations(range(8), 2)
        if {2, 6} & {*pair}
    }
    found = find_slow_link(rounds, measure(rounds, 8, pairs), measure(rounds, 8, {}), 1.5)
    assert found is not None
    assert (found.host, found.ratio) == (6, pytest.approx(9))


@pytest.mark.parametrize("hosts", range(4, 14))
def test_a_slow_pair_is_found_whose_hosts_are_fast_with_others(hosts: int) -> None:
    rounds = pair_hosts(hosts)
    pair = rounds[1][0]
    found = find_slow_link(
        rounds, measure(rounds, hosts, {pair: 3 * USUAL_S}), measure(rounds, hosts, {}), 1.5
    )
    assert found is not None
    assert ((found.host, found.peer), found.ratio) == (pair, pytest.approx(3))


@pytest.mark.parametrize("hosts", range(2, 10))
def test_none_is_found_where_all_are_alike_or_one_is_unknown(hosts: int) -> None:
    rounds = pair_hosts(hosts)
    alike = measure(rounds, hosts, {})
    slower = [[3 * seconds for seconds in of_host] for of_host in alike]
    assert find_slow_link(rounds, alike, alike, 1.1) is None
    assert find_slow_link(rounds, slower, alike, 1.1) is None, "what slows all links is the fault of none"
    unknown = [*alike[:1], [0.0] * len(rounds), *alike[2:]]
    assert find_slow_link(rounds, unknown, alike, 1.1) is None
    assert find_slow_link(rounds, alike, unknown, 1.1) is None


@pytest.mark.parametrize("hosts", range(3, 14))
def test_a_host_in_another_rack_is_not_slow(hosts: int) -> None:
    rounds = pair_hosts(hosts)
    far = {pair: 4 * USUAL_S for pair in itertools.combinations(range(hosts), 2) if hosts - 1 in pair}
    before = measure(rounds, hosts, far)
    assert find_slow_link(rounds, before, before, 1.5) is None
    busy = [[2 * seconds for seconds in of_host] for of_host in before]
    assert find_slow_link(rounds, busy, before, 1.5) is None
    far[0, hosts - 1] = 40 * USUAL_S
    pairs = {
        pair: 10 * far.get(pair, USUAL_S) for pair in itertools.combinations(range(hosts), 2) if 0 in pair
    }
    found = find_slow_link(rounds, measure(rounds, hosts, {**far, **pairs}), before, 1.5)
    assert found is not None
    assert (found.host, found.peer) == (0, None)


def test_of_two_hosts_no_link_is_slower_than_another() -> None:
    assert find_slow_link(pair_hosts(2), [[5.0], [5.0]], [[1.0], [1.0]], 1.5) is None


def test_what_one_end_waited_for_besides_is_not_the_links() -> None:
    rounds = pair_hosts(4)
    seconds = measure(rounds, 4, {})
    seconds[1] = [9.0] * len(rounds)  # its processor was busy: its partners were ready at once
    assert find_slow_link(rounds, seconds, measure(rounds, 4, {}), 1.5) is None


def test_links_that_are_all_faster_than_before_are_not_slow_though_one_is_less_so() -> None:
    """Links were measured first while standbys started on the same machine, and host-2 least of all in that moment."""
    rounds = pair_hosts(3)
    before = measure(rounds, 3, dict.fromkeys(itertools.combinations(range(3), 2), 5 * USUAL_S))
    now = measure(rounds, 3, dict.fromkeys([(0, 2), (1, 2)], 4 * USUAL_S))
    assert find_slow_link(rounds, now, before, 1.5) is None


@given(st.integers(2, 9), st.data())
def test_what_is_no_slower_than_it_ever_was_is_not_slow(hosts: int, data: st.DataObject) -> None:
    rounds = pair_hosts(hosts)
    pairs = [pair for of_round in rounds for pair in of_round]
    times = st.floats(1e-5, 1.0)
    now = {pair: data.draw(times) for pair in pairs}
    before = {pair: now[pair] * data.draw(st.floats(1.0, 100.0)) for pair in pairs}
    measured = measure(rounds, hosts, now)
    assert find_slow_link(rounds, measured, measure(rounds, hosts, before), 1.5) is None
    # The least of both is what it takes now: a busy moment in the past is forgotten.
    assert keep_fastest(measure(rounds, hosts, before), measured) == measured
    slow = {pair: 4 * seconds for pair, seconds in now.items() if 1 in pair}
    found = find_slow_link(rounds, measure(rounds, hosts, {**now, **slow}), measured, 1.5)
    assert hosts == 2 or (found is not None and found.host == 1)


def test_the_fastest_measurement_of_each_exchange_is_kept() -> None:
    assert keep_fastest(None, [[1.0, 0.0]]) == [[1.0, 0.0]]
    assert keep_fastest([[0.0, 2.0], [1.0, 0.0]], [[1.0, 3.0], [2.0, 0.0]]) == [[1.0, 2.0], [1.0, 0.0]]
