"""What the hybrid benchmark reads from the times of steps."""

import itertools
import math

import pytest

from resilient_jax.events import Event, EventKind
from tests.benchmarks.hybrid.command import list_join_gaps, list_moves, list_step_times
from tests.benchmarks.hybrid.restart import find_stalls, schedule_kills
from tests.benchmarks.resilience.timeline import Commit, InjectedKill, Timeline
from tests.benchmarks.step_times import StepTime, read_step_times


def end(process, generation, at_s):
    return StepTime(process=process, step=int(at_s), generation=generation, at_s=at_s)


STEPS = [
    *(end(process, 1, at_s) for process in (1, 2) for at_s in (1.0, 1.5, 2.0)),
    *(end(1, 2, at_s) for at_s in (3.0, 4.0)),
    end(1, 3, 4.75),
    end(3, 3, 4.8),
]


def test_steps_are_timed_within_generations_of_one_size():
    assert list_step_times(STEPS, 2) == pytest.approx([0.5] * 4)
    assert list_step_times(STEPS, 1) == pytest.approx([1.0])
    assert math.isnan(list_step_times(STEPS, 3)[0])


def test_a_join_costs_the_others_the_time_between_their_steps():
    assert list_join_gaps(STEPS, 2) == pytest.approx([0.75])


def test_a_line_that_a_killed_process_left_half_is_left_out(tmp_path):
    whole = '{"process":7,"step":3,"generation":2,"at_s":1.5}'
    (tmp_path / "times-7.jsonl").write_text(f"{whole}\n{whole[:20]}")
    assert read_step_times(tmp_path) == [StepTime(process=7, step=3, generation=2, at_s=1.5)]


def test_a_host_that_got_no_block_waited_for_none():
    def keep(received, seconds):
        return Event(
            monotonic_s=0.0,
            wall_s=0.0,
            host="host-1",
            kind=EventKind.PIPELINE_STATE_KEPT,
            detail={"step": 3, "received": received, "seconds": seconds},
        )

    assert list_moves([keep(0, 0.5), keep(64, 0.125)]) == [0.125]
    assert math.isnan(list_moves([keep(0, 0.5)])[0])


def test_kills_fall_at_every_distance_from_the_last_checkpoint():
    kills = schedule_kills(10, 10, ("host-0", "host-1"))
    assert {kill.step % 10 for kill in kills} == set(range(10))
    assert [kill.host for kill in kills[:3]] == ["host-0", "host-1", "host-0"]
    assert all(later.step - earlier.step >= 10 for earlier, later in itertools.pairwise(kills))


def test_a_restart_costs_what_is_beyond_a_step_and_does_steps_again():
    def commit(attempt, step, at_s):
        return Commit(attempt=attempt, step=step, at_s=at_s, hosts=4)

    # Steps of 1 s; a kill in step 6 at 3.5 s; step 4 again at 9 s, from a checkpoint after step 3.
    found = find_stalls(
        Timeline(
            commits=(
                *(commit(1, 2 + number, float(number)) for number in range(4)),
                *(commit(2, 4 + number, 9.0 + number) for number in range(4)),
            ),
            began_s={1: -5.0, 2: 4.0},
            struck=(InjectedKill(number=0, attempt=1, step=6, host="host-1", at_s=3.5),),
        )
    )
    assert found.step_s == pytest.approx(1.0)
    assert found.stalls_s == pytest.approx((4.5,))
    assert found.regained_s == pytest.approx((6.5,))
    assert found.redone == 2
