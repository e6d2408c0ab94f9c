"""Updates with the same bits on every mesh: sums that are exact, products that are not fused, the rest refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.exact_array_sum import sum_exactly
from resilient_jax.sharding.exact_reductions import apply_exactly, find_inexact
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of this module
from tests.support.full_only import full_but

SHAPES = {"matrix": (24, 96), "stack": (3, 24, 48), "odd": (7, 11)}
MESHES = [(2, 2, "tensor"), (1, 3, "fsdp"), (1, 8, "tensor")]
"""Replicas on a host, devices of each, and the axis over which their first or their last dim is sharded."""
STEPS = 2
OPTIMIZERS = {
    "adamw, clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
    "lamb": optax.lamb(0.01),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
    # Norms of rows: products with them are moved out of inner loops, where no addition can be fused with them.
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.01)),
    "steps skipped by a branch": optax.apply_if_finite(optax.lars(0.01), 2),
    # A product that is multiplied by one: two roundings in a row are not to cancel.
    "sm3": optax.sm3(0.01),
}
BELOW_A_POWER = np.nextafter(np.float32(2.0**20), np.float32(0))
"""An addend whose words are as large as they can be."""
NUMBERS = [0.0, np.inf, -np.inf, np.nan, -np.nan]


def sum_alone(x, dims):
    (found,) = sum_exactly([(x, dims)])
    return found


def draw(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {name: draw(index, shape) for index, (name, shape) in enumerate(SHAPES.items())}


def shard(mesh, width, axis, leaf):
    dims = [dim for dim, size in enumerate(leaf.shape) if size % width == 0]
    if not dims or width == 1:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*[None] * dims[0 if axis == "fsdp" else -1], axis))


def trace(optimizer):
    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(PARAMS)
    return state, jax.make_jaxpr(update)(PARAMS, state, PARAMS)


def train(optimizer, replicas, width, axis):
    """Return the bytes of parameters and optimizer state after some steps on a mesh."""
    mesh = Mesh(np.array(jax.devices()[: replicas * width]).reshape(replicas, width), ("replica", axis))
    state, closed = trace(optimizer)
    assert find_inexact(closed) is None

    def place(tree):
        return jax.tree.map(lambda leaf: shard(mesh, width, axis, leaf), tree)

    def step(params, state, gradients, number):
        leaves = jax.tree.leaves((params, state, gradients))
        found = apply_exactly(closed, leaves, jnp.minimum(number, 0))
        return jax.tree.structure((params, state)).unflatten(found)

    run = jax.jit(step, out_shardings=(place(PARAMS), place(state)))
    params, state = jax.device_put((PARAMS, state), (place(PARAMS), place(state)))
    for number in range(STEPS):
        gradients = {name: draw(100 * number + len(name), shape) for name, shape in SHAPES.items()}
        params, state = run(params, state, jax.device_put(gradients, place(gradients)), jnp.int32(number))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state))], params


@functools.cache
def train_alone(name):
    """Return the bytes of parameters and optimizer state after some steps on one device."""
    expected, params = train(OPTIMIZERS[name], 1, 1, "fsdp")
    assert not np.array_equal(params["matrix"], PARAMS["matrix"])
    return expected


EACH_ONCE = {(name, MESHES[number % len(MESHES)]) for number, name in enumerate(OPTIMIZERS)}
"""Each optimizer on a mesh, and each mesh for two optimizers; each pair is a program, and takes a second or two."""


@pytest.mark.parametrize(
    ("name", "mesh"), full_but(itertools.product(OPTIMIZERS, MESHES), EACH_ONCE.__contains__)
)
def test_an_update_has_the_same_bits_on_every_mesh(name, mesh):
    assert train(OPTIMIZERS[name], *mesh)[0] == train_alone(name)


def test_an_update_is_within_rounding_of_what_the_optimizer_computes():
    for optimizer in OPTIMIZERS.values():
        state, closed = trace(optimizer)
        leaves = jax.tree.leaves((PARAMS, state, PARAMS))
        found = jax.jit(lambda leaves, zero, closed=closed: apply_exactly(closed, leaves, zero))(
            leaves, 0 * jnp.int32(1)
        )
        expected = jax.jit(jaxpr_as_fun(closed))(*leaves)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("update", "primitive"),
    [
        (lambda x: x @ x.T, "dot_general"),
        (lambda x: jnp.cumsum(x), "cumsum"),
        (lambda x: jax.lax.scan(lambda total, row: (total + row, None), x[0], x)[0], "scan"),
        (lambda x: jnp.zeros(3).at[x.astype(int)].add(x), "scatter-add"),
        (lambda x: jnp.sort(x, axis=0), "sort"),
        (lambda x: jnp.arctan(x), "atan"),
        (lambda x: (x * 1j).sum(), "convert_element_type"),
    ],
)
def test_what_depends_on_the_mesh_is_named_with_its_arguments(update, primitive):
    closed = jax.make_jaxpr(lambda unused, x: update(jnp.tanh(x)))(jnp.zeros(2), jnp.ones((3, 3)))
    found = find_inexact(closed)
    assert found is not None
    assert (found.primitive, found.arguments) == (primitive, frozenset({1}))


def test_noise_from_a_key_is_independent_of_the_mesh():
    _, closed = trace(optax.chain(optax.add_noise(0.01, 0.5, 3), optax.sgd(0.01)))
    assert find_inexact(closed) is None


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    spread=st.floats(0, 30),
    scale=st.integers(-120, 90),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sum_is_that_of_its_addends_in_any_order(shape, spread, scale, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(scale - rng.uniform(0, spread, size=shape))
    x = np.where(np.abs(x) < 2.0**-126, 0, x).astype(np.float32)
    dims = tuple(range(len(shape)))
    found = np.asarray(sum_alone(jnp.asarray(x), dims))
    again = np.asarray(sum_alone(jnp.asarray(rng.permutation(x.ravel()).reshape(shape)), dims))
    assert found.tobytes() == again.tobytes()
    exact = x.astype(np.float64).sum()
    assert abs(found - exact) <= 2.0**-26 * np.abs(x).max() + 2.0**-23 * abs(exact) + 2.0**-126


@pytest.mark.parametrize(
    "shape",
    [(1,), (257,), (1024,), (512, 1024), (3, 3, 48, 64), (70_000, 3), (3, 70_000), (1, 5, 1)],
    ids=str,
)
def test_a_sum_of_many_addends_is_as_close_and_takes_no_memory(shape):
    x = draw(1, shape) * np.exp2(-np.random.default_rng(2).uniform(0, 20, size=shape)).astype(np.float32)
    for addends in (
        x,
        np.abs(x),
        np.full(shape, BELOW_A_POWER),
        np.full(shape, -(2.0**100), np.float32),
    ):
        exact = addends.astype(np.float64).sum()
        found = sum_alone(jnp.asarray(addends), tuple(range(len(shape))))
        assert abs(found - exact) <= 2.0**-26 * np.abs(addends).max() + 2.0**-23 * abs(exact)
    compiled = jax.jit(lambda x: sum_alone(x * x, tuple(range(len(shape))))).lower(x).compile()
    # Some integers of each row; XLA is not to write the words of all addends, or their squares.
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 40 * x.size / shape[-1] + 4096


def test_sums_are_the_same_alone_and_together():
    arrays = [
        draw(seed, shape) for seed, shape in enumerate([(8, 16), (16, 8), (8, 16), (5,), (), (2, 3, 4)])
    ]
    dims = [(0, 1), (0, 1), (1,), (0,), (), (2, 0)]
    for one, x, axes in zip(
        sum_exactly(list(zip(map(jnp.asarray, arrays), dims, strict=True))), arrays, dims, strict=True
    ):
        np.testing.assert_array_equal(one, sum_alone(jnp.asarray(x), axes))
        np.testing.assert_allclose(one, x.sum(axes), rtol=1e-5, atol=1e-6)


def test_a_sum_along_some_dims_keeps_the_others_and_what_is_not_finite():
    x = jnp.asarray(draw(0, (3, 4, 5)))
    for count in range(4):
        for dims in itertools.combinations(range(3), count):
            np.testing.assert_allclose(sum_alone(x, dims), x.sum(dims), rtol=1e-5, atol=1e-6)
    bad = x.at[1, 2, 3].set(jnp.inf).at[0, 0, 0].set(jnp.nan).at[2, 2, 1].set(-jnp.inf)
    bad = bad.at[:2, 1, 4].set(jnp.array([jnp.inf, -jnp.inf]))
    np.testing.assert_array_equal(sum_alone(bad, (0, 1)), bad.sum((0, 1)))
    assert np.isfinite(sum_alone(bad, (0, 1))[2])
    assert sum_alone(jnp.zeros((0, 2)), (0,)).tolist() == [0, 0]


@pytest.mark.parametrize("bad", [*itertools.product(NUMBERS, repeat=2)], ids=str)
def test_addends_that_are_not_finite_have_the_sum_that_floats_have(bad):
    x = jnp.array([*bad, -1.0, -2.0])
    np.testing.assert_array_equal(sum_alone(x, (0,)), x.sum())


def apply(function, *arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    assert find_inexact(closed) is None
    return jax.jit(lambda zero: apply_exactly(closed, jax.tree.leaves(arguments), zero))(jnp.int32(0))


def test_a_gradient_whose_square_overflows_is_clipped_as_the_optimizer_clips_it():
    clip = optax.clip_by_global_norm(1.0)
    gradients = jnp.array([1e20, 1.0, -2.0])
    (found,) = apply(lambda tree: clip.update(tree, clip.init(tree))[0], gradients)
    np.testing.assert_array_equal(found, jnp.zeros(3))


@pytest.mark.parametrize("divisor", [1.5, 2.0**100, 2.0**126.5, 3e38, -3e38, jnp.inf])
def test_a_quotient_by_a_large_divisor_is_not_zero(divisor):
    dividends, divisors = np.array([1e30, -3e38, 5.0], np.float32), np.full(3, divisor, np.float32)
    (found,) = apply(lambda x, y: x / y, jnp.asarray(dividends), jnp.asarray(divisors))
    # Numpy's: XLA's own division by an array of equal numbers gives 0 there.
    np.testing.assert_allclose(found, dividends / divisors, rtol=3e-7, atol=2.0**-126)
    (found,) = apply(lambda x, y: x / y, jnp.asarray(dividends), jnp.float32(divisor))
    np.testing.assert_allclose(found, dividends / divisors, rtol=3e-7, atol=2.0**-126)
