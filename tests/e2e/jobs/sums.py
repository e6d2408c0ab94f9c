"""A job that compares sums over hosts with numpy, on every host; exits with 0 if all are equal."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import resilient_jax as rj
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.reduction import AllReduce, OrderedAllReduce

SHAPES = {"odd": (7, 3), "one": (), "long": (1000,), "empty": (0, 4)}
DTYPES = (np.float32, jnp.bfloat16, np.int32)
OWNERS = ((0,), (2,), (0, 1, 2), (2, 0, 2, 1, 1, 2, 2), (1, 1, 1))


def part_of(unit: int) -> dict[str, np.ndarray]:
    """Return elements of very different magnitude: any other order of summation gives other bits."""
    random = np.random.default_rng(unit)
    return {
        f"{name} {np.dtype(dtype).name}": (
            random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)
        ).astype(dtype)
        for (name, shape), dtype in itertools.product(SHAPES.items(), DTYPES)
    }


def add_in_order(parts: list[np.ndarray]) -> np.ndarray:
    """Return the sum in order; narrow floats are added in float32 and rounded once."""
    wide = np.float32 if parts[0].dtype == jnp.bfloat16 else parts[0].dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return np.asarray(total).astype(parts[0].dtype)


def train(world: rj.World) -> None:
    assert len(world.hosts) == 3
    grid = HostGrid(world.devices, world.process_index)
    whole = NamedSharding(world.local_mesh("data"), P())
    here = jax.local_devices()[0]
    for owners, place in itertools.product(OWNERS, (whole, here)):
        mine = {
            unit: jax.device_put(part_of(unit), place)
            for unit, owner in enumerate(owners)
            if owner == world.host_index
        }
        like = jax.device_put(part_of(0), place)
        total = OrderedAllReduce(grid)(mine, owners, like)
        for name, found in total.items():
            expected = add_in_order([part_of(unit)[name] for unit in range(len(owners))])
            assert found.dtype == expected.dtype, (name, found.dtype)
            assert found.sharding == like[name].sharding, name
            assert np.asarray(found).tobytes() == expected.tobytes(), (owners, name, found, expected)
    summed = AllReduce(grid)(jax.device_put(part_of(world.host_index), here))
    for name, found in summed.items():
        expected = add_in_order([part_of(host)[name] for host in range(3)])
        np.testing.assert_allclose(np.asarray(found, np.float64), expected.astype(np.float64), rtol=2e-2)


if __name__ == "__main__":
    rj.run(train)
