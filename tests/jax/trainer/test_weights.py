"""A weighted mean: loss, gradient and metrics do not depend on how rows are divided into microbatches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.errors import CallerError, NonFiniteError
from tests.support.full_only import full_but

ROWS, WIDTH, TOKENS, STEPS = 8, 6, 5, 3
PARALLELISMS = {
    "replicated": rj.Parallelism(),
    "wide": rj.Parallelism(reduction="exact_wide"),
    "fast": rj.Parallelism(reduction="fast"),
    "sharded": rj.Parallelism(state="sharded"),
    "pipeline": rj.Parallelism(pipeline=rj.Pipeline(num_stages=2, gather_result=True)),
}
LENGTHS = np.array([1, 0, 5, 5, 2, 0, 0, 4])
"""Real tokens of each row of a step. Of microbatches of two rows the first has one, and the third two."""


def make_rows(step, lengths=LENGTHS):
    draw = np.random.default_rng(step).normal(size=(2, ROWS, TOKENS, WIDTH)).astype(np.float32)
    # What padding is computed to counts nowhere, however large it is.
    mask = np.arange(TOKENS) < lengths[:, None]
    return {"x": draw[0], "y": np.where(mask[..., None], draw[1], 9.0), "mask": mask.astype(np.float32)}


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def read_errors(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1)


def weighted(model, batch):
    errors, mask = read_errors(model, batch), batch["mask"]
    total, weight = jnp.sum(errors * mask), jnp.sum(mask)
    rows = mask.any(-1)
    large = rj.WeightedMean(
        jnp.sum(jnp.any((errors > 3) & (mask > 0), -1) * rows, dtype=jnp.float32), rows.sum()
    )
    return rj.WeightedMean(total, weight), {"large": large, "rows": rows.sum()}


def masked_mean(model, batch):
    """What users write without weights: right for all rows at once."""
    return jnp.sum(read_errors(model, batch) * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def train(loss_fn, parallelism, microbatch_size, rows=make_rows, steps=STEPS, **options):
    """Return the result, and what was reported of each step."""
    reports = []

    def draw(step, index):
        own = slice(index * microbatch_size, (index + 1) * microbatch_size)
        return {name: array[own] for name, array in rows(step).items()}

    result = rj.Trainer(
        model=Net,
        optimizer=options.pop("optimizer", optax.sgd(0.1)),
        loss_fn=loss_fn,
        data=draw,
        batch_size=ROWS,
        microbatch_size=microbatch_size,
        parallelism=PARALLELISMS[parallelism],
        callbacks=[lambda report: reports.append(report.metrics)],
        **options,
    ).fit(steps)
    return result, reports


def assert_close(found, expected, rtol=1e-4):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5)


@pytest.fixture(scope="module")
def whole():
    """What one microbatch of all rows trains, with the loss that users write."""
    return train(masked_mean, "replicated", ROWS, numerics=rj.Numerics(clip_norm=0.5, ema_decay=0.5))


@pytest.mark.parametrize(
    ("parallelism", "size"),
    full_but(
        [(name, size) for name in PARALLELISMS for size in (8, 4, 2, 1)],
        {("replicated", 2), ("replicated", 1), ("sharded", 2), ("fast", 2), ("pipeline", 2)}.__contains__,
    ),
)
def test_loss_and_update_do_not_depend_on_how_rows_are_divided_into_microbatches(parallelism, size, whole):
    result, reports = train(weighted, parallelism, size, numerics=rj.Numerics(clip_norm=0.5, ema_decay=0.5))
    for found, expected in zip(reports, whole[1], strict=True):
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4)
        # A scalar is still a mean over microbatches.
        assert found["rows"] == pytest.approx(5 * size / ROWS)
    assert_close((result.params, result.ema_params), (whole[0].params, whole[0].ema_params))


def test_without_weights_it_does_depend_on_that(whole):
    result, reports = train(masked_mean, "replicated", 2, numerics=rj.Numerics(clip_norm=0.5, ema_decay=0.5))
    assert abs(reports[0]["loss"] / whole[1][0]["loss"] - 1) > 0.1
    with pytest.raises(AssertionError):
        assert_close(result.params, whole[0].params)


def test_a_weighted_metric_is_the_mean_over_what_counts_also_beside_a_scalar_loss():
    def mixed(model, batch):
        return masked_mean(model, batch), weighted(model, batch)[1]

    expected = train(weighted, "replicated", 8)[1][0]
    assert 0 < expected["large"] < 1
    for loss_fn in (weighted, mixed):
        assert train(loss_fn, "replicated", 2, steps=1)[1][0]["large"] == pytest.approx(expected["large"])


@pytest.mark.parametrize("parallelism", ["replicated", "sharded", "pipeline"])
def test_a_step_of_padding_has_a_loss_and_a_gradient_of_zero(parallelism):
    def rows(step):
        return make_rows(step, LENGTHS * (step != 1))

    result, reports = train(
        weighted, parallelism, 2, rows, numerics=rj.Numerics(clip_norm=0.5), optimizer=optax.sgd(0.1)
    )
    assert {name: reports[1][name] for name in ("loss", "grad_norm", "large")} == dict.fromkeys(
        ("loss", "grad_norm", "large"), 0
    )
    # SGD does nothing with such a gradient: as if the step had not been.
    without, _ = train(
        weighted,
        parallelism,
        2,
        lambda step: make_rows(2 * step),
        numerics=rj.Numerics(clip_norm=0.5),
        steps=2,
    )
    assert result.params_sha256 == without.params_sha256


def test_a_microbatch_of_padding_changes_nothing():
    """Also the first one, by which limits of exact sums are chosen."""
    first = np.concatenate([np.zeros(2, int), LENGTHS[2:]])
    found, reports = train(weighted, "replicated", 2, lambda step: make_rows(step, first))
    expected, _ = train(masked_mean, "replicated", 8, lambda step: make_rows(step, first))
    assert_close(found.params, expected.params)
    assert all(np.isfinite(report["loss"]) for report in reports)


@pytest.mark.parametrize("parallelism", full_but(PARALLELISMS, ["replicated", "pipeline"].__contains__))
@pytest.mark.parametrize("weight", [-1.0, np.inf, np.nan])
def test_a_weight_that_is_none_is_treated_as_numbers_that_are_not_finite(parallelism, weight):
    def rows(step):
        found = make_rows(step)
        found["mask"][5, 0] = weight if step == 1 else 1
        return found

    def loss(model, batch):
        return rj.WeightedMean(jnp.mean(model(batch["x"])), batch["mask"][0, 0])

    with pytest.raises(NonFiniteError, match="step 1: found a loss"):
        train(loss, parallelism, 1, rows)


def test_a_microbatch_that_is_skipped_has_no_weight():
    def rows(step):
        found = make_rows(step)
        found["x"][2:4] = np.nan
        return found

    def rows_left(step):
        left = LENGTHS.copy()
        left[2:4] = 0
        return make_rows(step, left)

    found, reports = train(weighted, "replicated", 2, rows, numerics=rj.Numerics(non_finite="skip"))
    expected, of_left = train(masked_mean, "replicated", 8, rows_left)
    assert [report["skipped"] for report in reports] == [1] * STEPS
    assert reports[0]["loss"] == pytest.approx(of_left[0]["loss"], rel=1e-5)
    assert_close(found.params, expected.params)


@pytest.mark.parametrize("parallelism", ["replicated", "pipeline"])
def test_an_evaluation_has_the_mean_over_what_counts(parallelism):
    data = make_rows(99)
    found = []
    for size in (8, 2):
        evaluation = rj.Evaluation(data=data, interval_steps=100, microbatch_size=size)
        _, reports = train(weighted, parallelism, 2, evaluation=evaluation)
        found.append({name: value for name, value in reports[-1].items() if name != "eval_rows"})
    assert found[0].keys() == {"eval_loss", "eval_large"}
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    of_padding = rj.Evaluation(
        data={**data, "mask": np.zeros_like(data["mask"])}, interval_steps=100, microbatch_size=2
    )
    _, reports = train(weighted, parallelism, 2, evaluation=of_padding)
    assert (reports[-1]["eval_loss"], reports[-1]["eval_large"]) == (0, 0)


def changing(first, second):
    calls = []

    def loss(model, batch):
        calls.append(1)
        error = jnp.mean(model(batch["x"]))
        return (first if len(calls) == 1 else second)(error)

    return loss


def as_weighted(error):
    return rj.WeightedMean(error, 1.0)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (
            lambda model, batch: rj.WeightedMean(read_errors(model, batch), 1.0),
            "loss: found an array of shape (2, 5) as the total of a WeightedMean, expected one number. Add up",
        ),
        (
            lambda model, batch: rj.WeightedMean(read_errors(model, batch).sum(), batch["mask"]),
            "loss: found an array of shape (2, 5) as the weight of a WeightedMean, expected one number",
        ),
        (
            lambda model, batch: rj.WeightedMean(read_errors(model, batch).sum(), "ten"),
            "loss: found 'ten' (str) as the weight of a WeightedMean",
        ),
        (
            lambda model, batch: rj.WeightedMean(batch["mask"].sum().astype(int), 1),
            "loss: found a total of dtype int32 in a WeightedMean, expected a floating-point number",
        ),
        (
            lambda model, batch: (as_weighted(masked_mean(model, batch)), {"a": as_weighted(batch["mask"])}),
            "loss: metric 'a': found an array of shape (2, 5) as the total of a WeightedMean",
        ),
        (
            lambda model, batch: rj.WeightedMean(1.0, jnp.mean(model(batch["x"]))),
            "found a loss that depends on no parameter",
        ),
        (
            lambda model, batch: (read_errors(model, batch).sum(), batch["mask"].sum()),
            "A sum and its weight are rj.WeightedMean(total, weight)",
        ),
        (
            changing(lambda error: error, as_weighted),
            "loss: found loss as a WeightedMean, where it first returned loss as a scalar; expected the same in each",
        ),
        (
            changing(as_weighted, lambda error: (error, {"a": 1.0})),
            "loss: found loss as a scalar, a as a scalar, where it first returned loss as a WeightedMean",
        ),
    ],
)
def test_what_is_no_weighted_mean_is_refused_by_name(loss_fn, words):
    with pytest.raises(CallerError, match=re.escape(words)):
        train(loss_fn, "replicated", 2)


def test_the_weight_is_not_differentiated():
    def loss(model, batch):
        errors = read_errors(model, batch)
        return rj.WeightedMean(jnp.sum(errors), jax.lax.stop_gradient(jnp.sum(errors)))

    def same(model, batch):
        errors = read_errors(model, batch)
        return rj.WeightedMean(jnp.sum(errors), jnp.sum(errors))

    assert train(loss, "replicated", 2)[0].params_sha256 == train(same, "replicated", 2)[0].params_sha256


def test_a_weight_may_be_a_number_of_python():
    expected, _ = train(lambda model, batch: read_errors(model, batch).mean(), "replicated", 8)
    for parallelism in ("replicated", "pipeline"):
        found, reports = train(
            lambda model, batch: rj.WeightedMean(read_errors(model, batch).sum(), 2 * TOKENS), parallelism, 2
        )
        assert reports[0]["loss"] > 0
        assert_close(found.params, expected.params)
