"""`EarlyStopping`: what counts as an improvement, and when training stops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import CallerError
from resilient_jax.trainer.early_stopping import EarlyStopping


def judge_all(early_stopping, values):
    """Return the evaluation at which training stops, or None."""
    patience = early_stopping.make_initial_state()
    for number, value in enumerate(values):
        patience, stops, _ = early_stopping.update(patience, {early_stopping.metric: value})
        if stops:
            return number
    return None


def test_an_improvement_below_min_delta_does_not_count():
    assert judge_all(EarlyStopping(patience=2, min_delta=0.1), [1.0, 0.95, 0.91]) == 2
    assert judge_all(EarlyStopping(patience=2, min_delta=0.1), [1.0, 0.95, 0.85, 0.8]) is None


def test_an_accuracy_improves_by_growing():
    early_stopping = EarlyStopping(metric="eval_accuracy", patience=2, larger_is_better=True)
    assert judge_all(early_stopping, [0.1, 0.2, 0.3]) is None
    assert judge_all(early_stopping, [0.3, 0.2, 0.1]) == 2


def test_nan_improves_on_nothing():
    assert judge_all(EarlyStopping(patience=2), [np.nan, np.nan]) == 1


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30),
    st.integers(1, 5),
)
def test_training_stops_where_the_last_patience_values_improve_on_none_before(values, patience):
    expected = next(
        (
            last
            for last in range(patience, len(values))
            if min(values[last - patience + 1 : last + 1]) >= min(values[: last - patience + 1])
        ),
        None,
    )
    assert judge_all(EarlyStopping(patience=patience), values) == expected


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"min_delta": -1.0}, {"min_delta": np.nan}], ids=str)
def test_invalid_options_are_refused(wrong):
    with pytest.raises(CallerError, match="early_stopping: found"):
        EarlyStopping(**wrong)
