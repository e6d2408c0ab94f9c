"""Every microbatch exactly once, whoever dies whenever; and the paper's numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.step.quotas import (
    Roles,
    accept_disjoint_claims,
    apportion_units,
    count_units,
    deal_by_roles,
    distribute_units,
    extend_boundary_step,
    find_roles,
    microbatches_of_unit,
)

speeds = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=9)


@given(st.integers(1, 300), st.integers(1, 20))
def test_units_are_the_microbatches_in_order(microbatches: int, unit: int) -> None:
    units = range(count_units(microbatches, unit))
    assert [i for u in units for i in microbatches_of_unit(u, microbatches, unit)] == list(
        range(microbatches)
    )


@given(st.integers(0, 200), st.integers(1, 40))
def test_equal_hosts_differ_by_one_at_most(count: int, hosts: int) -> None:
    shares = apportion_units(count, [1.0] * hosts)
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@given(st.integers(0, 12), st.lists(st.floats(0.1, 10.0), min_size=1, max_size=3))
def test_no_other_division_is_done_sooner(count: int, speeds: list[float]) -> None:
    def makespan(shares: tuple[int, ...]) -> float:
        return max(n / s for n, s in zip(shares, speeds, strict=True))

    def divisions(left: int, hosts: int) -> list[tuple[int, ...]]:
        if hosts == 1:
            return [(left,)]
        return [(n, *rest) for n in range(left + 1) for rest in divisions(left - n, hosts - 1)]

    best = min(map(makespan, divisions(count, len(speeds))))
    assert makespan(apportion_units(count, speeds)) <= best * (1 + 1e-9)


@given(st.sets(st.integers(0, 100)), speeds, st.data())
def test_what_is_missing_is_dealt_exactly_once(missing: set[int], speeds: list[float], data) -> None:
    hosts = st.integers(0, len(speeds) - 1)
    begun = data.draw(st.dictionaries(st.integers(0, 100), hosts, max_size=5))
    dealt = distribute_units(sorted(missing), speeds, begun)
    assert sorted(unit for units in dealt for unit in units) == sorted(missing)
    for host, units in enumerate(dealt):
        mine = [unit for unit, owner in begun.items() if owner == host and unit in missing]
        assert set(units[: len(mine)]) <= set(mine), "what it had begun comes first"


@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_every_microbatch_once_however_many_die_in_a_step(microbatches: int, hosts: int, data) -> None:
    """A step of hosts that compute one unit a turn, die, and come back with nothing."""
    alive = {host: set[int]() for host in range(hosts)}
    for _ in range(1000):
        done = set().union(*alive.values())
        if len(done) == microbatches:
            break
        missing = [unit for unit in range(microbatches) if unit not in done]
        names = sorted(alive)
        dealt = distribute_units(missing, [1.0] * len(names))
        for name, units in zip(names, dealt, strict=True):
            alive[name] |= set(units[: data.draw(st.integers(1, 3))])
        if len(alive) > 1 and data.draw(st.booleans()):
            del alive[data.draw(st.sampled_from(names))]
    counted = [unit for held in alive.values() for unit in held]
    assert sorted(counted) == list(range(microbatches))


def test_a_survivor_goes_on_with_what_it_had_begun() -> None:
    assert distribute_units([2, 3, 4, 5], [1.0, 1.0], host_of_begun_unit={5: 0, 4: 1}) == ((5, 2), (4, 3))


@pytest.mark.parametrize(
    ("microbatches", "replicas", "expected"),
    [
        (256, 31, (9, 28, 4, 2)),
        (256, 30, (9, 28, 4, 1)),
        (256, 29, (9, 28, 4, 0)),
        (256, 28, (10, 25, 6, 2)),
        (256, 17, (16, 16, 0, 1)),
        (256, 16, (16, 16, 0, 0)),
        (32, 3, (11, 2, 10, 0)),
        (32, 2, (16, 2, 0, 0)),
        (8192, 63, (131, 62, 70, 0)),
    ],
)
def test_the_papers_roles(microbatches: int, replicas: int, expected: tuple[int, ...]) -> None:
    per_replica, majors, minor, spares = expected
    assert find_roles(microbatches, replicas) == Roles(
        per_replica=per_replica, majors=majors, minor=minor, spares=spares
    )


@given(st.integers(1, 300), st.integers(1, 40))
def test_roles_hand_out_every_microbatch_once(microbatches: int, replicas: int) -> None:
    dealt = deal_by_roles(range(microbatches), replicas)
    assert len(dealt) == replicas
    assert [index for units in dealt for index in units] == list(range(microbatches))


def test_the_papers_boundary_step() -> None:
    extra, one_fewer = extend_boundary_step(256, 248, 31)
    assert (extra, 31 - one_fewer) == (1, 8)


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0], [1.0, float("nan")]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(CallerError, match="expected a positive number"):
        apportion_units(3, speeds)


def test_no_microbatches_are_refused() -> None:
    with pytest.raises(CallerError, match="microbatches: found 0"):
        count_units(0, 1)


def test_of_two_sums_with_the_same_unit_the_first_counts() -> None:
    assert accept_disjoint_claims([[0, 1], [2], [1, 3], [], [3]]) == (True, True, False, True, True)
