"""The figures of the snapshot benchmark, computed from known times."""

import pytest

from resilient_jax.errors import CallerError
from tests.benchmarks.snapshot.command import snapshot
from tests.benchmarks.snapshot.figures import (
    GB,
    PARITY,
    TMPFS,
    GroupMemory,
    SnapshotTask,
    SnapshotTiming,
    SnapshotTimings,
    group_name,
    make_snapshot_figures,
    memory_formula,
    seconds_of,
    threads_name,
)
from tests.benchmarks.snapshot.memory import choose_sizes

ONE, TWO = threads_name(1), threads_name(2)


def timed(task: SnapshotTask, variant: str, *times_s: float) -> SnapshotTiming:
    return SnapshotTiming(task=task, variant=variant, times_s=list(times_s))


CAPTURED = (
    timed(SnapshotTask.COPY, ONE, 0.2, 0.4, 0.8),
    timed(SnapshotTask.COPY, TWO, 0.1, 0.1, 0.1),
    timed(SnapshotTask.BLOCKING, ONE, 0.002, 0.004, 0.006),
    timed(SnapshotTask.CAPTURE, ONE, 0.4, 0.5, 0.8),
    timed(SnapshotTask.CAPTURE, TWO, 0.2, 0.2, 0.2),
)
RESTORED = (
    timed(SnapshotTask.RESTORE, PARITY, 1.0, 4.0, 3.0),
    timed(SnapshotTask.ORBAX_RESTORE, TMPFS, 2.0, 2.0, 2.0),
)


def times_of(
    *found: SnapshotTiming, state_bytes: int = 2 * GB, memory: tuple[GroupMemory, ...] = ()
) -> SnapshotTimings:
    return SnapshotTimings(
        state_bytes=state_bytes,
        processor="P",
        timed=list(found),
        memory=list(memory),
        skipped={} if len(found) > len(CAPTURED) else {"a case": "a reason"},
        versions={},
    )


def test_speeds_are_bytes_of_state_over_time_and_ratios_compare_times_of_the_same_round() -> None:
    figures = make_snapshot_figures(3, [times_of(*CAPTURED, *RESTORED)], "M")
    assert (figures.capture_gbps, figures.copy_limit_gbps) == (4.0, 5.0)
    assert figures.capture_of_copy == {ONE: 0.8, TWO: 0.5}
    assert figures.blocking_ms_per_gb == 2.0
    assert (figures.parity_restore_s, figures.orbax_restore_s, figures.parity_of_orbax) == (3.0, 2.0, 1.5)
    assert (figures.n, figures.state_mb) == (3, 2000)
    low, high = figures.spread["capture_gbps"]
    assert 2.5 <= low < 4.0 < high <= 5.0
    assert figures.machine == "M, P; all hosts share it"


def test_figures_are_for_the_largest_state_whose_restores_were_compared() -> None:
    small = times_of(*CAPTURED, *RESTORED, state_bytes=GB)
    large = times_of(*CAPTURED, state_bytes=4 * GB)
    figures = make_snapshot_figures(3, [small, large], "M")
    assert figures.state_mb == 1000
    assert figures.skipped == {"4000 MB, a case": "a reason"}
    assert figures.seconds.keys() == {"1000", "4000"}


def test_skipped_cases_have_no_figures() -> None:
    figures = make_snapshot_figures(3, [times_of(*CAPTURED)], "M")
    assert (figures.parity_restore_s, figures.orbax_restore_s, figures.parity_of_orbax) == (None, None, None)
    assert set(figures.spread) == {"capture_gbps", "copy_limit_gbps", "blocking_ms_per_gb"}


def test_memory_is_compared_with_the_formula_for_the_group_of_eight_hosts() -> None:
    memory = tuple(
        GroupMemory(hosts=hosts, parity=2, part_bytes=100, held_bytes=held)
        for hosts, held in ((4, 1), (8, 270))
    )
    commits = timed(SnapshotTask.COMMIT, group_name(8, 2), 1.0)
    figures = make_snapshot_figures(1, [times_of(*CAPTURED, commits, memory=memory)], "M")
    found = figures.memory_per_byte["2"]
    assert (found.measured, found.formula) == (2.7, 2.667)
    assert figures.commit_s == {"8 hosts, m = 2": 1.0}
    assert memory_formula(4, 2) == 4.0


def test_a_time_is_the_median_of_the_rounds() -> None:
    seconds = seconds_of([3.0, 1.0, 2.0])
    assert seconds.median == 2.0
    assert 1.0 <= seconds.low < 2.0 < seconds.high <= 3.0


def test_sizes_and_rounds_out_of_range_are_rejected_before_the_benchmark_runs() -> None:
    with pytest.raises(CallerError, match=r"found --sizes 0, --rounds 3; expected sizes of 1 MB or more"):
        snapshot(sizes=[0], rounds=3)
    with pytest.raises(CallerError, match=r"--rounds 0; expected .* 1 round or more"):
        snapshot(sizes=[1], rounds=0)


@pytest.mark.parametrize(("free_gb", "expected"), [(24, (120, 1000)), (36, (120, 1000, 4000)), (1, ())])
def test_sizes_that_do_not_fit_into_free_memory_are_left_out(free_gb: int, expected: tuple[int, ...]) -> None:
    chosen, left_out = choose_sizes((120, 1000, 4000), free_gb * GB)
    assert chosen == expected
    assert len(left_out) == 3 - len(expected)


def test_a_size_that_was_left_out_is_reported_with_its_reason() -> None:
    _, left_out = choose_sizes((4000,), 24 * GB)
    figures = make_snapshot_figures(3, [times_of(*CAPTURED)], "M", left_out)
    assert figures.skipped["4000 MB, all"] == "needs 33.5 GB of memory, 24.0 GB are free"
