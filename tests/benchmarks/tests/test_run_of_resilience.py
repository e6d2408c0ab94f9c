"""The resilience benchmark with a tiny model: it finishes, and leaves no processes or files, even if interrupted."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.paths import COMMAND
from tests.support.patience import patience, wait_until

LIMIT_S = patience(28)
"""On an idle machine the test takes less than a minute."""
TINY = (*COMMAND, "resilience", "--size", "tiny", "--json")


def processes_of(folder: Path) -> list[int]:
    """Return the pids of all processes with `folder` as TMPDIR, whatever their parent is by now."""
    mark = f"TMPDIR={folder}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def check_nothing_is_left(folder: Path) -> None:
    wait_until("the end of all processes", lambda: processes_of(folder) == [])
    assert list(folder.iterdir()) == []


def test_both_systems_finish_and_ours_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [*TINY, "--plot", str(tmp_path / "curve.png")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(work)},
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)  # the line of JSON is the only output
    assert figures["bitwise_equal"]
    assert figures["steps_lost"] == 0
    assert figures["stall_s"] > 0
    assert figures["stall_ratio"] == pytest.approx(figures["baseline_stall_s"] / figures["stall_s"], rel=0.02)
    ours, fast, orbax = figures["runs"]
    for run in (ours, fast):
        assert (run["failures"], run["measured"], run["redone"]) == (1, 8, 0)
    assert (orbax["failures"], orbax["measured"]) == (1, 8)
    assert figures["fast_throughput_ratios"]["8"] == pytest.approx(
        fast["tokens_per_s"] / orbax["tokens_per_s"], abs=1e-3
    )
    for run in (ours, fast, orbax):
        wall_s = sum(run["buckets"].values())
        assert run["tokens_per_s"] == pytest.approx(8 * 1024 / wall_s / 2)
        assert run["goodput"] == pytest.approx(run["buckets"]["productive"] / wall_s)
        assert run["host_mib"] > 50
    assert (tmp_path / "curve.png").stat().st_size > 0
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")
    check_nothing_is_left(work)


def test_an_interrupted_benchmark_leaves_no_processes_or_files(tmp_path: Path) -> None:
    process = subprocess.Popen(
        # If the tests run in the background, SIGINT is ignored, and Python would inherit that.
        ("env", "--default-signal=INT", *TINY),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        wait_until(
            "the first run, or its end",
            lambda: list(tmp_path.glob("*/undisturbed/rows-*")) or process.poll() is not None,
        )
        assert len(processes_of(tmp_path)) > 2, "workers run by now"
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(3)) != 0
    finally:
        process.kill()
        process.wait()
    check_nothing_is_left(tmp_path)
