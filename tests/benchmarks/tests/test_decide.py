"""The decide benchmark: its losses, and the keys of its line of JSON."""

import dataclasses
import json
import sys

import pytest

from resilient_jax.ids import HostName
from resilient_jax.policy.return_groups import ExpectedReturn
from resilient_jax.policy.situations import Admission, Loss
from resilient_jax.protocol.recovery_records import RecoveryAction, TimedChange
from resilient_jax.protocol.state_records import StageLoss
from tests.benchmarks import command_line
from tests.benchmarks.decide import command as bench
from tests.benchmarks.decide.drawn_changes import Outcome, judge_drawn_changes, play_admission, play_loss
from tests.benchmarks.decide.figures import LOSS_CASES, LossCase, lose_devices
from tests.benchmarks.plan.figures import SearchCase, make_topology
from tests.support.paths import MESHES


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        """Return exit code, standard output and standard error of the command."""
        monkeypatch.setattr(sys, "argv", ["benchmarks", "decide", *arguments])
        with pytest.raises(SystemExit) as end:
            command_line.main()
        return end.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.key)
def test_as_many_devices_are_lost_as_the_case_says(case):
    full = make_topology(MESHES / "h100_2048x8.toml", case.devices // 8)
    left = lose_devices(full, case.lost)
    assert (full.device_count, left.device_count) == (case.devices, case.devices - case.lost)
    assert case.aim < 1 - case.lost / case.devices


def test_the_line_of_json_has_every_key(run, monkeypatch):
    case = LossCase(lost=1, devices=16, aim=0.88)
    monkeypatch.setattr(bench, "LOSS_CASES", (case,))
    small = (SearchCase(hosts=8, model="llama3_8b", global_batch=16),)
    monkeypatch.setattr(bench, "SEARCH_CASES", small)
    monkeypatch.setattr(bench, "AIMS_MS", {64: 10})
    monkeypatch.setattr(bench, "DRAWN_CHANGES", 50)
    code, shown, _ = run("--json", "--rounds", "1", "--no-programs")
    found = json.loads(shown)
    assert code == 0
    assert found["kept_1_of_16"] >= case.aim
    assert found["kept_1_of_16"] > found["kept_1_of_16_equal"]
    assert 0 < found["kept_1_of_16_few_sequences"] < 15 / 16
    assert found["search_ms_64"] > 0
    assert found["search_wall_ms_64"] > 0
    assert 0 < found["decision_ms"] < 1000
    assert 0 <= found["decision_regret"] < 0.01
    assert found["changes"] == 50


OUTCOME = Outcome(
    seconds={
        TimedChange.SHRINK: 1.0,
        TimedChange.KEEP_STAGES: 1.0,
        TimedChange.GROW: 2.0,
        TimedChange.REFORM: 10.0,
        TimedChange.REFORM_COLD: 10.0,
        TimedChange.REDIVIDE: 2.0,
    },
    returns=(ExpectedReturn(20.0),),
    failed_s=100.0,
    wait_s=30.0,
    num_awaited=1,
)


def test_what_a_choice_after_a_loss_is_worth():
    loss = Loss(places=4, ready=3, awaited=(ExpectedReturn(20.0),))
    go_on, wait = RecoveryAction.REFORM, RecoveryAction.WAIT
    # 10 s of re-forming, 10 s with three hosts, 2 s until the fourth has joined, 78 s with all.
    assert play_loss(go_on, go_on, loss, OUTCOME) == pytest.approx(10 * 0.75 + 78)
    assert play_loss(wait, go_on, loss, OUTCOME) == pytest.approx(100 - 20 - 10)
    in_vain = dataclasses.replace(OUTCOME, wait_s=15.0)
    # It was back during the pause, and joins after it.
    assert play_loss(wait, go_on, loss, in_vain) == pytest.approx(100 - 15 - 10 - 2)
    soon = dataclasses.replace(OUTCOME, failed_s=12.0)
    assert play_loss(go_on, go_on, loss, soon) == pytest.approx(2 * 0.75)
    assert play_loss(wait, go_on, loss, soon) == 0


def test_what_the_two_ways_of_a_pipeline_are_worth():
    loss = Loss(places=4, ready=3, awaited=(ExpectedReturn(20.0),))
    stage = StageLoss(hosts=(HostName("d"),), kept=0.5, cut=0.7, move_s=5.0)
    outcome = dataclasses.replace(OUTCOME, stage=stage)
    usual = RecoveryAction.SHRINK
    copied = dataclasses.replace(outcome, num_awaited=0)
    assert play_loss(RecoveryAction.KEEP_STAGES, usual, loss, outcome) == pytest.approx(19 * 0.5 + 78)
    assert play_loss(usual, usual, loss, outcome) == pytest.approx((20 - 6) * 0.7 + 100 - 20 - 2)
    expected = 5 * 0.5 + (20 - 1 - 5 - 2) * 0.7 + 78
    assert play_loss(RecoveryAction.KEEP_STAGES, usual, loss, copied) == pytest.approx(expected)


def test_one_of_two_hosts_may_be_waited_for():
    loss = Loss(
        places=4,
        ready=2,
        awaited=(ExpectedReturn(20.0), ExpectedReturn(60.0)),
    )
    both = dataclasses.replace(
        OUTCOME,
        returns=(ExpectedReturn(20.0), ExpectedReturn(60.0)),
        wait_s=90.0,
        num_awaited=2,
    )
    assert play_loss(RecoveryAction.WAIT, RecoveryAction.REFORM, loss, both) == pytest.approx(100 - 60 - 10)
    one = dataclasses.replace(both, num_awaited=1)
    expected = (60 - 20 - 10) * 0.75 + 100 - 62
    assert play_loss(RecoveryAction.WAIT, RecoveryAction.REFORM, loss, one) == pytest.approx(expected)


def test_what_a_choice_about_hosts_that_are_ready_is_worth():
    admission = Admission(places=4, training=2, joining=1, awaited=(ExpectedReturn(20.0),))
    assert play_admission(RecoveryAction.JOIN, admission, OUTCOME) == pytest.approx(18 * 0.75 + 78)
    assert play_admission(RecoveryAction.GATHER, admission, OUTCOME) == pytest.approx(20 * 0.5 + 78)
    assert play_admission(RecoveryAction.POSTPONE, admission, OUTCOME) == pytest.approx(50)
    again = dataclasses.replace(OUTCOME, left_s=8.0)  # after 10 s; then a second of shrinking
    expected = 8 * 0.75 + 9 * 0.5 + 78 * 0.75
    assert play_admission(RecoveryAction.JOIN, admission, again) == pytest.approx(expected)


def test_the_policy_misses_little_and_is_not_worse_than_a_fixed_rule():
    found = judge_drawn_changes(2000)
    assert 0 <= found.decision_regret < 0.01
    assert found.policy_gain_at_once >= 0
    assert found.policy_gain_waiting >= 0
    assert found.policy_gain_rerouting >= 0
    assert found.waits > 0


def test_zero_rounds_are_rejected(run):
    code, _, errors = run("--rounds", "0")
    assert code == 2
    assert "found --rounds 0, expected 1 or more" in errors
