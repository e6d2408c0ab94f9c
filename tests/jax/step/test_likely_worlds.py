"""The worlds that may come next: each holds this host, each shape is listed once, a joining host comes last."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.step.likely_worlds import list_likely_worlds


@dataclasses.dataclass(frozen=True, order=True)
class FakeDevice:
    process_index: int
    ordinal: int = 0


def make_devices(counts: Sequence[int], first: int = 0) -> list[FakeDevice]:
    return [FakeDevice(first + host, one) for host, count in enumerate(counts) for one in range(count)]


def list_hosts(counts: Sequence[int], spare: Sequence[int] = (), host: int = 0) -> list[list[int]]:
    """Return the hosts of the likely worlds."""
    found = list_likely_worlds(make_devices(counts), make_devices(spare, 100), host)
    return [list(dict.fromkeys(device.process_index for device in world)) for world in found]


def count_by_host(world: Sequence[FakeDevice]) -> tuple[int, ...]:
    hosts = dict.fromkeys(device.process_index for device in world)
    return tuple(sum(device.process_index == host for device in world) for host in hosts)


def test_of_equal_hosts_three_worlds_come_next_and_the_joining_host_is_last():
    assert list_hosts([2, 2, 2, 2], [2, 2]) == [[0, 2, 3], [0, 1, 2, 3, 100], [0, 3]]


def test_another_host_is_lost_than_this_one():
    assert list_hosts([1, 1, 1], host=1) == [[1, 2], [1]]


@pytest.mark.parametrize(("hosts", "expected"), [(1, []), (2, [[0]])])
def test_a_small_world_loses_what_it_has(hosts: int, expected: list[list[int]]):
    assert list_hosts([1] * hosts) == expected


def test_a_host_alone_may_be_joined():
    assert list_hosts([1], [1]) == [[0, 100]]


def test_hosts_with_other_numbers_of_devices_make_other_worlds():
    assert list_hosts([2, 2, 1]) == [[0, 2], [0, 1], [0]]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=7), st.data())
def test_every_shape_of_a_world_after_one_or_two_losses_is_listed_once(
    counts: list[int], data: st.DataObject
):
    host = data.draw(st.integers(0, len(counts) - 1))
    devices = make_devices(counts)
    found = [count_by_host(world) for world in list_likely_worlds(devices, [], host)]
    assert len(set(found)) == len(found)
    others = [place for place in range(len(counts)) if place != host]
    lost = [{one, other} for one in others for other in others]
    expected = {tuple(count for place, count in enumerate(counts) if place not in gone) for gone in lost}
    assert set(found) == expected


def test_a_large_world_of_hosts_that_differ_is_listed_in_part():
    found = list_hosts([1, 2] * 500)
    assert all(0 in world for world in found)
    assert len(found) < 2000
