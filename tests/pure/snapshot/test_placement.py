"""Parity groups of any number of hosts: equal in size, larger than their parity, with failure domains spread."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import SnapshotRefused
from resilient_jax.ids import HostName
from resilient_jax.snapshot.parity_groups import MAX_GROUP_SIZE, describe_weaknesses, form_parity_groups

sizes = st.integers(5, 12)


def hosts(count):
    return [HostName(f"h{index}") for index in range(count)]


@pytest.mark.parametrize("parity", range(5))
@pytest.mark.parametrize("count", range(1, 41))
@given(size=sizes)
def test_every_host_is_in_one_group_of_about_the_requested_size(count, parity, size):
    groups = form_parity_groups(hosts(count), parity, group_size=size)
    assert sorted(host for group in groups for host in group.hosts) == sorted(hosts(count))
    lengths = [len(group.hosts) for group in groups]
    assert max(lengths) - min(lengths) <= 1
    assert {group.parity for group in groups} == {min(parity, count - 1)}
    assert min(lengths) > groups[0].parity
    # At most one and a half times the requested size; otherwise there would be one more group.
    assert max(lengths) <= max(-(-3 * size // 2), 2 * groups[0].parity + 1)


@given(st.integers(1, 40), st.integers(1, 4), sizes, st.data())
def test_parity_covers_every_failure_domain_if_any_grouping_achieves_that(count, parity, size, data):
    racks = data.draw(st.integers(1, 12))
    rack_of = {
        host: f"rack{data.draw(st.integers(0, racks - 1))}"
        for host in hosts(count)
        if data.draw(st.integers(0, 9))  # one host in ten is not in the topology
    }
    groups = form_parity_groups(hosts(count), parity, group_size=size, domain_of=rack_of)
    lengths = [len(group.hosts) for group in groups]
    assert sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1
    kept = groups[0].parity
    assert min(lengths) > kept
    # Every group has more than m hosts: there are at most count // (m + 1) groups, each with at most m of a domain.
    largest = Counter(rack_of.values())
    possible = {rack for rack, members in largest.items() if members <= kept * (count // (kept + 1))}
    exposed = {
        rack
        for group in groups
        for rack, members in Counter(rack_of[host] for host in group.hosts if host in rack_of).items()
        if members > kept > 0
    }
    assert exposed.isdisjoint(possible)
    said = " ".join(describe_weaknesses(groups, parity, rack_of))
    assert {rack for rack in largest if f"failure domain {rack} " in said} == exposed
    assert ("was asked for" in said) == (kept < parity)


def test_two_racks_of_four_with_parity_two_form_groups_with_two_of_each():
    rack_of = {host: f"rack{index // 4}" for index, host in enumerate(hosts(8))}
    groups = form_parity_groups(hosts(8), 2, domain_of=rack_of)
    assert [sorted(rack_of[host] for host in group.hosts) for group in groups] == [
        ["rack0", "rack0", "rack1", "rack1"]
    ] * 2
    assert describe_weaknesses(groups, 2, rack_of) == ()


def test_weaker_protection_than_requested_is_described():
    groups = form_parity_groups(hosts(3), 4)
    assert [(group.hosts, group.parity) for group in groups] == [(("h0", "h1", "h2"), 2)]
    rack_of = dict.fromkeys(hosts(3), "r")
    assert describe_weaknesses(groups, 4, rack_of) == (
        "parity is 2, 4 was asked for: there are 3 hosts, and 4 parity needs 5",
        "losing failure domain r loses snapshots: it has 3 hosts of a group of 3 (h0, h1, h2), whose parity covers 2",
    )


def test_groups_follow_from_the_arguments_alone():
    rack_of = {host: f"rack{index % 3}" for index, host in enumerate(hosts(11))}
    shuffled = dict(reversed(rack_of.items()))
    assert form_parity_groups(hosts(11), 2, domain_of=rack_of) == form_parity_groups(
        hosts(11), 2, domain_of=shuffled
    )


def test_a_group_keeps_the_order_of_the_hosts():
    assert [group.hosts for group in form_parity_groups(hosts(5), 1, group_size=2)] == [
        ("h0", "h2", "h4"),
        ("h1", "h3"),
    ]


def test_no_hosts_form_no_groups_and_one_host_forms_a_group_without_parity():
    assert form_parity_groups([], 2) == ()
    assert [(group.hosts, group.parity) for group in form_parity_groups(hosts(1), 2)] == [(("h0",), 0)]


def test_groups_do_not_exceed_the_shards_of_the_code():
    groups = form_parity_groups(hosts(300), 4, group_size=MAX_GROUP_SIZE)
    assert [len(group.hosts) for group in groups] == [150, 150]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 8, 8), "group size: found 8 with parity 8, expected from 9 to 255 hosts"),
        ((8, 1, 256), "group size: found 256 with parity 1, expected from 2 to 255 hosts"),
        ((8, -1, 8), r"parity: found -1, expected 0 \(no protection\) or more"),
        ((300, 200, 255), "300 hosts with parity 200: found no groups .* lower the parity to 149"),
    ],
)
def test_impossible_group_sizes_are_refused_with_possible_ones(arguments, words):
    count, parity, size = arguments
    with pytest.raises(SnapshotRefused, match=words):
        form_parity_groups(hosts(count), parity, group_size=size)


def test_the_parity_that_a_refusal_proposes_is_possible():
    assert [len(group.hosts) for group in form_parity_groups(hosts(300), 149, group_size=255)] == [150, 150]


def test_a_host_that_is_listed_twice_is_refused():
    with pytest.raises(SnapshotRefused, match="hosts h1 are named twice"):
        form_parity_groups([*hosts(3), HostName("h1")], 1)
