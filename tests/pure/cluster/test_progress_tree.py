"""Each host reports to one agent, none to too many, and no host moves when others come and go."""

import random

from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.cluster.progress_tree import FANOUT, ProgressTree
from resilient_jax.ids import HostName


def fill(tree: ProgressTree, count: int) -> list[HostName]:
    names = [HostName(f"h{index}") for index in range(count)]
    for name in names:
        tree.add(name, f"{name}:1")
    return names


def test_a_small_job_reports_to_the_leader_itself():
    tree = ProgressTree()
    assert {tree.find_parent(name) for name in fill(tree, FANOUT)} == {""}


def test_some_thousand_hosts_are_three_levels_and_no_agent_collects_more_than_its_share():
    tree = ProgressTree()
    names = fill(tree, 4096)
    parents = {name: tree.find_parent(name) for name in names}
    loads = [list(parents.values()).count(parent) for parent in set(parents.values())]
    assert max(loads) == FANOUT
    for name in names:
        path = [parents[name]]
        while path[-1]:
            path.append(parents[HostName(path[-1].removesuffix(":1"))])
        assert len(path) <= 3


@given(st.randoms(use_true_random=False))
def test_no_host_moves_unless_its_agent_is_gone_and_then_it_reports_to_the_leader(chance: random.Random):
    tree = ProgressTree()
    names = fill(tree, 3 * FANOUT)
    before = {name: tree.find_parent(name) for name in names}
    lost = set(chance.sample(names, 5))
    for name in lost:
        tree.remove(name)
    for name in set(names) - lost:
        expected = "" if before[name].removesuffix(":1") in lost else before[name]
        assert tree.find_parent(name) == expected
    for name in lost:
        tree.add(name, f"{name}:2")
    assert len(tree) == len(names)
    parents = [tree.find_parent(name) for name in names]
    assert max(parents.count(parent) for parent in set(parents)) == FANOUT


def test_a_host_that_is_unknown_reports_to_the_leader():
    assert ProgressTree().find_parent(HostName("new")) == ""


def test_a_host_whose_agent_does_not_answer_reports_to_the_one_above_it():
    tree = ProgressTree()
    name = fill(tree, 4096)[-1]
    parent = tree.find_parent(name)
    above = tree.find_parent(HostName(parent.removesuffix(":1")))
    assert tree.find_parent(name, {parent}) == above != ""
    assert tree.find_parent(name, {parent, above}) == ""
    tree.remove(HostName(parent.removesuffix(":1")))
    assert tree.find_parent(name) == above
