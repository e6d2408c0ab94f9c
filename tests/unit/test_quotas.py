"""Every microbatch is computed exactly once, whichever hosts die, and hosts finish as early as they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.step.quotas import (
    accept_disjoint_claims,
    apportion_units,
    count_units,
    distribute_units,
    microbatches_of_unit,
)

speeds = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=9)


@given(st.integers(1, 300), st.integers(1, 20))
def test_units_are_consecutive_microbatches_in_order(microbatches: int, unit: int) -> None:
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
def test_no_other_apportionment_finishes_sooner(count: int, speeds: list[float]) -> None:
    def makespan(shares: tuple[int, ...]) -> float:
        return max(n / s for n, s in zip(shares, speeds, strict=True))

    def apportionments(left: int, hosts: int) -> list[tuple[int, ...]]:
        if hosts == 1:
            return [(left,)]
        return [(n, *rest) for n in range(left + 1) for rest in apportionments(left - n, hosts - 1)]

    best = min(map(makespan, apportionments(count, len(speeds))))
    assert makespan(apportion_units(count, speeds)) <= best * (1 + 1e-9)


@given(st.sets(st.integers(0, 100)), speeds, st.data())
def test_each_missing_unit_is_distributed_exactly_once(missing: set[int], speeds: list[float], data) -> None:
    hosts = st.integers(0, len(speeds) - 1)
    begun = data.draw(st.dictionaries(st.integers(0, 100), hosts, max_size=5))
    distributed = distribute_units(sorted(missing), speeds, begun)
    assert sorted(unit for units in distributed for unit in units) == sorted(missing)
    for host, units in enumerate(distributed):
        mine = [unit for unit, owner in begun.items() if owner == host and unit in missing]
        assert set(units[: len(mine)]) <= set(mine), "begun units come first"


@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_each_microbatch_counts_once_however_many_hosts_die_in_a_step(
    microbatches: int, hosts: int, data
) -> None:
    """Hosts compute one to three units in each round of a step, and some die with all of their units."""
    alive = {host: set[int]() for host in range(hosts)}
    for _ in range(1000):
        done = set().union(*alive.values())
        if len(done) == microbatches:
            break
        missing = [unit for unit in range(microbatches) if unit not in done]
        names = sorted(alive)
        distributed = distribute_units(missing, [1.0] * len(names))
        for name, units in zip(names, distributed, strict=True):
            alive[name] |= set(units[: data.draw(st.integers(1, 3))])
        if len(alive) > 1 and data.draw(st.booleans()):
            del alive[data.draw(st.sampled_from(names))]
    counted = [unit for held in alive.values() for unit in held]
    assert sorted(counted) == list(range(microbatches))


def test_a_survivor_continues_the_units_that_it_has_begun() -> None:
    assert distribute_units([2, 3, 4, 5], [1.0, 1.0], host_of_begun_unit={5: 0, 4: 1}) == ((5, 2), (4, 3))


@pytest.mark.parametrize("speeds", [[], [1.0, 0.0], [1.0, float("nan")]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(CallerError, match="expected a positive number"):
        apportion_units(3, speeds)


def test_no_microbatches_are_refused() -> None:
    with pytest.raises(CallerError, match="num_microbatches: found 0"):
        count_units(0, 1)


def test_of_two_claims_with_the_same_unit_the_first_is_accepted() -> None:
    assert accept_disjoint_claims([[0, 1], [2], [1, 3], [], [3]]) == (True, True, False, True, True)
