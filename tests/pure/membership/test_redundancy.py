"""How many more hosts may be lost before the state is: copies and parity together, against every set of losses."""

import itertools
import random
from collections.abc import Set

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.machine import HostLeft
from resilient_jax.membership.redundancy import Redundancy, RedundancyTally, measure_redundancy
from resilient_jax.protocol.generation import GenerationPhase
from resilient_jax.protocol.host_status import WorkerStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.snapshots import (
    ParityGroup,
    SnapshotId,
    SnapshotPhase,
    SnapshotPlan,
    SnapshotSource,
    SnapshotStatus,
)
from resilient_jax.protocol.state_records import StatePart, are_parts_complete
from resilient_jax.protocol.worker_report import WorkerState
from tests.support.membership_job import Job, keep, server, sharded, snapshot, training


def plan(groups: list[tuple[str, int]], missing: str = "") -> SnapshotPlan:
    """Return a plan of groups of hosts with parity, which some hosts do not have."""
    return SnapshotPlan(
        id=SnapshotId(5, GenerationNumber(1)),
        groups=tuple(ParityGroup(hosts=tuple(map(HostName, hosts)), parity=m) for hosts, m in groups),
        sources=tuple(
            SnapshotSource(host=HostName(host), endpoint="")
            for hosts, _ in groups
            for host in hosts
            if host not in missing
        ),
    )


def count_survivable_losses(copies: Set[HostName], snapshot: SnapshotPlan | None) -> int:
    """Return the largest n such that the state outlives the loss of any n hosts; -1 if there is no state."""
    if snapshot is None:
        return len(copies) - 1
    sources = {source.host for source in snapshot.sources}
    more = [
        max(0, group.parity - sum(host not in sources or host in copies for host in group.hosts) + 1)
        for group in snapshot.groups
    ]
    return len(copies) + min(more, default=0) - 1


def names(hosts: str) -> set[HostName]:
    return set(map(HostName, hosts))


def survives(lost: set[HostName], copies: set[HostName], kept: SnapshotPlan | None) -> bool:
    """Return whether the state outlives the loss of these hosts, straight from the definition."""
    if copies - lost:
        return True
    if kept is None:
        return False
    sources = {source.host for source in kept.sources} - lost
    return all(len(set(group.hosts) - sources) <= group.parity for group in kept.groups)


@pytest.mark.parametrize(
    ("copies", "groups", "missing", "losses"),
    [
        ("abcd", None, "", 3),
        ("a", None, "", 0),
        ("", None, "", -1),
        ("", [("abcd", 1)], "", 1),
        ("", [("abcd", 2)], "", 2),
        ("", [("abcd", 1)], "d", 0),
        ("", [("abcd", 2), ("efgh", 1)], "", 1),
        ("abcd", [("abcd", 1)], "", 3),
        ("a", [("abcd", 1)], "", 1),
        ("a", [("abcd", 1)], "a", 1),
        ("e", [("abcd", 1)], "", 2),
        ("ab", [("abcd", 1), ("efgh", 1)], "", 1),
        ("abc", [("abcd", 1), ("efgh", 1)], "", 2),
    ],
)
def test_copies_and_parity_together(copies, groups, missing, losses):
    assert (
        count_survivable_losses(names(copies), plan(groups, missing) if groups is not None else None)
        == losses
    )


@given(
    copies=st.sets(st.sampled_from("abcdef")),
    parity=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    missing=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_no_set_of_so_many_losses_is_fatal_and_one_of_one_more_is(copies, parity, missing):
    lack = "abc"[: min(parity[0], missing[0])] + "def"[: min(parity[1], missing[1])]
    kept = plan([("abc", parity[0]), ("def", parity[1])], lack)
    held = names("".join(copies))
    losses = count_survivable_losses(held, kept)
    for count in range(7):
        fates = {survives(set(lost), held, kept) for lost in itertools.combinations(names("abcdef"), count)}
        assert (fates == {True}) is (count <= losses)


def measure(job: Job) -> Redundancy | None:
    return measure_redundancy(job.state)


def test_a_job_without_a_committed_step_has_nothing_to_lose():
    job = Job("a", "b")
    job.serve()
    job.form()
    assert measure(job) is None
    assert job.generation.record.losses_left is None


def test_living_members_with_the_state_count_and_the_generation_says_so():
    job = training("a", "b", "c", step=5)
    assert measure(job) == Redundancy(losses=2, step=5, copies=3)
    assert job.generation.record.losses_left == 2
    job.worker("b", exit_code=-9)
    assert (job.phase, job.generation.record.losses_left) == (GenerationPhase.QUIESCE, 1)
    job.worker("c", is_unresponsive=True)
    assert job.generation.record.losses_left == 0


def test_a_host_counts_only_once_it_has_the_state():
    job = training("a", "b")
    job.worker("b", exit_code=-9)
    job.restart("b")
    job.acknowledge("a", step=5)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "b"])
    assert job.generation.record.losses_left == 0
    job.report("b", holds_state=True, step=5)  # of an earlier generation, and given up for what a has
    assert measure(job) == Redundancy(losses=0, step=5, copies=1)
    job.form("a")
    job.form("b")
    assert (job.phase, job.generation.record.losses_left) == (GenerationPhase.ACTIVE, 1)


def test_the_parity_of_a_sharded_state_counts_with_the_hosts_that_are_there():
    job = sharded("abcd", parity=2)
    assert measure(job) == Redundancy(losses=2, step=5, copies=0, snapshot=SnapshotId(5, GenerationNumber(1)))
    assert job.generation.record.losses_left == 2
    job.give(HostLeft(HostName("d")))
    assert job.generation.record.losses_left == 1
    job.give(HostLeft(HostName("c")))
    assert job.generation.record.losses_left == 0
    job.give(HostLeft(HostName("b")))
    assert measure(job) is None


def test_a_snapshot_that_some_hosts_have_yet_to_report_changes_nothing():
    job = sharded("abc")
    published = len(job.published)
    older = snapshot(5, "abc")
    for step in (6, 7, 8):
        new = snapshot(step, "abc")
        for name in "abc":
            keep(job, name, older, new)
        older = msgspec.structs.replace(new, phase=SnapshotPhase.COMMITTED)
        keep(job, "a", older, snapshot(step + 1, "abc"))
        keep(job, "b", snapshot(step - 1, "abc"))  # its newest report is lost for a while
        assert job.generation.record.losses_left == 1
    assert len(job.published) == published


def test_redundancy_that_comes_back_is_published_once():
    job = sharded("abc")
    job.change("c", snapshots=())
    assert job.generation.record.losses_left == 0
    published = len(job.published)
    keep(job, "c", snapshot(5, "abc"))
    assert job.generation.record.losses_left == 1
    assert len(job.published) == published + 1


def survives_in_parts(
    lost: set[HostName], parts: dict[HostName, StatePart], kept: SnapshotPlan | None
) -> bool:
    """Return whether all units, or the snapshot, outlive the loss of these hosts, straight from the definition."""
    if are_parts_complete(part for host, part in parts.items() if host not in lost):
        return True
    return kept is not None and survives(lost, set(), kept)


@given(seed=st.integers(0, 2**32), has_snapshot=st.booleans())
def test_no_set_of_so_many_losses_costs_a_state_in_parts_and_one_of_one_more_does(seed, has_snapshot):
    chance = random.Random(seed)
    job = training(*"abcdef", step=5)
    hosts = dict(job.state.hosts)
    state = MembershipState(generation=job.generation, hosts=hosts, phase_since_s=0.0)
    tally = RedundancyTally(state)
    groups = (("abc", chance.randrange(3)), ("def", chance.randrange(3)))
    missing = "".join(name for name in "abcdef" if chance.random() < 0.1)
    parts: dict[HostName, StatePart] = {}
    for name in names("abcdef"):
        units = [unit for unit in range(5) if chance.random() < 0.4]
        part = StatePart.from_units(units, 5) if units else None
        members, parity = groups[name in "def"]
        kept = SnapshotStatus(
            id=SnapshotId(5, GenerationNumber(1)),
            phase=SnapshotPhase.COMMITTED,
            group=ParityGroup(hosts=tuple(map(HostName, members)), parity=parity),
            group_index=name in "def",
            num_groups=2,
            nbytes=1,
            wall_s=0.0,
        )
        status = change_fields(
            job.status(name),
            snapshot_server=server(name),
            snapshots=(kept,) if has_snapshot and name not in missing else (),
        )
        assert status.worker is not None
        report = change_fields(status.worker.report, holds_state=False, part=part)
        worker = msgspec.structs.replace(status.worker, report=report)
        hosts[name] = change_fields(status, worker=worker)
        tally.look_at(name)
        if part is not None:
            parts[name] = part
    found = tally.measure()
    assert found == measure_redundancy(state)
    plan_of_all = plan(list(groups), missing) if has_snapshot else None
    is_there = survives_in_parts(set(), parts, plan_of_all)
    assert (found is not None) == is_there
    for count in range(7):
        fates = {
            survives_in_parts(set(lost), parts, plan_of_all)
            for lost in itertools.combinations(sorted(hosts), count)
        }
        assert (fates == {True}) is (found is not None and count <= found.losses)


def starting(job: Job, name: str) -> None:
    """Restart the worker of a host, which imports its libraries."""
    job.worker(name, exit_code=-9)
    dead = job.worker_of(name)
    job.change(name, worker=WorkerStatus(incarnation=type(dead.incarnation)(dead.incarnation + 1), pid=2))


def test_members_with_the_last_copy_wait_some_seconds_for_a_worker_that_starts():
    job = training("a", "b")
    starting(job, "b")
    job.acknowledge("a", step=5)
    assert job.phase is GenerationPhase.QUIESCE
    job.pass_time(4.0)
    assert job.phase is GenerationPhase.QUIESCE
    job.report("b", state=WorkerState.IDLE)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "b"])


def test_they_go_on_without_it_if_it_takes_longer_and_others_do_not_wait_at_all():
    job = training("a", "b")
    starting(job, "b")
    job.acknowledge("a", step=5)
    job.pass_time(5.5)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a"])
    job = training("a", "b", "c")
    starting(job, "c")
    job.acknowledge("a", "b", step=5)
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "b"])
    job = training("a", "b")
    whole = SnapshotStatus(
        id=SnapshotId(5, GenerationNumber(1)),
        phase=SnapshotPhase.COMMITTED,
        group=ParityGroup(hosts=(HostName("a"), HostName("b")), parity=1),
        group_index=0,
        num_groups=1,
        nbytes=1,
        wall_s=0.0,
    )
    keep(job, "ab", whole)
    assert job.status("b").snapshot_server == server("b")
    starting(job, "b")
    job.acknowledge("a", step=5)
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a"]), "b's server has its share of the state"


def measure_by_definition(state: MembershipState) -> int | None:
    """Return the losses of the safest snapshot, each looked at with all its hosts."""
    members = {m.host for m in state.generation.membership.members}
    copies = {
        host
        for host, status in state.hosts.items()
        if host in members and status.worker is not None and status.worker.report.held.holds_state
    }
    held = {host: {s.id: s for s in status.snapshots} for host, status in state.hosts.items()}
    committed = [s.id for kept in held.values() for s in kept.values() if s.phase is SnapshotPhase.COMMITTED]
    found = []
    for id in sorted({id for kept in held.values() for id in kept}, reverse=True):
        fits = (
            (lambda other, id=id: other.generation == id.generation)
            if id == max(committed, default=None)
            else (lambda other, id=id: other == id)
        )
        sources = {host for host, kept in held.items() if any(map(fits, kept))}
        kept = msgspec.structs.replace(
            plan([("abc", 1), ("defg", 2)], "".join(set("abcdefg") - sources)), id=id
        )
        if all(len(set(group.hosts) - sources) <= group.parity for group in kept.groups):
            found.append(kept)
        if found and id in committed:
            break
    if not copies and not found:
        return None
    return max(count_survivable_losses(copies, kept) for kept in [None, *found])


@given(seed=st.integers(0, 2**32))
def test_counting_host_by_host_gives_what_looking_at_all_of_them_gives(seed):
    chance = random.Random(seed)
    job = training(*"abcdefg", step=5)
    hosts = dict(job.state.hosts)
    state = MembershipState(generation=job.generation, hosts=hosts, phase_since_s=0.0)
    tally = RedundancyTally(state)
    for _ in range(40):
        name = HostName(chance.choice("abcdefg"))
        if chance.random() < 0.1:
            hosts.pop(name, None)
        else:
            group = (("abc", 1), ("defg", 2))[name in "defg"]
            kept = tuple(
                SnapshotStatus(
                    id=SnapshotId(step, GenerationNumber(step // 2)),
                    phase=chance.choice(list(SnapshotPhase)),
                    group=ParityGroup(hosts=tuple(map(HostName, group[0])), parity=group[1]),
                    group_index=group[0] == "defg",
                    num_groups=2,
                    nbytes=1,
                    wall_s=0.0,
                )
                for step in sorted(chance.sample(range(2, 6), chance.choice((0, 1, 2, 2, 2))))
            )
            status = change_fields(job.status(name), snapshot_server=server(name), snapshots=kept)
            assert status.worker is not None
            report = change_fields(status.worker.report, holds_state=chance.random() < 0.2)
            hosts[name] = change_fields(status, worker=msgspec.structs.replace(status.worker, report=report))
        tally.look_at(name)
        found = tally.measure()
        assert found == measure_redundancy(state)
        assert (found.losses if found is not None else None) == measure_by_definition(state)
