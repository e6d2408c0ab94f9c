"""Totals are kept for the next generation if their computation succeeded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.step.assignment import AccumulationSpec, ReplicaShape
from resilient_jax.step.contributions import Contribution, Contributions
from resilient_jax.step.running_total import NO_LIMITS, start_total
from tests.support.eight_devices import eight_devices as eight_devices

SPEC = AccumulationSpec(name="train", step=3, num_microbatches=4, reduction="exact")


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
def test_only_a_total_that_cannot_be_read_is_dropped(lost):
    kept = Contributions(SPEC, {0: make_part({0}), 1: Contribution(lost(), frozenset({1}))})
    kept.move_to_host()
    assert list(kept.parts) == [0]
    assert kept.list_claims().tolist() == [1, 0, 0, 0]


def test_totals_are_moved_to_the_host_and_back_with_their_bits():
    total = start_total(SPEC, {"w": jnp.arange(3.0), "count": jnp.int32(2)}, NO_LIMITS)
    kept = Contributions(SPEC, {0: Contribution(total, frozenset({1, 3}))})
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(total)]
    kept.move_to_host()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(kept.parts[0].total))
    kept.move_to_devices({"w": jnp.zeros(3), "count": jnp.int32(0)}, ReplicaShape(), 0, in_shards=False)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(kept.parts[0].total))
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(kept.parts[0].total)] == bits
    assert kept.list_claims().tolist() == [0, 1, 0, 1]


def test_totals_of_replicas_of_another_shape_are_resharded(eight_devices):
    two, four = (Mesh(np.array(eight_devices[:count]), ("fsdp",)) for count in (2, 4))
    total = start_total(
        SPEC, {"w": jax.device_put(jnp.arange(8.0), NamedSharding(two, P("fsdp")))}, NO_LIMITS
    )
    like = {"w": jax.device_put(jnp.zeros(8), NamedSharding(four, P("fsdp")))}
    kept = Contributions(SPEC, {0: Contribution(total, frozenset({1}))})
    kept.move_to_devices(like, ReplicaShape(), 0, in_shards=False)
    assert jax.tree.leaves(kept.parts[0].total) == jax.tree.leaves(total)
    kept.move_to_devices(like, ReplicaShape(per_host=2), 0, in_shards=False)
    assert {leaf.sharding for leaf in jax.tree.leaves(kept.parts[0].total)} == {like["w"].sharding}
    assert kept.replica_shape == ReplicaShape(per_host=2)


def test_shards_are_dropped_where_the_host_is_to_have_others_or_whole_sums():
    like = {"w": jnp.zeros(3)}
    for rank, in_shards, kept_parts in ((1, True, [0]), (0, True, []), (1, False, [])):
        kept = Contributions(SPEC, {0: make_part({0})}, ReplicaShape(hosts=2), rank=1, in_shards=True)
        kept.move_to_devices(like, ReplicaShape(hosts=2), rank, in_shards=in_shards)
        assert list(kept.parts) == kept_parts
        assert (kept.rank, kept.in_shards) == (rank, in_shards)


def test_parts_whose_claims_are_refused_are_dropped_and_the_others_count():
    kept = Contributions(SPEC, {0: make_part({0}), 4: make_part({1, 2}), 5: make_part({3}, is_counted=False)})
    assert kept.list_claims().tolist() == [1, 2, 2, 3]
    kept.keep_accepted(np.array([1, 0, 0, 3]))
    assert {number: part.is_counted for number, part in kept.parts.items()} == {0: True, 5: True}


def make_part(indexes, **fields):
    return Contribution(whole(), frozenset(indexes), **fields)


def test_parts_that_wait_have_numbers_of_their_own_whenever_their_threads_ask():
    """Numbers below the least one there is were given twice: one thread asks after another has stored its part."""
    kept = Contributions(SPEC, {0: make_part({0}), 1: make_part({1}), 2: make_part({2})})
    first, third = kept.draw_waiting_number(), kept.draw_waiting_number()
    kept.parts[first] = make_part({3})
    second = kept.draw_waiting_number()
    kept.parts |= {second: make_part({4}), third: make_part({5})}
    assert len(kept.parts) == 6
