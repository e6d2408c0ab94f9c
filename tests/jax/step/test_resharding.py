"""Trees are sharded over devices and replicated again: no bit changes.

Shards of other hosts are tested with real hosts, in tests/jobs/test_trainer_sharded.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.placements import Placement, fully_sharded
from resilient_jax.step import resharding
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.resharding import (
    abstract_shards,
    compile_replicate,
    compile_shard,
    compute_shard_grid,
    replicate_tree,
    shard_tree,
)
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module

MESHES = {
    "hosts and devices": {"host": 4, "local": 2},
    "one axis": {"all": 8},
    "three": {"a": 2, "b": 2, "c": 2},
}


@pytest.fixture(autouse=True, scope="module")
def forget(eight_devices):  # noqa: F811 - that fixture
    yield
    resharding.clear_caches()


@pytest.fixture(params=MESHES)
def mesh(request):
    axes = MESHES[request.param]
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def here():
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P())


def make_tree():
    draw = np.random.default_rng(0).normal
    tree = {
        "rows": draw(size=(64, 48)).astype(np.float32),
        "columns": draw(size=(31, 48)).astype(np.float32),
        "narrow": draw(size=(64, 3, 16)).astype(jnp.bfloat16),
        "one axis": draw(size=(6, 999)).astype(np.float32),
        "uncut": draw(size=(33, 33)).astype(np.float32),
        "count": np.int32(3),
    }
    return {name: jax.device_put(leaf, here()) for name, leaf in tree.items()}


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected)


def test_a_sharded_tree_has_the_shardings_of_the_placement_and_the_same_elements(mesh):
    tree, place = make_tree(), fully_sharded(mesh)
    found = shard_tree(tree, place)
    assert_same(found, tree)
    assert {name: leaf.sharding for name, leaf in found.items()} == {
        name: place(name, leaf) for name, leaf in tree.items()
    }
    assert not found["rows"].is_fully_replicated


def test_replicating_a_sharded_tree_returns_the_original(mesh):
    tree = make_tree()
    found = replicate_tree(shard_tree(tree, fully_sharded(mesh)), here())
    assert_same(found, tree)
    assert {leaf.sharding for leaf in found.values()} == {here()}


def test_random_keys_are_sharded_and_replicated(mesh):
    key = jax.device_put(jax.random.key(3), here())
    found = replicate_tree(shard_tree({"key": key}, fully_sharded(mesh)), here())["key"]
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(key))


def test_the_second_call_compiles_nothing(mesh, caplog):
    tree, place = make_tree(), fully_sharded(mesh)
    replicate_tree(shard_tree(tree, place), here())
    with jax.log_compiles():
        replicate_tree(shard_tree(tree, place), here())
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize("is_raveled", [False, True])
def test_what_was_compiled_ahead_is_not_compiled_again(is_raveled, mesh, caplog):
    resharding.clear_caches()
    tree, place, grid = make_tree(), fully_sharded(mesh), HostGrid(jax.devices(), 0)
    raveled = [is_raveled and leaf.size > 1 for leaf in jax.tree.leaves(tree)]
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )
    compile_shard(shapes, place, raveled, grid, lambda: None)
    compile_replicate(abstract_shards(shapes, place, raveled), grid, lambda: None)
    with jax.log_compiles():
        sharded = shard_tree(tree, place, raveled)
        found = replicate_tree(sharded, here())
    assert "Compiling" not in caplog.text
    assert_same(found, tree)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), sharded)
    assert described == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), abstract_shards(shapes, place, raveled)
    )


class FixedPlacement(Placement):
    """A placement with one spec, which shards several dims at once."""

    __slots__ = ()

    def partition_spec(self, path, leaf):
        return P("b", None, ("c", "a"))


def test_a_leaf_that_is_sharded_in_several_dims_in_any_order_is_joined():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    tree = {"x": jax.device_put(np.arange(4 * 3 * 8, dtype=np.float32).reshape(4, 3, 8), here())}
    found = shard_tree(tree, FixedPlacement(mesh))
    assert_same(found, tree)
    assert_same(replicate_tree(found, here()), tree)


@given(st.data(), st.sampled_from(list(MESHES)))
def test_shards_of_any_devices_that_cover_a_leaf_join_to_it(data, name):
    """Shards come from the devices of one host or of all hosts, in any order, as rows of an all-gather."""
    axes = MESHES[name]
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    cuts = data.draw(st.permutations([*axes, None, None]))[:3]
    leaf = np.arange(8 * 16 * 8, dtype=np.float32).reshape(8, 16, 8)
    sharding = NamedSharding(mesh, P(*cuts))
    devices = data.draw(st.permutations(jax.devices()))[: data.draw(st.integers(1, 8))]
    grid = compute_shard_grid(sharding, leaf.shape, devices)
    index = sharding.devices_indices_map(leaf.shape)
    covered = np.zeros(leaf.shape, bool)
    for device in devices:
        covered[index[device]] = True
    assert (grid is not None) == covered.all()
    if grid is not None:
        rows = np.stack([leaf[index[device]].reshape(-1) for device in devices])
        np.testing.assert_array_equal(grid.join_shards(jnp.asarray(rows)), leaf)
