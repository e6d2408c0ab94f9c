"""Each microbatch of a step is computed once, whichever hosts die when; none that a live host has is computed again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.pipeline_schedule.makespan import share_tasks
from resilient_jax.step.assignment import (
    HeldRanks,
    ReplicaLocation,
    ReplicaShape,
    assign_microbatches,
    count_working_devices,
    locate_replicas,
    replica_speeds,
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
    seats = locate_replicas(live, shape, [1] * len(live))
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
    seats = locate_replicas(range(hosts), ReplicaShape(), [1] * hosts)
    dealt = assign_microbatches(seats, np.zeros((hosts, microbatches), np.bool_), np.ones(hosts)).by_replica
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_intact_replicas_stay_together_and_survivors_of_broken_ones_are_regrouped() -> None:
    shape = ReplicaShape(hosts=2)
    assert locate_replicas(range(6), shape, [1] * 6) == (
        ReplicaLocation((0, 1)),
        ReplicaLocation((2, 3)),
        ReplicaLocation((4, 5)),
    )
    # Hosts 1 and 4 have died: 2 and 3 stay together, 0 and 5 form a new replica.
    assert locate_replicas([0, 2, 3, 5], shape, [1] * 4) == (ReplicaLocation((0, 3)), ReplicaLocation((1, 2)))
    # One more has died: host 5 is left over.
    assert locate_replicas([2, 3, 5], shape, [1] * 3) == (ReplicaLocation((0, 1)),)


def test_a_host_has_several_replicas_if_the_shape_asks_for_them() -> None:

    def seats(devices: int) -> tuple[ReplicaLocation, ...]:
        return tuple(ReplicaLocation((host,), slot, devices) for host in (0, 1) for slot in (0, 1))

    assert locate_replicas([0, 3], ReplicaShape(per_host=2), [8, 8]) == seats(4)
    assert locate_replicas([0, 3], ReplicaShape(per_host="devices"), [2, 2]) == seats(1)
    with pytest.raises(CallerError, match="found 3 devices on a host, expected a multiple of per_host=2"):
        locate_replicas([0, 3], ReplicaShape(per_host=2), [3, 3])


def test_where_no_host_has_the_devices_of_a_replica_the_error_says_how_to_wait_for_them() -> None:
    shape = ReplicaShape(axes=(("data", 2), ("tensor", 2)))
    assert locate_replicas(range(2), shape, [4, 2]) == (ReplicaLocation((0,), 0, 4),)
    with pytest.raises(CallerError, match="devices_after_loss = 'host'"):
        locate_replicas(range(2), shape, [2, 2])
    with pytest.raises(CallerError, match="devices_after_loss = 'host'"):
        locate_replicas([0], ReplicaShape(per_host=2), [3])


def test_too_few_hosts_for_a_replica_is_an_error() -> None:
    with pytest.raises(CallerError, match=r"found 1 live hosts, expected at least 2"):
        locate_replicas([5], ReplicaShape(hosts=2), [1])


@pytest.mark.parametrize(("hosts", "per_host"), [(0, 1), (2, 2), (1, -1)])
def test_an_impossible_shape_is_an_error(hosts: int, per_host: int) -> None:
    with pytest.raises(CallerError, match=f"hosts={hosts}, per_host={per_host}"):
        ReplicaShape(hosts=hosts, per_host=per_host)


@pytest.mark.parametrize(
    ("shape", "counts", "expected"),
    [
        (ReplicaShape(per_host="devices"), [2, 1, 3], [(1, 1), (1,), (1, 1, 1)]),
        (ReplicaShape(), [8, 8, 4], [(8,), (8,), (4,)]),
        (ReplicaShape(per_host=2), [8, 7, 3], [(4, 4), (4,), (3,)]),
        (ReplicaShape(per_host=4, axes=(("data", 1), ("tensor", 2))), [8, 7, 1], [(2,) * 4, (2,) * 3, ()]),
        (ReplicaShape(per_host="devices", axes=(("data", 1),)), [2, 1], [(1, 1), (1,)]),
        (ReplicaShape(per_host=2, axes=(("data", 4),)), [7, 5], [(4,), (4,)]),
    ],
    ids=[
        "each device",
        "one of all",
        "several",
        "given axes",
        "given axis of one",
        "none has all its devices",
    ],
)
def test_hosts_with_fewer_devices_have_fewer_replicas_which_are_alike(
    shape: ReplicaShape, counts: list[int], expected: list[tuple[int, ...]]
) -> None:
    found = locate_replicas(range(len(counts)), shape, counts)
    by_host = [tuple(one.devices for one in found if one.host_indexes == (h,)) for h in range(len(counts))]
    assert by_host == expected
    speeds = count_working_devices(found, len(counts))
    shares = share_tasks(10 * sum(map(sum, expected)), replica_speeds(found, speeds))
    assert list(shares) == [10 * one.devices for one in found], "in proportion to devices"


def test_a_host_with_too_few_devices_is_no_part_of_a_replica_that_spans_hosts() -> None:
    given = ReplicaShape(hosts=2, axes=(("data", 4),))
    assert locate_replicas(range(3), given, [2, 1, 2]) == (ReplicaLocation((0, 2), 0, 2),)
    assert locate_replicas(range(2), ReplicaShape(hosts=2), [2, 1]) == (ReplicaLocation((0, 1), 0, 1),)
    with pytest.raises(CallerError, match="found 1 live hosts, expected at least 2"):
        locate_replicas(range(2), given, [2, 1])


@pytest.mark.parametrize(("per_host", "count"), [(1, 4), (1, 1), (2, 6)])
def test_axes_that_were_meant_for_other_hosts_are_an_error(per_host: int, count: int) -> None:
    shape = ReplicaShape(per_host=per_host, axes=(("data", 2),))
    with pytest.raises(CallerError, match=r"found axes \{'data': 2\} for a replica of"):
        locate_replicas(range(2), shape, [count, count])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_no_device_is_in_two_replicas(counts: list[int], width: int) -> None:
    most = max(counts)
    axes = (("data", min(width, most)),)
    shape = ReplicaShape(per_host=max(most // min(width, most), 1), axes=axes)
    found = locate_replicas(range(len(counts)), shape, counts)
    used = [sum(one.devices for one in found if one.host_indexes == (host,)) for host in range(len(counts))]
    assert all(mine <= count < mine + min(width, most) for mine, count in zip(used, counts, strict=True))


BY_DEVICES = ReplicaShape(
    per_host="devices",
    axes_by_devices=((3, (("fsdp", 1), ("tensor", 3))), (4, (("fsdp", 2), ("tensor", 1)))),
)


def test_hosts_with_other_numbers_of_devices_may_have_other_axes() -> None:
    three, four = dict(BY_DEVICES.axes_by_devices)[3], dict(BY_DEVICES.axes_by_devices)[4]
    assert locate_replicas([0, 1], BY_DEVICES, [4, 3]) == (
        ReplicaLocation((0,), 0, 2, four),
        ReplicaLocation((0,), 1, 2, four),
        ReplicaLocation((1,), 0, 3, three),
    )
    assert BY_DEVICES.for_host(3) == ReplicaShape(per_host="devices", axes=three)
    assert BY_DEVICES.count_devices(4, [4, 3]) == 2
    assert BY_DEVICES.count_devices(3, [4, 3]) == 3


def test_a_host_without_axes_for_its_devices_is_refused() -> None:
    with pytest.raises(CallerError, match="found a host of 2 devices, and axes_by_devices"):
        locate_replicas([0, 1], BY_DEVICES, [4, 2])
    with pytest.raises(CallerError, match="axes_by_devices together with axes"):
        ReplicaShape(per_host="devices", axes=(("data", 1),), axes_by_devices=BY_DEVICES.axes_by_devices)


def test_hosts_that_form_replicas_anew_keep_their_shards() -> None:
    """Of four hosts in two replicas the first is lost: the second one cannot take its place without its shards."""
    shape = ReplicaShape(hosts=2)
    held = HeldRanks(2, (1, 0, 1))
    found = locate_replicas([1, 2, 3], shape, [1] * 3, held)
    assert [location.host_indexes for location in found] == [(1, 2)]
    # The lost one is back, with nothing, in the next free seat.
    back = locate_replicas([1, 2, 3, 4], shape, [1] * 4, HeldRanks(2, (None, 0, 1, None)))
    assert [location.host_indexes for location in back] == [(0, 3), (1, 2)]
    kept = locate_replicas([1, 2, 3, 4], shape, [1] * 4, HeldRanks(2, (1, 0, 1, None)))
    assert [location.host_indexes for location in kept] == [(1, 2), (3, 0)]


@given(data=st.data(), span=st.integers(2, 4), count=st.integers(2, 12))
def test_as_many_hosts_as_can_be_keep_their_ranks(data: st.DataObject, span: int, count: int) -> None:
    count = max(count, span)
    # Far apart, so that no hosts are neighbors.
    seats = [span * host for host in range(count)]
    ranks = tuple(data.draw(st.sampled_from([None, *range(span)])) for _ in range(count))
    found = locate_replicas(seats, ReplicaShape(hosts=span), [1] * count, HeldRanks(span, ranks))
    hosts = [host for location in found for host in location.host_indexes]
    assert len(set(hosts)) == len(hosts) == count // span * span
    kept = sum(ranks[host] == rank for location in found for rank, host in enumerate(location.host_indexes))
    assert kept == sum(min(len(found), ranks.count(rank)) for rank in range(span))
    # Ranks of replicas that had another number of hosts say nothing.
    others = locate_replicas(seats, ReplicaShape(hosts=span), [1] * count, HeldRanks(span + 1, ranks))
    assert others == locate_replicas(seats, ReplicaShape(hosts=span), [1] * count)
