"""The newest snapshot that can be rebuilt is chosen; if there is none, the reasons are explained."""

import dataclasses
import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPhase, SnapshotStatus
from resilient_jax.snapshot.parity_groups import form_parity_groups
from resilient_jax.snapshot.snapshot_choice import ReportedStatuses, choose_snapshot, explain_loss


def hosts(count):
    return [HostName(f"h{index}") for index in range(count)]


def snapshot(step, generation=1):
    return SnapshotId(step, GenerationNumber(generation))


@dataclasses.dataclass
class Kept:
    """A snapshot with all its groups, as any of its hosts may report it."""

    id: SnapshotId
    groups: Sequence[ParityGroup]
    phase: SnapshotPhase = SnapshotPhase.COMMITTED

    def report(self, host):
        """Return the report of a host, which has only the group of its own; of the first where it is in none."""
        index = next((i for i, group in enumerate(self.groups) if host in group.hosts), 0)
        return SnapshotStatus(
            id=self.id,
            phase=self.phase,
            group=self.groups[index],
            group_index=index,
            num_groups=len(self.groups),
            nbytes=1,
            wall_s=0.0,
        )


def reports(held):
    """Return the reports of hosts, from the snapshots of each."""
    return {host: (f"{host}:1", tuple(kept.report(host) for kept in some)) for host, some in held.items()}


@pytest.mark.parametrize(("n", "m"), [(1, 0), (3, 0), (4, 1), (5, 2), (6, 3)])
def test_a_snapshot_is_recoverable_exactly_if_no_group_lost_more_than_its_parity(n, m):
    group = ParityGroup(hosts=tuple(hosts(n)), parity=m)
    for count in range(n):
        for lost in combinations(group.hosts, count):
            left = {host: [Kept(snapshot(4), [group])] for host in group.hosts if host not in lost}
            plan = choose_snapshot(reports(left))
            assert (plan is not None) == (count <= m)
            if plan is not None:
                assert (plan.id, plan.groups) == (snapshot(4), (group,))
                assert [(source.host, source.endpoint) for source in plan.sources] == [
                    (h, f"{h}:1") for h in left
                ]


@given(st.integers(1, 20), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_newest_snapshot_with_enough_hosts_in_every_group_is_chosen(count, parity, rng: random.Random):
    ids = sorted({snapshot(rng.randrange(5), rng.randrange(3)) for _ in range(3)}, reverse=True)
    groups = {each: form_parity_groups(rng.sample(hosts(count), count), parity, group_size=5) for each in ids}
    holders = {each: set(rng.sample(hosts(count), rng.randint(0, count))) for each in ids}
    held = {
        host: [Kept(each, groups[each]) for each in ids if host in holders[each]] for host in hosts(count)
    }
    expected = next(
        (
            each
            for each in ids
            if all(len(holders[each].intersection(g.hosts)) >= len(g.hosts) - g.parity for g in groups[each])
        ),
        None,
    )
    plan = choose_snapshot(reports(held))
    assert (plan and plan.id) == expected
    if plan is not None:
        assert {source.host for source in plan.sources} == holders[plan.id]
    else:
        assert "can be rebuilt. " in explain_loss(reports(held)) or "no complete" in explain_loss(
            reports(held)
        )


def test_an_older_snapshot_that_tolerates_more_losses_is_preferred_to_an_incomplete_one():
    """With parity 2, the loss of a second host must not destroy the last snapshot that can be rebuilt."""
    group = ParityGroup(hosts=tuple(hosts(4)), parity=2)

    def left(phase: SnapshotPhase, holders: list[HostName]) -> ReportedStatuses:
        newer = [Kept(snapshot(2), [group], phase)]
        return reports({h: [Kept(snapshot(1), [group]), *(newer if h in holders else [])] for h in left_over})

    left_over = hosts(3)
    two, three = left_over[1:], left_over
    for phase, holders, step in [
        (SnapshotPhase.COMPLETE, two, 1),
        (SnapshotPhase.COMPLETE, three, 2),  # tolerates as many losses
        (SnapshotPhase.COMMITTED, two, 2),  # the older one may be overwritten at any time
    ]:
        plan = choose_snapshot(left(phase, holders))
        assert plan is not None
        assert plan.id == snapshot(step)


def test_reports_with_different_groups_are_not_combined():
    one, other = (
        ParityGroup(hosts=tuple(hosts(3)), parity=1),
        ParityGroup(hosts=tuple(reversed(hosts(3))), parity=1),
    )
    held = {host: [Kept(snapshot(1), [one if host != "h2" else other])] for host in hosts(3) if host != "h0"}
    assert choose_snapshot(reports(held)) is None


def test_a_host_that_is_in_no_group_is_ignored():
    group = ParityGroup(hosts=tuple(hosts(2)), parity=0)
    held = {host: [Kept(snapshot(1), [group])] for host in [HostName("h0"), HostName("x")]}
    assert choose_snapshot(reports(held)) is None


def test_the_explanation_lists_losses_and_survivors_of_each_snapshot():
    groups = [
        ParityGroup(hosts=tuple(hosts(3)), parity=1),
        ParityGroup(hosts=(HostName("x"), HostName("y")), parity=1),
    ]
    older = [ParityGroup(hosts=(HostName("x"), HostName("y"), HostName("z")), parity=0)]
    held = {
        HostName("h0"): [Kept(snapshot(12, 3), groups)],
        HostName("x"): [Kept(snapshot(12, 3), groups), Kept(snapshot(8, 2), older)],
        HostName("y"): [Kept(snapshot(8, 2), older), Kept(snapshot(4, 2), older)],
    }
    assert choose_snapshot(reports(held)) is None
    assert explain_loss(reports(held)) == (
        "no snapshot in host memory can be rebuilt. "
        "the snapshot of step 12 (generation 3): of a group of 3 hosts 1 may be lost, and h1, h2 are; h0 survives; "
        "1 of its 2 groups can be rebuilt. "
        "the snapshot of step 8 (generation 2): of a group of 3 hosts none may be lost, and z is; x, y survive. "
        "1 older one is incomplete as well"
    )


def test_the_explanation_covers_hosts_without_a_snapshot_and_no_hosts():
    assert explain_loss({}) == (
        "there is no complete snapshot in host memory: no host answers; training can only resume from a checkpoint"
    )
    assert "none of the 2 hosts that answer has one" in explain_loss(reports({host: [] for host in hosts(2)}))


def test_a_group_of_which_no_host_is_left_cannot_be_rebuilt():
    groups = [ParityGroup(hosts=(HostName(a), HostName(b)), parity=1) for a, b in ("ab", "cd")]
    held = {HostName(host): [Kept(snapshot(7), groups)] for host in "ab"}
    assert choose_snapshot(reports(held)) is None
    assert explain_loss(reports(held)) == (
        "no snapshot in host memory can be rebuilt. the snapshot of step 7 (generation 1): of 1 of its 2 groups no "
        "host is left; 1 of its 2 groups can be rebuilt"
    )
    held[HostName("c")] = [Kept(snapshot(7), groups)]
    plan = choose_snapshot(reports(held))
    assert plan is not None
    assert [source.host for source in plan.sources] == ["a", "b", "c"]
