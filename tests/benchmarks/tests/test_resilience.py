"""Schedule, time buckets and figures of the resilience benchmark, computed from known times of events."""

import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError, InternalError
from tests.benchmarks.jobs import resilience_record
from tests.benchmarks.resilience.figures import (
    BARE,
    DEFAULTS,
    OURS,
    Pace,
    RunFigures,
    best_baseline,
    make_resilience_figures,
    make_run_figures,
    with_longer_stalls,
)
from tests.benchmarks.resilience.plot_data import make_resilience_plot
from tests.benchmarks.resilience.schedule import (
    QUIET_STEPS,
    WARM_STEPS,
    RunSize,
    draw_faults,
    size_run,
)
from tests.benchmarks.resilience.timeline import (
    Commit,
    InjectedKill,
    RunRecord,
    TimeBuckets,
    Timeline,
    mean_hosts,
    measure_regained,
    measure_stalls,
    pad_buckets,
    read_timeline,
    saving_costs,
    split_time,
    step_times,
)

HOSTS = ("host-0", "host-1", "host-2", "host-3")
ORBAX = "Orbax, best n"


def commit(attempt: int, step: int, at_s: float, hosts: int = 4) -> Commit:
    return Commit(attempt=attempt, step=step, at_s=at_s, hosts=hosts)


def struck(attempt: int, step: int, at_s: float) -> InjectedKill:
    return InjectedKill(number=0, attempt=attempt, step=step, host="host-1", at_s=at_s)


RESTARTED = Timeline(
    # Steps of 1 s; a kill in step 6 at 3.5; new processes at 4, step 4 again at 9, from a checkpoint after step 3.
    commits=(
        *(commit(1, 2 + n, float(n)) for n in range(4)),
        *(commit(2, 4 + n, 9.0 + n) for n in range(4)),
    ),
    began_s={1: -5.0, 2: 4.0},
    struck=(struck(1, 6, 3.5),),
)
SHRUNK = Timeline(
    # The same kill: survivors resume at 3.6 and commit step 6 at 4.6; the fourth rejoins at 5.6, first commit at 7.6.
    commits=(
        *(commit(1, 2 + n, float(n)) for n in range(4)),
        commit(2, 6, 4.6, hosts=3),
        commit(2, 7, 5.6, hosts=3),
        commit(3, 8, 7.6),
    ),
    began_s={1: -5.0, 2: 3.6, 3: 6.0},
    struck=(struck(1, 6, 3.5),),
)


# The schedule.


@given(st.integers(0, 2**32), st.integers(4, 600), st.integers(4, 200), st.integers(1, 20))
def test_every_block_of_steps_has_one_failure_and_the_run_starts_and_ends_without_one(
    seed: int, failure_every: int, max_steps: int, max_failures: int
) -> None:
    size = size_run(failure_every, max_steps=max_steps, max_failures=max_failures)
    assert size.measured + size.padded == size.failures * failure_every  # the rate is exact
    assert size.measured <= max_steps
    faults = draw_faults(seed, size, HOSTS)
    block = size.measured // size.failures
    assert [(fault.step - WARM_STEPS) // block for fault in faults] == list(range(size.failures))
    assert all(WARM_STEPS < fault.step < size.total - QUIET_STEPS for fault in faults)
    assert {fault.host for fault in faults} <= set(HOSTS)


def test_the_schedule_depends_on_the_seed_alone() -> None:
    size = size_run(20, max_steps=200, max_failures=8)
    assert draw_faults(7, size, HOSTS) == draw_faults(7, size, HOSTS)
    assert len({draw_faults(seed, size, HOSTS) for seed in range(5)}) == 5


def test_a_rate_without_room_for_a_step_after_the_failure_is_rejected() -> None:
    with pytest.raises(CallerError, match=r"one failure in 3 steps.*expected at least 4"):
        size_run(3, max_steps=30, max_failures=2)


# Victims.


@pytest.mark.parametrize(
    ("step", "living", "victim"),
    [(4, HOSTS, None), (5, HOSTS, "host-2"), (6, HOSTS, "host-2"), (5, ("host-0", "host-1"), "host-0")],
)
def test_a_due_failure_kills_exactly_one_host_that_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, living: Sequence[str], victim: str | None
) -> None:
    timers: list[str] = []

    class Timer:
        def __init__(self, _: float, strike: object, __: object) -> None:
            timers.append(strike.__self__._host)  # pyright: ignore[reportAttributeAccessIssue]

        def start(self) -> None:
            pass

    monkeypatch.setattr(resilience_record, "threading", types.SimpleNamespace(Timer=Timer))
    schedule = [{"step": 1, "host": "host-1"}, {"step": 5, "host": "host-2"}]
    (tmp_path / "fault-0.json").touch()  # this failure is done
    for host in living:
        faults = resilience_record.Faults(tmp_path, schedule, host, HOSTS)
        faults.arm(1, step, living, [])
        faults.arm(1, step, living, [])  # a new generation starts the same step again
    assert timers == ([victim] if victim else [])


# Timelines.


def rows(attempt: int, step: int, times_s: Sequence[float]) -> list[RunRecord]:
    return [
        RunRecord(kind="committed", attempt=attempt, host=HOSTS[n], at_s=at_s, step=step, hosts=4)
        for n, at_s in enumerate(times_s)
    ]


def test_a_step_is_committed_when_the_last_host_has_committed_it() -> None:
    found = read_timeline([*rows(1, 0, [1.0, 1.3]), *rows(1, 1, [2.2, 2.0])], [], {1: 0.0}, steps=2, warm=1)
    assert [(c.step, c.at_s) for c in found.commits] == [(0, 1.3), (1, 2.2)]


def test_a_step_that_only_the_victim_committed_counts_as_in_flight() -> None:
    ahead = RunRecord(kind="committed", attempt=1, host="host-1", at_s=2.0, step=1, hosts=4)
    again = rows(2, 1, [5.0, 5.1, 5.2])
    timeline = read_timeline([*rows(1, 0, [1.0]), ahead, *again], [struck(1, 2, 2.1)], {}, steps=2, warm=1)
    assert [c.attempt for c in timeline.commits] == [1, 2]
    assert timeline.redone == 0
    others = msgspec.structs.replace(ahead, host="host-0"), msgspec.structs.replace(ahead, hosts=1)
    for lost in others:  # if a survivor committed, or there was only one host, the step counts
        assert read_timeline(
            [*rows(1, 0, [1.0]), lost, *again], [struck(1, 2, 2.1)], {}, steps=2, warm=1
        ).redone


def test_a_step_that_no_process_committed_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match=r"the steps \[1\] committed by no process"):
        read_timeline([*rows(1, 0, [1.0]), *rows(1, 2, [2.2])], [], {1: 0.0}, steps=3, warm=1)


def test_an_attempt_begins_when_its_last_process_begins() -> None:
    begins = [
        RunRecord(kind="began", attempt=1, host=HOSTS[n], at_s=at_s) for n, at_s in enumerate([0.2, 0.9, 0.4])
    ]
    assert read_timeline([*begins, *rows(1, 0, [1.0])], [], {}, steps=1, warm=1).began_s == {1: 0.9}


def test_a_stall_ends_with_the_next_step_even_if_that_step_is_redone() -> None:
    assert measure_stalls(RESTARTED) == [pytest.approx(5.5)]
    assert measure_regained(RESTARTED) == [pytest.approx(7.5)]
    assert measure_stalls(SHRUNK) == measure_regained(SHRUNK) == [pytest.approx(1.1)]
    assert (RESTARTED.redone, SHRUNK.redone) == (2, 0)


def test_a_step_that_survivors_committed_after_the_kill_does_not_end_the_stall() -> None:
    late = Timeline(
        commits=(commit(1, 2, 0.0), commit(1, 3, 1.0), commit(2, 4, 3.0)),
        began_s={2: 1.5},
        struck=(struck(1, 3, 0.9),),
    )
    assert measure_stalls(late) == [pytest.approx(2.1)]
    buckets = split_time(late, pace_s=1.0, keeps_partial=True)
    assert (buckets.productive, buckets.recovery) == (2.0, pytest.approx(0.5))


# Time buckets.


def test_a_restart_wastes_the_redone_steps_and_the_step_in_flight() -> None:
    buckets = split_time(RESTARTED, pace_s=1.0, keeps_partial=False)
    assert buckets == TimeBuckets(
        productive=5.0,  # steps 3, 6, 7 and the second time 4 and 5
        slower=0.0,
        wasted=2.5,  # the first time 4 and 5, half of 6
        recovery=0.5,
        reinitialisation=4.0,
    )
    assert buckets.goodput == pytest.approx(5 / 12)


def test_redone_warm_up_steps_are_wasted() -> None:
    timeline = Timeline(
        commits=(commit(1, 2, 0.0), commit(1, 3, 1.0), *(commit(2, n, 4.0 + n) for n in range(5))),
        began_s={2: 2.0},
        struck=(struck(1, 4, 1.5),),
    )
    buckets = split_time(timeline, pace_s=1.0, keeps_partial=False)
    assert (buckets.productive, buckets.wasted) == (2.0, 4.5)  # 3 and 4; 3, half of 4, and 0 to 2 again
    assert timeline.redone == 4


def test_a_shrink_wastes_no_time_of_the_survivors() -> None:
    buckets = split_time(SHRUNK, pace_s=1.0, keeps_partial=True)
    assert buckets.productive == pytest.approx(6.0)
    assert buckets.slower == pytest.approx(0.5)  # step 6 took half a step before the kill and one after
    assert (buckets.wasted, buckets.recovery) == (0.0, pytest.approx(0.1))
    assert buckets.reinitialisation == pytest.approx(1.0)  # the planned change, less its first step
    assert mean_hosts(SHRUNK) == pytest.approx((3 * 4 + 2.6 * 3 + 2 * 4) / 7.6)


def test_time_beyond_the_undisturbed_pace_is_not_productive() -> None:
    buckets = split_time(SHRUNK, pace_s=0.8, keeps_partial=True)
    assert buckets.productive == pytest.approx(6 * 0.8)


@given(
    st.lists(st.floats(0.01, 9.0), min_size=8, max_size=8),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.01, 5.0),
    st.booleans(),
)
def test_the_buckets_sum_to_the_wall_time(
    gaps: list[float], kill: float, began: float, pace_s: float, keeps_partial: bool
) -> None:
    ends = [0.0, *itertools.accumulate(gaps)]
    steps = [2, 3, 4, 5, 4, 5, 6, 7, 8]
    commits = [commit(1 if n < 4 else 2, step, ends[n]) for n, step in enumerate(steps)]
    killed_s = ends[3] + kill * gaps[3]
    timeline = Timeline(
        commits=tuple(commits),
        began_s={1: 0.0, 2: killed_s + began * (ends[4] - killed_s)},
        struck=(struck(1, 6, killed_s),),
    )
    buckets = split_time(timeline, pace_s=pace_s, keeps_partial=keeps_partial)
    assert buckets.wall_s == pytest.approx(timeline.wall_s)
    parts = (buckets.productive, buckets.slower, buckets.wasted, buckets.recovery, buckets.reinitialisation)
    assert min(parts) >= -1e-9


def test_padding_adds_steps_at_the_pace_without_failures() -> None:
    padded = pad_buckets(TimeBuckets(productive=10.0, wasted=10.0), 80, pace_s=1.0, saving_s=0.125)
    assert padded == TimeBuckets(productive=90.0, slower=10.0, wasted=10.0)


def test_the_cost_of_a_checkpoint_is_the_excess_of_its_window_over_the_window_before() -> None:
    ends = {3: 3.0, 4: 4.0, 6: 6.0, 8: 8.5, 10: 10.5, 12: 13.5}
    times = [ends.get(done, ends.get(done - 1, 0.0) + 1.0) for done in range(3, 13)]
    timeline = Timeline(
        commits=tuple(commit(1, done - 1, at_s) for done, at_s in zip(range(3, 13), times, strict=True)),
        began_s={},
        struck=(),
    )
    assert saving_costs(timeline, 2) == [pytest.approx(0.5), pytest.approx(1.0)]
    assert len(step_times(timeline, leave_out=[4, 5])) == 7


# Figures.


def run_of(system: str, timeline: Timeline, failure_every: int = 20) -> RunFigures:
    size = RunSize(failure_every=failure_every, failures=1, measured=5, padded=failure_every - 5)
    pace = Pace(step_s=1.0)
    return make_run_figures(
        system, size, timeline, pace, seed=0, checkpoint_every=2, hosts=4, host_mib=100.0 + failure_every
    )


def test_throughput_counts_each_step_once_and_all_devices_all_the_time() -> None:
    found = run_of(ORBAX, RESTARTED)
    assert found.tokens_per_s == pytest.approx(1024 * 20 / (12.0 + 15) / 4)
    assert found.goodput == pytest.approx(20 / 27)
    assert found.cost_s == pytest.approx(7.0)


def test_defaults_are_the_baseline_with_a_longer_stall() -> None:
    longer = with_longer_stalls(run_of(ORBAX, RESTARTED), 95.5)
    assert (longer.system, longer.computed, longer.stalls_s) == (DEFAULTS, True, [95.5])
    assert longer.regained_s == [pytest.approx(97.5)]
    assert longer.tokens_per_s == pytest.approx(1024 * 20 / (27.0 + 90) / 4)
    assert longer.buckets.wall_s == pytest.approx(117.0)


def test_figures_compare_with_the_best_baseline_and_count_a_shared_run_once() -> None:
    runs = [
        run_of(system, timeline, rate)
        for rate in (100, 50)
        for system, timeline in ((OURS, SHRUNK), (ORBAX, RESTARTED))
    ]
    runs += [with_longer_stalls(run, 95.0) for run in runs if run.system == ORBAX]
    assert best_baseline(runs, 50) == ORBAX
    found = make_resilience_figures(
        runs,
        paces={OURS: Pace(step_s=1.0), BARE: Pace(step_s=0.5)},
        costs_s=[0.5],
        blocking_s=[0.1],
        defaults_stall_s=95.0,
        bitwise_equal=True,
        load=(0.0, 0.0),
        machine="this",
    )
    assert (found.stall.n, found.baseline_stall.n) == (1, 1)  # both rates share the measured run
    assert found.stall_ratio == pytest.approx(5.0)
    assert (found.stall_less_a_step_s, found.baseline_stall_less_a_step_s) == (pytest.approx(0.1), 5.0)
    assert found.effective_throughput_ratio == pytest.approx((12.0 + 45) / (7.6 + 45), abs=1e-3)
    assert found.goodput == pytest.approx((6 + 95) / (7.6 + 95), abs=1e-3)
    assert found.baseline_goodput == pytest.approx(100 / 107, abs=1e-3)
    assert found.steps_lost == 0


def test_a_failed_run_removes_only_its_rate_from_the_comparison() -> None:
    runs = [run_of(OURS, SHRUNK, 100), run_of(ORBAX, RESTARTED, 100), run_of(ORBAX, RESTARTED, 50)]
    more: dict[str, Any] = {
        "paces": {OURS: Pace(step_s=1.0), BARE: Pace(step_s=1.0)},
        "costs_s": [0.5],
        "blocking_s": [0.1],
        "defaults_stall_s": None,
        "bitwise_equal": True,
        "load": (0.0, 0.0),
        "machine": "this",
        "failed": ["1 in 50, resilient_jax"],
    }
    found = make_resilience_figures(runs, **more)
    assert list(found.effective_throughput_ratios) == ["100"]
    assert (found.effective_throughput_ratio, found.failed) == (None, ["1 in 50, resilient_jax"])
    with pytest.raises(InternalError, match=r"no run to compare.*1 in 50, resilient_jax"):
        make_resilience_figures(runs[1:], **more)


def test_the_plot_marks_each_failure_at_its_time_and_committed_steps() -> None:
    picture = make_resilience_plot(
        [run_of(OURS, SHRUNK), run_of(ORBAX, RESTARTED)], {(OURS, 20): SHRUNK, (ORBAX, 20): RESTARTED}
    )
    ours, orbax = picture.lines
    assert (ours.struck_s, ours.struck_steps) == ([3.5], [6])
    assert orbax.steps == [3, 4, 5, 6, 5, 6, 7, 8]
    assert [rates.failure_every for rates in picture.rates] == [[20], [20]]
