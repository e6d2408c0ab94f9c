"""Every microbatch is computed exactly once, whichever hosts die."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.step.quotas import (
    accept_complete_claims,
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


def test_a_total_in_shards_counts_with_all_shards_of_all_its_microbatches_alone() -> None:
    # Hosts 0 and 1 have the shards of rank 0, hosts 2 and 3 those of rank 1; host 4 is left over.
    holders = [(0, 1), (2, 3)]
    claims = [
        [1, 1, 2, 0, 0],
        [0, 0, 0, 1, 1],
        [1, 1, 0, 0, 0],  # of the second total of host 0 the other shards are lost
        [0, 0, 0, 0, 1],  # and so of one microbatch of host 1, whose total cannot be taken apart
        [0, 0, 1, 0, 0],
    ]
    accepted = [[1, 1, 0, 0, 0], [0] * 5, [1, 1, 0, 0, 0], [0] * 5, [0] * 5]
    assert accept_complete_claims(np.array(claims), holders).tolist() == accepted


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.data())
def test_a_microbatch_in_shards_counts_once_for_each_rank_or_not_at_all(
    replicas: int, ranks: int, microbatches: int, data
) -> None:
    rows = st.lists(st.integers(0, 2), min_size=microbatches, max_size=microbatches)
    claims = np.array(data.draw(st.lists(rows, min_size=replicas * ranks, max_size=replicas * ranks)))
    holders = [tuple(range(rank, replicas * ranks, ranks)) for rank in range(ranks)]
    accepted = accept_complete_claims(claims, holders)
    counts = np.array([(accepted[list(hosts)] > 0).sum(axis=0) for hosts in holders])
    assert (counts == counts[0]).all()
    assert counts.max(initial=0) <= 1
    for row, of_host in zip(accepted, claims, strict=True):
        for total in set(row.tolist()) - {0}:
            assert ((row == total) == (of_host == total)).all(), "a total counts whole"
