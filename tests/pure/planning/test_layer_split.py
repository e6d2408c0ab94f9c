"""Layers over stages, and the members of a tensor group to keep: the papers' vectors and an exhaustive oracle."""

import itertools

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

times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.25])


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
def test_a_run_of_equal_stages_is_split_as_single_stages_are(runs, more, first_s, last_s):
    layer_s = [one for count, one in runs for _ in range(count)]
    if len(layer_s) < 2:
        return
    layers = len(layer_s) + more
    extra = [first_s, *[0.0] * (len(layer_s) - 2), last_s]
    equal = [StageRun(*run) for run in runs]
    split = [n for _, count, n in split_layers_by_run(layers, equal, first_s, last_s) for _ in range(count)]
    expected = split_layers(layers, layer_s, extra)
    assert sum(split) == layers

    def slowest(numbers):
        return max(e + n * one for e, n, one in zip(extra, numbers, layer_s, strict=True))

    assert slowest(split) == pytest.approx(slowest(expected))


@given(
    st.lists(
        st.builds(StageRun, stages=st.integers(1, 2), layer_s=times, max_layers=st.integers(1, 4)),
        min_size=2,
        max_size=3,
    ),
    times,
    times,
    st.data(),
)
def test_no_other_split_within_the_layer_limits_has_a_faster_slowest_stage(runs, first_s, last_s, data):
    stages = [run for run in runs for _ in range(run.stages)]
    layers = data.draw(st.integers(len(stages), sum(run.max_layers for run in stages)))
    split = [n for _, count, n in split_layers_by_run(layers, runs, first_s, last_s) for _ in range(count)]
    extra = [first_s, *[0.0] * (len(stages) - 2), last_s]

    def slowest(numbers):
        return max(e + n * run.layer_s for e, n, run in zip(extra, numbers, stages, strict=True))

    others = itertools.product(*[range(1, run.max_layers + 1) for run in stages])
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
