"""Members that together have the state go on with it, each with its part, and read no snapshot."""

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from membership_job import Job, change_leader, keep, know, sharded, snapshot, stop_at_boundary

from resilient_jax.cluster.agent import DRAIN_GRACE_S
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership import kept_stages, next_members
from resilient_jax.membership.machine import HostLeft, HostProgressed, QuarantineChanged
from resilient_jax.membership.redundancy import measure_redundancy
from resilient_jax.protocol.records import (
    GenerationPhase,
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
    WorldChange,
)
from resilient_jax.protocol.recovery_records import RecoveryAction, TimedChange
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.snapshots import SnapshotPhase
from resilient_jax.protocol.state_records import NextMembers, StageLoss, StageOutlook, StatePart

NUM_UNITS = 7
FRONT, BACK = (StatePart.from_units(units, NUM_UNITS) for units in (range(4), range(4, NUM_UNITS)))
PARTS = {"a": FRONT, "b": BACK, "c": FRONT, "d": BACK}


def unwind(job: Job, *names: str, step: int = 6, **changes) -> None:
    """Have members report that they are idle, with the part that each has."""
    for name in names:
        job.acknowledge(name, step=step, part=PARTS[name], **changes)


def test_survivors_that_have_the_state_between_them_go_on_at_its_step():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    unwind(job, "a", "c", "d", copied=snapshot(6, "abcd").id)
    new = job.generation
    assert (new.phase, new.change, new.is_state_in_parts) == (
        GenerationPhase.FORM,
        WorldChange.SHRINK,
        True,
    ), "no snapshot is waited for"
    assert (new.step, new.sources, new.receivers) == (6, (), ())
    assert new.snapshot is not None, "to go back to"
    assert new.snapshot.id.step == 5


def test_without_a_snapshot_no_state_counts_as_one_to_rely_on():
    job = Job("a", "b", "c", "d")
    job.serve()
    job.form()
    for name in "abcd":
        job.report(name, has_finished_step=True, step=2)
    job.give(HostLeft(HostName("b")))
    unwind(job, "a", "c", "d", step=2)
    assert job.generation.is_state_in_parts
    assert (job.generation.snapshot, job.generation.progress) == (None, 0)


def test_a_unit_that_no_survivor_has_is_read_from_a_snapshot():
    job = sharded("abcd", parity=2)
    for name in "bd":
        job.give(HostLeft(HostName(name)))
    unwind(job, "a", "c")
    assert not job.generation.is_state_in_parts
    assert job.generation.snapshot is not None
    assert job.generation.step == 5


@pytest.mark.parametrize(("behind", "is_in_parts"), [(1, True), (2, False)])
def test_members_may_be_a_step_apart(behind: int, is_in_parts: bool):
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    unwind(job, "a", step=7 - behind)
    unwind(job, "c", "d", step=7)
    assert job.generation.is_state_in_parts == is_in_parts
    assert job.generation.step == (7 if is_in_parts else 5)


def test_a_snapshot_of_a_later_step_wins():
    job = sharded("abcd")
    keep(job, "abcd", snapshot(5, "abcd"), snapshot(8, "abcd"))
    job.give(HostLeft(HostName("b")))
    unwind(job, "a", "c", "d", step=6)
    assert job.generation.snapshot is not None
    assert job.generation.step == 8


def test_a_host_that_joins_is_sent_its_part():
    job = sharded("abcd", spare_seats=2)
    job.worker("d", exit_code=-9)
    unwind(job, "a", "b", "c")
    job.form()
    for name in "abc":
        job.report(name, has_finished_step=True, step=7)
    job.restart("d")
    job.take_seat("d")
    for name in "abc":
        job.report(name, part=PARTS[name])  # as it is idle at the boundary, where all of them are at once
    stop_at_boundary(job, 8)
    assert job.generation.change is WorldChange.GROW
    assert job.generation.is_state_in_parts
    assert (job.generation.step, job.generation.receivers) == (8, ("d",))


@pytest.mark.parametrize(("leaving", "parts_stay"), [("d", True), ("bd", False)])
def test_a_snapshot_is_waited_for_at_the_boundary_only_if_members_that_stay_lack_a_part(
    leaving: str, parts_stay: bool
):
    job = sharded("abcd", parity=2)
    for name in "abcd":
        job.report(name, part=PARTS[name])
    for name in leaving:
        job.change(name, is_draining=True)
    for name in job.members:
        job.report(name, generation=job.generation.number, earliest_stop_step=6)
    assert (job.phase, job.generation.parts_stay) == (GenerationPhase.BOUNDARY, parts_stay)
    job.worker("a", exit_code=-9)
    assert not job.generation.parts_stay


def test_a_host_that_leaves_stays_registered_with_its_part_of_the_snapshot_until_there_is_another():
    job = sharded("abcd")
    for name in "abcd":
        job.report(name, part=PARTS[name])
    job.change("d", is_draining=True)
    stop_at_boundary(job, 6)
    assert (job.members, job.generation.is_state_in_parts) == (["a", "b", "c"], True)
    job.form()
    for name in "abc":
        job.report(name, has_finished_step=True, step=7)
    assert job.generation.snapshot is not None, "it leaves when this is None"
    newer = snapshot(7, "abc", generation=job.generation.number)
    keep(job, "abc", snapshot(5, "abcd"), msgspec.structs.replace(newer, phase=SnapshotPhase.COMMITTED))
    assert job.generation.snapshot is None


def train_in_parts(step_s: float, num_steps: int = 4, **config) -> Job:
    """Return a job whose members have the state in parts, and have taken so long for each of some more steps."""
    job = sharded("abcd", **config)
    # With more hosts, in an earlier generation, steps were short.
    history = msgspec.structs.replace(job.generation.history, step_s=0.5)
    generation = msgspec.structs.replace(job.generation, history=history)
    job.state = dataclasses.replace(job.state, generation=generation)
    for name in "abcd":
        job.report(name, part=PARTS[name], holds_state=False)
    job.wait(step_s * (num_steps - 1))  # the report of the first one may have been late
    job.give(HostProgressed(HostName("a"), "a", job.worker_of("a").report.step + num_steps))
    return job


@pytest.mark.parametrize(
    ("step_s", "num_steps", "copy_timeout_s"),
    [(1.0, 4, 10.0), (3.5, 4, 7.5), (4.5, 4, None), (1.0, 1, None), (1.0, 0, None)],
)
def test_blocks_are_copied_before_a_host_leaves_if_its_notice_is_long_enough(
    step_s: float, num_steps: int, copy_timeout_s: float | None
):
    job = train_in_parts(step_s, num_steps)
    job.change("d", is_draining=True)
    assert job.phase is GenerationPhase.PAUSE
    assert job.generation.next_members == (
        NextMembers(hosts=(HostName("a"), HostName("b"), HostName("c")), copy_timeout_s=copy_timeout_s)
        if copy_timeout_s is not None
        else None
    )
    stop_at_boundary(job, 12)
    assert (job.phase, job.generation.next_members) == (GenerationPhase.FORM, None)


def test_copies_and_the_steps_after_them_fit_into_the_time_of_a_notice():
    assert next_members.NOTICE_S == DRAIN_GRACE_S


def hold_for_a_slow_stage() -> Job:
    """Return a job that copies blocks before the layers of b are divided by speed."""
    job = train_in_parts(1.0)
    down = Slowdown(
        generation=job.generation.number,
        host=HostName("b"),
        kept=0.4,
        redivided=0.9,
        speeds=((HostName("b"), 0.4),),
    )
    slow = SlowHost(host=HostName("b"), kind="compute", factor=3.0, since_step=3)
    job.report("a", slow_hosts=(slow,), slowdown=down)
    assert job.phase is GenerationPhase.PAUSE
    assert job.generation.next_members is not None
    assert job.generation.next_members.copy_timeout_s == 60.0
    return job


def drain(job: Job, name: str) -> None:
    job.give(QuarantineChanged(job.state.quarantined | {HostName(name)}))


def give_notice(job: Job, name: str) -> None:
    job.change(name, is_draining=True)


@pytest.mark.parametrize("leave", [drain, give_notice])
def test_a_pause_that_waits_for_copies_comes_at_once_if_a_member_must_leave(
    leave: Callable[[Job, str], None],
):
    job = hold_for_a_slow_stage()
    number = job.generation.number
    job.report("a", generation=number, earliest_stop_step=9)
    leave(job, "d")
    found = job.generation
    assert (found.number, found.phase, found.next_members) == (number, GenerationPhase.PAUSE, None)
    stop_at_boundary(job, 9)
    assert (job.phase, job.members) == (GenerationPhase.FORM, list("abc"))


def test_a_second_notice_ends_the_copies_for_the_first():
    job = train_in_parts(1.0, parity=2)
    for name in "cd":
        job.report(name, part=StatePart.from_units(range(NUM_UNITS), NUM_UNITS))
    give_notice(job, "b")
    job.change("b", gpus=("hot",))
    assert job.generation.next_members is not None, "the notice was known before"
    give_notice(job, "a")
    assert (job.phase, job.generation.next_members) == (GenerationPhase.PAUSE, None)


def test_a_notice_ends_copies_that_only_a_quarantine_lasts_long_enough_for():
    job = train_in_parts(9.0)
    drain(job, "d")
    assert job.generation.next_members is not None
    assert job.generation.next_members.copy_timeout_s == 10.0
    job.change("a", gpus=("hot",))
    assert job.generation.next_members is not None, "a host in quarantine waits so long"
    give_notice(job, "d")
    assert (job.phase, job.generation.next_members) == (GenerationPhase.PAUSE, None)


def test_a_leader_that_does_not_know_when_a_notice_came_waits_for_no_copies():
    job = train_in_parts(1.0)
    give_notice(job, "d")
    change_leader(job)
    job.wait(0.1)
    assert (job.phase, job.generation.next_members) == (GenerationPhase.PAUSE, None)


def test_a_change_that_is_broken_off_leaves_no_members_that_blocks_are_copied_for():
    job = hold_for_a_slow_stage()
    job.give(HostLeft(HostName("d")))
    assert (job.phase, job.generation.next_members) == (GenerationPhase.QUIESCE, None)


def test_a_slow_host_that_is_taken_out_trains_no_longer_than_one_in_quarantine():
    job = train_in_parts(1.0, parity=2)
    know(job, shrink=0.2)
    for name in "abcd":
        job.report(name, part=StatePart.from_units(range(NUM_UNITS), NUM_UNITS))
    job.report(
        "a",
        slow_hosts=(SlowHost(host=HostName("b"), kind="link", factor=9.0, since_step=3),),
        slowdown=Slowdown(
            generation=job.generation.number, host=HostName("b"), kept=0.1, replaced=1.0, without=0.9
        ),
    )
    assert (job.phase, job.quarantined) == (GenerationPhase.PAUSE, ["b"])
    assert job.generation.next_members == NextMembers(hosts=tuple(map(HostName, "acd")), copy_timeout_s=10.0)


def test_blocks_are_copied_for_the_spare_that_comes_in_the_place_of_a_host_that_leaves():
    job = train_in_parts(1.0, spare_seats=2)
    job.spare("e")
    job.change("d", is_draining=True)
    assert job.generation.next_members is not None
    assert job.generation.next_members.hosts == tuple("abce")


def test_blocks_are_copied_before_layers_are_divided_by_speed():
    job = hold_for_a_slow_stage()
    assert job.generation.next_members == NextMembers(
        hosts=tuple(map(HostName, "abcd")), layer_speeds=((HostName("b"), 0.4),), copy_timeout_s=60.0
    )


def test_nothing_is_copied_where_no_host_that_stays_has_a_part():
    job = train_in_parts(1.0, parity=2)
    job.report("b", part=FRONT)
    job.change("d", is_draining=True)
    assert (job.phase, job.generation.next_members) == (GenerationPhase.PAUSE, None)


def test_members_that_all_have_the_whole_state_copy_nothing_before_a_change():
    job = sharded("abcd")
    job.change("d", is_draining=True)
    assert (job.phase, job.generation.next_members) == (GenerationPhase.PAUSE, None)


def lose_host_and_service(**config) -> Job:
    """Return a job that finishes its step in a world whose coordination service has ended with a host."""
    job = sharded("abcd", **config)
    job.give(HostLeft(HostName("b")))
    job.change("a", services=())
    unwind(job, "a", "c", "d")
    return job


def test_members_whose_service_has_ended_finish_their_step_where_they_are():
    job = lose_host_and_service()
    assert (job.generation.change, job.generation.service_address) == (WorldChange.SHRINK, "")
    assert (job.generation.is_state_in_parts, job.generation.step) == (True, 6)
    job.form()
    assert job.phase is GenerationPhase.ACTIVE, "no clique is awaited"


def test_a_service_that_ends_while_the_world_forms_is_done_without():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    unwind(job, "a", "c", "d")
    job.change("a", services=())
    assert job.generation.reason == "lost the coordination service before the world was complete"
    unwind(job, "a", "c", "d")
    assert (job.generation.change, job.generation.service_address) == (WorldChange.SHRINK, "")
    assert (job.generation.is_state_in_parts, job.generation.step) == (True, 6)


def test_after_that_step_all_leave_their_world_with_their_parts():
    job = lose_host_and_service()
    job.form()
    for name in "acd":
        job.report(name, has_finished_step=True, step=7, part=PARTS[name])
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "the coordination service has ended")
    stop_at_boundary(job, 9)
    job.serve("c")
    assert job.generation.change is WorldChange.REFORM
    assert job.generation.service_address
    assert (job.generation.is_state_in_parts, job.generation.step) == (True, 9)


@pytest.mark.parametrize(("spare_seats", "members"), [(2, ["a", "c", "d"]), (0, ["a", "b", "c", "d"])])
def test_a_host_that_is_back_joins_once_it_has_rehearsed_in_the_new_world(
    spare_seats: int, members: list[str]
):
    """Without a seat for that it joins in the new world at once."""
    job = lose_host_and_service(spare_seats=spare_seats)
    job.form()
    job.restart("b")
    for name in "acd":
        job.report(name, has_finished_step=True, step=7, part=PARTS[name])
    stop_at_boundary(job, 9)
    job.serve("c")
    assert (job.generation.change, sorted(job.members)) == (WorldChange.REFORM, members)


@pytest.mark.parametrize(
    ("kind", "is_in_parts"), [(WorkerFailureKind.NO_SERVICE, True), (WorkerFailureKind.COLLECTIVE, False)]
)
def test_a_step_that_fails_in_a_world_without_a_service_is_made_in_a_new_one(kind, is_in_parts: bool):
    """With the parts that members have, if all that is wrong is that it needed a clique."""
    job = lose_host_and_service()
    job.form()
    job.report("c", failure=WorkerFailure(kind=kind, text="a collective"))
    unwind(job, "a", "c", "d")
    job.serve("c")
    assert job.generation.change is WorldChange.REFORM
    assert (job.generation.is_state_in_parts, job.generation.step) == (is_in_parts, 6 if is_in_parts else 5)


def test_a_member_that_took_the_service_for_dead_forms_no_clique_and_finishes_the_step():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    unwind(job, "a", "c", "d", detached_from=job.generation.world)
    assert (job.generation.change, job.generation.service_address) == (WorldChange.SHRINK, "")
    job.form()
    for name in "acd":
        job.report(name, has_finished_step=True, step=7)
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "the coordination service has ended")


def test_a_host_on_its_way_is_not_waited_for_where_it_would_not_join():
    """Also with the last copy of the state: it joins after the step."""
    job = sharded("abcd", parity=0)
    job.restart("b")
    job.worker("b", report=WorkerReport(state=WorkerState.STARTING))
    job.change("a", services=())
    unwind(job, "a", "c", "d")
    assert job.phase is GenerationPhase.FORM
    assert job.generation.change is WorldChange.SHRINK


@pytest.mark.parametrize(("spare_seats", "change"), [(2, WorldChange.SHRINK), (0, WorldChange.REFORM)])
def test_a_host_that_is_back_at_once_joins_after_the_step_too(spare_seats: int, change: WorldChange):
    job = sharded("abcd", spare_seats=spare_seats)
    job.give(HostLeft(HostName("b")))
    job.change("a", services=())
    job.restart("b")
    unwind(job, "a", "c", "d")
    if change is WorldChange.REFORM:
        job.serve("c")
    assert job.generation.change is change
    assert job.generation.is_state_in_parts
    assert ("b" in job.members) == (change is WorldChange.REFORM)


def test_a_host_that_has_all_units_finishes_the_step_alone():
    job = sharded("ab")
    job.give(HostLeft(HostName("b")))
    job.acknowledge("a", step=6, part=StatePart.from_units(range(NUM_UNITS), NUM_UNITS))
    assert job.generation.change is WorldChange.SHRINK
    assert job.generation.service_address, "another may join it"
    assert (job.generation.is_state_in_parts, job.generation.step) == (True, 6)


def test_after_a_failure_that_no_death_explains_a_snapshot_is_read():
    job = sharded("abcd")
    failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="a unit did not come")
    job.report("a", failure=failure)
    unwind(job, "a", "b", "c", "d")
    job.serve("c")
    assert not job.generation.is_state_in_parts
    assert job.generation.snapshot is not None


def fail_once() -> Job:
    """Return a job that forms again from its snapshot, after a failure that no death explains."""
    job = sharded("abcd", parity=2)
    for name in "abcd":
        job.report(name, part=PARTS[name], holds_state=False)
    failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="a unit did not come")
    job.report("a", failure=failure)
    unwind(job, *"abcd", holds_state=False)
    job.serve("c")
    job.form()
    return job


def test_parts_count_again_once_all_have_finished_a_step_after_a_failure():
    job = fail_once()
    assert (job.generation.attempts, job.generation.are_parts_doubtful) == (1, True)
    before = measure_redundancy(job.state)
    assert before is not None
    assert not before.is_in_parts
    for name in "abcd":
        job.report(name, has_finished_step=True, step=6)
    after = measure_redundancy(job.state)
    assert after is not None
    assert (after.is_in_parts, job.generation.losses_left) == (True, after.losses)
    job.give(HostLeft(HostName("b")))
    unwind(job, *"acd", step=6)
    assert job.generation.is_state_in_parts


def test_a_death_before_they_have_finished_a_step_does_not_make_parts_fit():
    job = fail_once()
    job.give(HostLeft(HostName("b")))
    unwind(job, *"acd", step=6)
    assert (job.generation.attempts, job.generation.is_state_in_parts) == (0, False)
    assert job.generation.snapshot is not None


def test_the_flag_is_gone_in_a_generation_with_another_origin():
    job = sharded("abcd", parity=2)
    job.give(HostLeft(HostName("b")))
    unwind(job, "a", "c", "d")
    assert job.generation.is_state_in_parts
    job.give(HostLeft(HostName("d")))
    job.acknowledge("a", "c", step=6, part=FRONT)
    assert job.generation.snapshot is not None
    assert not job.generation.is_state_in_parts


def estimate(job: Job, *, move_s: float = 100.0) -> StatePart:
    """Return what a reports: the loss of any host would make blocks move for so long."""
    losses = tuple(StageLoss(hosts=(HostName(name),), kept=0.9, cut=0.95, move_s=move_s) for name in "abcd")
    part = say_order(PARTS["a"], job.generation.number, "abcd")
    return msgspec.structs.replace(part, losses=losses, outlook=make_outlook("ab", "cd"))


def make_outlook(*replicas: str, kept: float = 0.6, move_s: float = 50.0) -> StageOutlook:
    """Return what the loss of hosts of these replicas would make of a pipeline: half the speed that was `kept`."""
    numbers = range(1, 4)
    return StageOutlook(
        replicas=tuple(tuple(map(HostName, replica)) for replica in replicas),
        kept=(1.0, *(kept / number if number < len(replicas) else 0.0 for number in numbers)),
        cut=(1.0, *(0.9 - 0.1 * number for number in numbers)),
        move_s=(0.0, *(move_s for _ in numbers)),
    )


def say_order(part: StatePart, generation: GenerationNumber, order: str) -> StatePart:
    """Return a part as the first two members report it, who say in which order hosts make replicas."""
    return msgspec.structs.replace(part, generation=generation, order=tuple(map(HostName, order)))


def lose_stage(move_s: float = 100.0) -> Job:
    """Return a job that has lost the worker of b, which starts again."""
    job = sharded("abcd", spare_seats=8)
    before = estimate(job, move_s=move_s)
    job.worker("b", exit_code=-9)
    job.acknowledge("a", step=6, part=before)
    unwind(job, "c", "d")
    return job


def join_again(job: Job, name: str) -> None:
    job.restart(name)
    job.take_seat(name)
    stop_at_boundary(job, job.worker_of("a").report.step + 1)


def test_the_stage_of_a_lost_worker_is_kept_for_it_and_it_has_it_again():
    job = lose_stage()
    assert job.generation.decision is not None
    assert job.generation.decision.action is RecoveryAction.KEEP_STAGES
    assert (job.members, job.generation.stage_hosts) == (list("acd"), tuple("abcd"))
    assert job.generation.earlier_stage_hosts == ()
    job.form()
    job.train(7)
    assert job.generation.stage_hosts == tuple("abcd")
    join_again(job, "b")
    assert sorted(job.members) == list("abcd")
    assert job.generation.stage_hosts == tuple("abcd"), "in seats b is the last one now"


def lose_host(move_s: float = 50.0) -> Job:
    """Return a job that has lost b for good, after steps of a second."""
    job = sharded("abcd", spare_seats=8)
    job.wait(10.0)
    job.train(15)
    job.report("a", part=estimate(job, move_s=move_s))
    for name in "bcd":
        job.report(name, part=PARTS[name])
    job.give(HostLeft(HostName("b")))
    job.wait(0.5)
    unwind(job, "c", "d", step=15)
    job.acknowledge("a", step=15, part=estimate(job, move_s=move_s))
    return job


def test_the_stage_of_a_host_that_is_gone_is_kept_until_the_others_have_its_blocks():
    job = lose_host()
    decision = job.generation.decision
    assert decision is not None
    assert (decision.action, decision.wait_s, decision.awaited) == (RecoveryAction.KEEP_STAGES, 0.0, ())
    assert (job.members, job.generation.stage_hosts) == (list("acd"), tuple("abcd"))
    job.form()
    assert job.phase is GenerationPhase.ACTIVE
    job.train(16)
    assert (job.phase, job.generation.reason) == (
        GenerationPhase.PAUSE,
        "b is not awaited: its stage is kept no longer, and layers are divided anew",
    )
    assert job.generation.next_members == NextMembers(hosts=tuple(map(HostName, "acd")), copy_timeout_s=60.0)
    job.wait(30.0)  # copies are made, and all train on
    assert job.phase is GenerationPhase.PAUSE
    stop_at_boundary(job, 46)
    assert (job.phase, job.members, job.generation.stage_hosts) == (GenerationPhase.FORM, list("acd"), ())


@pytest.mark.parametrize("gone", ["bd", "bcd"])
def test_the_stages_of_hosts_that_are_gone_are_kept_until_the_others_have_their_blocks(gone: str):
    job = sharded("abcdef", parity=3)
    job.wait(10.0)
    job.train(15)
    pairs = ((HostName("b"), HostName("d")), (HostName("a"), HostName("c")))
    singles = tuple((HostName(name),) for name in "abcdef")
    losses = tuple(
        StageLoss(hosts=hosts, kept=0.6 / len(hosts), cut=0.9 - 0.2 * len(hosts), move_s=50.0)
        for hosts in (*singles, *pairs)
    )
    parts = {
        name: msgspec.structs.replace(
            say_order(FRONT if name in "ace" else BACK, job.generation.number, "abcdef"),
            outlook=make_outlook("ab", "cd", "ef"),
            losses=losses if name in "abc" else (),
        )
        for name in "abcdef"
    }
    for name, part in parts.items():
        job.report(name, part=part)
    for name in gone:
        job.give(HostLeft(HostName(name)))
    left = [name for name in "abcdef" if name not in gone]
    for name in left:
        job.acknowledge(name, step=15, part=parts[name])
    decision = job.generation.decision
    assert decision is not None
    assert (decision.action, decision.wait_s, decision.awaited) == (RecoveryAction.KEEP_STAGES, 0.0, ())
    assert (job.members, job.generation.stage_hosts) == (left, tuple("abcdef"))
    job.form()
    job.train(16)
    assert (job.phase, job.generation.reason) == (
        GenerationPhase.PAUSE,
        f"{', '.join(gone)} are not awaited: their stages are kept no longer, and layers are divided anew",
    )
    stop_at_boundary(job, 46)
    assert (job.phase, job.members, job.generation.stage_hosts) == (GenerationPhase.FORM, left, ())


def test_no_stage_is_lost_with_nobody_or_beside_a_host_that_no_estimate_has():
    job = sharded("abcd", parity=2)
    part = msgspec.structs.replace(PARTS["a"], outlook=make_outlook("ab", "cd"))
    job.report("a", part=part)
    hosts = {str(host): status for host, status in job.state.hosts.items()}
    assert kept_stages.find_stage_loss(list(hosts.values()), ()) is None
    found = kept_stages.find_stage_loss([hosts[name] for name in "abd"], ())
    assert found is not None
    assert found.hosts == ("c",)
    assert kept_stages.find_stage_loss([hosts[name] for name in "abd"], [hosts["c"]]) is None
    job.report("a", part=msgspec.structs.replace(PARTS["a"], outlook=make_outlook("ab", "c")))
    assert kept_stages.find_stage_loss(list(job.state.hosts.values()), ()) is None


def test_where_no_replica_is_left_the_model_is_cut_anew_at_once():
    job = sharded("abcd", parity=2)
    part = msgspec.structs.replace(
        say_order(FRONT, job.generation.number, "abcd"), outlook=make_outlook("ab", "cd")
    )
    for name in "bc":
        job.give(HostLeft(HostName(name)))
    job.acknowledge("a", step=6, part=part)
    unwind(job, "d")
    decision = job.generation.decision
    assert decision is not None
    assert decision.action is RecoveryAction.SHRINK
    (kept,) = [one for one in decision.options if one.action is RecoveryAction.KEEP_STAGES]
    assert kept.why_not == "no other replica is complete"


def test_a_stage_that_is_kept_until_it_is_copied_waits_for_no_worker_that_starts():
    job = lose_host()
    job.form()
    job.restart("b")
    job.report("b", state=WorkerState.PREPARING)
    job.train(16)
    assert job.phase is GenerationPhase.PAUSE
    stop_at_boundary(job, 17)
    assert job.members == list("acd")


def test_the_two_pauses_of_a_stage_that_is_given_up_are_measured_each_as_what_it_is():
    job = lose_host()
    job.form()
    job.wait(1.25)
    job.train(16)
    stop_at_boundary(job, 17)
    job.form()
    job.wait(1.5)
    job.train(17)
    change_leader(job)  # what is measured is written with the next decision
    job.give(HostLeft(HostName("d")))
    assert {one.change: one.typical_s for one in job.generation.history.times} == {
        TimedChange.KEEP_STAGES: pytest.approx(0.75),
        TimedChange.REDIVIDE: pytest.approx(0.5),
    }


def test_a_loss_while_blocks_are_copied_is_decided_at_once():
    job = lose_host()
    job.form()
    job.train(16)
    job.give(HostLeft(HostName("d")))
    for name in "ac":
        job.acknowledge(name, step=16, part=StatePart.from_units(range(NUM_UNITS), NUM_UNITS))
    assert (job.phase, job.members, job.generation.stage_hosts) == (GenerationPhase.FORM, list("ac"), ())
    assert job.generation.next_members is None


def test_where_blocks_move_in_no_time_the_model_is_cut_anew():
    job = lose_stage(move_s=0.0)
    assert job.generation.decision is not None
    assert job.generation.decision.action is RecoveryAction.SHRINK
    assert job.generation.stage_hosts == ()
    assert job.generation.earlier_stage_hosts == (tuple("abcd"),), (
        "so that each host can find out who had what"
    )
    job.form()
    job.train(7)
    number = job.generation.number
    for name in "acd":
        job.report(name, part=say_order(PARTS[name], number, "cad" if name in "ac" else ""))
    job.give(HostLeft(HostName("d")))
    for name in "ac":
        whole = StatePart.from_units(range(NUM_UNITS), NUM_UNITS)
        job.acknowledge(name, step=7, part=say_order(whole, number, "cad"))
    assert job.members == list("ac")
    assert job.generation.earlier_stage_hosts == (tuple("cad"),), (
        "no loss was estimated, but the order is said"
    )


def lose_first_two(job: Job) -> None:
    """Lose the members that say in which order hosts make replicas."""
    for name in "ab":
        job.give(HostLeft(HostName(name)))


def test_where_no_member_that_is_left_says_the_order_it_follows_from_those_before():
    job = sharded("abcdef", parity=2)
    for name in "abcdef":
        part = FRONT if name in "ace" else BACK
        job.report(name, part=say_order(part, job.generation.number, "fedcba" if name in "ab" else ""))
    lose_first_two(job)
    assert job.generation.earlier_stage_hosts == (tuple("abcdef"),), (
        "all that were there, not those that are left"
    )
    for name in "cdef":
        part = FRONT if name in "ce" else BACK
        job.acknowledge(name, step=6, part=msgspec.structs.replace(part, generation=GenerationNumber(1)))
    job.serve("d")
    assert (job.phase, sorted(job.members)) == (GenerationPhase.FORM, list("cdef"))
    assert job.generation.earlier_stage_hosts == (tuple("abcdef"),)
    job.give(HostLeft(HostName("c")))  # before it has formed: blocks are where they were
    for name in "def":
        job.acknowledge(name, step=6)
    job.serve("d")
    assert (job.phase, sorted(job.members)) == (GenerationPhase.FORM, list("def"))
    assert job.generation.earlier_stage_hosts == (tuple("abcdef"),)
    job.form()
    job.give(HostLeft(HostName("f")))  # before its first commit
    for name in "de":
        job.acknowledge(name, step=6)
    assert job.phase is GenerationPhase.FORM
    assert set(job.generation.earlier_stage_hosts[1]) == set("def")
    assert job.generation.earlier_stage_hosts[0] == tuple("abcdef")


def test_members_without_parts_have_no_order():
    job = sharded("abcd")
    job.give(HostLeft(HostName("b")))
    job.acknowledge(*"acd", step=5)
    assert job.generation.earlier_stage_hosts == ()


def test_hosts_before_are_noted_no_longer_than_a_record_may_be():
    job = sharded("abcd")
    groups = (tuple(map(HostName, "abc")),) * kept_stages.MAX_GROUPS
    generation = msgspec.structs.replace(job.generation, earlier_stage_hosts=groups)
    found = kept_stages.list_groups(dataclasses.replace(job.state, generation=generation))
    assert found == (*groups[1:], tuple("abcd"))


def test_a_stage_is_kept_so_long_and_then_the_model_is_cut_anew():
    job = lose_stage()
    assert job.generation.decision is not None
    job.form()
    job.train(7)
    job.wait(0.9 * job.generation.decision.wait_s)
    assert job.phase is GenerationPhase.ACTIVE
    job.wait(0.2 * job.generation.decision.wait_s)
    assert (job.phase, job.generation.reason) == (
        GenerationPhase.PAUSE,
        "b did not come back: its stage is kept no longer, and layers are divided anew",
    )
    stop_at_boundary(job, 8)
    assert (job.phase, job.members, job.generation.stage_hosts) == (GenerationPhase.FORM, list("acd"), ())


def test_a_further_loss_while_a_stage_is_kept_is_decided_anew():
    job = lose_stage()
    job.form()
    job.train(7)
    job.give(HostLeft(HostName("c")))  # nothing says that it comes back
    for name in "ad":
        job.acknowledge(name, step=7, part=StatePart.from_units(range(NUM_UNITS), NUM_UNITS))
    assert (job.members, job.generation.stage_hosts) == (list("ad"), ())


def test_another_leader_keeps_the_stage_too():
    job = lose_stage()
    job.form()
    job.train(7)
    change_leader(job)
    job.wait(1.0)
    assert (job.phase, job.generation.stage_hosts) == (GenerationPhase.ACTIVE, tuple("abcd"))


def test_a_kept_stage_outlives_the_decision_that_another_host_waits():
    job = lose_stage()
    job.form()
    job.train(7)
    kept = job.generation.decision
    # No join pays any more, but for the host whose stage is kept.
    know(job, grow=1e7)
    job.restart("e")
    job.take_seat("e")
    assert (job.phase, job.generation.decision) == (GenerationPhase.ACTIVE, kept)
    join_again(job, "b")
    assert "b" in job.members


def test_a_stage_is_kept_on_while_its_host_is_on_its_way():
    job = lose_stage()
    assert job.generation.decision is not None
    job.form()
    job.train(7)
    job.restart("b")
    job.report("b", state=WorkerState.PREPARING)
    job.wait(2 * job.generation.decision.wait_s)
    assert job.phase is GenerationPhase.ACTIVE, "it comes"
    job.worker("b", exit_code=-9)
    assert job.phase is GenerationPhase.PAUSE


@pytest.mark.parametrize(("replicas", "is_restored"), [("abcd", False), ("ab", True)])
def test_a_slow_host_of_a_pipeline_is_taken_out_without_a_restore_if_the_others_have_the_state(
    replicas: str, is_restored: bool
):
    job = sharded("abcd", parity=2)
    know(job, shrink=0.2, restore=50.0)
    for name in "abcd":
        # Without other replicas nobody else has what b has.
        job.report(name, part=PARTS[name] if name in replicas else FRONT, holds_state=False, step=6)
    number = job.generation.number
    job.report(
        "a",
        slow_hosts=(SlowHost(host=HostName("b"), kind="link", factor=3.0, since_step=3),),
        slowdown=Slowdown(generation=number, host=HostName("b"), kept=0.5, replaced=1.0, without=0.7),
    )
    decision = job.generation.slowness.decision
    assert decision is not None
    (option,) = [one for one in decision.options if one.action is RecoveryAction.TAKE_OUT]
    assert option.pause_s == pytest.approx(50.2 if is_restored else 0.2)


def test_a_death_that_is_noticed_after_the_failure_of_its_peers_explains_it():
    job = sharded("abcd")
    failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="b sends no more mail")
    job.report("a", failure=failure)
    assert (job.generation.attempts, job.generation.are_parts_doubtful) == (1, True)
    job.worker("b", exit_code=-9)
    unwind(job, "a", "c", "d")
    assert job.generation.is_state_in_parts
    assert job.generation.step == 6
