"""Partial sums are kept for the next generation if their computation succeeded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.contributions import Contributions, PartialSum
from tests.support.eight_devices import eight_devices as eight_devices


def job(*, pooled=False):
    return AccumulationSpec(name="train", step=3, num_microbatches=4, unit_size=1, is_pooled=pooled)


def whole():
    return {"w": jnp.ones(2)}


def donated():
    total = whole()
    total["w"].delete()
    return total


def call_on_two_devices(function):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def compute(x):
        return jax.pure_callback(function, jax.ShapeDtypeStruct((1,), jnp.float32), x)

    return {"w": compute(jnp.zeros(2))}


def never_computed():
    """Return an array on two devices whose computation failed, as a broken collective leaves it."""

    def fail(_):
        raise RuntimeError("connection closed by peer")

    return call_on_two_devices(fail)


@pytest.fixture(autouse=True)
def forget_the_failure():
    """Compute on the devices: otherwise JAX raises the failure again when the backend is cleared."""
    yield
    jax.block_until_ready(call_on_two_devices(np.asarray))


@pytest.mark.parametrize("lost", [donated, never_computed])
def test_an_unusable_partial_sum_is_dropped_and_the_others_stay(lost):
    kept = Contributions(
        job(), {0: PartialSum(1, whole()), 1: PartialSum(1, lost()), 2: PartialSum(1, whole())}
    )
    kept.move_to_host()
    assert kept.count_progress().tolist() == [1, 0, 1, 0]
    assert isinstance(kept.partial_sums[0].total["w"], np.ndarray)


@pytest.mark.parametrize("lost", [donated, never_computed])
def test_all_pooled_partial_sums_are_dropped_because_the_units_of_the_unusable_one_are_unknown(lost):
    kept = Contributions(job(pooled=True), {-1: PartialSum(0, whole()), -2: PartialSum(0, lost())}, {0, 1})
    kept.drop_unusable()
    assert not kept.partial_sums
    assert kept.count_progress().tolist() == [0, 0, 0, 0]
