"""Placements shard each leaf over as many devices as possible, the same on every host."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.placements import MIN_SHARDED_SIZE, ReplicatedPlacement, fully_sharded

shapes = st.lists(st.sampled_from([1, 2, 3, 5, 7, 12, 64, 96, 160, 192]), max_size=4).map(tuple)
sizes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)


def mesh_of(*sizes):
    return AbstractMesh(tuple(sizes), ("host", "local", "third")[: len(sizes)])


def leaf_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def cuts_of(spec):
    """Return (dim, axes) of each sharded dim."""
    return [
        (dim, (entry,) if isinstance(entry, str) else tuple(entry))
        for dim, entry in enumerate(spec)
        if entry is not None
    ]


def possible_cuts(mesh, shape):
    """Yield the number of shards of every way to shard one dim."""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            pieces = math.prod(mesh.shape[axis] for axis in chosen)
            if any(size % pieces == 0 for size in shape):
                yield pieces


PATH = "['x']"


@given(sizes, shapes)
def test_a_leaf_is_sharded_in_one_dim_into_as_many_equal_shards_as_possible(sizes, shape):
    mesh = mesh_of(*sizes)
    cuts = cuts_of(fully_sharded(mesh).partition_spec(PATH, leaf_of(*shape)))
    best = max(possible_cuts(mesh, shape), default=1) if math.prod(shape) >= MIN_SHARDED_SIZE else 1
    assert len(cuts) <= 1
    pieces = [math.prod(mesh.shape[axis] for axis in axes) for _, axes in cuts]
    assert math.prod(pieces) == best
    assert all(shape[dim] % count == 0 for (dim, _), count in zip(cuts, pieces, strict=True))


@given(sizes, shapes)
def test_of_equally_divisible_dims_the_largest_is_sharded(sizes, shape):
    mesh = mesh_of(*sizes)
    for dim, axes in cuts_of(fully_sharded(mesh).partition_spec(PATH, leaf_of(*shape))):
        pieces = math.prod(mesh.shape[axis] for axis in axes)
        assert shape[dim] == max(size for size in shape if size % pieces == 0)


@pytest.mark.parametrize(
    ("hosts", "local", "shape", "expected"),
    [
        (3, 2, (160, 192), P(None, ("host", "local"))),
        (3, 2, (160, 160), P("local")),
        (2, 2, (6, 999), P("host")),
        (4, 1, (256, 192), P("host")),
        (1, 1, (256, 192), P()),
        (5, 7, (64, 64), P()),
    ],
)
def test_hosts_come_before_the_devices_of_a_host(hosts, local, shape, expected):
    assert fully_sharded(mesh_of(hosts, local)).partition_spec(PATH, leaf_of(*shape)) == expected


def test_gradients_and_moments_are_sharded_as_their_parameter_whatever_their_dtype():
    place = fully_sharded(mesh_of(4, 2))
    types = (jnp.bfloat16, jnp.float32, jnp.int8)
    assert len({place.partition_spec(PATH, leaf_of(64, 16, dtype=dtype)) for dtype in types}) == 1


def test_small_leaves_and_random_keys_are_replicated():
    place = fully_sharded(mesh_of(4, 2))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4096))
    assert (
        place.partition_spec(PATH, leaf_of())
        == place.partition_spec(PATH, leaf_of(MIN_SHARDED_SIZE - 8))
        == place.partition_spec(PATH, keys)
        == P()
    )
    assert place.partition_spec(PATH, leaf_of(MIN_SHARDED_SIZE)) != P()


def test_placements_of_the_same_kind_and_mesh_are_equal():
    """An equal placement as static argument of a program does not trace the program again."""
    one, same, other = (fully_sharded(mesh_of(hosts, 2)) for hosts in (4, 4, 3))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != ReplicatedPlacement(mesh_of(4, 2))
