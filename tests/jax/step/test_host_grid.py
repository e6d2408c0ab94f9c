"""The grid of the hosts' devices on one host: sums keep the sharding of their inputs."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.step.host_grid import HostGrid
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module


def test_a_host_with_more_devices_than_the_others_uses_some_and_has_its_sums_on_all() -> None:
    devices = jax.devices()[:4]
    numbers = np.arange(6, dtype=np.float32)
    origin = jax.device_put(numbers, NamedSharding(Mesh(np.array(devices), ("data",)), P()))
    grid = HostGrid(devices[:2], 0)
    (found,) = grid.unpack(grid.to_local(grid.pack([origin]))[0], [origin])
    assert found.sharding == origin.sharding
    assert np.array_equal(found, numbers)


def test_each_device_packs_its_own_shards_and_gets_them_back() -> None:
    devices = jax.devices()[:4]
    grid = HostGrid(devices, 0, in_shards=True)
    shapes = {"matrix": (8, 3), "vector": (4,)}
    leaves = [
        jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), grid.leaf_sharding)
        for shape in shapes.values()
    ]
    packed = grid.pack(leaves)
    for device, shard in zip(devices, packed.addressable_shards, strict=True):
        own = [part.data for leaf in leaves for part in leaf.addressable_shards if part.device == device]
        assert shard.device == device
        assert np.array_equal(shard.data[0], np.concatenate([np.ravel(part) for part in own]))
    for leaf, found in zip(leaves, grid.unpack(grid.to_local(packed)[0], leaves), strict=True):
        assert found.sharding == leaf.sharding
        assert np.array_equal(found, leaf)
