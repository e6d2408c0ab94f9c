"""A raveled state, on devices that stand for hosts: equal shares and the same bits on any number of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.placements import ReplicatedPlacement, fully_sharded
from resilient_jax.sharding.raveled_array import RaveledArray, is_raveled, ravel_array, ravel_leaves
from resilient_jax.snapshot.manifest import SLICE_ALIGNMENT
from resilient_jax.state.flat_state import copy_to_host, flatten_state, make_abstract_state
from resilient_jax.state.index_box import cover_range
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.state_placement import place_initial_state, restore_state
from resilient_jax.step import resharding
from resilient_jax.step.resharding import replicate_tree, shard_tree
from resilient_jax.trainer.loss_function import adapt_loss
from resilient_jax.trainer.model_adapters import adapt_model
from resilient_jax.trainer.numerics import Numerics
from resilient_jax.trainer.parameter_ema import track_ema
from resilient_jax.trainer.train_step import Recipe, TrainStep
from resilient_jax.worker.ledger import compute_additive_digest, compute_sha256
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.fake_snapshots import host_names, take

SHAPES = {"kernel": (97, 101), "cube": (5, 7, 83), "bias": (257,), "bfloat16": (61, 67)}
MAX_IMBALANCE = 1.01
COUNTS = [1, 2, 3, 4, 5, 7, 8]


@pytest.fixture(autouse=True, scope="module")
def forget(eight_devices):  # noqa: F811 - that fixture
    yield
    resharding.clear_caches()


def init():
    """Return a state with two leaves that are not raveled."""
    draw = np.random.default_rng(0).normal
    arrays = {name: jnp.asarray(draw(size=shape), jnp.float32) for name, shape in SHAPES.items()}
    arrays["bfloat16"] = arrays["bfloat16"].astype(jnp.bfloat16)
    return arrays | {"count": jnp.int32(3), "key": jax.random.key(1)}


RAVELED = [name in SHAPES for name in sorted([*SHAPES, "count", "key"])]


def init_raveled():
    return ravel_leaves(init(), RAVELED)


def place_on(count):
    """Return the placement on so many hosts of one device each."""
    return fully_sharded(Mesh(np.array(jax.devices()[:count]).reshape(count, 1), ("host", "local")))


def snapshot_on(count):
    hosts = host_names(count)
    state = place_initial_state(init_raveled(), place_on(count))
    return state, *take(state, hosts, lambda device: hosts[device.id])


def raw(leaf):
    """Return the elements of a leaf, in its own shape and without padding."""
    if is_raveled(leaf):
        return np.asarray(leaf.vector)[: leaf.size].reshape(leaf.shape)
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def assert_is_the_state_in_equal_shares(state, count):
    for name, expected in init().items():
        np.testing.assert_array_equal(raw(state[name]), raw(expected), err_msg=name)
    total = sum(math.prod(shape) * state[name].dtype.itemsize for name, shape in SHAPES.items())
    for device in jax.devices()[:count]:
        shards = [s for n in SHAPES for s in state[n].vector.addressable_shards if s.device == device]
        assert sum(shard.data.nbytes for shard in shards) * count <= MAX_IMBALANCE * total


@pytest.mark.parametrize("before", [4, 7, 1])
def test_a_snapshot_of_one_number_of_hosts_is_restored_on_any_other_in_equal_shares(before):
    state, snapshot, partition = snapshot_on(before)
    assert_is_the_state_in_equal_shares(state, before)
    for after in COUNTS:
        _, found = restore_snapshot(make_abstract_state(init_raveled), snapshot, place_on(after))
        assert_is_the_state_in_equal_shares(found, after)
        for leaf in filter(is_raveled, jax.tree.leaves(found, is_leaf=is_raveled)):
            assert np.all(np.asarray(leaf.vector)[leaf.size :] == 0)  # padding is in no snapshot
        assert tuple(leaf.spec for leaf in flatten_state(3, found).leaves) == partition.leaves


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_parts_of_a_raveled_state_are_equal_and_have_no_padding(count):
    _, _, partition = snapshot_on(count)
    total = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in partition.leaves)
    assert not partition.replicated_on
    # Padding of a vector, and of a slice, each less than an alignment.
    assert max(partition.part_bytes.values()) <= total / count + SLICE_ALIGNMENT * len(partition.leaves)
    covered = {}
    for slices in partition.slices.values():
        for one in slices:
            size = math.prod(stop - start for start, stop in zip(one.start, one.stop, strict=True))
            covered[one.leaf] = covered.get(one.leaf, 0) + size
    assert [covered[number] for number in range(len(partition.leaves))] == [
        math.prod(leaf.shape) for leaf in partition.leaves
    ]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 3), (3, 3), (7, 2)])
def test_a_state_from_memory_is_placed_on_any_number_of_hosts(before, after):
    held = flatten_state(3, place_initial_state(init_raveled(), place_on(before)))
    for state in (held, copy_to_host(held)):
        found = restore_state(make_abstract_state(init_raveled), state, place_on(after))
        assert_is_the_state_in_equal_shares(found, after)
    assert [leaf.value.shape for leaf in copy_to_host(held).leaves] == [leaf.shape for leaf in held.leaves]


@pytest.mark.parametrize("count", [3, 4])
def test_the_digests_of_a_ledger_do_not_depend_on_raveling_or_padding(count):
    complete = flatten_state(3, init())
    raveled = flatten_state(3, place_initial_state(init_raveled(), place_on(count)))
    assert [leaf.spec for leaf in raveled.leaves] == [leaf.spec for leaf in complete.leaves]
    assert compute_sha256(raveled) == compute_sha256(complete)
    assert compute_additive_digest(raveled, is_first=True) == compute_additive_digest(complete, is_first=True)


@pytest.mark.parametrize("count", [1, 3, 5, 7, 8])
def test_a_tree_is_raveled_from_copies_and_gathered_again(count):
    place = place_on(count)
    here = NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), P())
    tree = jax.device_put(init(), here)
    found = shard_tree(tree, place, RAVELED)
    assert_is_the_state_in_equal_shares(found, count)
    assert {name: isinstance(leaf, RaveledArray) for name, leaf in sorted(found.items())} == dict(
        zip(sorted(tree), RAVELED, strict=True)
    )
    again = replicate_tree(found, here)
    for name, expected in tree.items():
        np.testing.assert_array_equal(raw(again[name]), raw(expected))
        assert again[name].sharding == here


def make_programs():
    """Return the programs of a step of a recipe that clips, decays matrices only, and averages the parameters."""
    decayed = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    recipe = Recipe(
        model=adapt_model(lambda key: {name: leaf for name, leaf in init().items() if name in SHAPES}),
        optimizer=track_ema(optax.adamw(0.01, mask=decayed), 0.9),
        loss_fn=adapt_loss(
            lambda params, batch: sum(jnp.sum(leaf) for leaf in params.values()) * batch["x"][0]
        ),
        num_microbatches=3,
        seed=0,
        numerics=Numerics(clip_norm=0.1),
        early_stopping=(),
    )
    return TrainStep(recipe, {"x": jax.ShapeDtypeStruct((1,), jnp.float32)})


def make_sums(programs):
    draw = np.random.default_rng(1).normal
    return jax.tree.map(lambda leaf: np.asarray(draw(size=leaf.shape), leaf.dtype), programs.abstract_sums)


def test_an_update_has_the_bits_of_a_replicated_state_on_any_number_of_hosts():
    programs = make_programs()
    expected, raveled = None, programs.raveled_leaves
    for count in [None, 2, 3, 5, 7]:
        place = place_on(count or 1)
        here = NamedSharding(Mesh(np.array(jax.devices()[: count or 1]), ("data",)), P())
        sums = jax.device_put(make_sums(programs), here)
        summary, _ = programs.summarize(sums)
        state, given = programs.init(), ((sums.gradients, sums.collections), summary)
        if count is None:  # replicated
            placement = ReplicatedPlacement(here.mesh.abstract_mesh)
            state = jax.device_put(state, here)
        else:
            placement = place.with_abstract_mesh()
            state = place_initial_state(ravel_leaves(state, raveled.state), place)
            given = shard_tree(given, place, raveled.sums)
        for _ in range(2):
            state = programs.update(state, *given, placement=placement)
        found = flatten_state(2, replicate_tree(state, here))
        expected = expected or compute_sha256(found)
        assert compute_sha256(found) == expected
        if count is not None:
            large = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_raveled) if leaf.size >= 64]
            assert len(large) == 4 * len(SHAPES)  # parameters, two moments, the average
            assert all(map(is_raveled, large))
            assert all(leaf.vector.addressable_data(0).size * count - leaf.size < count for leaf in large)


def test_a_raveled_array_has_the_shape_of_the_array():
    found = ravel_array(jnp.zeros((3, 5), jnp.bfloat16))
    assert (found.shape, found.ndim, found.size, found.nbytes) == ((3, 5), 2, 15, 30)
    assert ravel_array(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)).vector.shape == (15,)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_cover_a_range_of_elements_in_order(shape, data):
    array = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    boxes = list(cover_range(shape, start, stop))
    parts = [array[tuple(map(slice, box.start, box.stop))].reshape(-1) for box in boxes]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *parts]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
