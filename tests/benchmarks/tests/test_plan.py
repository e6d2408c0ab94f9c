"""The cases of the plan benchmark, and the keys of its line of JSON."""

import json
import sys

import pytest

from tests.benchmarks import command_line
from tests.benchmarks.plan import command as bench
from tests.benchmarks.plan.figures import PUBLISHED_RUNS, SEARCH_CASES, SearchCase, make_topology
from tests.support.paths import MESHES


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        """Return exit code, standard output and standard error of the command."""
        monkeypatch.setattr(sys, "argv", ["benchmarks", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            command_line.main()
        return end.value.code, *capsys.readouterr()

    return run


def test_every_search_case_has_an_aim_for_its_number_of_devices():
    assert [case.devices for case in SEARCH_CASES] == list(bench.AIMS_MS) == [64, 1024, 16_384, 131_072]


def test_a_generated_topology_has_racks_and_pods_of_the_sizes_in_the_file():
    made = make_topology(MESHES / "h100_2048x8.toml", 800)
    assert made.device_count == 6400
    assert [len(domain.hosts) for domain in made.domains("pod")] == [384, 384, 32]
    assert {len(domain.hosts) for domain in made.domains("rack")} == {2}


def test_the_line_of_json_has_every_key(run, monkeypatch):
    small = tuple(SearchCase(hosts=1 << i, model="llama3_8b", global_batch=16) for i in range(3, 5))
    monkeypatch.setattr(bench, "SEARCH_CASES", small)
    monkeypatch.setattr(bench, "AIMS_MS", {case.devices: 1 for case in small})
    monkeypatch.setattr(bench, "PUBLISHED_RUNS", PUBLISHED_RUNS[:1])
    held = [layout for layout in bench.LAYOUTS if layout.model == "llama_65b" and layout.devices == 64]
    monkeypatch.setattr(bench, "LAYOUTS", held)
    code, shown, _ = run("--json", "--rounds", "1", "--no-programs", "--no-job")
    found = json.loads(shown)
    assert code == 0
    for devices in (64, 128):
        for key in ("search_ms", "search_cpu_ms", "search_after_ms", "search_after_cpu_ms", "search_mib"):
            assert found[f"{key}_{devices}"] > 0
    (published,) = found["published"]
    assert published["error"] == pytest.approx(published["estimated_mfu"] / 0.43 - 1, abs=1e-3)
    assert "2407.21783" in published["source"]
    assert found["published_ratio"]["a100"]["n"] == len(held) == 14
    (grid,) = found["published_rank_correlation"].values()
    assert grid["n"] == 14
    assert not grid["is_fitted"]
    assert sum(map(len, found["published_layouts"].values())) == 14


def test_zero_rounds_are_rejected(run):
    code, _, errors = run("--rounds", "0")
    assert code == 2
    assert "found --rounds 0, expected 1 or more" in errors
