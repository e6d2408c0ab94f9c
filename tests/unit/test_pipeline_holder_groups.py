"""Groups of blocks with the same holders: a partition, in one order that cannot deadlock."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.errors import HoldersLost
from resilient_jax.pipeline_schedule.holder_groups import HolderGroup, group_blocks, make_rounds
from resilient_jax.pipeline_schedule.routes import find_holders
from tests.support.pipeline_layouts import layouts

A, B, C, D = map(HostName, "abcd")
any_holders = st.lists(st.sets(st.sampled_from([A, B, C, D]), min_size=1), min_size=1, max_size=8)


@given(any_holders)
def test_every_block_is_in_the_group_of_exactly_its_holders(holders):
    groups = group_blocks(holders)
    assert sorted(block for group in groups for block in group.blocks) == list(range(len(holders)))
    assert all(set(group.hosts) == holders[block] for group in groups for block in group.blocks)
    assert len({group.hosts for group in groups}) == len(groups)


@given(any_holders, st.data())
def test_groups_are_in_one_order_whatever_the_order_of_holders(holders, data):
    groups = group_blocks(holders)
    assert [group.blocks[0] for group in groups] == sorted(group.blocks[0] for group in groups)
    assert groups == group_blocks([data.draw(st.permutations(sorted(hosts))) for hosts in holders])


@given(any_holders, st.data())
def test_tied_blocks_are_in_one_group_with_the_holders_of_all_of_them(holders, data):
    blocks = st.integers(0, len(holders) - 1)
    tied = data.draw(st.lists(st.sets(blocks, min_size=1), max_size=3))
    groups = group_blocks(holders, tied=tied)
    assert sorted(block for group in groups for block in group.blocks) == list(range(len(holders)))
    group_of = {block: group for group in groups for block in group.blocks}
    for blocks_of_weight in tied:
        (group,) = {group_of[block] for block in blocks_of_weight}
        assert set().union(*(holders[block] for block in blocks_of_weight)) <= set(group.hosts)


def test_sets_of_tied_blocks_that_share_a_block_are_one_group():
    groups = group_blocks([{A}, {B}, {C}, {D}], tied=[{0, 1}, {2, 3}, {1, 2}])
    assert groups == (HolderGroup((0, 1, 2, 3), (A, B, C, D)),)


def test_dead_holders_are_in_no_group_and_blocks_without_others_are_an_error():
    assert group_blocks([{A, B}, {B}], dead=[A]) == (HolderGroup((0, 1), (B,)),)
    with pytest.raises(HoldersLost, match="blocks 1: found no living holder"):
        group_blocks([{A, B}, {B}], dead=[B])


@given(any_holders)
def test_groups_of_a_round_share_no_host_and_all_groups_are_in_a_round(holders):
    groups = group_blocks(holders)
    rounds = make_rounds(groups)
    assert sorted(group for found in rounds for group in found) == sorted(groups)
    for found in rounds:
        hosts = [host for group in found for host in group.hosts]
        assert len(hosts) == len(set(hosts))
        assert list(found) == sorted(found)


@given(any_holders)
def test_hosts_that_run_collectives_one_at_a_time_in_order_of_rounds_never_wait_in_a_cycle(holders):
    listed = [group for found in make_rounds(group_blocks(holders)) for group in found]
    left = {host: [group for group in listed if host in group.hosts] for host in (A, B, C, D)}
    while any(left.values()):
        runnable = [group for group in listed if all(left[host][:1] == [group] for host in group.hosts)]
        assert runnable
        for host in runnable[0].hosts:
            left[host].pop(0)


@given(layouts(min_teams=2))
def test_stages_need_as_many_rounds_as_one_host_has_groups(layout):
    groups = group_blocks(find_holders(layout[0]))
    counts = collections.Counter(host for group in groups for host in group.hosts)
    assert len(make_rounds(groups)) == max(counts.values())
