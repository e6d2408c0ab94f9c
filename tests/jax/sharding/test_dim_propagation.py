"""The names of dims are propagated through a program: of the batch, and of parameters."""

import jax
import jax.numpy as jnp
import pytest

from resilient_jax.sharding.dim_propagation import BATCH, make_unnamed, propagate_names

X = jax.ShapeDtypeStruct((6, 3, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 5), jnp.float32)


def examples_in(function, *others):
    """Return the batch dim of each result; the first argument of `function` is an array of six examples."""
    jaxpr = jax.make_jaxpr(function)(X, *others).jaxpr
    names = propagate_names(jaxpr, [(BATCH, None, None), *map(make_unnamed, others)])
    return [found.index(BATCH) if BATCH in found else None for found in names]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jnp.tanh(x) + 1, 0),
        (lambda x: x.transpose(1, 0, 2), 1),
        (lambda x: x.reshape(6, 12), 0),
        (lambda x: x.reshape(18, 4), None),
        (lambda x: x.sum(axis=1), 0),
        (lambda x: x.transpose(1, 0, 2).sum(axis=0), 0),
        (lambda x: x.sum(axis=0), None),
        (lambda x: jnp.einsum("btd,bsd->bts", x, x), 0),
        (lambda x: jnp.einsum("btd,bte->de", x, x), None),
        (lambda x: jnp.broadcast_to(x[:, 0], (2, 6, 4)), 1),
        (lambda x: jnp.zeros((7, 4))[x[:, :, 0].astype(int)], 0),
        (lambda x: jax.jit(jnp.sin)(x), 0),
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, c.sum(axis=1)), x, None, length=3)[0], 0),
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, c.sum(axis=1)), x, None, length=3)[1], 1),
    ],
)
def test_the_batch_dim_is_propagated_through_operations(function, expected):
    assert examples_in(function) == [expected]


def test_a_product_with_a_parameter_keeps_the_batch_dim_and_its_gradient_has_none():
    assert examples_in(lambda x, w: x @ w, W) == [0]
    assert examples_in(lambda x, w: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), W) == [None]


def test_a_carry_that_starts_without_a_batch_dim_takes_the_one_of_its_end():
    def sums(x):
        return jax.lax.scan(lambda c, step: (c + step, c.max(1)), jnp.zeros((6, 4)), x.transpose(1, 0, 2))

    assert examples_in(sums) == [0, 1]


HEADS = jax.ShapeDtypeStruct((16, 4, 6), jnp.float32)
UP = jax.ShapeDtypeStruct((16, 24), jnp.float32)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda heads, up: heads.astype(jnp.bfloat16), ("embed", "heads", None)),
        (lambda heads, up: heads.reshape(16, 24), ("embed", "heads")),
        (lambda heads, up: up.reshape(16, 4, 6), ("embed", "mlp", None)),
        (lambda heads, up: up.reshape(1, 16, 24)[0], ("embed", "mlp")),
        (lambda heads, up: up[:, :12], ("embed", None)),
        (lambda heads, up: up.sum(0), ("mlp",)),
        (lambda heads, up: up.T, ("mlp", "embed")),
        (lambda heads, up: jnp.einsum("dhk,df->hkf", heads, up), ("heads", None, "mlp")),
        (lambda heads, up: jax.lax.scan(lambda c, row: (c, row * 2), 0, up)[1], (None, "mlp")),
        (lambda heads, up: jax.nn.relu(up), ("embed", "mlp")),
    ],
)
def test_the_names_of_a_parameter_are_propagated_through_operations(function, expected):
    names = [("embed", "heads", None), ("embed", "mlp")]
    assert propagate_names(jax.make_jaxpr(function)(HEADS, UP), names) == [expected]


def test_of_two_operands_with_a_name_the_first_gives_it_to_the_result():
    names = [("embed", "mlp"), ("mlp", "embed")]
    jaxpr = jax.make_jaxpr(lambda x, y: (x + y, x @ y))(*[jax.ShapeDtypeStruct((2, 2), jnp.float32)] * 2)
    assert propagate_names(jaxpr, names) == [("embed", "mlp"), ("embed", None)]
