"""Variables that a loss function changes besides the parameters: each kind's rule, the defaults, and the refusals."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import resilient_jax as rj
from resilient_jax.errors import CallerError
from resilient_jax.trainer.variable_reductions import find_sources
from tests.support.full_only import full_but

B = 4
"""Microbatches of a step."""
ROWS = np.arange(48, dtype=np.float32).reshape(16, 3)
MEANS = ROWS.reshape(B, 4, 3).mean((1, 2))
"""Of each microbatch of step 0."""


class Count(nnx.Variable):
    """A number of calls."""


class Average(nnx.Variable):
    """A moving average of the inputs."""


class NnxNet(nnx.Module):
    """A network that counts its calls, averages its inputs, and has a constant."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.count = Count(jnp.int32(0))
        self.average = Average(jnp.float32(0))
        self.scale = nnx.Variable(jnp.float32(2))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        self.count[...] += 1
        self.average[...] = 0.5 * self.average[...] + 0.5 * x.mean()
        return self.dropout(self.linear(x)) * self.scale[...]


class LinenNet(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("Count", "n", lambda: jnp.int32(0))
        average = self.variable("Average", "n", lambda: jnp.float32(0))
        scale = self.variable("Variable", "n", lambda: jnp.float32(2))
        if not self.is_initializing():
            count.value += 1
            average.value = 0.5 * average.value + 0.5 * x.mean()
        return nn.Dense(1)(x) * scale.value


NETS = {"nnx": NnxNet, "linen": LinenNet()}
each_net = pytest.mark.parametrize("net", full_but(NETS, "nnx".__eq__))


def fit(model, num_steps=1, loss_fn=lambda model, x: jnp.mean(model(x) ** 2), **changes):
    defaults = {
        "model": model,
        "optimizer": optax.sgd(0.0),
        "loss_fn": loss_fn,
        "data": ROWS,
        "batch_size": len(ROWS),
        "microbatch_size": len(ROWS) // B,
        "read_options": rj.ReadOptions(shuffle=False),
    }
    return rj.Trainer(**{**defaults, **changes}).fit(num_steps)


def find_values(result):
    return {name: jax.tree.leaves(tree)[0].item() for name, tree in result.variables.collections.items()}


@each_net
def test_each_rule_makes_one_value_of_those_of_the_microbatches(net):
    found = fit(NETS[net], variable_reductions={"Count": "sum", "Average": "mean"})
    assert find_values(found) == {"Count": B, "Average": pytest.approx(MEANS.mean() / 2), "Variable": 2.0}
    found = fit(NETS[net], variable_reductions={"Count": "first", "Average": "first"})
    assert find_values(found) == {"Count": 1, "Average": pytest.approx(MEANS[0] / 2), "Variable": 2.0}
    found = fit(NETS[net], variable_reductions={"Count": "discard", "Average": lambda old, mean: old - mean})
    assert find_values(found) == {"Count": 0, "Average": pytest.approx(-MEANS.mean() / 2), "Variable": 2.0}


def test_a_rule_may_name_the_type_itself_and_holds_for_every_step():
    found = fit(NnxNet, num_steps=3, variable_reductions={Count: "sum", Average: "first"})
    assert find_values(found)["Count"] == 3 * B


@each_net
def test_the_result_has_the_trained_model(net):
    result = fit(
        NETS[net], 2, optimizer=optax.sgd(0.1), variable_reductions={"Count": "sum", "Average": "mean"}
    )
    if net == "nnx":
        assert isinstance(result.model, NnxNet)
        assert int(result.model.count[...]) == 2 * B
        result.model.eval()
        out, params = result.model(jnp.asarray(ROWS)), result.params["linear"]
    else:
        out, _ = NETS[net].apply(result.model, ROWS, mutable=["Count", "Average"])
        params = result.params["Dense_0"]
    assert out.shape == (16, 1)
    assert params["kernel"].any()


def test_the_trained_model_has_random_keys_again():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.key = nnx.Linear(3, 1, rngs=rngs), nnx.Variable(rngs.noise())

        def __call__(self, x):
            return self.linear(x) + jax.random.normal(self.key[...])

    result = fit(Noisy)
    expected = result.variables.collections["Variable"]["key"]
    np.testing.assert_array_equal(jax.random.key_data(result.model.key[...]), expected)
    assert result.model(ROWS).shape == (16, 1)


@each_net
def test_a_change_without_a_rule_is_refused_with_the_path_and_the_remedy(net):
    path = "['count']" if net == "nnx" else "['n']"
    said = (
        rf"changes Count{re.escape(path)}, expected a rule.*variable_reductions=\{{\"Count\": \.\.\.\}} with"
    )
    with pytest.raises(CallerError, match=said):
        fit(NETS[net], variable_reductions={"Average": "mean"})


@each_net
def test_a_value_of_a_skipped_first_microbatch_is_not_taken(net):
    def read(step, index):
        rows = ROWS.reshape(B, 4, 3)[index]
        return np.full_like(rows, np.nan) if (step, index) == (1, 0) else rows

    rules = {"Count": "first", "Average": "discard"}
    options = {"data": read, "read_options": rj.ReadOptions(), "numerics": rj.Numerics(non_finite="skip")}
    assert find_values(fit(NETS[net], 2, variable_reductions=rules, **options))["Count"] == 1


def test_a_resumed_run_continues_with_the_variables(tmp_path):
    rules = {"Count": "sum", "Average": "mean"}
    options = {"variable_reductions": rules, "checkpoints": rj.Checkpoints(directory=tmp_path)}
    fit(NnxNet, **options)
    assert find_values(fit(NnxNet, num_steps=2, **options)) == find_values(
        fit(NnxNet, num_steps=2, variable_reductions=rules)
    )


def test_a_sharded_state_has_the_same_variables():
    class Codes(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 1, rngs=rngs)
            self.codes = Average(jnp.ones((1024, 3)))

        def __call__(self, x):
            self.codes[...] = 0.9 * self.codes[...] + 0.1 * x.mean(0)
            return self.linear(x)

    rules = {"Average": "mean"}
    one, other = (
        fit(Codes, 2, variable_reductions=rules, parallelism=rj.Parallelism(state=state)).variables
        for state in ("replicated", "sharded")
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("rule", ["first", "discard"])
def test_booleans_and_random_keys_follow_their_rules(rule):
    class Flags(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 1, rngs=rngs)
            self.seen, self.key = Count(jnp.array(False)), Count(jax.random.key(0))

        def __call__(self, x):
            self.seen[...] = jnp.array(True)
            self.key[...] = jax.random.fold_in(self.key[...], 1)
            return self.linear(x)

    found = fit(Flags, variable_reductions={"Count": rule}).variables.collections["Count"]
    assert found["seen"].dtype == np.bool_
    assert bool(found["seen"]) == (rule == "first")
    expected = jax.random.key(0) if rule == "discard" else jax.random.fold_in(jax.random.key(0), 1)
    np.testing.assert_array_equal(found["key"], jax.random.key_data(expected))


def test_a_variable_that_passes_through_transformations_is_not_changed():
    def step(carry, row):
        carry, constant = carry
        return (carry + row, constant), row

    def program(a, rows, constant):
        (total, same), again = jax.lax.scan(step, (a, constant), rows)
        return total, jax.checkpoint(lambda x: x)(same), jax.jit(lambda x: x)(again)

    jaxpr = jax.make_jaxpr(program)(0.0, jnp.ones(3), 1.0)
    assert find_sources(jaxpr) == [None, 2, 1]


def test_a_carry_that_swaps_places_is_changed():
    def swap(carry, _):
        return carry[::-1], None

    jaxpr = jax.make_jaxpr(lambda a, b: jax.lax.scan(swap, (a, b), length=3)[0])(0.0, 1.0)
    assert find_sources(jaxpr) == [None, None]


class Sown(nnx.Module):
    """A network that keeps what is between its layers."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        self.hidden = nnx.Intermediate(self.linear(x))
        return self.hidden[...]


def test_intermediate_values_are_refused_until_they_are_discarded_or_popped():
    with pytest.raises(CallerError, match=r"changes Intermediate\['hidden'\], expected a rule"):
        fit(Sown)
    with pytest.raises(CallerError, match=r"expected \"discard\".*lacks.*nnx\.pop"):
        fit(Sown, variable_reductions={"Intermediate": "mean"})
    assert fit(Sown, variable_reductions={"Intermediate": "discard"}).step == 1

    def pop(model, x):
        out = model(x)
        return jnp.mean(out**2), {"hidden": jax.tree.leaves(nnx.pop(model, nnx.Intermediate))[0].mean()}

    assert "hidden" in fit(Sown, loss_fn=pop).metrics


def test_an_assigned_parameter_is_refused_until_it_is_discarded():
    def assign(model, x):
        model.linear.bias[...] = jnp.ones(1)
        return jnp.mean(model(x) ** 2)

    rules = {"Count": "sum", "Average": "mean"}
    with pytest.raises(CallerError, match=r"changes Param\['linear'\]\['bias'\]"):
        fit(NnxNet, loss_fn=assign, variable_reductions=rules)
    assert fit(NnxNet, loss_fn=assign, variable_reductions={**rules, "Param": "discard"}).step == 1


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("mean", r"found 'mean' \(str\), expected a dict"),
        ({"Count": "max"}, "found 'max' for Count, expected \"mean\""),
        ({3: "mean"}, "found the key 3"),
    ],
    ids=["no dict", "no rule", "no name"],
)
def test_wrong_rules_are_refused_when_the_trainer_is_constructed(rules, said):
    with pytest.raises(CallerError, match=said):
        fit(NnxNet, num_steps=-1, variable_reductions=rules)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"Cuont": "sum"}, "found a rule for Cuont, expected names .*: Average, Count, Param, Variable"),
        ({"Count": "mean", "Average": "mean"}, r"found .*mean.* for Count\['count'\] of dtype int32"),
    ],
    ids=["another name", "the mean of integers"],
)
def test_rules_that_do_not_suit_the_model_are_refused(rules, said):
    with pytest.raises(CallerError, match=said):
        fit(NnxNet, variable_reductions=rules)
