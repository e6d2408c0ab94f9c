"""What the loss of a host would make of a pipeline: against the schedule played task by task, and over layouts."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline.stage_assignment import assign_stages
from resilient_jax.pipeline.stage_losses import (
    StageLayout,
    count_unlike_tasks,
    estimate_stage_losses,
    estimate_stage_outlook,
    make_even_seconds,
)
from resilient_jax.pipeline_schedule.rerouting import reroute
from resilient_jax.pipeline_schedule.routes import Routes, find_holders, make_routes
from resilient_jax.pipeline_schedule.task_orders import order_tasks
from resilient_jax.pipeline_schedule.tasks import KINDS, PipelineSchedule
from resilient_jax.pipeline_schedule.teams import make_teams, share_microbatches
from resilient_jax.policy.choice import choose
from resilient_jax.policy.prices import PRIOR_S, Prices
from resilient_jax.policy.return_groups import PATIENCE, ExpectedReturn
from resilient_jax.policy.score import HOUR_S, Phase, score_phases
from resilient_jax.policy.situations import Loss
from resilient_jax.policy.stage_prices import price_copied
from resilient_jax.protocol.recovery_records import (
    RecoveryAction,
    RecoveryDecision,
    RecoveryOption,
    TimedChange,
)
from resilient_jax.protocol.state_records import COPY_TIMEOUT_S, StageLoss

SCHEDULE = PipelineSchedule.ZERO_BUBBLE
LAYOUTS = [(2, 2, 8), (4, 2, 16), (2, 4, 8), (2, 16, 8), (4, 8, 8), (8, 4, 8)]
"""Stages, replicas, microbatches of each."""


def make_layout(
    stages: int,
    replicas: int,
    microbatches: int,
    *,
    blocks: int = 32,
    block_bytes: float = 1e9,
    absent: tuple[str, ...] = (),
) -> StageLayout:
    hosts = [HostName(f"host-{number:03}") for number in range(stages * replicas)]
    teams, away = make_teams(hosts, [1.0] * blocks, stages), frozenset(map(HostName, absent))
    return StageLayout(
        teams=tuple(teams),
        quotas=share_microbatches(teams, microbatches * replicas, away),
        absent=away,
        num_stages=stages,
        schedule=SCHEDULE,
        block_costs=(1.0,) * blocks,
        block_seconds=make_even_seconds([1.0] * blocks, SCHEDULE),
        block_bytes=(block_bytes,) * blocks,
        bytes_per_s=1e9,
    )


def play(routes: Routes) -> float:
    """Return the time of a step of these routes, if a task of a block takes a third."""
    return order_tasks(routes, lambda *_: 1 / len(KINDS[SCHEDULE]), schedule=SCHEDULE).makespan_s


def test_the_blocks_that_move_are_those_of_the_cut_that_follows_whatever_tasks_take():
    layout = make_layout(2, 2, 8, blocks=6)
    # Cut by what its blocks take, the model would be on three hosts as 0 to 2, 3, 4 and 5: where they are already.
    seconds = make_even_seconds([1.0, 1.0, 1.0, 3.0, 1.5, 1.5], SCHEDULE)
    measured = msgspec.structs.replace(layout, block_seconds=seconds)
    assert [loss.move_s for loss in estimate_stage_losses(measured)] == [1.0] * 4


def test_speeds_and_moves_are_those_of_the_two_ways_to_go_on():
    layout = make_layout(4, 2, 16)
    lost, present_s = layout.teams[1][2][0], play(make_routes(layout.teams, layout.quotas))
    (found,) = [one for one in estimate_stage_losses(layout) if one.hosts == (lost,)]
    assert found.kept == pytest.approx(present_s / play(make_routes(layout.teams, (32, 0))), abs=1e-3)
    before = [host for team in layout.teams for host, _ in team]
    left = [host for host in before if host != lost]
    cut = make_teams(assign_stages(left, before, [1.0] * 32, 4), [1.0] * 32, 4)
    cut_s = play(make_routes(cut, share_microbatches(cut, 32)))
    assert found.cut == pytest.approx(present_s / cut_s, abs=1e-3)
    # The host that gets most: blocks that it had not, a second each.
    had, has = (
        {host: {block for block, hosts in enumerate(find_holders(teams)) if host in hosts} for host in left}
        for teams in (layout.teams, cut)
    )
    assert found.move_s == max(len(has[host] - had[host]) for host in left)


@pytest.mark.parametrize(
    "second", [(0, 2), (1, 0), (2, 1)]
)  # the same place, the same replica, another place
def test_so_are_those_after_the_loss_of_two_hosts_at_one_moment(second: tuple[int, int]):
    layout = make_layout(4, 3, 8)
    lost = {layout.teams[1][2][0], layout.teams[second[0]][second[1]][0]}
    losses = estimate_stage_losses(layout, most_lost=2)
    assert len({one.hosts for one in losses}) == len(losses) == 12 + 66
    (found,) = [one for one in losses if set(one.hosts) == lost]
    present_s, broken = play(make_routes(layout.teams, layout.quotas)), {1, second[0]}
    quotas = share_microbatches(layout.teams, 24, lost)
    assert [number for number, quota in enumerate(quotas) if not quota] == sorted(broken)
    assert found.kept == pytest.approx(present_s / play(make_routes(layout.teams, quotas)), abs=1e-3)
    before = [host for team in layout.teams for host, _ in team]
    left = [host for host in before if host not in lost]
    cut = make_teams(assign_stages(left, before, [1.0] * 32, 4), [1.0] * 32, 4)
    assert found.cut == pytest.approx(
        present_s / play(make_routes(cut, share_microbatches(cut, 24))), abs=1e-3
    )
    had, has = (
        {host: {block for block, hosts in enumerate(find_holders(teams)) if host in hosts} for host in left}
        for teams in (layout.teams, cut)
    )
    assert found.move_s == max(len(has[host] - had[host]) for host in left)


@pytest.mark.parametrize("absent", [(), ("host-001",)])
@pytest.mark.parametrize(("stages", "replicas", "microbatches"), LAYOUTS)
def test_by_the_number_of_lost_hosts_alone_no_loss_is_cheaper_than_it_is(
    stages: int, replicas: int, microbatches: int, absent: tuple[str, ...]
):
    layout = make_layout(stages, replicas, microbatches, absent=absent)
    outlook = estimate_stage_outlook(layout, most_lost=3)
    assert outlook is not None
    assert outlook.hosts == {host for team in layout.teams for host, _ in team} - set(absent)
    for exact in estimate_stage_losses(layout, most_lost=2):
        rough = outlook.estimate(exact.hosts)
        assert rough is not None
        assert rough.kept == pytest.approx(exact.kept, abs=2e-4), "replicas are alike"
        assert rough.cut == pytest.approx(exact.cut, abs=2e-4)
        assert rough.move_s >= exact.move_s


def test_of_replicas_that_differ_the_fastest_break_first():
    layout = make_layout(4, 3, 8)
    slow = layout.teams[0][0][0]
    outlook = estimate_stage_outlook(msgspec.structs.replace(layout, device_speeds={slow: 0.5}), 3)
    assert outlook is not None
    exact = estimate_stage_losses(msgspec.structs.replace(layout, device_speeds={slow: 0.5}))
    assert outlook.kept[1] == min(one.kept for one in exact)


def test_what_the_loss_of_many_hosts_makes_is_not_known():
    outlook = estimate_stage_outlook(make_layout(2, 4, 8), most_lost=3)
    assert outlook is not None
    hosts = sorted(outlook.hosts)
    assert outlook.estimate(hosts[:4]) is None
    three = outlook.estimate(hosts[:3])
    assert three is not None
    assert (three.hosts, three.kept) == (tuple(hosts[:3]), outlook.kept[2]), "two replicas are broken"
    assert estimate_stage_outlook(make_layout(1, 1, 8), 3) is None


def test_tasks_of_equal_replicas_count_once():
    one, many = make_layout(4, 1, 8), make_layout(4, 16, 8)
    assert count_unlike_tasks(one) == count_unlike_tasks(many) == 4 * 8 * len(KINDS[SCHEDULE])
    slower = msgspec.structs.replace(many, device_speeds={many.teams[3][0][0]: 0.5})
    assert count_unlike_tasks(slower) == 2 * count_unlike_tasks(many)
    assert count_unlike_tasks(make_layout(4, 2, 8, absent=("host-001",))) == 2 * count_unlike_tasks(one)


def test_two_hosts_are_not_lost_where_nobody_would_be_left():
    losses = estimate_stage_losses(make_layout(2, 1, 8), most_lost=2)
    assert [len(one.hosts) for one in losses] == [1, 1]


def test_a_second_loss_in_the_replica_that_computes_nothing_costs_no_speed():
    layout = make_layout(2, 2, 8, absent=("host-001",))
    kept = {one.hosts[0]: one.kept for one in estimate_stage_losses(layout)}
    assert kept == {"host-000": 1.0, "host-002": 0.0, "host-003": 0.0}


def test_a_pipeline_of_one_replica_keeps_no_stage():
    assert {one.kept for one in estimate_stage_losses(make_layout(4, 1, 8))} == {0.0}


@pytest.mark.parametrize(("stages", "replicas", "microbatches"), LAYOUTS)
def test_no_rerouting_of_later_steps_is_faster_than_a_replica_that_computes_nothing(
    stages: int, replicas: int, microbatches: int
):
    """So `KEEP_STAGES` stands for both: of all numbers of microbatches that the broken replica may have, 0 is best."""
    layout = make_layout(stages, replicas, microbatches)
    team, total = replicas // 2, microbatches * replicas
    lost = layout.teams[team][stages // 2][0]
    others = [one for number, one in enumerate(layout.teams) if number != team]
    rerouted = []
    for quota in range(1, microbatches + 1, 1 if stages * replicas <= 16 else 3):
        quotas = [*share_microbatches(others, total - quota)]
        quotas.insert(team, quota)
        found = reroute(
            make_routes(layout.teams, quotas), (), find_holders(layout.teams), [lost], schedule=SCHEDULE
        )
        rerouted.append(play(found.routes))
    kept_s = play(make_routes(layout.teams, share_microbatches(layout.teams, total, {lost})))
    assert min(rerouted) >= kept_s - 1e-9


def choose_for_stage(
    stage: StageLoss, hosts: int, returned_s: float, next_failure_s: float = 3 * HOUR_S
) -> RecoveryAction:
    loss = Loss(
        places=hosts,
        ready=hosts - 1,
        awaited=(ExpectedReturn(returned_s),),
        stage=stage,
        stage_return_s=returned_s,
    )
    return choose(loss, Prices(seconds=PRIOR_S, next_failure_s=next_failure_s)).action


@pytest.mark.parametrize(
    ("billions", "layout", "gigabytes_per_s", "returned_s", "action"),
    [
        # Layouts of papers.md, 16 bytes of state for each parameter.
        (13, (4, 8, 8), 3.0, 10.0, RecoveryAction.KEEP_STAGES),
        (13, (4, 8, 8), 3.0, 60.0, RecoveryAction.KEEP_STAGES),
        (13, (4, 8, 8), 3.0, 7200.0, RecoveryAction.SHRINK),
        (70, (8, 4, 8), 3.0, 60.0, RecoveryAction.KEEP_STAGES),
        (70, (8, 4, 8), 10.0, 10.0, RecoveryAction.KEEP_STAGES),
        (70, (8, 4, 8), 50.0, 10.0, RecoveryAction.SHRINK),
        (70, (8, 4, 8), 50.0, 300.0, RecoveryAction.SHRINK),
        (7, (2, 2, 8), 50.0, 30.0, RecoveryAction.SHRINK),
        (0.01, (4, 8, 8), 3.0, 10.0, RecoveryAction.SHRINK),
    ],
)
def test_blocks_move_where_that_pays_until_the_host_is_back(
    billions: float,
    layout: tuple[int, int, int],
    gigabytes_per_s: float,
    returned_s: float,
    action: RecoveryAction,
):
    stages, replicas, microbatches = layout
    state = make_layout(stages, replicas, microbatches, block_bytes=16e9 * billions / 32 / gigabytes_per_s)
    stage = estimate_stage_losses(state)[stages // 2]
    assert choose_for_stage(stage, stages * replicas, returned_s) is action


def lose_for_good(stage: StageLoss, **seconds: float) -> RecoveryDecision:
    """Return what is chosen in a job of four hosts if nobody comes back, with these measured pauses."""
    known = {**PRIOR_S, **{TimedChange(change): value for change, value in seconds.items()}}
    loss = Loss(places=4, ready=3, stage=stage, can_join_in_place=False)
    return choose(loss, Prices(seconds=known, next_failure_s=HOUR_S))


def find_option(choice: RecoveryDecision, action: RecoveryAction) -> RecoveryOption:
    (found,) = [one for one in choice.options if one.action is action]
    return found


SLOW_TO_MOVE = StageLoss(hosts=(HostName("a"),), kept=0.5, cut=0.6, move_s=50.0)


def test_the_stage_of_a_host_that_nobody_awaits_is_kept_until_its_blocks_are_copied():
    choice = lose_for_good(SLOW_TO_MOVE)
    assert (choice.action, choice.wait_s, len(choice.awaited)) == (RecoveryAction.KEEP_STAGES, 0.0, 0)
    assert "until others have copies of their blocks" in choice.reason
    assert "for it" not in choice.reason
    cut = find_option(choice, RecoveryAction.SHRINK)
    assert (cut.why_not, cut.pause_s) == ("", pytest.approx(50.2))


def test_the_stages_of_two_hosts_are_kept_until_their_blocks_are_copied_and_not_for_them():
    stage = StageLoss(hosts=(HostName("a"), HostName("b")), kept=0.4, cut=0.5, move_s=50.0)
    loss = Loss(
        places=6,
        ready=4,
        num_lost=2,
        awaited=(ExpectedReturn(1.0), ExpectedReturn(2.0)),
        stage=stage,
    )
    choice = choose(loss, Prices(seconds=PRIOR_S, next_failure_s=HOUR_S))
    assert (choice.action, choice.wait_s, len(choice.awaited)) == (RecoveryAction.KEEP_STAGES, 0.0, 0)
    gone = dataclasses.replace(loss, awaited=())
    found = find_option(choose(gone, Prices(seconds=PRIOR_S, next_failure_s=HOUR_S)), choice.action)
    assert found.score == pytest.approx(score_phases(price_copied(stage, 1.0, PRIOR_S), HOUR_S)), (
        "of the speed of all six"
    )


@pytest.mark.parametrize(("move_s", "kept"), [(0.3, 0.5), (50.0, 0.05), (50.0, 0.0)])
def test_blocks_that_move_soon_or_for_which_the_others_lose_too_much_move_at_once(move_s: float, kept: float):
    stage = StageLoss(hosts=(HostName("a"),), kept=kept, cut=0.6, move_s=move_s)
    assert lose_for_good(stage).action is RecoveryAction.SHRINK


def test_what_is_not_copied_in_time_moves_in_the_pause_and_is_priced_so():
    stage = StageLoss(hosts=(HostName("a"),), kept=0.5, cut=0.6, move_s=COPY_TIMEOUT_S + 100.0)
    choice = lose_for_good(stage)
    divided_s = PRIOR_S[TimedChange.REDIVIDE] + 100.0
    trained_s = HOUR_S - PRIOR_S[TimedChange.KEEP_STAGES] - COPY_TIMEOUT_S - divided_s
    expected = (COPY_TIMEOUT_S * 0.5 + trained_s * 0.6) / HOUR_S
    assert find_option(choice, RecoveryAction.KEEP_STAGES).score == pytest.approx(expected)


@pytest.mark.parametrize(
    "slow", [{"keep_stages": 30.0}, {"shrink": 30.0}, {"shrink": 0.2, "keep_stages": 99.0}]
)
def test_a_pause_that_was_measured_on_a_busy_machine_does_not_decide_between_two_ways_that_have_it(
    slow: dict[str, float],
):
    assert lose_for_good(SLOW_TO_MOVE, **slow).action is RecoveryAction.KEEP_STAGES
    quick = StageLoss(hosts=(HostName("a"),), kept=0.5, cut=0.6, move_s=0.1)
    assert lose_for_good(quick, **slow).action is RecoveryAction.SHRINK


def test_no_speed_that_hosts_cannot_reach_hides_what_is_saved():
    """Of four hosts three have a quarter of the speed that is left: what lasts until the next failure saves nothing."""
    stage = StageLoss(hosts=(HostName("a"),), kept=0.15, cut=0.2, move_s=20.0)
    assert lose_for_good(stage).action is RecoveryAction.KEEP_STAGES


def test_a_host_that_is_back_too_late_is_not_waited_for_while_its_blocks_are_copied():
    stage = StageLoss(hosts=(HostName("a"),), kept=0.3, cut=0.9, move_s=50.0)
    loss = Loss(places=4, ready=3, awaited=(ExpectedReturn(200.0),), stage=stage, stage_return_s=200.0)
    choice = choose(loss, Prices(seconds=PRIOR_S, next_failure_s=HOUR_S))
    copied = find_option(choice, RecoveryAction.KEEP_STAGES)
    first, second = price_copied(stage, 1.0, PRIOR_S)
    later = Phase(pause_s=PRIOR_S[TimedChange.GROW], speed=1.0)
    second = dataclasses.replace(second, training_s=200.0 - 50.0 - first.pause_s - second.pause_s)
    assert copied.score == pytest.approx(score_phases((first, second, later), HOUR_S))


def test_a_host_that_cannot_come_back_into_its_world_is_not_waited_for():
    loss = Loss(
        places=4,
        ready=3,
        awaited=(ExpectedReturn(100.0),),
        stage=SLOW_TO_MOVE,
        stage_return_s=100.0,
        can_join_in_place=False,
    )
    choice = choose(loss, Prices(seconds=PRIOR_S, next_failure_s=HOUR_S))
    kept = find_option(choice, RecoveryAction.KEEP_STAGES)
    assert (choice.action, kept.why_not, choice.wait_s) == (RecoveryAction.KEEP_STAGES, "", 0.0)


def test_a_stage_is_kept_as_long_as_its_own_host_needs_and_not_another_one():
    stage = StageLoss(hosts=(HostName("a"),), kept=0.95, cut=1.0, move_s=85.0)
    loss = Loss(
        places=7,
        ready=6,
        awaited=(ExpectedReturn(1.0), ExpectedReturn(300.0)),
        stage=stage,
        stage_return_s=300.0,
    )
    choice = choose(loss, Prices(seconds=PRIOR_S, next_failure_s=HOUR_S))
    assert choice.action is RecoveryAction.KEEP_STAGES
    assert choice.wait_s >= PATIENCE * 300.0


@given(
    move_s=st.floats(1.0, 60.0),
    difference=st.floats(0.02, 0.3),
    returned_s=st.floats(1.0, 20_000.0),
    next_failure_s=st.floats(1e4, 1e6),
)
def test_a_stage_that_is_kept_until_that_costs_as_much_as_moves_loses_twice_the_least_at_most(
    move_s: float, difference: float, returned_s: float, next_failure_s: float
):
    """The host is expected in a second, and comes back whenever it likes."""
    stage = StageLoss(hosts=(HostName("a"),), kept=0.95 - difference, cut=0.95, move_s=move_s)
    loss = Loss(places=32, ready=31, awaited=(ExpectedReturn(1.0),), stage=stage, stage_return_s=1.0)
    choice = choose(loss, Prices(seconds=PRIOR_S, next_failure_s=next_failure_s))
    if choice.action is not RecoveryAction.KEEP_STAGES or returned_s > next_failure_s:
        return
    copied_s = PRIOR_S[TimedChange.REDIVIDE] + move_s * difference
    wait_s = choice.wait_s
    kept_s = min(returned_s, wait_s) * difference + (copied_s if returned_s > wait_s else 0.0)
    # Of the speed that a cut has; PATIENCE for the first return is on top.
    assert kept_s <= 2 * min(move_s, copied_s, returned_s * difference) + 2.0


def test_without_a_host_of_fewer_devices_more_speed_is_left_than_without_another():
    layout = make_layout(4, 2, 16)
    lost, peer = layout.teams[1][2][0], layout.teams[0][2][0]
    layout = msgspec.structs.replace(layout, device_speeds={lost: 0.5})
    found = {one.hosts[0]: one for one in estimate_stage_losses(layout)}
    assert found[lost].cut > found[peer].cut
    assert found[lost].kept > found[peer].kept, "its replica was the slower one"
    alike = {one.hosts[0]: one for one in estimate_stage_losses(make_layout(4, 2, 16))}
    assert found[lost].cut > alike[lost].cut
