"""Each microbatch of a step is computed once, whichever hosts die when; none that a live host has is computed again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.step.assignment import (
    ReplicaLocation,
    ReplicaShape,
    assign_microbatches,
    locate_replicas,
)
from resilient_jax.step.quotas import accept_disjoint_claims


@given(data=st.data(), hosts=st.integers(1, 7), microbatches=st.integers(1, 40), span=st.integers(1, 3))
def test_a_step_is_finished_with_each_microbatch_once(
    data: st.DataObject, hosts: int, microbatches: int, span: int
) -> None:
    """Hosts compute in order, stop at any point, die, and rejoin with nothing or with what they had."""
    shape = ReplicaShape(hosts=span)
    live = list(range(max(hosts, span)))
    kept = {host: np.zeros(microbatches, np.int32) for host in live}
    for _ in range(data.draw(st.integers(0, 6))):
        compute(data, shape, live, kept, finish=False)
        live = data.draw(st.lists(st.sampled_from(sorted(kept)), min_size=span, unique=True).map(sorted))
        for host in live:
            if data.draw(st.booleans()):
                kept[host] = np.zeros(microbatches, np.int32)  # restarted
    owners = compute(data, shape, live, kept, finish=True)
    assert len(owners) == microbatches
    assert all(kept[live[owner]][index] for index, owner in enumerate(owners))


def compute(
    data: st.DataObject, shape: ReplicaShape, live: list[int], kept: dict[int, np.ndarray], *, finish: bool
) -> tuple[int, ...]:
    """Run one generation of the step, in which each replica computes its microbatches, or the first of them.

    Every host of a replica keeps the total, as one more part, and claims it in the next generation.
    """
    claims = accept_disjoint_claims(np.stack([kept[host] for host in live]))
    seats = locate_replicas(live, shape)
    assignment = assign_microbatches(seats, claims > 0, np.ones(len(live)))
    counted = (claims > 0).sum(axis=0)
    for host, row in zip(live, claims, strict=True):
        kept[host] = row.copy()
    for seat, indexes in zip(seats, assignment.by_replica, strict=True):
        assert not claims[:, list(indexes)].any(), "a microbatch is computed again"
        done = list(indexes[: len(indexes) if finish else data.draw(st.integers(0, len(indexes)))])
        counted[done] += 1
        for host in seat.host_indexes:
            kept[live[host]][done] = 1 + kept[live[host]].max()
    assert not finish or counted.tolist() == [1] * len(counted)
    return assignment.owners


@given(st.integers(1, 12), st.integers(1, 60))
def test_the_microbatches_of_a_new_step_are_divided_evenly(hosts: int, microbatches: int) -> None:
    seats = locate_replicas(range(hosts), ReplicaShape())
    dealt = assign_microbatches(seats, np.zeros((hosts, microbatches), np.bool_), np.ones(hosts)).by_replica
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_intact_replicas_stay_together_and_survivors_of_broken_ones_are_regrouped() -> None:
    shape = ReplicaShape(hosts=2)
    assert locate_replicas(range(6), shape) == (
        ReplicaLocation((0, 1)),
        ReplicaLocation((2, 3)),
        ReplicaLocation((4, 5)),
    )
    # Hosts 1 and 4 have died: 2 and 3 stay together, 0 and 5 form a new replica.
    assert locate_replicas([0, 2, 3, 5], shape) == (ReplicaLocation((0, 3)), ReplicaLocation((1, 2)))
    # One more has died: host 5 is left over.
    assert locate_replicas([2, 3, 5], shape) == (ReplicaLocation((0, 1)),)


def test_a_host_has_several_replicas_if_the_shape_asks_for_them() -> None:
    seats = (
        ReplicaLocation((0,), 0),
        ReplicaLocation((0,), 1),
        ReplicaLocation((1,), 0),
        ReplicaLocation((1,), 1),
    )
    assert locate_replicas([0, 3], ReplicaShape(per_host=2), devices_per_host=8) == seats
    assert locate_replicas([0, 3], ReplicaShape(per_host="devices"), devices_per_host=2) == seats
    with pytest.raises(CallerError, match="found 3 devices on a host, expected a multiple of per_host=2"):
        locate_replicas([0, 3], ReplicaShape(per_host=2), devices_per_host=3)


def test_too_few_hosts_for_a_replica_is_an_error() -> None:
    with pytest.raises(CallerError, match=r"found 1 live hosts, expected at least 2"):
        locate_replicas([5], ReplicaShape(hosts=2))


@pytest.mark.parametrize(("hosts", "per_host"), [(0, 1), (2, 2), (1, -1)])
def test_an_impossible_shape_is_an_error(hosts: int, per_host: int) -> None:
    with pytest.raises(CallerError, match=f"hosts={hosts}, per_host={per_host}"):
        ReplicaShape(hosts=hosts, per_host=per_host)
