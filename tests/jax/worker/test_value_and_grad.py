"""`World.value_and_grad` on one host: what `jax.value_and_grad` gives, as the mean over microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.errors import CallerError, DataError
from tests.support.standalone_world import make_world

MICROBATCHES = 4
PARAMS = {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "half": jnp.ones(3, jnp.bfloat16)}


def draw(step, index):
    return np.random.default_rng((step, index)).normal(size=(8, 2)).astype(np.float32)


def compute_loss(params, rows):
    return jnp.mean((rows @ params["w"] + params["half"]) ** 2)


def compute_loss_and_aux(params, rows, scale):
    loss = scale * compute_loss(params, rows)
    return loss, {"count": (rows > 0).sum(), "mean": rows.mean(0).astype(jnp.bfloat16)}


def draw_number(params, rows, key):
    return jnp.mean(params["w"]) * jax.random.uniform(key)


def draw_number_of_nnx(params, rows, rngs):
    return jnp.mean(params["w"]) * jax.random.uniform(rngs.dropout())


def call(loss_fn, data=draw, *args, steps=1, params=PARAMS, **options):
    world = make_world()
    value_and_grad = world.value_and_grad(loss_fn, data, MICROBATCHES, **options)
    found = []
    for _ in world.steps(steps):
        found.append(value_and_grad(params, *args))
        world.commit(params)
    return found[-1]


def mean(trees):
    return jax.tree.map(lambda *leaves: np.mean(np.asarray(leaves, np.float32), 0), *trees)


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), b, rtol=1e-2), found, expected)


def test_loss_and_gradient_are_the_means_over_all_microbatches_of_the_step():
    loss, gradients = call(compute_loss, steps=2)
    expected = mean(jax.value_and_grad(compute_loss)(PARAMS, draw(1, index)) for index in range(MICROBATCHES))
    assert_close((loss, gradients), expected)
    assert loss.dtype == jnp.float32
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), gradients) == jax.tree.map(
        lambda leaf: (leaf.dtype, leaf.sharding), PARAMS
    )


def test_auxiliary_output_is_averaged_and_further_arguments_are_passed_on():
    (loss, aux), gradients = call(compute_loss_and_aux, draw, 3.0, has_aux=True)
    differentiate = jax.value_and_grad(compute_loss_and_aux, has_aux=True)
    assert_close(
        ((loss, aux), gradients), mean(differentiate(PARAMS, draw(0, i), 3.0) for i in range(MICROBATCHES))
    )
    assert aux["count"].dtype == jnp.float32, "a mean of whole numbers"
    assert aux["mean"].dtype == jnp.bfloat16


@pytest.mark.parametrize("loss_fn", [draw_number, draw_number_of_nnx])
def test_random_numbers_depend_on_seed_step_and_index_alone(loss_fn):
    loss, _ = call(loss_fn)
    assert loss == call(loss_fn)[0]
    assert loss != call(loss_fn, steps=2)[0]
    assert loss != call(loss_fn, seed=1)[0]


def test_a_loss_function_is_traced_once_for_all_steps_and_worlds():
    traced = []

    def counted(params, rows):
        traced.append(rows.shape)
        return compute_loss(params, rows)

    call(counted, steps=3)
    call(counted, steps=2)
    assert len(traced) == 1


def test_the_shapes_of_auxiliary_output_are_found_once():
    traced, read = [], []

    def counted(params, rows):
        traced.append(rows.shape)
        return compute_loss(params, rows), rows.sum()

    def read_batch(step, index):
        read.append((step, index))
        return draw(step, index)

    call(counted, read_batch, steps=3, has_aux=True)
    assert len(traced) == 2, "once for the shapes, once for the program"
    assert len(read) == 3 * MICROBATCHES + 1 + 2, (
        "once for the shapes, and twice, by a host alone, to compare"
    )


def test_every_kind_of_data_gives_the_same_microbatches():
    made = rj.make_microbatch_data(draw, num_microbatches=MICROBATCHES, microbatch_size=8)
    prefetcher = rj.Prefetcher(made)
    losses = [call(compute_loss, data)[0] for data in (draw, made, prefetcher)]
    prefetcher.close()
    assert len(set(map(float, losses))) == 1


def test_two_losses_in_a_step_have_names():
    world = make_world()
    make = functools.partial(world.value_and_grad, compute_loss, draw, MICROBATCHES)
    first, second = make(name="critic"), make(name="actor")
    next(world.steps(1))
    assert first(PARAMS)[0] == second(PARAMS)[0]
    with pytest.raises(CallerError, match="found a second accumulation named 'actor' in step 0"):
        second(PARAMS)


class Affine(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))


@pytest.mark.parametrize(
    ("loss_fn", "options", "words"),
    [
        (3, {}, r"loss_fn: found 3 \(int\), expected loss_fn\(params, batch, \*args\)"),
        (lambda params: 0.0, {}, r"loss_fn: found a function of \(params\), expected loss_fn\(params, batch"),
        (compute_loss, {"data": [1]}, "data: found a list, expected a function batch"),
        (
            compute_loss,
            {"data": lambda step: 0},
            r"data: found a function of \(step\), expected batch\(step, index\)",
        ),
        (
            compute_loss,
            {"params": Affine()},
            "found the model Affine, expected its parameters: graphdef, params, rest",
        ),
        (
            compute_loss,
            {"params": {"w": 1.0}},
            r"found 1\.0 \(float\) at params\['w'\], expected an array on this",
        ),
        (compute_loss, {"params": {}}, "found no array in params"),
        (lambda params, rows: (compute_loss(params, rows), {}), {}, "found a pair .* give has_aux=True"),
        (compute_loss, {"has_aux": True}, "return .loss, aux., or leave has_aux out"),
        (lambda params, rows: rows @ params["w"], {}, r"found a loss of shape \(8, 3\) .* jnp\.mean"),
    ],
)
def test_wrong_arguments_are_refused_in_words(loss_fn, options, words):
    with pytest.raises(CallerError, match=words):
        call(loss_fn, **options)


def test_a_number_of_microbatches_is_an_integer():
    with pytest.raises(DataError, match=r"num_microbatches: found 4\.0 \(float\), expected an integer"):
        make_world().value_and_grad(compute_loss, draw, 4.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, rows: jnp.mean(rows),
        lambda params, rows: jnp.mean(rows @ jax.lax.stop_gradient(params["w"])),
        lambda params, rows: jnp.mean(rows @ (params["w"] > 0)),
    ],
)
def test_a_loss_that_depends_on_no_parameter_trains_nothing_and_is_refused(loss_fn):
    with pytest.raises(CallerError, match="found a loss that depends on no parameter"):
        call(loss_fn)


def test_a_loop_that_makes_a_new_loss_in_each_step_is_told_that_it_compiles_each_time(caplog):
    world = make_world()
    for _ in world.steps(6):
        world.value_and_grad(lambda params, rows: jnp.mean(rows @ params["w"]), draw, MICROBATCHES)(PARAMS)
        world.commit(PARAMS)
    (record,) = [record for record in caplog.records if "is compiled anew" in record.getMessage()]
    assert "found 4 functions made by line" in record.getMessage()
    assert "test_value_and_grad.py" in record.getMessage()
