"""Every microbatch is computed exactly once, whichever hosts die."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.step.quotas import (
    accept_disjoint_claims,
    distribute_microbatches,
)

speeds = st.lists(st.floats(0.05, 20.0), min_size=1, max_size=9)


@given(st.sets(st.integers(0, 100)), speeds)
def test_each_missing_microbatch_is_distributed_exactly_once(missing: set[int], speeds: list[float]) -> None:
    distributed = distribute_microbatches(sorted(missing), speeds)
    assert [index for indexes in distributed for index in indexes] == sorted(missing)


@given(st.integers(1, 60), st.integers(1, 6), st.data())
def test_each_microbatch_counts_once_however_many_hosts_die_in_a_step(
    microbatches: int, hosts: int, data
) -> None:
    """Hosts compute one to three microbatches in each round of a step, and some die with all of theirs."""
    alive = {host: set[int]() for host in range(hosts)}
    for _ in range(1000):
        done = set().union(*alive.values())
        if len(done) == microbatches:
            break
        missing = [index for index in range(microbatches) if index not in done]
        names = sorted(alive)
        distributed = distribute_microbatches(missing, [1.0] * len(names))
        for name, indexes in zip(names, distributed, strict=True):
            alive[name] |= set(indexes[: data.draw(st.integers(1, 3))])
        if len(alive) > 1 and data.draw(st.booleans()):
            del alive[data.draw(st.sampled_from(names))]
    counted = [index for held in alive.values() for index in held]
    assert sorted(counted) == list(range(microbatches))


def test_of_two_claims_with_the_same_microbatch_the_first_is_accepted() -> None:
    claims = [[1, 1, 2, 0, 0], [0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    accepted = [[1, 1, 2, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 1, 0]]
    assert accept_disjoint_claims(np.array(claims)).tolist() == accepted
