"""Variables that are not trained, in a model that is cut into blocks: batch statistics, counters, frozen parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.errors import CallerError
from tests.support.full_only import full_but

WIDTH, LAYERS, ROWS, STEPS = 6, 2, 4, 2
PIPELINE = rj.Parallelism(pipeline=rj.Pipeline(num_stages=2, gather_result=True, axes_by_host=False))
"""With the optimizer's own update, as without a pipeline: the gradient of a bias before a normalization is nothing but
rounding, of which Adam makes steps as large as any."""


class Count(nnx.Variable):
    """How many microbatches a layer has seen."""


class Seen(nnx.Variable):
    """The mean of the last input of a layer."""


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.count = Count(jnp.zeros((), jnp.int32))
        self.seen = Seen(jnp.zeros(WIDTH))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        self.seen.set_value(jnp.mean(x, 0))
        return x + jnp.tanh(self.norm(self.linear(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.steps = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.steps.set_value(self.steps.get_value() + 1)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class LinenLayer(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        y = nn.BatchNorm(use_running_average=not self.train, momentum=0.5)(nn.Dense(WIDTH)(x))
        return x + jnp.tanh(y)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(WIDTH)(x)
        for number in range(LAYERS):
            x = LinenLayer(train, name=f"layer_{number}")(x)
        return x


class ScannedNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        def body(layer, carry, _):
            return layer(carry), None

        x = nn.Dense(WIDTH)(x)
        scan = nn.scan(
            body,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return scan(LinenLayer(train), x, None)[0]


def nnx_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def linen_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def linen_evaluation(model, batch):
    return jnp.mean((model(batch["x"], train=False) - batch["y"]) ** 2)


def draw(step, index):
    rng = np.random.default_rng((step, index))
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


MODELS = {
    "nnx": (Net, nnx_loss, None),
    "linen": (LinenNet(), linen_loss, linen_evaluation),
    "scan": (ScannedNet(), linen_loss, linen_evaluation),
}
RULES = {"nnx": {Count: "sum", Seen: "first"}, "linen": {}, "scan": {}}


def make_trainer(kind, parallelism, rules=None, **options):
    model, loss, evaluation_loss = MODELS[kind]
    evaluation = rj.Evaluation(
        data=draw, num_microbatches=2, interval_steps=STEPS, loss_fn=evaluation_loss or loss
    )
    return rj.Trainer(
        model=model,
        # With Adam's usual eps, rounding would move a bias whose gradient is zero (before a norm) as far as any other.
        optimizer=optax.adam(1e-2, eps=1e-4),
        loss_fn=loss,
        data=draw,
        batch_size=3 * ROWS,
        microbatch_size=ROWS,
        variable_reductions=RULES[kind] if rules is None else rules,
        parallelism=parallelism,
        evaluation=evaluation,
        **options,
    )


@pytest.mark.parametrize("kind", full_but(MODELS, "scan".__eq__))
def test_variables_become_what_they_become_without_a_pipeline(kind, tmp_path):
    whole = make_trainer(kind, rj.Parallelism()).fit(STEPS)
    checkpoints = rj.Checkpoints(directory=tmp_path, interval_steps=STEPS)
    blocks = make_trainer(kind, PIPELINE, checkpoints=checkpoints).fit(STEPS)
    found = jax.tree_util.tree_leaves_with_path(blocks.variables)
    expected = jax.tree_util.tree_leaves_with_path(whole.variables)
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, a), (_, b) in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype == np.int32:
            assert a == b == 3 * STEPS, path
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=jax.tree_util.keystr(path))
    assert blocks.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        assert blocks.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    # Checkpoints have the layout of the whole model, and a resumed job goes on with the same bits.
    again = make_trainer(kind, rj.Parallelism(), checkpoints=checkpoints).fit(STEPS)
    for a, b in zip(jax.tree.leaves(blocks.variables), jax.tree.leaves(again.variables), strict=True):
        np.testing.assert_array_equal(a, b)
    resumed = make_trainer(kind, PIPELINE, checkpoints=checkpoints).fit(STEPS + 1)
    undisturbed = make_trainer(kind, PIPELINE).fit(STEPS + 1)
    for a, b in zip(jax.tree.leaves(resumed.variables), jax.tree.leaves(undisturbed.variables), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_changed_variable_without_a_rule_is_refused_as_without_a_pipeline():
    with pytest.raises(CallerError, match=r"variable_reductions: found that the loss function changes Count"):
        make_trainer("nnx", PIPELINE, rules={Seen: "first"}).fit(1)


def test_frozen_parameters_stay_and_have_no_optimizer_state():
    def is_trained(path, value):
        return "first" not in path

    options = {"wrt": nnx.All(nnx.Param, is_trained)}
    begun = make_trainer("nnx", PIPELINE, **options).fit(0)
    trained = make_trainer("nnx", PIPELINE, **options).fit(STEPS)
    whole = make_trainer("nnx", rj.Parallelism(), **options).fit(STEPS)
    frozen = trained.variables.collections["Param"]
    for a, b in zip(
        jax.tree.leaves(frozen), jax.tree.leaves(begun.variables.collections["Param"]), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(trained.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


class Keyed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.key = Count(jax.random.key(0))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_random_key_among_the_variables_is_refused_by_name():
    with pytest.raises(CallerError, match=r"found the variable \['Count'\]\['key'\], which is a random key"):
        rj.Trainer(
            model=Keyed,
            optimizer=optax.sgd(1e-2),
            loss_fn=nnx_loss,
            data=draw,
            batch_size=ROWS,
            microbatch_size=ROWS,
            parallelism=PIPELINE,
        ).fit(1)
