"""Hosts that were started as spares: they wait with a seat, and take the place of the first host that is missing."""

import pytest
from membership_job import Job, keep, sharded, snapshot, stop_at_boundary, training

from resilient_jax.errors import ExitCode
from resilient_jax.ids import HostName, Incarnation
from resilient_jax.membership.facts import MembershipState
from resilient_jax.membership.machine import HostLeft
from resilient_jax.membership.redundancy import measure_redundancy
from resilient_jax.membership.spare_hosts import list_unseated, list_used
from resilient_jax.protocol.records import (
    GenerationPhase,
    JobOutcomeKind,
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
    WorkerStatus,
    WorldChange,
)

TRAINS = GenerationPhase.ACTIVE


def spared(*names: str, spares: str = "s", **config) -> Job:
    """Return a job whose hosts train, with spares that wait in their seats."""
    job = training(*names, **{"spare_seats": 8, **config})
    for name in spares:
        job.spare(name)
    assert (job.phase, job.members) == (TRAINS, list(names))
    return job


def lose(job: Job, *names: str, step: int = 6) -> None:
    """Lose hosts; the members that are left stop with the state of `step`."""
    left = [name for name in job.members if name not in names]
    for name in names:
        job.give(HostLeft(HostName(name)))
    job.acknowledge(*left, step=step, holds_state=True)
    for name in job.state.hosts:
        newcomer = job.generation.find_newcomer(name, job.worker_of(name).incarnation)
        if newcomer is not None and job.worker_of(name).report.state is WorkerState.IDLE:
            job.report(name, generation=job.generation.number)


def go_on(job: Job, step: int) -> None:
    job.form()
    job.train(step)


def come_back(job: Job, name: str, incarnation: int = 2) -> None:
    """Have a host that was lost register again, and be ready."""
    report = WorkerReport(state=WorkerState.IDLE)
    job.change(name, worker=WorkerStatus(incarnation=Incarnation(incarnation), pid=2, report=report))
    job.take_seat(name)


def test_a_spare_waits_with_a_seat_and_nothing_changes():
    job = training("a", "b", "c", spare_seats=2)
    number = job.generation.number
    job.spare("s")
    assert [m.host for m in job.generation.newcomers] == ["s"]
    job.wait(1000.0)
    assert (job.phase, job.members, job.generation.number) == (TRAINS, list("abc"), number)
    assert job.generation.max_members == 3


def test_a_spare_takes_part_in_the_generation_that_follows_the_loss():
    job = spared("a", "b", "c")
    world = job.generation.world
    lose(job, "b")
    new = job.generation
    assert (new.phase, new.change, new.world, job.members) == (
        GenerationPhase.FORM,
        WorldChange.GROW,
        world,
        ["a", "c", "s"],
    )
    assert (new.receivers, {s.host for s in new.sources}) == (("s",), {"a", "c"})
    go_on(job, 7)
    assert job.phase is TRAINS


def test_the_last_host_that_is_left_goes_on_in_place_with_a_spare():
    job = spared("a", "b")
    world = job.generation.world
    lose(job, "b")
    assert (job.generation.change, job.generation.world) == (WorldChange.GROW, world)
    assert job.members == ["a", "s"]


def test_the_host_that_is_back_is_the_spare_from_then_on_and_fills_the_next_place():
    job = spared("a", "b", "c")
    lose(job, "b")
    go_on(job, 7)
    number = job.generation.number
    come_back(job, "b")
    job.wait(1000.0)
    assert (job.phase, job.members, job.generation.number) == (TRAINS, ["a", "c", "s"], number)
    assert [m.host for m in job.generation.newcomers] == ["b"]
    lose(job, "s", step=8)
    assert (job.generation.change, sorted(job.members)) == (WorldChange.GROW, ["a", "b", "c"])


def test_a_spare_that_is_not_ready_at_the_loss_joins_at_the_next_step_boundary():
    job = training("a", "b", "c", spare_seats=2)
    job.report("s", state=WorkerState.STARTING)
    job.change("s", is_spare=True)
    lose(job, "b")
    assert (job.generation.change, job.members) == (WorldChange.SHRINK, ["a", "c"])
    go_on(job, 7)
    job.spare("s")
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "s asked to join")
    stop_at_boundary(job, 8)
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "c", "s"])


def test_a_spare_that_loads_its_programs_at_the_loss_is_not_waited_for():
    job = training("a", "b", "c", spare_seats=2)
    job.report("s", state=WorkerState.STARTING)
    job.change("s", is_spare=True)
    job.report("s", state=WorkerState.IDLE)
    job.report("s", state=WorkerState.PREPARING, seat=job.find_seat("s"))
    lose(job, "b")
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "c"])
    assert [m.host for m in job.generation.newcomers] == ["s"], "it keeps its seat"


def test_a_worker_that_dies_is_replaced_by_the_spare_and_its_successor_spares():
    job = spared("a", "b", "c")
    job.worker("b", exit_code=-9)
    job.acknowledge("a", "c", step=6, holds_state=True)
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "c", "s"])
    go_on(job, 7)
    job.restart("b")
    job.take_seat("b")
    job.wait(100.0)
    assert (job.phase, job.members) == (TRAINS, ["a", "c", "s"])


def test_a_spare_takes_the_place_of_a_host_that_got_a_notice_at_the_same_boundary():
    job = spared("a", "b", "c")
    job.change("b", is_draining=True)
    assert job.phase is GenerationPhase.PAUSE
    stop_at_boundary(job, 8)
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "c", "s"])
    assert job.generation.max_members == 3


def test_a_spare_that_dies_changes_nothing():
    job = spared("a", "b", "c")
    number = job.generation.number
    job.worker("s", exit_code=-9)
    job.give(HostLeft(HostName("s")))
    assert (job.phase, job.generation.number) == (TRAINS, number)
    lose(job, "b")
    assert (job.generation.change, job.members) == (WorldChange.SHRINK, ["a", "c"])


def test_of_two_lost_hosts_one_spare_replaces_one_and_the_first_that_is_back_the_other():
    job = spared("a", "b", "c", "d")
    lose(job, "b", "c")
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "d", "s"])
    go_on(job, 7)
    come_back(job, "c")
    assert job.phase is GenerationPhase.PAUSE
    stop_at_boundary(job, 8)
    assert job.members == ["a", "d", "s", "c"]
    go_on(job, 9)
    come_back(job, "b")
    job.wait(100.0)
    assert (job.phase, job.members) == (TRAINS, ["a", "d", "s", "c"])


def test_of_two_spares_only_one_takes_one_place():
    job = spared("a", "b", "c", spares="st")
    lose(job, "b")
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "c", "s"])
    assert [m.host for m in job.generation.newcomers] == ["t"]
    go_on(job, 7)
    job.wait(100.0)
    assert (job.phase, job.members) == (TRAINS, ["a", "c", "s"])


def test_a_host_that_was_never_there_and_is_no_spare_makes_the_job_larger_and_has_the_new_place():
    job = spared("a", "b", "c")
    job.report("d", state=WorkerState.STARTING)
    assert job.phase is TRAINS, "a place is there when its host is ready"
    job.report("d", state=WorkerState.IDLE)
    job.take_seat("d")
    stop_at_boundary(job, 8)
    assert (job.members, job.generation.max_members) == (["a", "b", "c", "d"], 4)
    go_on(job, 9)
    lose(job, "d", step=9)
    assert job.members == ["a", "b", "c", "s"]


def test_a_host_under_another_name_in_the_place_of_a_dead_one_leaves_the_number_of_places():
    job = training("a", "b", "c", spare_seats=8)
    job.report("e", state=WorkerState.IDLE)
    job.take_seat("e")
    assert job.phase is GenerationPhase.PAUSE, "the lease of c is still valid"
    job.spare("s")
    lose(job, "c")
    assert (job.members, job.generation.max_members) == (["a", "b", "e"], 3)


@pytest.mark.parametrize("seats", [0, 1])
def test_without_a_seat_of_its_own_a_spare_waits_and_joins_by_a_reform(seats):
    job = training("a", "b", "c", spare_seats=seats)
    names = "st"[: seats + 1]
    for name in names:
        job.spare(name)
    job.wait(100.0)
    assert (job.phase, job.members) == (TRAINS, list("abc"))
    job.give(HostLeft(HostName("b")))
    if seats:
        job.give(HostLeft(HostName("s")))
    job.acknowledge("a", "c", step=6, holds_state=True)
    job.serve()
    assert (job.generation.change, sorted(job.members)) == (WorldChange.REFORM, ["a", "c", names[-1]])


def test_the_last_seat_is_for_the_host_that_has_a_place():
    job = training("a", "b", "c", spare_seats=1)
    job.give(HostLeft(HostName("c")))
    for name in "st":
        job.change(name, is_spare=True)
        job.report(name, state=WorkerState.IDLE, generation=job.generation.number)
    job.acknowledge("a", "b", step=6, holds_state=True)
    go_on(job, 7)
    assert [(m.host, m.seat) for m in job.generation.newcomers] == [("s", 3)]
    job.take_seat("s")
    stop_at_boundary(job, 8)
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "b", "s"])


def test_a_new_leader_knows_who_spares():
    job = spared("a", "b", "c")
    lose(job, "b")
    go_on(job, 7)
    job.state = MembershipState(
        generation=job.generation, hosts=job.state.hosts, phase_since_s=job.now_s
    )  # as a leader reads it from the store
    come_back(job, "b")
    job.wait(100.0)
    assert (job.phase, job.members) == (TRAINS, ["a", "c", "s"])


def test_a_leader_that_dies_with_its_host_between_two_decisions_is_replaced_by_the_spare():
    job = spared("a", "b", "c")
    job.give(HostLeft(HostName("b")))
    assert job.phase is GenerationPhase.QUIESCE
    job.state = MembershipState(
        generation=job.generation,
        hosts={host: status for host, status in job.state.hosts.items() if host != "a"},
        phase_since_s=job.now_s,
    )
    job.wait(0.0)
    assert job.members == ["c"]
    job.acknowledge("c", step=6, holds_state=True)
    job.serve("c")
    assert (job.generation.change, sorted(job.members)) == (WorldChange.REFORM, ["c", "s"])


def test_the_job_does_not_begin_with_a_spare_while_a_host_may_still_come():
    job = Job("a", "b", num_hosts=3, min_hosts=3)
    job.spare("s")
    job.wait(299.0)
    assert not job.asked
    job.report("c", state=WorkerState.IDLE)
    job.serve()
    assert job.members == ["a", "b", "c"]


def test_a_spare_takes_the_place_of_a_host_that_did_not_come_in_time():
    job = Job("a", "b", num_hosts=3, min_hosts=3)
    job.spare("s")
    job.wait(301.0)
    job.serve()
    assert job.members == ["a", "b", "s"]


def test_a_waiting_spare_does_not_count_for_the_least_number_of_hosts():
    job = spared("a", "b", "c", "d", spares="s", min_hosts=4, start_timeout_s=50.0)
    lose(job, "a", "b")
    assert job.phase is GenerationPhase.QUIESCE, "two members and a spare are three hosts"
    job.wait(51.0)
    assert job.generation.outcome is not None
    assert job.generation.outcome.message.startswith("3 of the 4 hosts")


def test_a_job_of_spares_alone_ends_and_says_why():
    job = Job(num_hosts=2)
    job.spare("s")
    job.spare("t")
    job.wait(301.0)
    outcome = job.generation.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == (JobOutcomeKind.TOO_FEW_HOSTS, ExitCode.TOO_FEW_HOSTS)
    assert "all 2 hosts that are ready after 301 s were started with --spare" in outcome.message


def test_when_all_hosts_register_again_those_with_the_state_have_the_places():
    job = spared("a", "b", "c")
    lose(job, "b")
    go_on(job, 7)
    for name in "acs":
        job.give(HostLeft(HostName(name)))
    assert job.phase is GenerationPhase.QUIESCE
    job.report("b", state=WorkerState.IDLE, generation=job.generation.number)
    for name in "acs":
        job.report(name, state=WorkerState.IDLE, generation=job.generation.number, step=7, holds_state=True)
    job.change("s", is_spare=True)
    job.wait(6.0)
    job.serve()
    assert sorted(job.members) == ["a", "c", "s"]


def test_when_all_members_leave_the_spare_goes_on_with_their_state():
    job = spared("a", "b")
    for name in "ab":
        job.change(name, is_draining=True)
    stop_at_boundary(job, 8)
    assert job.members == ["a", "b", "s"]
    assert (job.generation.receivers, job.generation.max_members) == (("s",), 2)


def test_a_waiting_spare_holds_no_part_of_the_state():
    job = spared("a", "b", "c")
    before = measure_redundancy(job.state)
    job.give(HostLeft(HostName("s")))
    assert before == measure_redundancy(job.state)
    assert before is not None
    assert (before.copies, before.losses) == (3, 2)


def test_where_workers_are_replaced_the_spare_is_a_member_of_the_next_formation():
    job = sharded("abcd", replaces_workers=True, regroup_grace_s=1000.0)
    job.spare("s")
    assert (job.phase, job.generation.newcomers) == (TRAINS, ()), "no seats"
    job.give(HostLeft(HostName("b")))
    for name in "acd":
        job.restart(name)
    job.serve()
    assert (job.phase, sorted(job.members)) == (GenerationPhase.FORM, ["a", "c", "d", "s"])
    assert job.generation.snapshot is not None
    go_on(job, 6)
    job.restart("b")
    job.wait(100.0)
    assert (job.phase, sorted(job.members)) == (TRAINS, ["a", "c", "d", "s"])


def test_where_workers_are_replaced_the_spare_is_faster_than_a_worker_that_starts_again():
    job = sharded("abcd", replaces_workers=True, regroup_grace_s=1000.0)
    job.spare("s")
    job.worker("b", exit_code=-9)
    for name in "acd":
        job.restart(name)
    job.serve()
    assert (job.phase, sorted(job.members)) == (GenerationPhase.FORM, ["a", "c", "d", "s"])


def test_a_spare_of_a_job_with_snapshots_restores_with_the_others():
    job = sharded("abc", parity=1, spare_seats=4)
    keep(job, "abc", snapshot(5, "abc", parity=1))
    job.spare("s")
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", "c", step=5)
    job.report("s", generation=job.generation.number)
    assert (job.generation.change, job.members) == (WorldChange.GROW, ["a", "c", "s"])
    assert job.generation.snapshot is not None


def test_hosts_that_leave_add_no_places():
    job = training("a", "b", spare_seats=4)
    for name in "ab":
        job.change(name, is_draining=True)
    for name in "ab":
        job.report(name, generation=job.generation.number, earliest_stop_step=8)
    job.report("e", state=WorkerState.IDLE)
    for name in "ab":
        job.report(name, state=WorkerState.IDLE, step=8, earliest_stop_step=8, has_formed=False)
    job.serve()
    assert (job.members, job.generation.max_members) == (["a", "b", "e"], 2)


def test_a_spare_does_not_hide_that_a_host_with_the_state_is_missing():
    job = spared("a", "b", "c", state_loss_grace_s=100.0)
    for name in "abc":
        job.give(HostLeft(HostName(name)))
    job.report("s", generation=job.generation.number)
    for name in "ab":
        job.report(name, state=WorkerState.IDLE, generation=job.generation.number)
    job.wait(99.0)
    assert job.phase is GenerationPhase.QUIESCE
    job.report("c", state=WorkerState.IDLE, generation=job.generation.number, step=5, holds_state=True)
    job.serve()
    assert (job.phase, job.generation.step) == (GenerationPhase.FORM, 5)


def test_with_the_last_copy_no_host_is_waited_for_that_has_no_place():
    job = training("a", "b", spare_seats=4)
    job.report("b", holds_state=False)
    assert job.generation.losses_left == 0
    job.report("s", state=WorkerState.STARTING)
    job.change("s", is_spare=True)
    failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="reset")
    job.report("a", state=WorkerState.IDLE, failure=failure)
    job.acknowledge("a", "b")
    job.serve()
    assert (job.phase, job.members) == (GenerationPhase.FORM, ["a", "b"])


def test_a_spare_is_used_when_it_becomes_a_member_and_not_before():
    job = spared("a", "b", "c")
    assert list_used(job.published[-2], job.state) == []
    job.give(HostLeft(HostName("b")))
    before = job.generation
    lose(job, "b")
    assert list_used(before, job.state) == ["s"]
    go_on(job, 7)
    come_back(job, "b")
    assert job.generation.spares == ("b",)
    job.give(HostLeft(HostName("c")))
    before = job.generation
    lose(job, "c", step=8)
    assert list_used(before, job.state) == ["b"], "it had waited, although it was not started as a spare"


def test_a_spare_without_a_seat_is_known_and_one_with_a_seat_is_not():
    job = training("a", "b", "c", spare_seats=1)
    job.spare("s")
    assert list_unseated(job.state, job.config) == []
    job.spare("t")
    assert list_unseated(job.state, job.config) == ["t"]
    job.give(HostLeft(HostName("t")))
    assert list_unseated(job.state, job.config) == []


def test_where_worlds_have_no_seats_none_is_missed():
    job = training("a", "b", "c", spare_seats=0)
    job.spare("s")
    assert list_unseated(job.state, job.config) == []
