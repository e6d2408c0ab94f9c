"""The planned axes after a loss or a join: by brute force, by the machine, whoever leads, and as they are read."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.membership.machine import HostLeft
from resilient_jax.membership.planned_axes import find_plan_change
from resilient_jax.policy.choice import HYSTERESIS, MIN_SAVED_S, choose
from resilient_jax.policy.prices import PRIOR_S, Prices
from resilient_jax.policy.return_groups import ExpectedReturn
from resilient_jax.policy.situations import Admission, Loss
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.plan_records import PlanChange, PlanConstants, PlanOutlook
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.recovery_records import RecoveryAction, RecoveryDecision, TimedChange
from resilient_jax.protocol.worker_report import (
    WorkerFailure,
    WorkerFailureKind,
    WorkerFindings,
    WorkerReport,
    WorkerState,
)
from tests.support.membership_job import Job, change_leader, know, stop_at_boundary, training


def make_axes(fsdp):
    return ((0, (("fsdp", fsdp), ("expert", 1), ("tensor", 1))),)


AXES, BEST_AXES = make_axes(2), make_axes(1)
NAMES = tuple(map(HostName, "abcd"))
KEPT, BEST = 0.7, 0.75
"""Speeds of three hosts of four."""


BEST_OF_TWO = 0.6
"""Of two hosts of four."""


def estimate(
    *,
    prepare_s: float,
    kept: float = KEPT,
    best_axes=BEST_AXES,
    generation: int = 1,
    most_lost: int = 2,
    fitted: PlanConstants = (),
) -> PlanOutlook:
    losses = (
        PlanChange(groups=(0,), kept=kept, best=BEST, best_axes=best_axes, prepare_s=prepare_s),
        PlanChange(
            groups=(0, 0), kept=kept - 0.2, best=BEST_OF_TWO, best_axes=best_axes, prepare_s=prepare_s
        ),
    )
    return PlanOutlook(
        generation=GenerationNumber(generation),
        axes=AXES,
        groups=(NAMES,),
        losses=losses[:most_lost],
        fitted=fitted,
        num_measured=len(fitted),
    )


def play(
    seconds: float, pause_s: float, speed: float, returns_s: list[float], join_s: float, num_lost: int
) -> float:
    """Return what is trained in that time, moment by moment: hosts of four that are back join, with the best axes."""
    moments, trained = 4000, 0.0
    busy_until_s, left = pause_s, list(returns_s)
    for moment in range(moments):
        now_s = (moment + 0.5) * seconds / moments
        if now_s < busy_until_s:
            continue
        if left and left[0] <= now_s:
            # Whoever is back in the pause joins after it.
            begins_s = max(left.pop(0), busy_until_s)
            busy_until_s, speed = begins_s + join_s, (4 - num_lost + len(returns_s) - len(left)) / 4
            if now_s < busy_until_s:
                continue
        trained += speed
    return trained * seconds / moments


@given(
    prepare_s=st.floats(0.0, 60.0),
    kept=st.floats(0.1, 0.75),
    form_s=st.floats(0.1, 5.0),
    place_s=st.floats(0.1, 5.0),
    # Far enough from each other to be no group, which would be waited for together.
    returns_s=st.lists(st.sampled_from((1.0, 8.0, 20.0, 50.0)), max_size=2, unique=True).map(sorted),
    next_failure_s=st.floats(20.0, 2000.0),
    num_lost=st.sampled_from((1, 2)),
    move_s=st.sampled_from((0.0, 0.1, 5.0, 60.0)),
)
def test_the_choice_is_the_better_one_of_both_played_moment_by_moment(
    prepare_s, kept, form_s, place_s, returns_s, next_failure_s, num_lost, move_s
):
    returns_s = returns_s[:num_lost]
    best = (4 - num_lost) / 4
    kept = min(kept, best)
    seconds = {**PRIOR_S, TimedChange.SHRINK: form_s, TimedChange.NEW_AXES: place_s}
    # All four hosts trained before the loss, so parts of the present speed are parts of that of all.
    plan = PlanChange(
        groups=(0,) * num_lost,
        kept=kept,
        best=best,
        best_axes=BEST_AXES,
        prepare_s=prepare_s,
        move_s=move_s,
    )
    loss = Loss(
        places=4,
        ready=4 - num_lost,
        awaited=tuple(map(ExpectedReturn, returns_s)),
        plan=plan,
        has_new_axes=True,
        num_lost=num_lost,
    )
    choice = choose(loss, Prices(seconds=seconds, next_failure_s=next_failure_s))
    join_s = seconds[TimedChange.GROW]
    pauses_s = {
        RecoveryAction.SHRINK: (max(form_s, place_s, move_s) + prepare_s, best),
        RecoveryAction.KEEP_AXES: (form_s, kept),
    }
    trained = {
        action: play(next_failure_s, pause_s, speed, returns_s, join_s, num_lost)
        for action, (pause_s, speed) in pauses_s.items()
    }
    best_speed = (4 - num_lost + len(returns_s)) / 4
    lost = {action: next_failure_s * best_speed - found for action, found in trained.items()}
    saved_s = (lost[RecoveryAction.SHRINK] - lost[RecoveryAction.KEEP_AXES]) / best_speed
    margin_s = max(HYSTERESIS * lost[RecoveryAction.SHRINK] / best_speed, MIN_SAVED_S)
    if abs(saved_s - margin_s) > 0.005 * next_failure_s:  # of the moments
        expected = RecoveryAction.KEEP_AXES if saved_s > margin_s else RecoveryAction.SHRINK
        assert choice.action is expected


@pytest.mark.parametrize(
    ("move_s", "action"), [(0.5, RecoveryAction.SHRINK), (60.0, RecoveryAction.KEEP_AXES)]
)
def test_axes_for_which_all_shards_are_cut_anew_are_not_taken_where_that_takes_long(move_s, action):
    plan = PlanChange(groups=(0,), kept=0.5, best=0.75, best_axes=BEST_AXES, move_s=move_s)
    # The lost host is expected back soon.
    awaited = (ExpectedReturn(20.0),)
    loss = Loss(places=4, ready=3, awaited=awaited, plan=plan, has_new_axes=True, num_lost=1)
    assert choose(loss, Prices(seconds=PRIOR_S, next_failure_s=2000.0)).action is action


def lose(
    *prepared: float | None, names: str = "b", restarts: bool = True, is_new_leader: bool = False, **estimated
) -> Job:
    """Return a job that has lost workers; a and the next host that is left reported so many seconds of preparation."""
    job = training(*"abcd", spare_seats=8)
    for name, prepare_s in zip("ac", prepared, strict=False):
        if prepare_s is not None:
            job.report(name, plans=estimate(prepare_s=prepare_s, **estimated))
    for name in names:
        if restarts:
            job.worker(name, exit_code=-9)
        else:
            job.give(HostLeft(HostName(name)))
    if is_new_leader:
        change_leader(job)
    job.acknowledge(*(name for name in "abcd" if name not in names), step=6, holds_state=True)
    return job


def decided(job: Job) -> RecoveryDecision:
    assert job.generation.record.decision is not None
    return job.generation.record.decision


def test_where_programs_take_longer_than_the_host_is_away_the_axes_are_kept():
    job = lose(30.0)
    decision = decided(job)
    assert (decision.action, decision.awaited) == (RecoveryAction.KEEP_AXES, ("b",))
    assert (job.phase, job.members, job.generation.shape.plan_axes) == (
        GenerationPhase.FORM,
        list("acd"),
        AXES,
    )
    options = {option.action: option for option in decision.options if not option.why_not}
    assert set(options) == {RecoveryAction.KEEP_AXES, RecoveryAction.SHRINK}
    assert options[RecoveryAction.SHRINK].pause_s == pytest.approx(30.6)


@pytest.mark.parametrize(
    ("devices", "present"),
    [
        ({"num_used": 4}, 3.5),  # as before its worker was killed
        ({"num_used": 0}, 4),
    ],
)
def test_the_speed_after_a_loss_is_a_part_of_what_the_host_had_before(devices, present):
    job = Job(*"abcd", spare_seats=8)
    for name in "abcd":
        job.change(name, num_devices=8, **(devices if name == "b" else {}))
    job.serve()
    job.form()
    job.train(5)
    job.report("a", plans=estimate(prepare_s=0.0))
    job.worker("b", exit_code=-9)
    job.acknowledge(*"acd", step=6, holds_state=True)
    speeds = {option.action: option.speed for option in decided(job).options}
    assert speeds[RecoveryAction.SHRINK] == pytest.approx(present / 4 * BEST)


def test_a_host_that_is_lost_with_a_device_had_all_of_its_devices_before():
    job = training(*"abcd", spare_seats=8)
    for name in "abcd":
        job.change(name, num_devices=8)
    job.report("a", plans=estimate(prepare_s=0.0))
    job.change("b", num_used=4, worker=msgspec.structs.replace(job.worker_of("b"), exit_code=-9))
    job.acknowledge(*"acd", step=6, holds_state=True)
    speeds = {option.action: option.speed for option in decided(job).options}
    assert speeds[RecoveryAction.SHRINK] == pytest.approx(BEST)


@pytest.mark.parametrize("restarts", [True, False])
def test_where_programs_are_ready_the_best_axes_follow(restarts):
    job = lose(0.0, restarts=restarts)
    assert (decided(job).action, job.generation.shape.plan_axes) == (RecoveryAction.SHRINK, BEST_AXES)


@pytest.mark.parametrize("names", ["bc", "bd", "ab"])
def test_after_the_loss_of_two_hosts_at_once_axes_are_kept_by_the_same_rules(names):
    job = lose(30.0, 30.0, names=names)
    decision = decided(job)
    assert (decision.action, decision.awaited) == (RecoveryAction.KEEP_AXES, tuple(names))
    assert all(f"{name}: its worker ended" in decision.reason for name in names), "one after the other"
    assert job.generation.shape.plan_axes == AXES
    assert decision.wait_s == pytest.approx(30.4 / (BEST_OF_TWO - KEPT + 0.2))
    assert (decided(lose(0.0, 0.0, names=names)).action) is RecoveryAction.SHRINK


def test_a_new_world_has_the_best_axes_for_whose_programs_it_waits_in_any_case():
    job = training(*"abcd", spare_seats=8)
    job.report("a", plans=estimate(prepare_s=30.0))
    job.worker("b", exit_code=-9)
    job.change("a", services=())
    job.acknowledge(*"acd", step=6, holds_state=True)
    job.serve()
    decision = decided(job)
    assert (decision.action, decision.plan_axes) == (RecoveryAction.REFORM, BEST_AXES)
    assert (decision.has_new_axes, decision.prepare_s) == (True, 0.0)
    assert (job.phase, job.generation.shape.plan_axes) == (GenerationPhase.FORM, BEST_AXES)


def test_the_entry_is_that_of_the_groups_which_lost_a_host():
    groups = tuple(tuple(map(HostName, names)) for names in ("ac", "bd"))
    job = training(*"abcd", spare_seats=8)
    losses = tuple(
        PlanChange(groups=lost, kept=0.5, best=0.6, best_axes=make_axes(axis))
        for axis, lost in enumerate([(0,), (1,), (0, 0), (0, 1), (1, 1), (0, 1, 1)], 1)
    )
    plans = PlanOutlook(generation=GenerationNumber(1), axes=AXES, groups=groups, losses=losses)
    for name in "abc":
        job.report(name, plans=plans)
    statuses = {status.host: status for status in job.state.hosts.values()}
    for gone, axis in {"a": 1, "d": 2, "ac": 3, "ab": 4, "cd": 4, "bd": 5, "bcd": 6, "abd": 6}.items():
        kept = [status for host, status in statuses.items() if host not in gone]
        found = find_plan_change(kept, ())
        assert found is not None
        assert found[1].best_axes == make_axes(axis)
    assert find_plan_change(list(statuses.values()), ()) is None, "of no change nothing was reported"
    assert find_plan_change([statuses[HostName("b")]], ()) is None, "of a, c and d nothing was reported"


def test_the_later_one_of_two_workers_counts():
    assert decided(lose(0.0, 30.0)).action is RecoveryAction.KEEP_AXES


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({"names": "bc", "most_lost": 1}, "no planned axes are known for the hosts that would train"),
        ({"generation": 0}, "no planned axes are known for the hosts that would train"),
        ({"kept": 0.0}, "its axes do not fit the hosts that would train"),
        ({"best_axes": AXES}, "the best axes are those that the job has"),
    ],
)
def test_why_axes_cannot_be_kept(changes, why_not):
    decision = decided(lose(30.0, **changes))
    assert decision.action is RecoveryAction.SHRINK
    (kept,) = [option for option in decision.options if option.action is RecoveryAction.KEEP_AXES]
    assert kept.why_not == why_not


@pytest.mark.parametrize("prepare_s", [0.0, 30.0])
def test_another_leader_decides_the_same(prepare_s):
    one, other = lose(prepare_s), lose(prepare_s, is_new_leader=True)
    assert decided(one) == decided(other)
    assert one.generation.shape.plan_axes == other.generation.shape.plan_axes


def foresee_all(generation: int = 1) -> PlanOutlook:
    """Return what workers estimate where a spare, e, is like the members, and f is not."""
    groups, absent = ((NAMES, ()), ((HostName("e"),), (HostName("f"),)))
    return PlanOutlook(
        generation=GenerationNumber(generation),
        axes=AXES,
        groups=groups,
        absent=absent,
        losses=(
            PlanChange(groups=(), kept=1.0, best=1.1, best_axes=make_axes(3)),
            PlanChange(groups=(0,), kept=0.7, best=0.75, best_axes=make_axes(4)),
        ),
        joins=(PlanChange(groups=(1,), kept=1.2, best=1.3, best_axes=make_axes(5)),),
    )


@pytest.mark.parametrize(
    ("lost", "joining", "axes"),
    [
        ("d", "", make_axes(4)),
        ("d", "e", make_axes(3)),
        ("d", "d", make_axes(3)),
        ("cd", "e", make_axes(4)),
        ("", "f", make_axes(5)),
        ("d", "f", None),
        ("cd", "", None),
    ],
)
def test_a_host_that_joins_is_in_the_place_of_one_like_it(lost, joining, axes):
    job = training(*"abcdef", spare_seats=8)
    for name in "abcd":
        job.report(name, plans=foresee_all())
    statuses = {str(status.host): status for status in job.state.hosts.values()}
    kept = [statuses[name] for name in "abcd" if name not in lost]
    found = find_plan_change(kept, [statuses[name] for name in joining])
    assert (found and found[1].best_axes) == axes


def test_of_a_host_that_may_have_got_its_devices_back_nothing_is_foreseen():
    job = training(*"abcdef", spare_seats=8)
    for name in "abcd":
        job.report(name, plans=msgspec.structs.replace(foresee_all(), incomplete=(HostName("d"),)))
    kept = [job.status(name) for name in "abc"]
    assert find_plan_change(kept, [job.status("e")]) is not None
    assert find_plan_change(kept, [job.status("d")]) is None


def test_the_axes_stay_and_are_recorded_where_a_spare_takes_the_place_of_a_lost_host():
    job = training(*"abcd", spare_seats=8)
    job.spare("e")
    job.take_seat("e")
    for name in "abcd":
        job.report(name, plans=foresee_all())
    job.worker("d", exit_code=-9)
    job.acknowledge(*"abc", step=5, holds_state=True)
    assert decided(job).action is RecoveryAction.REPLACE
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abce"), AXES)


def test_the_axes_are_recorded_where_a_host_leaves_after_a_notice():
    job = training(*"abcd", spare_seats=8)
    for name in "abcd":
        job.report(name, plans=foresee_all())
    job.change("b", is_draining=True)
    stop_at_boundary(job, 6)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("acd"), make_axes(4))


def test_the_axes_that_follow_those_that_were_kept_are_recorded():
    job = lose(30.0)
    job.form()
    job.train(7)
    for name in "acd":
        left = foresee_all(job.generation.number)
        job.report(name, plans=msgspec.structs.replace(left, groups=(tuple(map(HostName, "acd")), ())))
    job.pass_time(2 * decided(job).wait_s)
    stop_at_boundary(job, 8)
    assert (job.members, job.generation.shape.plan_axes) == (list("acd"), make_axes(3))


def test_axes_are_kept_for_as_long_as_was_decided_and_no_longer():
    job = lose(30.0)
    job.form()
    job.train(7)
    wait_s = decided(job).wait_s
    job.pass_time(0.99 * wait_s)
    assert job.generation.phase is GenerationPhase.ACTIVE
    job.pass_time(0.02 * wait_s)
    assert job.generation.phase is GenerationPhase.PAUSE


FITTED = (("matrix_efficiency", 0.3),)


@pytest.mark.parametrize("is_new_leader", [False, True])
def test_constants_that_members_have_fitted_are_those_of_all_later_generations(is_new_leader):
    job = lose(0.0, None, fitted=FITTED, is_new_leader=is_new_leader)
    job.form()
    assert job.generation.shape.plan_constants == FITTED
    # Nobody has fitted any in the next one, whose estimates are by these.
    job.train(7)
    job.worker("d", exit_code=-9)
    job.acknowledge("a", "c", step=7, holds_state=True)
    job.form()
    assert (sorted(job.members), job.generation.shape.plan_constants) == (["a", "c"], FITTED)


def test_of_members_that_have_fitted_constants_that_with_the_most_plans_counts():
    job = training(*"abcd", spare_seats=8)
    for name, count in (("a", 1), ("c", 3), ("d", 2)):
        constants = (("matrix_efficiency", count / 10),)
        plans = msgspec.structs.replace(estimate(prepare_s=0.0), fitted=constants, num_measured=count)
        job.report(name, plans=plans)
    job.worker("b", exit_code=-9)
    job.acknowledge(*"acd", step=6, holds_state=True)
    job.form()
    assert job.generation.shape.plan_constants == (("matrix_efficiency", 0.3),)


def test_where_a_host_joins_its_axes_and_the_fitted_constants_are_recorded():
    job = join(msgspec.structs.replace(foresee_join(0.0), fitted=FITTED, num_measured=1))
    stop_at_boundary(job, 6)
    assert (job.generation.shape.plan_axes, job.generation.shape.plan_constants) == (BEST_AXES, FITTED)


def test_where_the_same_hosts_try_again_they_keep_their_axes_though_others_are_estimated_to_be_faster():
    job = training(*"abcd", spare_seats=8)
    same = PlanChange(groups=(), kept=1.0, best=1.2, best_axes=BEST_AXES)
    plans = msgspec.structs.replace(estimate(prepare_s=0.0), losses=(same,))
    for name in "abcd":
        job.report(name, plans=plans)
    job.report(
        "b",
        state=WorkerState.IDLE,
        failure=WorkerFailure(kind=WorkerFailureKind.COLLECTIVE, text="reset by peer"),
    )
    job.acknowledge(*"abcd", step=6, holds_state=True)
    job.serve()
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), AXES)


def test_a_generation_with_axes_and_a_report_of_losses_are_read_as_they_were_written():
    generation = lose(30.0).generation
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(generation), type=Generation) == generation
    report = WorkerReport(findings=WorkerFindings(plans=estimate(prepare_s=30.0)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=WorkerReport) == report


def test_a_host_that_is_back_joins_and_the_axes_are_the_best_ones():
    job = lose(30.0)
    job.form()
    job.train(7)
    job.restart("b")
    job.take_seat("b")
    stop_at_boundary(job, 8)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), ())


@pytest.mark.parametrize("is_new_leader", [False, True])
def test_axes_are_kept_so_long_and_then_the_best_ones_follow(is_new_leader):
    job = lose(30.0)
    wait_s = decided(job).wait_s
    # Until the slower steps have cost as much as the programs would, or the host should be back.
    assert wait_s == pytest.approx(30.4 / (BEST - KEPT))
    job.form()
    job.train(7)
    if is_new_leader:
        change_leader(job)
    job.pass_time(0.9 * wait_s)
    assert (job.phase, job.generation.shape.plan_axes) == (GenerationPhase.ACTIVE, AXES)
    job.pass_time(0.2 * wait_s)
    assert job.phase is GenerationPhase.PAUSE
    stop_at_boundary(job, 8)
    assert (job.phase, job.members, job.generation.shape.plan_axes) == (GenerationPhase.FORM, list("acd"), ())
    job.form()
    job.train(9)
    job.pass_time(2 * wait_s)
    assert job.phase is GenerationPhase.ACTIVE, "once"


def test_a_host_that_is_back_waits_no_longer_than_axes_are_kept():
    job = lose(30.0)
    wait_s = decided(job).wait_s
    job.form()
    job.train(7)
    know(job, grow=1e7)  # no join pays
    job.restart("b")
    job.take_seat("b")
    job.pass_time(0.5 * wait_s)
    assert (job.phase, decided(job).action) == (GenerationPhase.ACTIVE, RecoveryAction.KEEP_AXES)
    job.pass_time(wait_s)
    assert job.phase is GenerationPhase.PAUSE
    stop_at_boundary(job, 8)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), ())


def test_what_it_takes_to_give_axes_up_is_the_time_of_no_change():
    job = training(*"abcd", spare_seats=8)
    job.pass_time(10.0)
    job.train(15)
    job.report("a", plans=estimate(prepare_s=30.0))
    job.worker("b", exit_code=-9)
    job.acknowledge(*"acd", step=15, holds_state=True)
    job.form()
    job.train(16)
    job.pass_time(2 * decided(job).wait_s)
    stop_at_boundary(job, 17)
    job.form()
    job.pass_time(50.0)
    job.train(18)
    job.worker("d", exit_code=-9)  # with the next generation it is written
    measured = [seconds for time in job.generation.record.history.times for seconds in time.recent_s]
    assert all(seconds < 40.0 for seconds in measured), "of the loss alone"


@pytest.mark.parametrize(
    ("restarts", "prepare_s", "why"),
    [(True, 30.0, "enough, and b did not come back: the best"), (False, 1e6, "enough: the best")],
)
def test_why_kept_axes_are_given_up_says_who_did_not_come_back(restarts, prepare_s, why):
    job = lose(prepare_s, restarts=restarts)
    assert decided(job).action is RecoveryAction.KEEP_AXES
    job.form()
    job.train(7)
    job.pass_time(2 * decided(job).wait_s)
    assert why in job.generation.reason


@pytest.mark.parametrize(
    ("prepare_s", "measured"), [(30.0, TimedChange.SHRINK), (0.0, TimedChange.NEW_AXES), (0.1, None)]
)
def test_a_change_is_measured_by_its_axes(prepare_s, measured):
    job = training(*"abcd", spare_seats=8)
    job.pass_time(10.0)
    job.train(15)
    job.report("a", plans=estimate(prepare_s=prepare_s))
    job.worker("b", exit_code=-9)
    job.acknowledge(*"acd", step=15, holds_state=True)
    job.form()
    job.pass_time(3.0)
    job.train(16)
    job.worker("d", exit_code=-9)  # with the next generation it is written
    times = {time.change: time.typical_s for time in job.generation.record.history.times}
    assert times == ({measured: pytest.approx(2.0)} if measured is not None else {})


def foresee_join(prepare_s: float, *, kept: float = 1.27, best_axes=BEST_AXES, groups=((0,),)) -> PlanOutlook:
    """Return what workers of three hosts estimate of the join of d."""
    joins = tuple(
        PlanChange(groups=joining, kept=kept, best=1.3, best_axes=best_axes, prepare_s=prepare_s)
        for joining in groups
    )
    names = tuple(map(HostName, "abc"))
    return PlanOutlook(
        generation=GenerationNumber(1), axes=AXES, groups=(names,), absent=((HostName("d"),),), joins=joins
    )


def join(plans: PlanOutlook | None, *, failures: int = 0, is_new_leader: bool = False, **changes) -> Job:
    """Return a job of three hosts that d joins; with so many failures it expects the next one soon."""
    job = training(*"abc", spare_seats=8)
    job.config = dataclasses.replace(job.config, num_hosts=4)
    job.state = job.state
    history = msgspec.structs.replace(job.generation.record.history, failures=failures, observed_s=1000.0)
    job.state = dataclasses.replace(job.state, generation=change_fields(job.generation, history=history))
    for name in "abc":
        job.report(name, plans=plans)
    if is_new_leader:
        change_leader(job)
    job.report("d", state=WorkerState.IDLE)
    if changes:
        job.change("d", **changes)
    job.take_seat("d")
    assert job.phase is GenerationPhase.PAUSE
    return job


@pytest.mark.parametrize("is_new_leader", [False, True])
def test_the_axes_of_a_join_are_in_the_record_that_all_obey(is_new_leader):
    job = join(foresee_join(0.0), is_new_leader=is_new_leader)
    assert (decided(job).action, decided(job).has_new_axes) == (RecoveryAction.JOIN, True)
    stop_at_boundary(job, 6)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), BEST_AXES)


@pytest.mark.parametrize("plans", [None, foresee_join(0.0, groups=())])
def test_where_a_join_is_not_foreseen_each_worker_takes_the_best_plan(plans):
    job = join(plans)
    (kept,) = [option for option in decided(job).options if option.action is RecoveryAction.KEEP_AXES]
    assert kept.why_not == "no planned axes are known for the hosts that would train"
    stop_at_boundary(job, 6)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), ())


def test_a_host_with_fewer_devices_than_its_own_is_not_foreseen():
    job = join(foresee_join(0.0), num_devices=3, num_used=2)
    stop_at_boundary(job, 6)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), ())


def test_where_another_host_leaves_before_the_join_its_axes_are_not_those_that_were_decided():
    job = join(foresee_join(0.0))
    job.change("c", is_draining=True)
    stop_at_boundary(job, 6)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abd"), ())


FAILURES = 100
"""In 1000 s: the next one is expected in less than a minute."""


def test_hosts_join_with_the_axes_that_the_job_has_where_other_programs_take_longer_than_they_give_back():
    job = join(foresee_join(4.0), failures=FAILURES)
    decision = decided(job)
    assert (decision.action, decision.joining) == (RecoveryAction.KEEP_AXES, ("d",))
    stop_at_boundary(job, 6)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), AXES)
    job.form()
    job.train(7)
    # They are given up when they have cost as much, or at the time of the next failure.
    assert decision.wait_s == pytest.approx(min(4.0 / (1 - 1.27 / 1.3), decision.next_failure_s))
    job.pass_time(0.9 * decision.wait_s)
    assert job.phase is GenerationPhase.ACTIVE
    job.pass_time(0.2 * decision.wait_s)
    assert job.phase is GenerationPhase.PAUSE
    assert "enough: the best" in job.generation.reason
    stop_at_boundary(job, 8)
    assert (sorted(job.members), job.generation.shape.plan_axes) == (list("abcd"), ())
    job.form()
    job.train(9)
    job.pass_time(2 * decision.wait_s)
    assert job.phase is GenerationPhase.ACTIVE, "once"


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({"kept": 0.0}, "its axes do not fit the hosts that would train"),
        ({"best_axes": AXES}, "the best axes are those that the job has"),
    ],
)
def test_why_hosts_do_not_join_with_the_axes_that_the_job_has(changes, why_not):
    decision = decided(join(foresee_join(4.0, **changes), failures=FAILURES))
    assert decision.action is RecoveryAction.JOIN
    (kept,) = [option for option in decision.options if option.action is RecoveryAction.KEEP_AXES]
    assert kept.why_not == why_not


@pytest.mark.parametrize("prepare_s", [0.0, 4.0])
def test_the_time_of_a_join_is_measured_where_no_programs_were_waited_for(prepare_s):
    job = training(*"abc", spare_seats=8)
    job.config = dataclasses.replace(job.config, num_hosts=4)
    job.state = job.state
    job.pass_time(10.0)
    job.train(15)
    for name in "abc":
        job.report(name, plans=foresee_join(prepare_s))
    job.report("d", state=WorkerState.IDLE)
    job.take_seat("d")
    stop_at_boundary(job, 16)
    assert job.generation.shape.plan_axes == BEST_AXES
    job.form()
    job.pass_time(3.0)
    job.train(17)
    job.worker("d", exit_code=-9)  # with the next generation it is written
    times = {time.change for time in job.generation.record.history.times}
    assert times == ({TimedChange.GROW} if not prepare_s else set())


@given(
    prepare_s=st.floats(0.0, 30.0),
    kept=st.floats(0.5, 1.0),
    join_s=st.floats(0.1, 5.0),
    returns_s=st.lists(st.sampled_from((6.0, 20.0)), max_size=1),
    next_failure_s=st.floats(20.0, 500.0),
)
def test_the_axes_of_a_join_are_the_better_ones_played_moment_by_moment(
    prepare_s, kept, join_s, returns_s, next_failure_s
):
    """Of four hosts two train, one is ready, and the last may come back."""
    plan = PlanChange(groups=(0,), kept=1.5 * kept, best=1.5, best_axes=BEST_AXES, prepare_s=prepare_s)
    admission = Admission(
        places=4,
        training=2,
        joining=1,
        awaited=tuple(map(ExpectedReturn, returns_s)),
        plan=plan,
        has_new_axes=True,
    )
    seconds = {**PRIOR_S, TimedChange.GROW: join_s}
    choice = choose(admission, Prices(seconds=seconds, next_failure_s=next_failure_s))
    trained = {
        RecoveryAction.JOIN: play(next_failure_s, join_s + prepare_s, 0.75, returns_s, join_s, 1),
        RecoveryAction.KEEP_AXES: play(next_failure_s, join_s, 0.75 * kept, returns_s, join_s, 1),
        RecoveryAction.POSTPONE: 0.5 * next_failure_s,
    }
    if choice.action is RecoveryAction.GATHER:
        return
    best_speed = (3 + len(returns_s)) / 4
    lost = {action: next_failure_s - found / best_speed for action, found in trained.items()}
    saved_s = lost[choice.action] - min(lost.values())
    # Within the moments: no other choice saves as much as it takes to make it.
    margin_s = max(HYSTERESIS * lost[RecoveryAction.JOIN], MIN_SAVED_S)
    assert saved_s <= (margin_s if choice.action is RecoveryAction.JOIN else 0) + 0.005 * next_failure_s
