"""The figures of the step benchmark, computed from known measurements."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from resilient_jax.errors import CallerError
from tests.benchmarks import plotting
from tests.benchmarks.plotting import check_can_plot
from tests.benchmarks.step.command import make_figures
from tests.benchmarks.step.figures import (
    MicrobatchId,
    RedoneWork,
    WorkerKill,
    count_redone,
    count_work,
    find_missing,
    overheads,
)
from tests.benchmarks.step.redone_work import KillCampaign
from tests.benchmarks.step.step_times import BARE, EXACT_SMALL, FAST, LOOPS, LoopTimes, ProcessUsage
from tests.benchmarks.step.sum_errors import measure_sum_errors

DEAD, NEIGHBOUR = 11, 12
KILL = WorkerKill(host="host-1", pid=DEAD, step=1)


def all_of(step: int, indexes: Sequence[int]) -> list[MicrobatchId]:
    return [(step, index) for index in indexes]


BEST = {
    DEAD: [*all_of(0, [0, 1]), *all_of(1, [0, 1])],
    NEIGHBOUR: [*all_of(0, [2, 3]), *all_of(1, [2, 3]), *all_of(1, [0, 1])],
}
"""The neighbor redoes the microbatches of the dead worker, and no others."""


def test_a_kill_costs_the_microbatches_that_the_dead_worker_had_computed() -> None:
    assert count_work(BEST, KILL, 4) == RedoneWork(lost=2, redone=2, missing=0)
    assert count_redone(BEST, 2) == 2
    assert find_missing(BEST, 2, 4) == []


def test_a_survivor_that_redoes_its_own_microbatch_is_counted() -> None:
    worse = {**BEST, NEIGHBOUR: [*BEST[NEIGHBOUR], (1, 3)]}
    assert count_work(worse, KILL, 4) == RedoneWork(lost=2, redone=3, missing=0)


def test_a_microbatch_missing_from_a_batch_is_counted() -> None:
    shrunk = {**BEST, NEIGHBOUR: BEST[NEIGHBOUR][:-1]}
    shrunk[DEAD] = BEST[DEAD][:-1]
    assert count_work(shrunk, KILL, 4) == RedoneWork(lost=1, redone=1, missing=1)
    assert find_missing(shrunk, 2, 4) == [(1, 1)]


def test_steps_that_were_not_committed_do_not_count() -> None:
    assert count_redone({**BEST, 13: all_of(2, [0, 0])}, 2) == count_redone(BEST, 2)


def test_overheads_are_ratios_of_medians_minus_one_for_each_pair_of_windows() -> None:
    found = overheads([[3.0], [1.0, 1.02, 50.0]], [[2.0], [0.9, 1.0, 1.1]])
    assert found == pytest.approx([0.02, 0.5])


def test_exact_sums_have_smaller_errors_than_float32_sums_in_order() -> None:
    errors = measure_sum_errors((4, 16, 256))
    assert 0 < errors.largest <= 1.0
    assert 0 < errors.wide <= 1.0


def test_figures_compare_each_loop_with_its_counterpart() -> None:
    seconds = {loop: 1.0 for loop in LOOPS} | {BARE: 2.0, FAST: 2.5, EXACT_SMALL: 1.25}
    sent = {loop: 40.0 for loop in LOOPS} | {EXACT_SMALL: 60.0}
    times = {
        loop: LoopTimes(windows=[[found]], usage=[ProcessUsage(peak_rss_mib=100.0, sent_bytes=sent[loop])])
        for loop, found in seconds.items()
    }
    campaign = KillCampaign(
        steps=2,
        kills=(KILL, KILL),
        work=(RedoneWork(lost=4, redone=4, missing=0),) * 2,
        redone=9,
        digest="a",
        undisturbed="a",
    )
    figures = make_figures(times, campaign, measure_sum_errors((4,)))
    assert math.isclose(figures.fast_overhead, 0.25)
    assert math.isclose(figures.exact_overhead, 0.25)
    assert math.isclose(figures.exact_overhead_one_microbatch, -0.6)
    assert (figures.exact_memory_ratio, figures.exact_traffic_ratio) == (1.0, 1.5)
    assert (figures.lost_microbatches, figures.redone_microbatches) == (4.0, 4.5)
    assert figures.bitwise_equal


def test_a_plot_without_matplotlib_is_rejected_before_the_benchmark_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plotting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CallerError, match=r"found no matplotlib.*resilient_jax\[plot\]"):
        check_can_plot(tmp_path / "loss.png")


@pytest.mark.parametrize("name", ["missing/loss.png", "loss.jpg"])
def test_a_plot_that_could_not_be_written_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plotting.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(CallerError, match="found no such folder, or another suffix"):
        check_can_plot(tmp_path / name)
