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


def test_parameters_may_be_numpy_arrays():
    loss, gradients = call(compute_loss, params=jax.tree.map(np.asarray, PARAMS))
    expected = call(compute_loss)
    assert jax.tree.map(np.array_equal, (loss, gradients), expected) == (True, {"half": True, "w": True})
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(gradients))


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


def read_errors(params, rows):
    return jnp.square(rows["x"] @ params["w"] + params["half"]).mean(-1)


def weighted(params, rows):
    errors = read_errors(params, rows)
    return rj.WeightedMean(jnp.sum(errors * rows["mask"]), jnp.sum(rows["mask"]))


def draw_masked(step, index, lengths=(1, 0, 5, 8)):
    return {"x": draw(step, index), "mask": np.arange(8) < lengths[index]}


def read_all_rows(step, **options):
    batches = [draw_masked(step, index, **options) for index in range(MICROBATCHES)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in ("x", "mask")}


def test_the_mean_of_weighted_means_is_that_of_all_rows_at_once():
    def mean_of_all(params):
        rows = read_all_rows(1)
        return jnp.sum(read_errors(params, rows) * rows["mask"]) / 14

    loss, gradients = call(weighted, draw_masked, steps=2)
    expected, expected_gradients = jax.value_and_grad(mean_of_all)(PARAMS)
    assert (loss.dtype, loss.shape) == (jnp.float32, ())
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert_close(gradients, jax.tree.map(np.float32, expected_gradients))


@pytest.mark.parametrize("has_weight", [True, False])
def test_auxiliary_output_may_have_weighted_means_too(has_weight):
    def loss_fn(params, rows):
        found = weighted(params, rows)
        aux = {"count": rows["mask"].sum(), "errors": [found, rj.WeightedMean(jnp.float32(0), 0)]}
        return (found if has_weight else jnp.mean(read_errors(params, rows))), aux

    (loss, aux), _ = call(loss_fn, draw_masked, has_aux=True)
    expected = float(call(weighted, draw_masked)[0])
    assert aux["errors"] == [pytest.approx(expected, rel=1e-6), 0]
    assert aux["count"] == 14 / MICROBATCHES
    assert (float(loss) == pytest.approx(expected, rel=1e-6)) == has_weight


def test_a_step_of_padding_has_a_loss_and_a_gradient_of_zero():
    loss, gradients = call(weighted, functools.partial(draw_masked, lengths=(0,) * MICROBATCHES))
    assert loss == 0
    assert all((np.float32(leaf) == 0).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_weight_that_is_none_makes_the_mean_nan(weight):
    loss, gradients = call(lambda params, rows: rj.WeightedMean(compute_loss(params, rows), weight))
    assert np.isnan(loss)
    assert all(np.isnan(np.float32(leaf)).all() for leaf in jax.tree.leaves(gradients))


def test_a_loss_function_that_has_weights_in_some_steps_only_is_refused():
    def loss_fn(params, rows, other):
        loss = compute_loss(params, rows)
        return rj.WeightedMean(loss, 3.0) if other.shape else loss

    world = make_world()
    value_and_grad = world.value_and_grad(loss_fn, draw, MICROBATCHES)
    steps = world.steps(2)
    next(steps)
    value_and_grad(PARAMS, jnp.zeros(()))
    world.commit(PARAMS)
    next(steps)
    with pytest.raises(CallerError, match="loss_fn: found a WeightedMean, where it returned a scalar before"):
        value_and_grad(PARAMS, jnp.zeros(2))


def test_sums_of_the_general_form_have_means_too():
    world = make_world()
    next(world.steps(1))

    def compute(microbatch):
        rows = microbatch.replica.place_batch(draw_masked(microbatch.step, microbatch.index))
        return weighted(microbatch.replica.to_replica(PARAMS), rows)

    zeros = rj.WeightedMean(jnp.zeros(()), jnp.zeros((), jnp.int32))
    summed = world.accumulate_microbatches(MICROBATCHES, compute, zeros)
    assert summed.weight == 14
    assert float(summed.mean) == pytest.approx(float(call(weighted, draw_masked)[0]), rel=1e-6)


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
    made = rj.data.make_microbatch_data(draw, num_microbatches=MICROBATCHES, microbatch_size=8)
    prefetcher = rj.data.Prefetcher(made)
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
        (
            lambda params, rows: rj.WeightedMean(params["w"], 1),
            {},
            r"loss_fn: found an array of shape \(2, 3\) as the total of a WeightedMean, expected one number",
        ),
        (
            lambda params, rows: (compute_loss(params, rows), {"a": [rj.WeightedMean(rows, 1)]}),
            {"has_aux": True},
            r"loss_fn: aux\['a'\]\[0\]: found an array of shape \(8, 2\) as the total of a WeightedMean",
        ),
        (
            lambda params, rows: (compute_loss(params, rows), rows.sum()),
            {},
            r"give has_aux=True; a sum and its weight are rj.WeightedMean\(total, weight\)",
        ),
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
