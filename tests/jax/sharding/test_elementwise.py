"""Programs on raveled arrays: which arguments may be raveled; results have the bits of those in the arrays' shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from resilient_jax.sharding.elementwise import apply_elementwise, find_elementwise, ravel_like
from resilient_jax.sharding.raveled_array import RaveledArray, compute_padded_size, ravel_array

SHAPES = {"matrix": (7, 11), "vector": (13,), "cube": (3, 5, 2)}
DEVICES = 4

ELEMENTWISE = {
    "adam": optax.adam(0.01),
    "adamw, whose mask looks at shapes": optax.adamw(
        0.01, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.02, 5, 9), nesterov=True),
    "sgd": optax.sgd(0.01, momentum=0.9, nesterov=True),
    "lion": optax.lion(0.01),
    "amsgrad": optax.amsgrad(0.01),
    "rmsprop": optax.rmsprop(0.01, centered=True),
    "clipped by value": optax.chain(optax.clip(0.1), optax.adam(0.01)),
    "half precision": optax.adam(0.01, mu_dtype=jnp.bfloat16),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=0.01),
    "one group is frozen": optax.partition(
        {"a": optax.adam(0.01), "b": optax.set_to_zero()}, {"matrix": "a", "vector": "b", "cube": "a"}
    ),
}
OTHERS = {
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=4),
    "lamb": optax.lamb(0.01),
    "clipped by norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
    "noise": optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.01)),
    "centralized": optax.chain(optax.centralize(), optax.sgd(0.01)),
}


def make_params(dtype=jnp.float32):
    draw = np.random.default_rng(0).normal
    return {name: jnp.asarray(draw(size=shape), dtype) for name, shape in SHAPES.items()}


def make_update(optimizer):
    def update(state, gradients):
        params, inner = state
        updates, inner = optimizer.update(gradients, inner, params)
        return optax.apply_updates(params, updates), inner

    return update


def trace(optimizer, params):
    """Return the state, the gradients, the program of an update, and which leaves of the state may be raveled."""
    state = params, optimizer.init(params)
    gradients = jax.tree.map(jnp.cos, params)
    closed = jax.make_jaxpr(make_update(optimizer))(state, gradients)
    count = len(jax.tree.leaves(state))
    return state, gradients, closed, find_elementwise(closed, [(i, i) for i in range(count)])


def pad(leaf, padding=np.nan):
    """Return a leaf raveled and padded for a number of devices, with what must not matter."""
    raveled = ravel_array(leaf)
    missing = compute_padded_size(leaf.shape, DEVICES) - leaf.size
    vector = jnp.pad(raveled.vector, (0, missing), constant_values=jnp.asarray(padding, leaf.dtype))
    return RaveledArray(vector, raveled.shape)


def unravel(value):
    return value.vector[: value.size].reshape(value.shape) if isinstance(value, RaveledArray) else value


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.float32) for name in ELEMENTWISE), ("adam", jnp.bfloat16)]
)
def test_an_elementwise_optimizer_has_equal_bits_on_raveled_leaves_with_any_padding(name, dtype):
    state, gradients, closed, raveled = trace(ELEMENTWISE[name], make_params(dtype))
    arguments = jax.tree.leaves((state, gradients))
    assert raveled == [leaf.ndim > 0 for leaf in arguments]
    expected = jax.tree.leaves(jax.jit(make_update(ELEMENTWISE[name]))(state, gradients))
    chosen = [pad(leaf) if one else leaf for leaf, one in zip(arguments, raveled, strict=True)]
    found = jax.jit(functools.partial(apply_elementwise, closed))(chosen)
    for one, before, other in zip(found, chosen, expected, strict=False):
        after = ravel_like(one, before)
        assert isinstance(after, RaveledArray) == isinstance(before, RaveledArray)
        assert unravel(after).dtype == other.dtype
        # Every bfloat16 is a float32; NaNs of float32 compare as equal.
        one, other = (np.asarray(array.astype(jnp.float32)) for array in (unravel(after), other))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", OTHERS)
def test_leaves_that_meet_another_operation_keep_their_shape(name):
    _, _, _, (cube, matrix, *_) = trace(OTHERS[name], make_params())
    assert not cube
    assert not matrix


def test_only_the_leaves_of_a_group_that_reduces_keep_their_shape():
    labels = {"matrix": "a", "vector": "b", "cube": "a"}
    optimizer = optax.partition({"a": optax.adam(0.01), "b": optax.lamb(0.01)}, labels)
    params = make_params()
    state, gradients, closed, raveled = trace(optimizer, params)
    by_shape = {}
    for leaf, one in zip(jax.tree.leaves((state, gradients)), raveled, strict=True):
        by_shape.setdefault(leaf.shape, set()).add(one)
    assert by_shape == {(): {False}, (7, 11): {True}, (3, 5, 2): {True}, (13,): {False}}
    chosen = [
        pad(leaf) if one else leaf
        for leaf, one in zip(jax.tree.leaves((state, gradients)), raveled, strict=True)
    ]
    found = map(unravel, jax.jit(functools.partial(apply_elementwise, closed))(chosen))
    for one, other in zip(found, jax.tree.leaves(make_update(optimizer)(state, gradients)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_control_flow_operation_keeps_the_shapes_of_what_enters_it():
    def update(state, gradients):
        return jax.lax.cond(state[0, 0] > 0, lambda s, g: s - g, lambda s, g: s, state, gradients), gradients

    leaf = jnp.ones((4, 4))
    closed = jax.make_jaxpr(update)(leaf, leaf)
    assert find_elementwise(closed, [(0, 0)]) == [False, False]


def test_a_constant_array_of_the_program_keeps_the_shape_of_what_meets_it():
    leaf, weights = jnp.ones((4, 4)), np.arange(16.0, dtype=np.float32).reshape(4, 4)
    closed = jax.make_jaxpr(lambda x, y: (x * weights, y + 1))(leaf, leaf)
    assert find_elementwise(closed, [(0, 0), (1, 1)]) == [False, True]


def test_a_result_that_is_uniform_is_raveled_as_its_argument_is():
    closed = jax.make_jaxpr(lambda x: (jnp.zeros_like(x) + 3, jnp.exp(jnp.full_like(x, 2.0))))(
        jnp.ones((3, 5))
    )
    before = pad(jnp.ones((3, 5)))
    three, other = apply_elementwise(closed, [before])
    after = ravel_like(three, before)
    assert (after.shape, after.vector.shape) == ((3, 5), before.vector.shape)
    np.testing.assert_array_equal(unravel(after), np.full((3, 5), 3, np.float32))
    np.testing.assert_array_equal(other, jnp.exp(jnp.full((3, 5), 2.0)))
