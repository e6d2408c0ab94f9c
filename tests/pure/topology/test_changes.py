"""`without`, `slowed` and `with_hosts`: new topologies, for any sequence of losses and returns."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.topology import Topology, TopologyError, UnknownHost
from tests.support.topologies import SMALL, host

NAMES = [host.name for host in SMALL.hosts]
names = st.sampled_from(NAMES)
speeds = st.floats(0, 1, exclude_min=True)
some = st.sets(names, max_size=len(NAMES) - 1)


def assert_consistent(topology: Topology) -> None:
    """Assert that precomputed counts and look-ups equal those over all hosts."""
    assert topology.device_count == sum(host.devices for host in topology.hosts)
    counted = {(kind.accelerator, kind.devices, kind.speed): kind.hosts for kind in topology.classes}
    looked = [(host.accelerator, host.devices, host.speed) for host in topology.hosts]
    assert counted == {kind: looked.count(kind) for kind in looked}
    assert all(topology.host(host.name) is host for host in topology.hosts)


@given(lost=some)
def test_without_removes_these_hosts_and_no_others(lost):
    left = SMALL.without(*lost)
    assert [host.name for host in left.hosts] == [name for name in NAMES if name not in lost]
    assert_consistent(left)


@given(lost=some)
def test_hosts_that_come_back_give_the_same_topology(lost):
    assert SMALL.without(*lost).with_hosts([SMALL.host(name) for name in lost]) == SMALL


@given(lost=some)
def test_losing_hosts_one_by_one_equals_losing_them_at_once(lost):
    topology = SMALL
    for name in lost:
        topology = topology.without(name)
    assert topology == SMALL.without(*lost)


@given(name=names, speed=speeds)
def test_slowed_changes_one_host_s_speed_and_nothing_else(name, speed):
    slowed = SMALL.slowed(name, speed)
    assert {host.name: host.speed for host in slowed.hosts} == {
        other: speed if other == name else 1.0 for other in NAMES
    }
    assert slowed.slowed(name, 1) == SMALL
    assert_consistent(slowed)


@given(name=names, first=speeds, second=speeds)
def test_a_speed_is_relative_to_the_healthy_host_whatever_it_was_before(name, first, second):
    assert SMALL.slowed(name, first).slowed(name, second) == SMALL.slowed(name, second)


@given(lost=some, slow=names, speed=speeds)
def test_a_loss_and_a_slowdown_may_come_in_either_order(lost, slow, speed):
    lost = lost - {slow}
    assert SMALL.without(*lost).slowed(slow, speed) == SMALL.slowed(slow, speed).without(*lost)


@given(indices=st.sets(st.integers(8, 40), max_size=6))
def test_new_hosts_bring_their_devices_and_failure_domains(indices):
    more = SMALL.with_hosts(map(host, indices))
    assert more.device_count == SMALL.device_count + 4 * len(indices)
    for index in indices:
        domains = [domain.name for domain in more.failure_domains(f"host-{index}")]
        assert domains == [f"host-{index}", f"rack-{index // 2}", f"pod-{index // 4}"]
    assert_consistent(more)
    assert more.without(*(f"host-{index}" for index in indices)) == SMALL


@given(lost=some, slow=names, speed=speeds)
def test_a_change_does_not_modify_the_original(lost, slow, speed):
    before = copy.deepcopy(SMALL)
    SMALL.without(*lost)
    SMALL.slowed(slow, speed)
    SMALL.with_hosts([host(8)])
    assert before == SMALL


def test_hosts_that_did_not_change_are_shared_and_not_copied():
    slowed = SMALL.slowed("host-3", 0.5)
    assert [a is b for a, b in zip(slowed.hosts, SMALL.hosts, strict=True)].count(False) == 1


def test_losing_no_host_changes_nothing():
    assert SMALL.without() is SMALL


def test_losing_every_host_is_refused():
    with pytest.raises(TopologyError, match="topology 'small': found no hosts, expected at least one"):
        SMALL.without(*NAMES)


def test_a_host_cannot_be_lost_twice():
    with pytest.raises(UnknownHost, match="host 'host-3': found no such host"):
        SMALL.without("host-3").without("host-3")


def test_a_host_that_is_in_the_topology_cannot_be_added_again():
    with pytest.raises(TopologyError, match="host 'host-3': found it twice, expected every host once"):
        SMALL.with_hosts([host(3)])


@pytest.mark.parametrize("speed", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_speed_out_of_range_is_refused_with_the_host(speed):
    with pytest.raises(
        TopologyError, match=r"host 'host-3': speed: found .*, expected a number > 0 and <= 1"
    ):
        SMALL.slowed("host-3", speed)


def test_a_device_is_lost_by_its_host_and_index():
    left = SMALL.without("host-3/1", "host-3/2")
    assert left.device_count == SMALL.device_count - 2
    assert left.host("host-3").living_devices == (0, 3)
    assert left == SMALL.without("host-3/2").without("host-3/1")
    assert_consistent(left)


def test_a_host_that_lost_all_its_devices_or_its_link_is_lost():
    every = [f"host-3/{index}" for index in range(4)]
    assert SMALL.without(*every) == SMALL.without("host-3") == SMALL.without("host-3/link")
    assert SMALL.without("host-3/1", "host-3") == SMALL.without("host-3")


def test_a_slow_device_makes_its_host_wait_until_it_is_healed_or_lost():
    slow = SMALL.slowed("host-3/1", 0.5)
    assert slow.host("host-3").device_speeds == (1.0, 0.5, 1.0, 1.0)
    assert slow.host("host-3").speed == 0.5
    assert slow.slowed("host-3/1", 1) == slow.slowed("host-3", 1) == SMALL
    assert slow.without("host-3/1") == SMALL.without("host-3/1")
    assert_consistent(slow)


def test_a_slow_link_leaves_the_host_s_devices_as_fast_as_they_are():
    slow = SMALL.slowed("host-3/link", 0.25)
    assert (slow.host("host-3").link_speed, slow.host("host-3").speed) == (0.25, 1.0)
    assert slow.slowed("host-3/link", 1) == SMALL


@pytest.mark.parametrize("name", ["host-3/4", "host-3/x", "host-3/-1", "host-3/"])
def test_a_device_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(
        UnknownHost, match=r"expected HOST/INDEX with one of its devices \(0, 1, 2, 3\), or HOST/link"
    ):
        SMALL.without(name)


def test_a_device_is_lost_once():
    left = SMALL.without("host-3/1")
    with pytest.raises(UnknownHost, match=r"one of its devices \(0, 2, 3\)"):
        left.without("host-3/1")


def test_a_speed_of_a_link_out_of_range_is_refused():
    with pytest.raises(TopologyError, match="link: found 2, expected a number > 0 and <= 1"):
        SMALL.slowed("host-3/link", 2)
