"""What a job does about slow hosts: which it takes out, in whose place, and when it leaves all as it is."""

import dataclasses
import itertools
import random

import msgspec
import pytest
from membership_job import Job, change_leader, know, stop_at_boundary, training

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.commands import QuarantineDevice
from resilient_jax.membership.machine import HostChanged, QuarantineChanged
from resilient_jax.membership.recovery_options import PRIOR_S, Prices
from resilient_jax.membership.recovery_policy import HYSTERESIS, MIN_SAVED_S
from resilient_jax.membership.slow_host_policy import (
    MIN_SPEED_GAIN,
    SlowTraining,
    choose_for_slow_host,
    count_standby_devices,
)
from resilient_jax.protocol.records import (
    GenerationPhase,
    WorkerFailure,
    WorkerFailureKind,
    WorkerReport,
    WorkerState,
    WorldChange,
)
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision, TimedChange
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost, SlownessRecord

HOUR_S = 3600.0
C = HostName("c")


def tell(job: Job, *hosts: str, kind: str = "compute", since: int = 40, **speeds) -> None:
    """Have the first worker report that hosts are slow, and what that costs; the first of them is the slowest."""
    found = tuple(
        SlowHost(host=HostName(name), kind=kind, factor=3.0, since_step=since + 5 * place)
        for place, name in enumerate(hosts)
    )
    slowest = HostName(hosts[0]) if hosts else HostName("")
    number = job.generation.number
    slowdown = Slowdown(generation=number, host=slowest, **speeds) if speeds else None
    job.report("a", slow_hosts=found, slowdown=slowdown)


def decided(job: Job) -> RecoveryDecision:
    decision = job.generation.slowness.decision
    assert decision is not None
    return decision


def with_spare(**config) -> Job:
    """Return a job of three that trains, beside a spare which is ready in a seat."""
    job = training("a", "b", "c", spare_seats=4, **config)
    job.spare("d")
    return job


def go_on(job: Job, step: int) -> None:
    """Have a planned change carried out, and all members train in its generation."""
    stop_at_boundary(job, step)
    if job.phase is GenerationPhase.BOUNDARY:  # which is a re-form
        job.serve()
    job.form()
    job.train(step + 1)
    assert job.phase is GenerationPhase.ACTIVE


def test_a_spare_takes_the_place_of_a_slow_host_between_two_steps():
    job = with_spare()
    tell(job, "c", kept=0.8, replaced=1.0, without=0.7)
    decision = decided(job)
    assert (decision.action, decision.slow) == (RecoveryAction.REPLACE, "c")
    assert decision.reason.startswith(
        "c is slow (compute): 3.0 times since step 40: the job goes on in place"
    )
    assert job.quarantined == ["c"]
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, decision.reason)
    go_on(job, 9)
    assert (job.members, job.generation.change) == (["a", "b", "d"], WorldChange.GROW)
    assert (job.generation.step, job.generation.slowness.count_taken_out(C)) == (9, 1)
    number = job.generation.number
    job.wait(100.0)
    assert job.generation.number == number, "the slow host has left, and that is all"


def test_every_option_is_recorded_with_its_score_and_the_reason_against_it():
    job = training("a", "b", "c")
    tell(job, "c", kept=0.8, replaced=1.0, without=0.7)
    options = {option.action: option for option in decided(job).options}
    assert {action: option.why_not for action, option in options.items()} == {
        RecoveryAction.KEEP: "",
        RecoveryAction.REPLACE: "no spare is ready",
        RecoveryAction.TAKE_OUT: "the speed rises by less than 5%",
        RecoveryAction.FEWER_DEVICES: "no device of it is known to be slower than its other ones",
        RecoveryAction.REDIVIDE: "no other division of layers is faster",
    }
    assert decided(job).action is RecoveryAction.KEEP
    assert (job.phase, job.quarantined) == (GenerationPhase.ACTIVE, [])
    assert options[RecoveryAction.KEEP].score == pytest.approx(0.8)


def test_without_a_spare_a_host_is_taken_out_only_if_the_others_are_faster_alone():
    job = training("a", "b", "c", "d", spare_seats=4)
    tell(job, "c", kind="link", kept=0.5, replaced=1.0, without=0.75)
    assert (decided(job).action, job.quarantined) == (RecoveryAction.TAKE_OUT, ["c"])
    go_on(job, 9)
    assert (job.members, job.generation.change) == (["a", "b", "d"], WorldChange.SHRINK)


@pytest.mark.parametrize(
    ("names", "config", "why_not"),
    [
        ("abc", {"min_hosts": 3}, "fewer than min_hosts = 3 would be left"),
        ("abc", {}, ""),
        ("ac", {}, "the next loss after it might be that of the state"),
    ],
)
def test_min_hosts_and_the_last_copies_of_the_state_stay(names, config, why_not):
    job = training(*names, spare_seats=4, **config)
    tell(job, "c", kept=0.3, replaced=1.0, without=0.6)
    options = {option.action: option.why_not for option in decided(job).options}
    assert options[RecoveryAction.TAKE_OUT] == why_not
    assert job.quarantined == ([] if why_not else ["c"])


def test_hosts_that_became_slow_together_have_a_cause_in_common_and_stay():
    job = with_spare()
    tell(job, "c", "b", kept=0.5, replaced=0.8, without=0.6)
    why_not = {option.action: option.why_not for option in decided(job).options}
    assert decided(job).action is RecoveryAction.KEEP
    assert why_not[RecoveryAction.REPLACE] == "b became slow with it, so that the cause is not in the host"
    assert job.quarantined == []


def test_hosts_that_are_reported_one_after_the_other_have_a_cause_in_common_too():
    job = training("a", "b", "c", "d", spare_seats=6)
    for spare in "ef":
        job.spare(spare)
    tell(job, "c", since=100, kept=0.5, replaced=0.8, without=0.6)
    assert job.quarantined == ["c"]
    quarantined = job.state.quarantined
    go_on(job, 9)
    assert job.members == ["a", "b", "d", "e"]
    change_leader(job)
    job.give(QuarantineChanged(quarantined))
    tell(job, "b", since=164, kept=0.5, replaced=0.8, without=0.6)
    why_not = {option.action: option.why_not for option in decided(job).options}
    reason = "c became slow with it, so that the cause is not in the host"
    assert (why_not[RecoveryAction.REPLACE], why_not[RecoveryAction.TAKE_OUT]) == (reason, reason)
    assert job.quarantined == ["c"]
    # Another part of it is slow, or it is slow since another time: that is another cause.
    tell(job, "b", since=164, kind="link", kept=0.5, replaced=0.8, without=0.6)
    assert job.quarantined == ["c", "b"]
    go_on(job, 20)
    tell(job, "d", since=165, kept=0.5, replaced=0.8, without=0.7)
    assert job.quarantined == ["c", "b", "d"]


def test_a_host_is_compared_with_the_last_hosts_that_were_taken_out():
    job = with_spare()
    reports = tuple(
        SlowHost(host=HostName(f"h{i}"), kind="link", factor=2.0, since_step=0) for i in range(16)
    )
    slowness = SlownessRecord(taken_out_as=reports)
    generation = msgspec.structs.replace(job.generation, slowness=slowness)
    job.state = dataclasses.replace(job.state, generation=generation)
    tell(job, "c", kept=0.8, replaced=1.0, without=0.7)
    kept = [one.host for one in job.generation.slowness.taken_out_as]
    assert kept == [*(f"h{i}" for i in range(1, 16)), "c"]


def test_one_slow_host_is_taken_out_at_a_time():
    job = training("a", "b", "c", "d", spare_seats=6)
    for spare in "ef":
        job.spare(spare)
    tell(job, "c", kept=0.5, replaced=0.8, without=0.6)
    assert job.quarantined == ["c"]
    tell(job, "b", kept=0.5, replaced=0.8, without=0.6)
    stop_at_boundary(job, 9)
    assert job.quarantined == ["c"], "the change is under way"
    assert len(job.members) == 4


def test_a_job_may_be_told_to_report_slow_hosts_only():
    job = with_spare(act_on_slow_hosts=False)
    tell(job, "c", kept=0.2, replaced=1.0, without=0.7)
    assert (job.generation.slowness.decision, job.quarantined) == (None, [])


def test_a_decision_to_keep_a_host_is_taken_once_and_again_when_a_spare_is_ready():
    job = training("a", "b", "c", spare_seats=4)
    tell(job, "c", kept=0.8, replaced=1.0, without=0.7)
    written = len(job.published)
    for kept in (0.79, 0.81, 0.8):
        tell(job, "c", kept=kept, replaced=1.0, without=0.7)
        job.wait(30.0)
    assert decided(job).action is RecoveryAction.KEEP
    assert len([g for g in job.published[written:] if g.slowness != job.generation.slowness]) == 0
    job.spare("d")
    assert (decided(job).action, job.quarantined) == (RecoveryAction.REPLACE, ["c"])


def test_a_host_that_is_slow_again_is_taken_out_again_and_for_longer():
    job = training("a", "b", "c", "d", spare_seats=6)
    for turn in range(3):
        tell(job, "c", kind="link", since=100 * turn, kept=0.5, replaced=1.0, without=0.75)
        go_on(job, 20 * turn + 9)
        assert (job.members, job.quarantined) == (["a", "b", "d"], ["c"] * (turn + 1))
        job.give(QuarantineChanged(frozenset()))
        job.take_seat("c")
        go_on(job, 20 * turn + 14)
        assert sorted(job.members) == ["a", "b", "c", "d"], "it is back"
    assert job.taken_out_before == [0, 1, 2]


def test_a_quarantine_for_another_cause_is_as_long_as_ever_for_a_host_that_was_slow():
    job = training("a", "b", "c", "d", spare_seats=6, max_collective_retries=0)
    tell(job, "c", kind="link", kept=0.5, replaced=1.0, without=0.75)
    go_on(job, 9)
    job.give(QuarantineChanged(frozenset()))
    job.take_seat("c")
    go_on(job, 14)
    assert sorted(job.members) == ["a", "b", "c", "d"], "it is back"
    job.report(
        "c", state=WorkerState.IDLE, failure=WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="failed")
    )
    job.acknowledge(*"abcd", step=15)
    assert job.quarantined == ["c", "c"]
    assert job.generation.reason.startswith("c is taken out: training failed")
    assert job.generation.slowness.count_taken_out(C) == 1
    assert job.taken_out_before == [0, 0]


@pytest.mark.parametrize("ended_in", [GenerationPhase.PAUSE, GenerationPhase.BOUNDARY])
def test_a_host_whose_quarantine_ended_before_it_left_is_quarantined_again_if_it_stays_slow(ended_in):
    job = training("a", "b", "c", "d", spare_seats=6)
    for turn in range(3):
        tell(job, "c", kind="link", kept=0.5, replaced=1.0, without=0.75)
        assert job.phase is GenerationPhase.PAUSE
        assert job.quarantined == ["c"] * (turn + 1)
        step = 20 * turn + 9
        if ended_in is GenerationPhase.BOUNDARY:
            for name in job.members:
                job.report(name, generation=job.generation.number, earliest_stop_step=step)
        assert job.phase is ended_in
        job.give(QuarantineChanged(frozenset()))
        for name in job.members:
            job.report(name, generation=job.generation.number, earliest_stop_step=step)
        for name in job.members:
            job.report(name, state=WorkerState.IDLE, step=step, earliest_stop_step=step, has_formed=False)
        job.form()
        job.train(step + 1)
        assert (job.phase, job.members) == (GenerationPhase.ACTIVE, ["a", "b", "c", "d"])
        assert job.generation.taken_out is None


def test_a_host_that_was_taken_out_comes_back_as_a_spare_and_replaces_no_host_that_was_slow_less_often():
    job = with_spare()
    tell(job, "c", kept=0.6, replaced=1.0, without=0.7)
    go_on(job, 9)
    tell(job)
    job.give(QuarantineChanged(frozenset()))
    job.take_seat("c")
    number = job.generation.number
    job.wait(1.0)
    assert (job.members, job.generation.number) == (["a", "b", "d"], number), "it spares"
    # Of another slow host it is no replacement: it was slow more often.
    tell(job, "b", kept=0.6, replaced=1.0, without=0.5, since=200)
    assert decided(job).action is RecoveryAction.KEEP
    assert {o.action: o.why_not for o in decided(job).options}[RecoveryAction.REPLACE] == "no spare is ready"


def with_slow_spare(*others: str) -> Job:
    """Return a job of a, b, c and f, beside d, which was taken out once and spares since, and others."""
    job = training("a", "b", "c", "d", spare_seats=8)
    job.spare("f")
    tell(job, "d", kept=0.6, replaced=1.0, without=0.7)
    go_on(job, 9)
    assert job.members == ["a", "b", "c", "f"]
    tell(job)
    job.give(QuarantineChanged(frozenset()))
    job.take_seat("d")
    for name in others:
        job.spare(name)
    return job


def test_a_spare_that_was_slow_more_often_does_not_join_where_a_host_is_taken_out_without_a_replacement():
    job = with_slow_spare()
    tell(job, "b", kind="link", kept=0.5, replaced=1.0, without=0.75, since=200)
    assert decided(job).action is RecoveryAction.TAKE_OUT
    go_on(job, 20)
    job.wait(100.0)
    assert job.members == ["a", "c", "f"], "neither in this change nor after it"
    change_leader(job)
    job.give(QuarantineChanged(frozenset({HostName("b")})))
    job.wait(100.0)
    assert job.members == ["a", "c", "f"]
    # A second place that is free is not kept from it.
    job.change("c", is_draining=True)
    go_on(job, 30)
    assert sorted(job.members) == ["a", "d", "f"]


def test_the_place_of_a_slow_host_is_kept_for_it_until_its_quarantine_is_over():
    job = with_slow_spare()
    tell(job, "b", kind="link", kept=0.5, replaced=1.0, without=0.75, since=200)
    go_on(job, 20)
    job.give(QuarantineChanged(frozenset()))
    assert (job.phase, job.generation.reason) == (GenerationPhase.PAUSE, "d asked to join")


def test_after_a_failure_and_for_the_last_copy_of_the_state_a_spare_that_was_slow_joins_all_the_same():
    for is_last_copy in (False, True):
        job = with_slow_spare()
        tell(job, "b", kind="link", kept=0.5, replaced=1.0, without=0.75, since=200)
        go_on(job, 20)
        assert job.members == ["a", "c", "f"]
        if is_last_copy:
            for name in "cf":
                job.report(name, holds_state=False)
            go_on(job, 30)
        else:
            failure = WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="failed")
            job.report("c", state=WorkerState.IDLE, failure=failure)
            job.acknowledge(*"acf", step=21)
            job.serve()
        assert sorted(job.members) == ["a", "c", "d", "f"]


def test_an_operator_who_takes_out_a_host_that_was_slow_once_gets_any_spare_in_its_place():
    job = with_slow_spare()
    tell(job, "b", kind="link", kept=0.5, replaced=1.0, without=0.75, since=200)
    go_on(job, 20)
    job.give(QuarantineChanged(frozenset()))
    go_on(job, 30)
    job.take_seat("b")
    assert sorted(job.members) == ["a", "c", "d", "f"], "b is a spare that was slow as often as d"
    job.give(QuarantineChanged(frozenset({HostName("d")})))
    go_on(job, 40)
    assert sorted(job.members) == ["a", "b", "c", "f"]


def test_of_two_spares_the_one_that_was_slow_less_often_replaces_a_slow_host():
    job = with_slow_spare("z")
    tell(job, "b", kept=0.6, replaced=1.0, without=0.5, since=200)
    assert decided(job).action is RecoveryAction.REPLACE
    go_on(job, 20)
    assert sorted(job.members) == ["a", "c", "f", "z"]


def test_a_spare_is_waited_for_that_takes_its_seat_just_now():
    job = training("a", "b", "c", spare_seats=4)
    new = msgspec.structs.replace(job.status("d"), is_spare=True)
    assert new.worker is not None
    worker = msgspec.structs.replace(new.worker, report=WorkerReport(state=WorkerState.IDLE))
    job.give(HostChanged(msgspec.structs.replace(new, worker=worker)))
    assert job.generation.find_newcomer(HostName("d"), worker.incarnation) is not None, (
        "it has a seat to take"
    )
    tell(job, "c", kind="link", kept=0.5, replaced=1.0, without=0.75)
    assert (job.phase, job.generation.slowness.decision) == (GenerationPhase.ACTIVE, None)
    job.take_seat("d")
    assert decided(job).action is RecoveryAction.REPLACE
    go_on(job, 9)
    assert (job.members, job.generation.change) == (["a", "b", "d"], WorldChange.GROW)


def test_a_spare_for_which_there_is_no_seat_replaces_a_slow_host_by_a_reform():
    job = training("a", "b", "c", spare_seats=0)
    job.spare("d")
    tell(job, "c", kept=0.5, replaced=1.0, without=0.7)
    decision = decided(job)
    assert decision.action is RecoveryAction.REPLACE
    go_on(job, 9)
    assert (sorted(job.members), job.generation.change) == (["a", "b", "d"], WorldChange.REFORM)


def test_another_leader_decides_the_same_and_finishes_what_was_begun():
    job = with_spare()
    tell(job, "c", kept=0.8, replaced=1.0, without=0.7)
    decision, quarantined = decided(job), job.state.quarantined
    change_leader(job)
    job.give(QuarantineChanged(quarantined))
    assert (decided(job), job.phase) == (decision, GenerationPhase.PAUSE)
    go_on(job, 9)
    assert job.members == ["a", "b", "d"]


def test_the_layers_of_a_pipeline_are_divided_anew_and_back_again():
    job = training("a", "b", "c", "d", spare_seats=4)
    speeds = ((C, 0.33),)
    tell(job, "c", kept=0.4, replaced=1.0, redivided=0.8, speeds=speeds)
    assert (decided(job).action, job.phase) == (RecoveryAction.REDIVIDE, GenerationPhase.PAUSE)
    assert decided(job).options[0].pause_s == PRIOR_S[TimedChange.REDIVIDE], "in their world"
    assert job.quarantined == []
    go_on(job, 9)
    assert (job.members, job.generation.change) == (["a", "b", "c", "d"], WorldChange.SHRINK)
    assert job.generation.slowness.speeds == speeds
    times = (
        {time.change for time in job.state.memory.unwritten.times} if job.state.memory.unwritten else set()
    )
    assert TimedChange.SHRINK not in times, "it is no shrink"
    tell(job, kept=0.6, redivided=1.0)
    assert (decided(job).action, decided(job).slow) == (RecoveryAction.REDIVIDE, "")
    assert decided(job).reason.startswith(
        "hosts are as fast as their peers again: the job divides its layers anew"
    )
    go_on(job, 20)
    assert job.generation.slowness.speeds == ()


def test_a_pipeline_forgets_the_speed_of_a_host_that_leaves():
    job = training("a", "b", "c", "d", spare_seats=4)
    tell(job, "c", kept=0.4, replaced=1.0, redivided=0.8, speeds=((C, 0.33),))
    go_on(job, 9)
    job.change("c", is_draining=True)
    go_on(job, 12)
    assert (job.members, job.generation.slowness.speeds) == (["a", "b", "d"], ())


def test_a_change_that_costs_more_than_it_saves_until_the_next_failure_is_left():
    job = with_spare()
    know(job, grow=10 * HOUR_S * 1000)
    tell(job, "c", kept=0.8, replaced=1.0, without=0.7)
    assert decided(job).action is RecoveryAction.KEEP


def narrow(job: Job, **changes) -> None:
    """Have the first worker report that device 3 of c is slow, and what the job would be without it."""
    job.change("c", num_devices=4)
    speeds = {"kept": 0.6, "replaced": 1.0, "without": 0.7, "devices": (3,), "fewer_devices": 0.9}
    tell(job, "c", **{**speeds, **changes})


def test_a_host_goes_on_without_its_slow_device_and_stays_a_member():
    job = training("a", "b", "c", spare_seats=4)
    job.change("c", gpu_uuids=("GPU-0", "GPU-1", "GPU-2", "GPU-3"), gpus=("GPU 3: too hot",))
    narrow(job)
    decision = decided(job)
    assert (decision.action, decision.slow, decision.devices) == (RecoveryAction.FEWER_DEVICES, "c", (3,))
    assert "c is slow (compute): 3.0 times since step 40; GPU 3: too hot: the job goes on" in decision.reason
    assert job.phase is GenerationPhase.ACTIVE, "until its agent ends the worker"
    assert job.quarantined == []
    assert job.quarantined_devices == [
        QuarantineDevice(host=C, device=3, uuid="GPU-3", reason=decision.reason, num_before=0)
    ]
    narrow(job)
    job.wait(100.0)
    change_leader(job)
    narrow(job)
    assert len(job.quarantined_devices) == 1, "it is decided once"
    assert job.generation.slowness.count_device(C, 3) == 1


@pytest.mark.parametrize(("standby", "action"), [(0, RecoveryAction.KEEP), (1, RecoveryAction.FEWER_DEVICES)])
def test_a_device_that_stands_by_takes_the_place_of_a_slow_one(standby, action):
    """Without it, half of the four devices that are left would be no faster than all with the slow one."""
    job = training("a", "b", "c", spare_seats=4)
    job.change("c", standby_devices=standby)
    narrow(job, without=0.5, fewer_devices=0.6, slow_devices=(3,))
    assert decided(job).action is action
    assert [one.device for one in job.quarantined_devices] == [3] * standby


def test_standby_devices_count_only_where_they_are_enough_for_all_slow_ones():
    down = Slowdown(
        generation=GenerationNumber(1),
        kept=0.5,
        host=C,
        replaced=1.0,
        devices=(3,),
        slow_devices=(2, 3),
        fewer_devices=0.6,
    )
    assert count_standby_devices(down, 1) == down
    enough = count_standby_devices(down, 2)
    assert (enough.devices, enough.fewer_devices) == ((2, 3), 1.0)
    none_slow = msgspec.structs.replace(down, devices=(), slow_devices=())
    assert count_standby_devices(none_slow, 2) == none_slow


def test_a_device_that_is_slow_again_is_out_for_longer_and_its_restart_is_no_failure():
    job = training("a", "b", "c", spare_seats=4)
    narrow(job)
    failures = job.generation.history.failures
    job.restart("c")
    job.acknowledge("a", "b", step=20)
    job.form()
    job.train(21)
    assert job.members == ["a", "b"]
    assert job.generation.history.failures == failures, "it was planned"
    job.take_seat("c")
    go_on(job, 30)
    assert job.members == ["a", "b", "c"]
    narrow(job)
    assert [one.num_before for one in job.quarantined_devices] == [0, 1]


def test_a_restart_without_a_slow_device_is_planned_after_other_changes_too():
    job = training("a", "b", "c", spare_seats=4)
    narrow(job)
    job.restart("d")
    job.take_seat("d")
    go_on(job, 9)
    assert job.members == list("abcd")
    narrow(job)
    assert len(job.quarantined_devices) == 1, "its agent has not ended the worker yet"
    failures = job.generation.history.failures
    job.restart("c")
    assert job.generation.history.failures == failures


@pytest.mark.parametrize(
    ("changes", "status", "why_not"),
    [
        ({"devices": ()}, {}, "no device of it is known to be slower than its other ones"),
        ({"fewer_devices": 0.0}, {}, "it cannot do without a device"),
        ({"fewer_devices": 0.0, "why_all_devices": "a stage"}, {}, "a stage"),
        ({"fewer_devices": 0.62}, {}, "the speed rises by less than 5%"),
        ({}, {"num_devices": 0}, "its agent does not know how many devices it has"),
    ],
)
def test_why_a_slow_host_keeps_all_devices_is_said(changes, status, why_not):
    job = training("a", "b", "c", spare_seats=4)
    for one in "abc":
        job.change(one, **{"num_devices": 4, **status})
    speeds = {"kept": 0.6, "replaced": 1.0, "without": 0.5, "devices": (3,), "fewer_devices": 0.9}
    tell(job, "c", **{**speeds, **changes})
    options = {option.action: option.why_not for option in decided(job).options}
    assert options[RecoveryAction.FEWER_DEVICES] == why_not
    assert (decided(job).action, job.quarantined_devices) == (RecoveryAction.KEEP, [])


def test_a_host_with_the_last_copy_of_the_state_keeps_its_slow_devices():
    job = training("a", "c", spare_seats=4)
    job.report("a", holds_state=False)
    job.change("c", num_devices=4)
    narrow(job, without=0.0)
    options = {option.action: option.why_not for option in decided(job).options}
    assert options[RecoveryAction.FEWER_DEVICES] == "the next loss may be that of the state"


def test_no_worker_is_started_again_without_slow_devices_if_the_others_would_have_to_wait_for_it():
    job = training("a", "b", "c", spare_seats=4, min_hosts=3)
    narrow(job)
    options = {option.action: option.why_not for option in decided(job).options}
    assert options[RecoveryAction.FEWER_DEVICES] == (
        "fewer than min_hosts = 3 would train until its worker has started again"
    )
    assert job.quarantined_devices == []


ACTIONS = (
    RecoveryAction.KEEP,
    RecoveryAction.REPLACE,
    RecoveryAction.TAKE_OUT,
    RecoveryAction.FEWER_DEVICES,
    RecoveryAction.REDIVIDE,
)


def play(action: RecoveryAction, training: SlowTraining, prices: Prices) -> float:
    """Return how many hosts' seconds of work are done until the next failure, second by second in thousandths."""
    pauses: dict[RecoveryAction, TimedChange | None] = {
        RecoveryAction.KEEP: None,
        RecoveryAction.REPLACE: TimedChange.GROW,
        RecoveryAction.TAKE_OUT: TimedChange.SHRINK,
        RecoveryAction.FEWER_DEVICES: TimedChange.SHRINK,
        RecoveryAction.REDIVIDE: TimedChange.REDIVIDE,
    }
    down = training.slowdown
    speeds = (down.kept, down.replaced, down.without, down.fewer_devices, down.redivided)
    speed = speeds[ACTIONS.index(action)]
    change = pauses[action]
    pause_s = prices.seconds[change] if change is not None else 0.0
    trains_s = max(prices.next_failure_s - pause_s, 0.0)
    if action is not RecoveryAction.FEWER_DEVICES:
        return trains_s * speed * training.training
    # The others train until the worker is back, and then all wait until it has joined.
    meanwhile_s = min(trains_s, max(prices.seconds[TimedChange.RETURN] - pause_s, 0.0))
    rest_s = max(trains_s - meanwhile_s - prices.seconds[TimedChange.GROW], 0.0)
    return (meanwhile_s * down.without + rest_s * speed) * training.training


def list_possible(training: SlowTraining) -> list[RecoveryAction]:
    down = training.slowdown
    enough = down.kept * (1 + MIN_SPEED_GAIN)
    found = [RecoveryAction.KEEP]
    if training.has_spare and down.replaced >= enough:
        found.append(RecoveryAction.REPLACE)
    if not training.has_spare and down.without and down.without >= enough:
        found.append(RecoveryAction.TAKE_OUT)
    if down.devices and down.fewer_devices and down.fewer_devices >= enough:
        found.append(RecoveryAction.FEWER_DEVICES)
    if down.redivided and down.redivided >= enough:
        found.append(RecoveryAction.REDIVIDE)
    return found


def test_the_choice_is_the_best_of_all_possible_ones_but_for_the_hysteresis():
    chance = random.Random(4)
    chosen = set()
    for has_spare, _ in itertools.product((False, True), range(1500)):
        training = SlowTraining(
            places=4,
            training=4,
            has_spare=has_spare,
            slowdown=Slowdown(
                generation=GenerationNumber(2),
                host=C,
                kept=chance.uniform(0.2, 1.0),
                replaced=1.0,
                without=chance.choice((0.0, 0.75, chance.uniform(0.2, 0.8))),
                redivided=chance.choice((0.0, chance.uniform(0.2, 1.0))),
                devices=chance.choice(((), (1,))),
                fewer_devices=chance.choice((0.0, chance.uniform(0.2, 1.0))),
            ),
        )
        prices = Prices(
            seconds={change: chance.uniform(0.1, 20.0) for change in PRIOR_S},
            next_failure_s=chance.choice((15.0, 60.0, HOUR_S, 100 * HOUR_S)),
        )
        choice = choose_for_slow_host(training, prices)
        assert {o.action for o in choice.options if not o.why_not} == set(list_possible(training))
        works = {action: play(action, training, prices) for action in list_possible(training)}
        best = max(works, key=lambda action: works[action])
        whole = prices.next_failure_s * training.training
        saved_s = (works[best] - works[RecoveryAction.KEEP]) / training.training
        lost_s = (whole - works[RecoveryAction.KEEP]) / training.training
        pays = saved_s > max(HYSTERESIS * lost_s, MIN_SAVED_S)
        assert choice.action is (best if pays else RecoveryAction.KEEP), choice.reason
        chosen.add(choice.action)
    assert chosen == set(ACTIONS)


def test_noise_of_what_is_reported_moves_nothing_to_and_fro():
    chance = random.Random(8)
    for usual in (0.82, 0.85, 0.88, 0.91):
        job = training("a", "b", "c", "d", spare_seats=4)
        for _ in range(50):
            even, by_speed = (share + chance.gauss(0, 0.005) for share in (usual, 0.87))
            if job.generation.slowness.speeds:
                speeds = {"kept": by_speed, "redivided": even, "speeds": ()}
            else:
                speeds = {"kept": even, "redivided": by_speed, "speeds": ((C, 0.5),)}
            tell(job, "c", replaced=1.0, without=0.75, **speeds)
            job.wait(10.0)
            if job.phase is not GenerationPhase.ACTIVE:
                go_on(job, job.generation.step + 9)
        assert job.generation.number == (2 if usual == 0.82 else 1), job.generation.reason
