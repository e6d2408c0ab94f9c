"""Weighted means: what they are divided by, on devices and in host memory, and as numbers by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import resilient_jax as rj
from resilient_jax.errors import CallerError
from resilient_jax.weighted_mean import (
    find_divisor,
    join_weights,
    read_divisor,
    read_weighted_mean,
    split_weights,
)

WEIGHTS = {
    3.0: 3.0,
    2.0**-120: 2.0**-120,
    0.0: np.inf,
    -2.0: np.nan,
    np.inf: np.nan,
    np.nan: np.nan,
}


@pytest.mark.parametrize(("weight", "divisor"), WEIGHTS.items())
def test_a_divisor_is_the_same_on_devices_and_in_host_memory(weight, divisor):
    np.testing.assert_equal(read_divisor(weight), divisor)
    np.testing.assert_equal(np.asarray(jax.jit(find_divisor)(weight)), np.float32(divisor))


def test_a_mean_is_the_total_over_the_weight_and_zero_without_any():
    assert rj.WeightedMean(6.0, 4).mean == 1.5
    assert rj.WeightedMean(jnp.float32(6), jnp.int32(4)).mean.dtype == jnp.float32
    assert rj.WeightedMean(5.0, 0).mean == 0
    assert np.isnan(rj.WeightedMean(5.0, -1).mean)


def test_it_is_a_tree_whose_parts_have_names():
    one, other = rj.WeightedMean(1.0, 2.0), rj.WeightedMean(3.0, 4.0)
    assert jax.tree.map(lambda a, b: a + b, one, other) == rj.WeightedMean(4.0, 6.0)
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(one)] == [".total", ".weight"]


def test_weights_are_split_off_by_name_and_joined_again():
    means = {"loss": rj.WeightedMean(1.0, 2.0), "a": 3.0, "b/c": rj.WeightedMean(4.0, 5.0)}
    assert all(isinstance(value, float) for value in split_weights(means).values())
    assert join_weights(split_weights(means)) == means
    assert join_weights({}) == {}


@pytest.mark.parametrize("weight", [True, 3, np.int64(3), np.float32(0.5), jnp.asarray(3)])
def test_any_number_may_be_a_weight(weight):
    found = read_weighted_mean(rj.WeightedMean(jnp.bfloat16(2), weight), "loss")
    assert (found.total.dtype, found.weight.dtype) == (jnp.float32, jnp.float32)
    assert found.weight == float(weight)


@pytest.mark.parametrize("weight", [-1, np.inf, np.nan])
def test_what_is_no_weight_becomes_nan_before_it_is_added_up(weight):
    assert np.isnan(read_weighted_mean(rj.WeightedMean(1.0, weight), "loss").weight)


@pytest.mark.parametrize("weight", [None, "ten", 1j, np.ones(1)])
def test_what_is_no_number_is_refused(weight):
    with pytest.raises(
        CallerError, match=r"loss: found .* as the weight of a WeightedMean, expected one number"
    ):
        read_weighted_mean(rj.WeightedMean(1.0, weight), "loss")
