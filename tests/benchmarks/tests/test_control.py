"""The figures of the control benchmark: from known samples, and its line of JSON from a job of a few hosts."""

import json
import sys

import msgspec
import pytest

from tests.benchmarks import command_line
from tests.benchmarks.control.decision_gaps import EtcdMeasurements, list_gaps
from tests.benchmarks.control.figures import PartResult, make_line, make_plot_data, summarize, summarize_all
from tests.benchmarks.control.machine_cost import measure_machine
from tests.support.checked_membership import CheckedMachine


def test_the_spread_is_of_all_of_a_few_samples_and_of_nine_tenths_of_many():
    few = summarize([3.0, 1.0, 2.0])
    assert (few.median, few.low, few.high, few.n) == (2.0, 1.0, 3.0, 3)
    many = summarize([float(value) for value in range(101)])
    assert (many.median, many.low, many.high) == (50.0, 5.0, 95.0)


def test_the_line_of_json_has_each_median_under_its_key_and_the_cause_of_what_is_missing():
    parts = [
        PartResult(samples={"form_s_64": [1.0, 2.0, 4.0]}),
        PartResult(missing={"etcd": "not installed"}),
    ]
    line = msgspec.to_builtins(make_line(summarize_all(parts), parts, "M", (0.5, 1.0)))
    assert (line["form_s_64"], line["n"]) == (2.0, {"form_s_64": 3})
    assert line["spread"] == {"form_s_64": (1.0, 4.0)}
    assert line["missing"] == {"etcd": "not installed"}


def test_a_gap_is_the_longest_time_without_a_decision_after_a_kill_also_one_that_does_not_end():
    published_s = [0.5, 1.5, 2.5, 3.0, 3.2, 5.0, 5.1]
    measured = EtcdMeasurements(published_s=published_s, killed_s=[3.1, 5.5], watched_s=2.0)
    after, before = list_gaps(measured)
    assert after == pytest.approx([1.8, 2.4])
    assert before == pytest.approx([1.0])


def test_the_plot_has_the_figures_of_one_name_in_the_order_of_the_hosts():
    samples = {"form_s_256": [2.0], "form_s_64": [1.0], "form_s_etcd_64": [3.0], "real_agents": [64.0]}
    (panel,) = make_plot_data(summarize_all([PartResult(samples=samples)])).panels
    assert {name: [size for size, _ in line] for name, line in panel.lines.items()} == {
        "form_s": [64, 256],
        "form_s_etcd": [64],
    }


def test_the_machine_is_measured_on_a_job_that_trains_and_loses_a_host():
    cost = measure_machine(4, 2, CheckedMachine)
    assert cost.form_s > 0
    assert cost.shrink_s is not None
    assert {kind: len(times_us) for kind, times_us in cost.event_us.items()} == dict.fromkeys(
        ("step", "snapshot", "report"), 8
    )
    sampled = measure_machine(4, 1, CheckedMachine, num_events=2)
    assert sampled.shrink_s is None
    assert len(sampled.event_us["step"]) == 2


def test_the_command_prints_the_figures_of_the_machine(monkeypatch, capsys):
    arguments = ["benchmarks", "control", "--json", "--parts", "machine", "--sizes", "8", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        command_line.main()
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert found["event_us_8"] > 0
    assert found["n"]["form_cpu_s_8"] == 2
    assert found["generation_bytes_8"] > found["status_bytes_8"] > 0
