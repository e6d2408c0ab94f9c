"""Pipeline times: the formula against the simulated schedule, memory in flight."""

from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.routes import make_routes
from resilient_jax.pipeline_schedule.task_orders import TaskOrders, order_tasks
from resilient_jax.pipeline_schedule.tasks import DEFAULT_SCHEDULE, TaskKind
from resilient_jax.planning.memory import count_in_flight
from resilient_jax.planning.pipeline import (
    find_weight_share,
    time_pipeline,
)
from tests.support.properties import examples

times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.25])


def simulate(stage_s, transfer_s, microbatches, *, is_remat=False) -> TaskOrders:
    """Return the step of one pipeline, as its hosts run it."""
    weights = find_weight_share(is_remat=is_remat)
    shares = {
        TaskKind.FORWARD: weights,
        TaskKind.INPUT_GRADIENT: 1 - 2 * weights,
        TaskKind.WEIGHT_GRADIENT: weights,
    }
    team = [(HostName(f"host-{stage}"), 1) for stage in range(len(stage_s))]
    return order_tasks(
        make_routes([team], [microbatches]),
        lambda _host, kind, block: shares[kind] * stage_s[block],
        schedule=DEFAULT_SCHEDULE,
        transfer_s=lambda _source, _destination: transfer_s,
    )


def estimate_s(stages, stage_s, transfer_s, microbatches, *, is_remat=False):
    """Return what the planner estimates of the same step."""
    time = time_pipeline(stages, stage_s, transfer_s, weight_share=find_weight_share(is_remat=is_remat))
    return microbatches * time.microbatch_s + time.fill_s


@examples(few=5)
@given(st.integers(1, 6), st.integers(1, 20), st.sampled_from([0.01, 0.1, 0.3]), st.booleans())
def test_the_formula_is_the_simulated_schedule_of_equal_stages_with_transfers(
    stages, microbatches, transfer_s, is_remat
):
    simulated = simulate([1.0] * stages, transfer_s, microbatches, is_remat=is_remat).makespan_s
    formula = estimate_s(stages, 1.0, transfer_s, microbatches, is_remat=is_remat)
    assert simulated <= formula + 1e-9
    if (
        microbatches >= 2 * stages
    ):  # with fewer the gaps of filling are not all filled, and nothing is delayed
        assert simulated >= 0.9 * formula


@examples(few=5)
@given(st.lists(times, min_size=1, max_size=5), st.integers(1, 9), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_formula_is_no_less_than_the_simulated_schedule_of_unequal_stages(
    stage_s, microbatches, transfer_s
):
    simulated = simulate(stage_s, transfer_s, microbatches)
    assert simulated.makespan_s <= estimate_s(len(stage_s), max(stage_s), transfer_s, microbatches) + 1e-9
    assert simulated.makespan_s >= microbatches * max(stage_s) - 1e-9
    most = count_in_flight(0, len(stage_s), microbatches)
    assert max(simulated.peak_in_flight.values()) <= most


def test_pipeline_repeats_shorten_the_fill():
    assert time_pipeline(4, 1.0, repeats=3).fill_s == 1
    assert time_pipeline(4, 1.0, repeats=1).fill_s == 2


def test_every_stage_keeps_as_many_microbatches_as_there_are_stages():
    assert [count_in_flight(stage, 4, 8) for stage in range(4)] == [4, 4, 4, 4]
    assert [count_in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 2]
    assert [count_in_flight(stage, 4, 8, repeats=3) for stage in range(4)] == [5, 4, 3, 2]
