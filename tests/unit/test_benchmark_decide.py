"""The decide benchmark: its losses, and the keys of its line of JSON."""

import json
import sys

import pytest
from benchmarks import command_line
from benchmarks.decide import command as bench
from benchmarks.decide.figures import LOSS_CASES, LossCase, lose_devices
from benchmarks.plan.figures import SearchCase, make_topology
from topologies import MESHES


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
    code, shown, _ = run("--json", "--rounds", "1", "--no-programs")
    found = json.loads(shown)
    assert code == 0
    assert found["kept_1_of_16"] >= case.aim
    assert found["kept_1_of_16"] > found["kept_1_of_16_equal"]
    assert 0 < found["kept_1_of_16_few_sequences"] < 15 / 16
    assert found["search_ms_64"] > 0
    assert found["search_wall_ms_64"] > 0
    assert 0 < found["decision_ms"] < 1000


def test_zero_rounds_are_rejected(run):
    code, _, errors = run("--rounds", "0")
    assert code == 2
    assert "found --rounds 0, expected 1 or more" in errors
