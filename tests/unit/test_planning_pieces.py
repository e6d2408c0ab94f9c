"""Dealing, stages, pipelines: the papers' vectors, and against trying everything."""

import heapq
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.planning.layer_split import (
    StageRun,
    select_tensor_group,
    split_layers,
    split_layers_by_run,
)
from resilient_jax.planning.makespan import MachineClass, assign_tasks
from resilient_jax.planning.memory import count_in_flight
from resilient_jax.planning.pipeline import estimate_pipeline_s, estimate_rerouted_s, simulate_pipeline_s

times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.25])
classes = st.lists(
    st.builds(
        MachineClass, count=st.integers(1, 4), start_s=st.sampled_from([0.0, 1.0, 2.5, 9.0]), piece_s=times
    ),
    min_size=1,
    max_size=4,
)


@given(st.integers(0, 60), classes, st.data())
def test_no_taker_gets_more_than_it_has_room_for_and_no_other_division_is_done_sooner(pieces, takers, data):
    takers = [msgspec.structs.replace(kind, most=data.draw(st.integers(0, 6))) for kind in takers]
    pieces = min(pieces, sum(kind.count * kind.most for kind in takers))
    done = sorted(
        kind.start_s + number * kind.piece_s
        for kind in takers
        for _ in range(kind.count)
        for number in range(1, kind.most + 1)
    )
    dealt = assign_tasks(pieces, takers)
    assert dealt.makespan_s == pytest.approx(done[pieces - 1] if pieces else 0.0)
    assert sum(count * number for shares in dealt.task_counts for count, number in shares) == pieces
    assert [sum(count for count, _ in shares) for shares in dealt.task_counts] == [
        kind.count for kind in takers
    ]
    for kind, shares in zip(takers, dealt.task_counts, strict=True):
        assert max(number for _, number in shares) <= kind.most


@given(st.integers(0, 60), classes)
def test_no_other_division_is_done_sooner_and_every_piece_is_dealt(pieces, takers):
    queue = [(kind.start_s + kind.piece_s, i) for i, kind in enumerate(takers) for _ in range(kind.count)]
    heapq.heapify(queue)
    finish = 0.0
    for _ in range(pieces):
        finish, i = queue[0]
        heapq.heapreplace(queue, (finish + takers[i].piece_s, i))
    dealt = assign_tasks(pieces, takers)
    assert dealt.makespan_s == pytest.approx(finish)
    assert sum(count * number for shares in dealt.task_counts for count, number in shares) == pieces
    assert [sum(count for count, _ in shares) for shares in dealt.task_counts] == [
        kind.count for kind in takers
    ]


def test_microbatches_of_recover_31_survivors_of_32():
    """ReCoVer, arXiv 2605.11215: B = 256; eight replicas with 9, 23 with 8, the form without lock step."""
    assert assign_tasks(256, [MachineClass(count=31, start_s=0, task_s=1)]).task_counts == (
        ((8, 9), (23, 8)),
    )


def test_a_hundred_thousand_takers_cost_as_much_as_one():
    dealt = assign_tasks(
        10**9, [MachineClass(count=10**5, start_s=0, task_s=1), MachineClass(count=1, start_s=0, task_s=2)]
    )
    assert dealt.makespan_s == 10_000


@given(st.lists(times, min_size=1, max_size=4), st.integers(0, 5), st.data())
def test_no_other_split_of_layers_has_a_faster_slowest_stage(layer_s, more, data):
    stages, layers = len(layer_s), len(layer_s) + more
    extra = data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=stages, max_size=stages))
    split = split_layers(layers, layer_s, extra)
    assert sum(split) == layers
    assert min(split) >= 1
    best = min(
        max(e + n * one for e, n, one in zip(extra, other, layer_s, strict=True))
        for other in itertools.product(range(1, layers + 1), repeat=stages)
        if sum(other) == layers
    )
    assert max(e + n * one for e, n, one in zip(extra, split, layer_s, strict=True)) == pytest.approx(best)


@given(st.lists(st.tuples(st.integers(1, 4), times), min_size=1, max_size=3), st.integers(0, 9), times, times)
def test_stages_that_are_alike_are_split_as_if_one_by_one(runs, more, first_s, last_s):
    layer_s = [one for count, one in runs for _ in range(count)]
    if len(layer_s) < 2:
        return
    layers = len(layer_s) + more
    extra = [first_s, *[0.0] * (len(layer_s) - 2), last_s]
    alike = [StageRun(*run) for run in runs]
    split = [n for _, count, n in split_layers_by_run(layers, alike, first_s, last_s) for _ in range(count)]
    wanted = split_layers(layers, layer_s, extra)
    assert sum(split) == layers

    def slowest(numbers):
        return max(e + n * one for e, n, one in zip(extra, numbers, layer_s, strict=True))

    assert slowest(split) == pytest.approx(slowest(wanted))


@given(
    st.lists(
        st.builds(StageRun, stages=st.integers(1, 2), layer_s=times, most=st.integers(1, 4)),
        min_size=2,
        max_size=3,
    ),
    times,
    times,
    st.data(),
)
def test_no_other_split_for_which_stages_have_room_has_a_faster_slowest_stage(runs, first_s, last_s, data):
    stages = [run for run in runs for _ in range(run.stages)]
    layers = data.draw(st.integers(len(stages), sum(run.most for run in stages)))
    split = [n for _, count, n in split_layers_by_run(layers, runs, first_s, last_s) for _ in range(count)]
    extra = [first_s, *[0.0] * (len(stages) - 2), last_s]

    def slowest(numbers):
        return max(e + n * run.layer_s for e, n, run in zip(extra, numbers, stages, strict=True))

    others = itertools.product(*[range(1, run.most + 1) for run in stages])
    possible = [numbers for numbers in others if sum(numbers) == layers]
    assert tuple(split) in possible
    assert slowest(split) == pytest.approx(min(map(slowest, possible)))


def test_resihp_gives_the_slow_stage_fewer_layers():
    """ResiHP, arXiv 2605.06374: (4, 4, 4) becomes (5, 2, 5)."""
    assert split_layers(12, [1, 1 / 0.4, 1]) == (5, 2, 5)


def test_resihp_keeps_two_of_a_tensor_group_with_a_slow_member():
    """k = 4 gives 1.6, k = 2 gives 2.0."""
    assert select_tensor_group([1, 1, 1, 0.4]) == (0, 1)
    assert select_tensor_group([1, 1, 1, 0.6]) == (0, 1, 2, 3)
    assert select_tensor_group([0, 1, 1, 1], at_least=2) == (1, 2)


def test_a_tensor_group_of_which_too_few_are_alive_is_refused():
    with pytest.raises(
        CallerError, match="found 3 of 4 members alive, expected a power of two of them that is 4"
    ):
        select_tensor_group([0, 1, 1, 1], at_least=4)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(CallerError, match="found 2 for 3 stages"):
        split_layers(2, [1, 1, 1])


def test_chameleons_pipelines():
    """arXiv 2508.21613: P = 4, N_m = 8, N_dp = 4, t = 1."""
    assert estimate_pipeline_s(4, 8, 1.0) == 11
    assert estimate_rerouted_s(4, 8, 4, [1, 0, 0, 0], 1.0) == pytest.approx(13.667, abs=5e-4)
    assert estimate_rerouted_s(4, 8, 4, [1, 1, 0, 0], 1.0) == pytest.approx(16.333, abs=5e-4)
    assert estimate_rerouted_s(4, 8, 4, [0, 0, 0, 0], 1.0) == 11
    assert estimate_rerouted_s(4, 8, 4, [4, 0, 0, 0], 1.0) is None


def test_failures_of_other_stages_than_there_are_are_refused():
    with pytest.raises(CallerError, match="found 3 numbers, expected one for each of 4"):
        estimate_rerouted_s(4, 8, 4, [1, 0, 0], 1.0)


@given(st.integers(1, 6), st.integers(1, 9), times, times)
def test_the_longest_path_of_equal_stages_is_the_formula(stages, microbatches, forward_s, backward_s):
    walked = simulate_pipeline_s([forward_s] * stages, [backward_s] * stages, microbatches)
    assert walked == pytest.approx(estimate_pipeline_s(stages, microbatches, forward_s + backward_s))


@given(st.lists(times, min_size=1, max_size=5), st.integers(1, 9))
def test_the_formula_is_never_less_than_the_longest_path(stage_s, microbatches):
    walked = simulate_pipeline_s([s / 3 for s in stage_s], [2 * s / 3 for s in stage_s], microbatches)
    assert walked <= estimate_pipeline_s(len(stage_s), microbatches, max(stage_s)) + 1e-9
    assert walked >= microbatches * max(stage_s) - 1e-9


def test_rounds_fill_a_pipeline_in_a_part_of_the_time():
    assert estimate_pipeline_s(4, 8, 1.0, pipeline_repeats=3) == 9


def test_a_stage_keeps_as_many_microbatches_as_are_after_it():
    assert [count_in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [count_in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
