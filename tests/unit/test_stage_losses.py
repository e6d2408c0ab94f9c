"""What the loss of a host would make of a pipeline: against the schedule played task by task, and over layouts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.membership.recovery_policy import PATIENCE, PRIOR_S, Loss, Prices, choose_after_loss
from resilient_jax.pipeline.stage_assignment import assign_stages
from resilient_jax.pipeline.stage_losses import StageLayout, estimate_stage_losses, make_even_seconds
from resilient_jax.pipeline_schedule.rerouting import reroute
from resilient_jax.pipeline_schedule.routes import Routes, find_holders, make_routes
from resilient_jax.pipeline_schedule.task_orders import order_tasks
from resilient_jax.pipeline_schedule.tasks import KINDS, PipelineSchedule
from resilient_jax.pipeline_schedule.teams import make_teams, share_in_complete_teams, share_microbatches
from resilient_jax.planning.recovery_score import HOUR_S
from resilient_jax.protocol.recovery_records import RecoveryAction
from resilient_jax.protocol.state_records import StageLoss

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
        quotas=tuple(share_in_complete_teams(teams, microbatches * replicas, away)),
        absent=away,
        num_stages=stages,
        schedule=SCHEDULE,
        block_seconds=make_even_seconds([1.0] * blocks, SCHEDULE),
        block_bytes=(block_bytes,) * blocks,
        bytes_per_s=1e9,
    )


def play(routes: Routes) -> float:
    """Return the time of a step of these routes, if a task of a block takes a third."""
    return order_tasks(routes, lambda *_: 1 / len(KINDS[SCHEDULE]), schedule=SCHEDULE).makespan_s


def test_speeds_and_moves_are_those_of_the_two_ways_to_go_on():
    layout = make_layout(4, 2, 16)
    lost, present_s = layout.teams[1][2][0], play(make_routes(layout.teams, layout.quotas))
    (found,) = [one for one in estimate_stage_losses(layout) if one.host == lost]
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


def test_a_second_loss_in_the_replica_that_computes_nothing_costs_no_speed():
    layout = make_layout(2, 2, 8, absent=("host-001",))
    kept = {one.host: one.kept for one in estimate_stage_losses(layout)}
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
        quotas = share_microbatches(others, total - quota)
        quotas.insert(team, quota)
        found = reroute(
            make_routes(layout.teams, quotas), (), find_holders(layout.teams), [lost], schedule=SCHEDULE
        )
        rerouted.append(play(found.routes))
    kept_s = play(make_routes(layout.teams, share_in_complete_teams(layout.teams, total, {lost})))
    assert min(rerouted) >= kept_s - 1e-9


def choose(
    stage: StageLoss, hosts: int, returned_s: float, next_failure_s: float = 3 * HOUR_S
) -> RecoveryAction:
    loss = Loss(places=hosts, ready=hosts - 1, awaited=(returned_s,), stage=stage)
    return choose_after_loss(loss, Prices(seconds=PRIOR_S, next_failure_s=next_failure_s)).action


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
    assert choose(stage, stages * replicas, returned_s) is action


def test_a_host_that_is_not_expected_back_has_no_stage_kept():
    stage = StageLoss(host=HostName("a"), kept=0.9, cut=0.95, move_s=1e3)
    loss = Loss(places=8, ready=7, stage=stage)
    choice = choose_after_loss(loss, Prices(seconds=PRIOR_S, next_failure_s=HOUR_S))
    assert choice.action is RecoveryAction.SHRINK
    (kept,) = [one for one in choice.options if one.action is RecoveryAction.KEEP_STAGES]
    assert (kept.why_not, kept.score > 0) == ("no host is on its way back", True)


def test_a_stage_is_kept_as_long_as_its_own_host_needs_and_not_another_one():
    stage = StageLoss(host=HostName("a"), kept=0.8, cut=1.0, move_s=85.0)
    loss = Loss(places=7, ready=6, awaited=(1.0, 300.0), stage=stage, stage_return_s=300.0)
    choice = choose_after_loss(loss, Prices(seconds=PRIOR_S, next_failure_s=HOUR_S))
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
    stage = StageLoss(host=HostName("a"), kept=0.95 - difference, cut=0.95, move_s=move_s)
    loss = Loss(places=32, ready=31, awaited=(1.0,), stage=stage)
    choice = choose_after_loss(loss, Prices(seconds=PRIOR_S, next_failure_s=next_failure_s))
    if choice.action is not RecoveryAction.KEEP_STAGES or returned_s > next_failure_s:
        return
    moves_s, wait_s = move_s, choice.wait_s
    kept_s = min(returned_s, wait_s) * difference + (moves_s if returned_s > wait_s else 0.0)
    # Of the speed that a cut has; PATIENCE for the first return is on top.
    assert kept_s <= 2 * min(moves_s, returned_s * difference) + 2.0


def test_without_a_host_of_fewer_devices_more_speed_is_left_than_without_another():
    layout = make_layout(4, 2, 16)
    lost, peer = layout.teams[1][2][0], layout.teams[0][2][0]
    layout = msgspec.structs.replace(layout, device_speeds={lost: 0.5})
    found = {one.host: one for one in estimate_stage_losses(layout)}
    assert found[lost].cut > found[peer].cut
    assert found[lost].kept > found[peer].kept, "its replica was the slower one"
    alike = {one.host: one for one in estimate_stage_losses(make_layout(4, 2, 16))}
    assert found[lost].cut > alike[lost].cut
