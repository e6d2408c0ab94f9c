"""Layers over stages: the paper's vector and an exhaustive oracle."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.planning.layer_split import StageRun, split_layers_by_run

times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.25])


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
    runs = [StageRun(1, 1.0), StageRun(1, 1 / 0.4), StageRun(1, 1.0)]
    assert split_layers_by_run(12, runs, 0.0, 0.0) == ((0, 1, 5), (1, 1, 2), (2, 1, 5))
