"""NNX, Linen and plain functions behind one interface: initialization, randomness, and running statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from resilient_jax.errors import CallerError
from resilient_jax.trainer.model_adapters import FunctionAdapter, LinenAdapter, NnxAdapter, adapt_model

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


class NnxNet(nnx.Module):
    """A network with dropout, batch normalization, and a variable of a kind of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Variable(jnp.float32(2.0))

    def __call__(self, x):
        x = self.dropout(self.norm(self.linear(x)))
        for layer in self.layers:
            x = layer(x)
        return x * self.scale[...]


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(8)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def plain(key):
    return {"w": jax.random.normal(key, (4, 8))}


MODELS = {
    "nnx": (NnxNet, lambda model: model(X)),
    "linen": (LinenNet(), lambda model: model(X)),
    "plain": (plain, lambda params: X @ params["w"]),
}
each_model = pytest.mark.parametrize("name", MODELS)


def make(name):
    given, use = MODELS[name]
    model = adapt_model(given)
    return model, use, jax.jit(lambda: model.init(jax.random.key(3), use))()


def test_each_kind_of_model_gets_its_adapter():
    assert isinstance(adapt_model(NnxNet), NnxAdapter)
    assert isinstance(adapt_model(lambda rngs: NnxNet(rngs)), NnxAdapter)
    assert isinstance(adapt_model(LinenNet()), LinenAdapter)
    assert isinstance(adapt_model(plain), FunctionAdapter)


def filter_norm(path, value):
    return any("norm" in str(part).lower() for part in path)


@pytest.mark.parametrize(("name", "wrt"), [("nnx", nnx.All(nnx.Param, filter_norm)), ("linen", filter_norm)])
def test_a_filter_selects_what_is_trained_and_the_model_gets_all_parameters(name, wrt):
    (given, use), key = MODELS[name], jax.random.key(3)
    whole, some = adapt_model(given), adapt_model(given, wrt)
    all_variables, variables = whole.init(key, use), some.init(key, use)
    assert {leaf.shape for leaf in jax.tree.leaves(variables.params)} == {(8,)}
    assert len(jax.tree.leaves(variables)) == len(jax.tree.leaves(all_variables))
    one, other = (
        model.apply(found, key, use, training=True)[0]
        for model, found in ((whole, all_variables), (some, variables))
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "wrt", "said"),
    [
        ("nnx", nnx.All(nnx.Param, nnx.PathContains("haed")), r"selects none .*\['layers'\]\[0\]\['bias'\]"),
        ("linen", nnx.PathContains("haed"), r"selects none .*\['Dense_0'\]\['bias'\].*expected a filter"),
        ("nnx", nnx.PathContains("dropout"), r"selects \['dropout'\].* of dtype uint32, expected floating"),
        ("plain", 3.5, r"wrt: found 3\.5 \(float\), expected a filter of nnx"),
    ],
    ids=["nothing in nnx", "nothing in linen", "integers", "no filter"],
)
def test_a_filter_that_selects_nothing_to_train_is_refused(name, wrt, said):
    given, use = MODELS[name]
    with pytest.raises(CallerError, match=said):
        adapt_model(given, wrt).init(jax.random.key(0), use)


@each_model
def test_initial_variables_are_a_function_of_the_key(name):
    (_, _, one), (_, _, other) = make(name), make(name)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))


def test_initial_variables_are_those_of_a_directly_constructed_module():
    _, _, variables = make("nnx")
    by_hand = nnx.to_pure_dict(nnx.state(NnxNet(nnx.Rngs(3)), nnx.Param))
    assert jax.tree.structure(variables.params) == jax.tree.structure(by_hand)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), variables.params, by_hand)


def test_logical_axis_names_change_nothing():
    def make_net(names):
        def make_linear(rngs):
            start = nnx.initializers.lecun_normal()
            return nnx.Linear(
                4, 8, kernel_init=nnx.with_partitioning(start, names) if names else start, rngs=rngs
            )

        return adapt_model(lambda rngs: nnx.Sequential(make_linear(rngs)))

    named, plain_net = make_net((None, "mlp")), make_net(None)
    key = jax.random.key(3)
    variables = named.init(key, lambda net: net(X))
    jax.tree.map(np.testing.assert_array_equal, variables, plain_net.init(key, lambda net: net(X)))
    out, _ = named.apply(variables, key, lambda net: net(X), training=True)
    expected, _ = plain_net.apply(variables, key, lambda net: net(X), training=True)
    np.testing.assert_array_equal(out, expected)


@each_model
def test_random_numbers_are_a_function_of_the_key(name):
    model, use, variables = make(name)
    apply = jax.jit(lambda key: model.apply(variables, key, use, training=True)[0])
    one, same, other = (np.asarray(apply(jax.random.key(seed))) for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one == other).all() == (name == "plain")


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_batch_stats_start_from_the_given_ones_and_are_returned(name):
    model, use, variables = make(name)
    _, found = model.apply(variables, jax.random.key(0), use, training=True)
    assert jax.tree.structure(found) == jax.tree.structure(variables)
    (mean,) = (
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found.batch_stats) if "mean" in str(path)
    )
    assert np.abs(mean).max() > 0  # the initial mean is 0
    _, again = model.apply(variables, jax.random.key(0), use, training=True)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, again))


def test_an_nnx_model_evaluates_in_its_evaluation_mode():
    model, use, variables = make("nnx")
    one, unchanged = model.apply(variables, jax.random.key(1), use, training=False)
    other, _ = model.apply(variables, jax.random.key(2), use, training=False)
    assert (one == other).all()
    assert (unchanged.batch_stats["norm"]["mean"] == variables.batch_stats["norm"]["mean"]).all()


def test_other_variables_keep_their_initial_values():
    _, _, variables = make("nnx")
    assert variables.collections["Variable"] == {"scale": 2.0}


def test_nothing_of_a_model_is_on_a_device_before_it_is_used():
    abstract = jax.eval_shape(lambda: adapt_model(NnxNet).init(jax.random.key(0), lambda model: model(X)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: NnxNet(nnx.Rngs(0)), "found an instance of the nnx.Module NnxNet.*lambda rngs: NnxNet"),
        (lambda: {"w": 1}, "found a dict, expected a function"),
    ],
    ids=["an nnx instance", "a tree"],
)
def test_other_objects_than_models_are_refused(wrong, said):
    with pytest.raises(CallerError, match=said):
        adapt_model(wrong())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda rngs: {"w": 1}, "makes a dict, expected an nnx.Module"),
        (lambda key: {"net": LinenNet()}, r"found a LinenNet at init\(key\)\['net'\]"),
    ],
    ids=["a factory of no module", "a plain function of no arrays"],
)
def test_a_function_that_makes_no_model_is_refused_when_it_is_called(wrong, said):
    with pytest.raises(CallerError, match=said):
        adapt_model(wrong).init(jax.random.key(0), lambda model: None)
