"""Each microbatch of a step is computed once, whichever hosts die when, and no complete unit is computed again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.step.assignment import (
    AccumulationSpec,
    ReplicaLocation,
    ReplicaShape,
    assign_units,
    find_common_progress,
    locate_replicas,
    predict_widths_after_loss,
)


def job_of(microbatches: int, unit: int, *, pooled: bool = False) -> AccumulationSpec:
    return AccumulationSpec(
        name="train", step=0, num_microbatches=microbatches, unit_size=unit, is_pooled=pooled
    )


@given(
    data=st.data(),
    hosts=st.integers(1, 7),
    microbatches=st.integers(1, 40),
    unit=st.integers(1, 5),
    span=st.integers(1, 3),
)
def test_a_step_is_finished_with_each_microbatch_once(
    data: st.DataObject, hosts: int, microbatches: int, unit: int, span: int
) -> None:
    """Hosts compute in order, stop at any point, die, and rejoin with no progress or with their own."""
    job, shape = job_of(microbatches, unit), ReplicaShape(hosts=span)
    live = list(range(max(hosts, span)))
    kept = {host: np.zeros(job.num_units, np.int32) for host in live}
    for _ in range(data.draw(st.integers(0, 6))):
        compute(data, job, shape, live, kept, finish=False)
        live = data.draw(st.lists(st.sampled_from(sorted(kept)), min_size=span, unique=True).map(sorted))
        for host in live:
            if data.draw(st.booleans()):
                kept[host] = np.zeros(job.num_units, np.int32)  # restarted
    owners = compute(data, job, shape, live, kept, finish=True)
    assert len(owners) == job.num_units
    for unit_number, owner in enumerate(owners):
        assert kept[live[owner]][unit_number] == len(job.microbatches_of(unit_number))


def compute(
    data: st.DataObject,
    job: AccumulationSpec,
    shape: ReplicaShape,
    live: list[int],
    kept: dict[int, np.ndarray],
    *,
    finish: bool,
) -> tuple[int, ...]:
    """Run one generation of the step, in which each host computes its units completely or in part."""
    progress = np.stack([kept[host] for host in live])
    seats = locate_replicas(live, shape)
    assignment = assign_units(job, seats, progress, np.ones(len(live)))
    dealt = [unit for units in assignment.units_by_replica for unit in units]
    assert len(dealt) == len(set(dealt))
    for seat, units in zip(seats, assignment.units_by_replica, strict=True):
        for unit in units:
            whole = len(job.microbatches_of(unit))
            assert not (progress[:, unit] == whole).any(), "a finished unit is computed again"
            begun = find_common_progress(progress, seat, unit)
            count = whole if finish else data.draw(st.integers(begun, whole))
            for place in seat.host_indexes:
                kept[live[place]][unit] = count
            if count < whole:
                break
    return assignment.owners


@given(st.integers(1, 12), st.integers(1, 60))
def test_the_units_of_a_new_step_are_divided_evenly(hosts: int, microbatches: int) -> None:
    job = job_of(microbatches, 1)
    seats = locate_replicas(range(hosts), ReplicaShape())
    dealt = assign_units(
        job, seats, np.zeros((hosts, job.num_units), np.int32), np.ones(hosts)
    ).units_by_replica
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_host_that_began_a_unit_continues_it() -> None:
    progress = np.zeros((3, 3), np.int32)
    progress[2, 0] = 1
    dealt = assign_units(
        job_of(6, 2), locate_replicas(range(3), ReplicaShape()), progress, np.ones(3)
    ).units_by_replica
    assert dealt[2] == (0,)


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


def test_widths_after_a_loss_are_predicted_for_the_beginning_and_the_end_of_a_step() -> None:
    job, two_each = job_of(12, 1), ReplicaShape(per_host=2)
    before, after = locate_replicas(range(4), ReplicaShape()), locate_replicas(range(3), two_each, 2)
    # From the start: 4 units for each of 3 hosts. At the end: 3 lost units over 6 replicas, two of them on host 0.
    assert predict_widths_after_loss(job, before, after) >= {4, 5}
    # If one host has its 3 units and the others have none, 9 are left for 3 hosts.
    assert predict_widths_after_loss(job, before, locate_replicas(range(3), ReplicaShape())) == {4, 5, 6}


@given(data=st.data(), hosts=st.integers(2, 4), microbatches=st.integers(2, 12))
def test_widths_after_a_loss_in_the_middle_of_a_step_are_predicted(
    data: st.DataObject, hosts: int, microbatches: int
) -> None:
    job = job_of(microbatches, 1)
    before, after = (locate_replicas(range(count), ReplicaShape()) for count in (hosts, hosts - 1))
    own = assign_units(
        job, before, np.zeros((hosts, job.num_units), np.int32), np.ones(hosts)
    ).units_by_replica
    lost = data.draw(st.integers(0, hosts - 1))
    progress = np.zeros((hosts - 1, job.num_units), np.int32)
    for place, host in enumerate(host for host in range(hosts) if host != lost):
        progress[place, list(own[host])[: data.draw(st.integers(0, len(own[host])))]] = 1
    owners = assign_units(job, after, progress, np.ones(hosts - 1)).owners
    assert max(owners.count(place) for place in owners) in predict_widths_after_loss(job, before, after)
