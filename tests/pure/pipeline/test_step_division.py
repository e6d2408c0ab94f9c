"""How a step is divided by what tasks take: pure, with hysteresis, and the same from the same numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.health.step_prediction import StepPath
from resilient_jax.ids import HostName
from resilient_jax.pipeline.step_division import (
    DivisionChooser,
    StepDivision,
    divide_by_speed,
)
from resilient_jax.pipeline.task_timings import TaskTimings
from resilient_jax.pipeline_schedule.routes import Hop, Team, make_routes
from resilient_jax.pipeline_schedule.task_orders import order_tasks, take_equal_time
from resilient_jax.pipeline_schedule.tasks import KINDS, PipelineSchedule, Task, TaskKind
from resilient_jax.pipeline_schedule.teams import make_teams, share_microbatches
from resilient_jax.step.measured_seconds import MIN_MEASURED

SCHEDULE = PipelineSchedule.ZERO_BUBBLE
TEAMS: list[Team] = [[(HostName("a"), 2), (HostName("b"), 3)], [(HostName("c"), 2), (HostName("d"), 3)]]
TASK_S = 0.1


def measure(teams=TEAMS, **factors):
    """Return what tasks take on each host: `TASK_S`, times a factor."""
    return {
        host: {kind: TASK_S * factors.get(host, 1.0) for kind in KINDS[SCHEDULE]}
        for team in teams
        for host, _ in team
    }


def choose_all(chooser, *measured):
    """Return the quotas of the change after each measurement; None: there was none."""
    found = [chooser.choose(one) for one in measured]
    return [change and change.division.quotas for change in found]


def test_a_slow_replica_gets_fewer_microbatches_when_it_was_slow_twice():
    chooser = DivisionChooser(TEAMS, (4, 4), SCHEDULE)
    equal, slow = measure(), measure(b=3.0)
    assert choose_all(chooser, equal, slow, slow) == [None, None, (2, 6)]
    assert choose_all(chooser, slow, equal, equal) == [None, None, (4, 4)], "and back when it is healthy"


@pytest.mark.parametrize(
    "measured",
    [
        [measure(b=1.3), measure(d=1.3)] * 4,  # now this one, now that one
        [measure(b=3.0), measure()] * 4,  # for once
        [measure(**dict.fromkeys("abcd", factor)) for factor in (1.0, 2.0, 0.5, 3.0)],  # all alike
        [measure(b=1.04), measure(b=1.04)],  # less than a tenth of a step
        [{host: {kind: s / 1000 for kind, s in of.items()} for host, of in measure(b=3.0).items()}] * 2,
    ],
)
def test_noise_changes_nothing(measured):
    chooser = DivisionChooser(TEAMS, (4, 4), SCHEDULE)
    assert choose_all(chooser, *measured) == [None] * len(measured)
    assert chooser.present == StepDivision((4, 4))


def test_nothing_changes_while_a_host_is_unknown():
    unknown = {**measure(b=3.0), HostName("d"): {}}
    assert choose_all(DivisionChooser(TEAMS, (4, 4), SCHEDULE), unknown, unknown) == [None, None]


UNEQUAL_S = {"a": (0.1, 0.2, 0.1), "b": (0.4, 0.05, 0.2), "c": (0.4, 0.1, 0.05), "d": (0.1, 0.05, 0.4)}
"""Of F, B and W, for which orders that are made for equal times are a bad choice."""


def test_tasks_are_put_in_another_order_where_there_is_one_replica():
    team: list[Team] = [[(HostName(name), 1) for name in UNEQUAL_S]]
    measured = {
        HostName(name): dict(zip(KINDS[SCHEDULE], found, strict=True)) for name, found in UNEQUAL_S.items()
    }
    chooser = DivisionChooser(team, (4,), SCHEDULE)
    first, change = chooser.choose(measured), chooser.choose(measured)
    assert first is None
    assert change is not None
    assert change.division.quotas == (4,)
    routes = make_routes(team, (4,))
    for seconds, expected_s in (
        (take_equal_time, change.before_s),
        (change.division.seconds, change.after_s),
    ):
        orders = order_tasks(routes, seconds, schedule=SCHEDULE).orders
        path_s = StepPath(orders, routes).predict_s(lambda task: measured[task.hop.host][task.kind])
        assert path_s == pytest.approx(expected_s)
    assert change.before_s > 1.25 * change.after_s


FACTORS = st.floats(0.2, 20.0)


@given(st.data())
def test_every_replica_has_a_microbatch_and_a_change_is_predicted_to_pay(data):
    hosts = [HostName(f"h{number}") for number in range(data.draw(st.integers(1, 7)))]
    teams = make_teams(hosts, [1.0] * 4, data.draw(st.integers(1, 3)))
    num_microbatches = data.draw(st.integers(len(teams), 16))
    quotas = share_microbatches(teams, num_microbatches)
    measured = measure(teams, **{host: data.draw(FACTORS) for team in teams for host, _ in team})
    found = divide_by_speed(teams, quotas, measured)
    assert sum(found) == num_microbatches
    if num_microbatches > len(teams):
        assert min(found) >= 1
    one, other = (DivisionChooser(teams, quotas, SCHEDULE) for _ in range(2))
    for _ in range(2):
        change, same = one.choose(measured), other.choose(measured)
        assert (change and change.division.quotas) == (same and same.division.quotas)
        if change is not None:
            assert change.before_s > 1.1 * change.after_s
            assert sum(change.division.quotas) == num_microbatches
    assert one.choose(measured) is None, "what has just been chosen stays"


HOP = Hop(HostName("a"), 0, 2)


def run_step(timings, *, stalled=TaskKind.FORWARD, stall_s=0.0, waited_s=0.0):
    """Have a step of two microbatches, one of whose tasks is stalled."""
    for microbatch in (4, 5):
        for number, kind in enumerate(KINDS[SCHEDULE]):
            seconds = 1.0 + number + (waited_s if kind is TaskKind.FORWARD else 0.0)
            seconds += stall_s if (kind, microbatch) == (stalled, 4) else 0.0
            timings.add(Task(kind, microbatch, HOP), seconds)
        timings.add_wait(microbatch, waited_s)
    return timings.end_step()


def test_tasks_are_known_after_some_steps_without_waits_for_data():
    timings = TaskTimings()
    for _ in range(MIN_MEASURED):
        assert timings.estimate() == {}
        work = run_step(timings, waited_s=0.25)
        assert (work.microbatches, work.waited_s, work.seconds) == ((4, 5), (0.25, 0.25), 12.5)
    estimate = timings.estimate()
    assert [estimate[kind] for kind in KINDS[SCHEDULE]] == pytest.approx([1.0, 2.0, 3.0])
    timings.clear()
    assert timings.estimate() == {}


def test_a_host_that_is_stopped_in_another_task_of_each_step_is_slow():
    timings = TaskTimings()
    for number in range(9):
        run_step(timings, stalled=KINDS[SCHEDULE][number % 3], stall_s=12.0)
    assert sum(timings.estimate().values()) == pytest.approx(12.0)


def test_a_step_that_is_slow_for_once_does_not_count():
    timings = TaskTimings()
    for number in range(9):
        run_step(timings, stall_s=600.0 if number == 4 else 0.0)
    assert sum(timings.estimate().values()) == pytest.approx(6.0)
