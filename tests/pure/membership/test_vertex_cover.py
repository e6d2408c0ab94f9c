"""The covers of pairs of hosts, held against the definition."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.membership.vertex_cover import MAX_EXACT_HOSTS, Pair, list_covers

HOSTS = tuple(map(HostName, "abcdefg"))


def pair(one: str, other: str) -> Pair:
    return frozenset((HostName(one), HostName(other)))


def list_by_definition(pairs: frozenset[Pair], size: int) -> set[frozenset[HostName]]:
    """Return all covers of this size that are none any more without one of their hosts."""

    def covers(hosts: frozenset[HostName]) -> bool:
        return all(pair & hosts for pair in pairs)

    return {
        hosts
        for hosts in map(frozenset, itertools.combinations(HOSTS, size))
        if covers(hosts) and not any(covers(hosts - {host}) for host in hosts)
    }


@given(st.frozensets(st.sampled_from([pair(*both) for both in itertools.combinations(HOSTS, 2)]), min_size=1))
def test_the_covers_are_those_of_the_definition(pairs: frozenset[Pair]) -> None:
    for size in range(len(HOSTS) + 1):
        assert list_covers(pairs, size) == list_by_definition(pairs, size)


def test_of_many_hosts_those_behind_one_switch_are_the_cover() -> None:
    ones, others = [
        [f"{name}{number:02}" for number in range(count)] for name, count in (("a", 40), ("b", 9))
    ]
    pairs = frozenset(pair(one, other) for one in ones for other in others)
    assert len({host for both in pairs for host in both}) > MAX_EXACT_HOSTS
    assert [list_covers(pairs, size) for size in (8, 9)] == [frozenset(), {frozenset(others)}]


def test_as_many_separate_pairs_as_are_looked_at_exactly_have_all_their_covers() -> None:
    pairs = frozenset(pair(f"a{number}", f"b{number}") for number in range(MAX_EXACT_HOSTS // 2))
    assert len(list_covers(pairs, len(pairs))) == 2 ** len(pairs)
    assert not list_covers(pairs, len(pairs) - 1)
