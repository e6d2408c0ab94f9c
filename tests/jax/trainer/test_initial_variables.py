"""Pretrained weights in the initial state: of every kind of model, in part, and what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.errors import CallerError

ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class NnxNet(nnx.Module):
    """Normalization and a list of layers."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x)


class LinenNet(nn.Module):
    """Normalization and a layer."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


REMEMBER = optax.GradientTransformation(
    lambda params: params, lambda updates, state, params=None: (updates, state)
)
"""Keeps the parameters that it is initialized with, as the averages of many optimizers."""


def fit(model, load, num_steps=0, **changes):
    trainer = rj.Trainer(
        model=model,
        loss_fn=changes.pop("loss_fn", lambda model, x: jnp.mean(model(x) ** 2)),
        initial_variables=load,
        **{"optimizer": optax.sgd(0.1), "data": ROWS, "batch_size": 8, "microbatch_size": 4, **changes},
    )
    return trainer.fit(num_steps)


def make_other():
    return NnxNet(nnx.Rngs(7))


def as_tree():
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(make_other(), nnx.Not(nnx.RngState))))


@pytest.mark.parametrize("load", [make_other, lambda: nnx.state(make_other(), nnx.Param), as_tree])
def test_an_nnx_model_begins_with_a_module_a_state_or_a_tree(load):
    found = fit(NnxNet, load).params
    jax.tree.map(np.testing.assert_array_equal, found, nnx.to_pure_dict(nnx.state(make_other(), nnx.Param)))


@pytest.mark.parametrize("has_collections", [True, False])
def test_a_linen_model_begins_with_its_parameters_or_collections(has_collections):
    other = LinenNet().init(jax.random.key(7), ROWS)
    other = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, dict(other))
    result = fit(LinenNet(), lambda: other if has_collections else other["params"])
    jax.tree.map(np.testing.assert_array_equal, result.params, other["params"])
    mean = result.variables.batch_stats["BatchNorm_0"]["mean"]
    assert (mean == (1 if has_collections else 0)).all()


@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_the_optimizer_starts_from_the_given_parameters_and_training_goes_on_from_them(state):
    seen = []
    result = fit(
        lambda key: {"w": jnp.zeros(3), "b": jnp.zeros(())},
        lambda: {"w": np.arange(3)[::-1] / 2},  # float64, and not contiguous
        1,
        loss_fn=lambda params, x: params["w"].sum() + 0 * x.mean() + 0 * params["b"],
        optimizer=optax.chain(optax.sgd(0.5), REMEMBER),
        parallelism=rj.Parallelism(state=state),
        callbacks=[lambda report: seen.append(np.asarray(report.state.opt_state[1]["w"]).tolist())],
    )
    np.testing.assert_array_equal(result.params["w"], [0.5, 0.0, -0.5])
    assert result.params["b"] == 0
    assert seen == [[1.0, 0.5, 0.0]]


def test_a_resumed_job_does_not_load_them_again(tmp_path):
    calls = []

    def load():
        calls.append(1)
        return as_tree()

    checkpoints = rj.Checkpoints(directory=tmp_path)
    first = fit(NnxNet, load, 1, checkpoints=checkpoints)
    second = fit(NnxNet, load, 1, checkpoints=checkpoints)
    assert (len(calls), first.params_sha256) == (1, second.params_sha256)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": {"0": {"kernle": np.ones((3, 3))}}}, "found layers/0/kernle, expected .*layers/0/kernel"),
        (
            {"layers": {"0": {"kernel": np.ones((3, 4))}}},
            r"found float64\[3, 4\] at layers/0/kernel.*\[3, 3\]",
        ),
        ({"norm": {"mean": np.ones(3, np.int32)}}, r"found int32\[3\] at norm/mean, expected float32\[3\]"),
        ({}, "found a tree without arrays"),
    ],
    ids=["path", "shape", "kind", "nothing"],
)
def test_variables_that_do_not_suit_the_model_are_refused(given, said):
    with pytest.raises(CallerError, match=said):
        fit(NnxNet, lambda: given)


def test_a_tree_in_place_of_a_function_is_refused_when_the_trainer_is_constructed():
    with pytest.raises(CallerError, match="initial_variables: found a dict, expected a function without"):
        fit(NnxNet, {"norm": {}})
