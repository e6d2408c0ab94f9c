"""Where a loss is cut, what crosses, and what is refused: small losses of plain functions, one promise each."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.blocks.layer_marks import find_layer_paths, mark_layer, mark_layers
from resilient_jax.errors import CallerError
from tests.support.cut_variables import (
    find_shared_weights,
    join_gradients,
    join_results,
    join_variables,
    split_variables,
)

ROWS, WIDTH, LAYERS = 3, 4, 3
KEY = jax.random.key(1)
BATCH = {"x": np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)}


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(WIDTH**-0.5)


def make_variables():
    layers = [{"w": draw(number, WIDTH, WIDTH), "b": draw(9, WIDTH)} for number in range(LAYERS)]
    return {"first": draw(7, WIDTH, WIDTH), "layers": layers, "last": draw(8, WIDTH)}


def layer(weights, x):
    return x + jnp.tanh(x @ weights["w"] + weights["b"])


def head(variables, x):
    return jnp.mean((x @ variables["last"]) ** 2)


def loss_of_layers(variables, batch, key, call=lambda number, weights, x: mark_layer(layer, weights, x)):
    x = batch["x"] @ variables["first"]
    for number, weights in enumerate(variables["layers"]):
        x = call(number, weights, x)
    return head(variables, x)


def compute(cut, variables, batch=BATCH, key=KEY):
    """Return ((loss, auxiliary output), gradients) by blocks."""
    weights, results, residuals = split_variables(cut, variables), [], []
    x: tuple[Any, ...] = ()
    for block in cut.blocks:
        x, made, kept = block.programs.forward(weights[block.number], x, batch, key)
        results.append(made)
        residuals.append(kept)
    g, gradients = cut.loss_gradient, {}
    for block in reversed(cut.blocks):
        number = block.number
        gradients[number], g = block.programs.backward(weights[number], residuals[number], g)
    gradient = join_gradients(cut, [gradients[number] for number in range(cut.num_blocks)])
    return (x[0], join_results(cut, results)), gradient


def check_against_uncut(loss, variables, cut, batch=BATCH):
    """Compare loss, auxiliary output and gradients with those of the uncut loss."""

    def with_aux(variables):
        found = loss(variables, batch, KEY)
        return found if isinstance(found, tuple) else (found, {})

    (value, aux), gradients = compute(cut, variables, batch)
    (expected, expected_aux), expected_gradients = jax.jit(jax.value_and_grad(with_aux, has_aux=True))(
        variables
    )
    found, wanted = (value, aux, gradients), (expected, expected_aux, expected_gradients)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def test_layers_of_a_plain_function_are_blocks():
    cut = cut_model(loss_of_layers, make_variables(), BATCH, KEY)
    assert [block.kind for block in cut.blocks] == [0, 1, 1, 1, 2]
    assert [sorted(own) for own in split_variables(cut, make_variables())] == [
        ["first"],
        *(sorted([f"layers/{number}/b", f"layers/{number}/w"]) for number in range(LAYERS)),
        ["last"],
    ]
    check_against_uncut(loss_of_layers, make_variables(), cut)


def test_nothing_is_computed_to_cut_a_model():
    shapes = jax.eval_shape(make_variables)
    cut = cut_model(loss_of_layers, shapes, jax.eval_shape(lambda: BATCH), jax.eval_shape(lambda: KEY))
    check_against_uncut(loss_of_layers, make_variables(), cut)


def test_the_users_jit_is_no_obstacle():
    loss = jax.jit(lambda variables, batch, key: jax.jit(loss_of_layers)(variables, batch, key) * 2)
    cut = cut_model(loss, make_variables(), BATCH, KEY)
    assert cut.num_blocks == LAYERS + 2
    check_against_uncut(loss, make_variables(), cut)


def test_the_users_remat_of_a_layer_is_kept():
    def call(number, weights, x):
        return mark_layer(jax.checkpoint(layer), weights, x)

    loss = functools.partial(loss_of_layers, call=call)
    cut = cut_model(loss, make_variables(), BATCH, KEY)
    plain = cut_model(loss_of_layers, make_variables(), BATCH, KEY)
    kept = [len(each.kinds[1].kind.derivative.residuals) for each in (cut, plain)]
    assert kept[0] < kept[1]
    check_against_uncut(loss, make_variables(), cut)


def test_a_loss_may_make_a_random_key_of_a_number():
    def loss(variables, batch, key):
        noise = jax.random.normal(jax.random.key(3), ())
        return loss_of_layers(variables, batch, key) + noise

    cut = cut_model(loss, make_variables(), BATCH, KEY)
    assert cut.num_layers == cut_model(loss_of_layers, make_variables(), BATCH, KEY).num_layers


def test_layers_that_differ_in_a_number_are_of_one_kind():
    def call(number, weights, x):
        noise = jax.random.normal(jax.random.fold_in(KEY, number), x.shape)
        return mark_layer(lambda w, x: layer(w, x) * (1 - number / 10) + noise, weights, x)

    loss = functools.partial(loss_of_layers, call=call)
    cut = cut_model(loss, make_variables(), BATCH, KEY)
    assert [block.kind for block in cut.blocks] == [0, 1, 1, 1, 2]
    check_against_uncut(loss, make_variables(), cut)


def test_layers_that_count_their_calls_are_of_one_kind():
    def loss(variables, batch, key):
        count = jnp.zeros((), jnp.uint32)

        def call(number, weights, x):
            nonlocal count
            count += 1
            return mark_layer(layer, weights, x * jax.random.uniform(jax.random.fold_in(key, count)))

        return loss_of_layers(variables, batch, key, call)

    cut = cut_model(loss, make_variables(), BATCH, KEY)
    assert len(cut.kinds) <= 4
    assert cut.blocks[1].kind == cut.blocks[2].kind
    check_against_uncut(loss, make_variables(), cut)


def test_layers_whose_derivatives_differ_are_of_different_kinds():
    def make_scaled(scale):
        @jax.custom_vjp
        def scaled(x):
            return x * 1.0

        scaled.defvjp(lambda x: (x * 1.0, None), lambda _, g: (g * scale,))
        return scaled

    def call(number, weights, x):
        scaled = make_scaled((2.0, 2.0, 3.0)[number])
        return mark_layer(lambda w, x: scaled(layer(w, x)), weights, x)

    loss = functools.partial(loss_of_layers, call=call)
    cut = cut_model(loss, make_variables(), BATCH, KEY)
    assert [block.kind for block in cut.blocks] == [0, 1, 1, 2, 3]
    check_against_uncut(loss, make_variables(), cut)


def test_an_auxiliary_output_is_a_result_of_the_block_that_makes_it():
    def loss(variables, batch, key):
        norms = {}

        def call(number, weights, x):
            x = mark_layer(layer, weights, x)
            norms[f"norm_{number}"] = jnp.mean(x**2)
            return x

        value = loss_of_layers(variables, batch, key, call)
        return value, norms | {"mean": batch["x"].mean(), "bias": variables["layers"][1]["b"].sum()}

    cut = cut_model(loss, make_variables(), BATCH, KEY)
    made = [block.programs.result_names for block in cut.blocks]
    assert made == [(), ("norm_0",), ("bias", "norm_1"), (), ("mean", "norm_2")]
    check_against_uncut(loss, make_variables(), cut)


def test_an_auxiliary_loss_crosses_the_cuts_beside_the_hidden_state():
    def loss(variables, batch, key):
        penalties = jnp.zeros(())

        def call(number, weights, x):
            nonlocal penalties
            x = mark_layer(layer, weights, x)
            penalties = penalties + jnp.mean(jnp.abs(x))
            return x

        return loss_of_layers(variables, batch, key, call) + 0.1 * penalties

    cut = cut_model(loss, make_variables(), BATCH, KEY)
    assert [value.shape for value in cut.blocks[3].x] == [(ROWS, WIDTH), ()]
    check_against_uncut(loss, make_variables(), cut)


def test_weights_that_are_cast_before_they_are_used_stay_in_their_blocks():
    def loss(variables, batch, key):
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables)
        return loss_of_layers(cast, batch, key).astype(jnp.float32)

    cut = cut_model(loss, make_variables(), BATCH, KEY)
    plain = cut_model(loss_of_layers, make_variables(), BATCH, KEY)
    assert [block.weights for block in cut.blocks] == [block.weights for block in plain.blocks]
    assert find_shared_weights(cut) == {}


def scanned(variables, batch, key, *, reverse=False, dtype=jnp.float32):
    x = (batch["x"] @ variables["first"]).astype(dtype)
    stacks = jax.tree.map(lambda leaf: leaf.astype(dtype), variables["layers"])
    x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, stacks, reverse=reverse)
    return head(variables, x).astype(jnp.float32)


def make_stacked():
    variables = make_variables()
    return {**variables, "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *variables["layers"])}


@pytest.mark.parametrize("reverse", [False, True])
def test_each_iteration_of_a_scan_over_layers_is_a_block_with_its_layer_of_each_stack(reverse):
    loss = functools.partial(scanned, reverse=reverse)
    cut = cut_model(loss, make_stacked(), BATCH, KEY)
    layers = range(LAYERS)[::-1] if reverse else range(LAYERS)
    assert [sorted(own) for own in split_variables(cut, make_stacked())[1:-1]] == [
        [f"layers/b[{number}]", f"layers/w[{number}]"] for number in layers
    ]
    assert len(cut.kinds) == 3
    check_against_uncut(loss, make_stacked(), cut)


def test_a_stack_that_is_cast_as_a_whole_is_cast_layer_by_layer():
    cut = cut_model(functools.partial(scanned, dtype=jnp.bfloat16), make_stacked(), BATCH, KEY)
    assert [len(block.weights) for block in cut.blocks] == [1, 2, 2, 2, 1]


def test_a_weight_without_a_use_belongs_to_the_first_block_and_has_a_gradient_of_zero():
    variables = {**make_variables(), "unused": draw(3, 2)}
    cut = cut_model(loss_of_layers, variables, BATCH, KEY)
    assert "unused" in split_variables(cut, variables)[0]
    _, gradients = compute(cut, variables)
    np.testing.assert_array_equal(gradients["unused"], 0)


def test_frozen_weights_have_no_gradient():
    variables = {**make_variables(), "count": jnp.int32(3)}
    loss = lambda variables, batch, key: loss_of_layers(variables, batch, key) * variables["count"]  # noqa: E731
    cut = cut_model(
        loss, variables, BATCH, KEY, is_trained=lambda path, leaf: path != "count" and "b" not in path
    )
    _, gradients = compute(cut, variables)
    assert gradients["count"] is None
    assert all(own["b"] is None and own["w"] is not None for own in gradients["layers"])
    joined = join_variables(cut, split_variables(cut, variables))
    assert jax.tree.all(jax.tree.map(np.array_equal, joined, variables))


def test_a_layer_that_is_called_twice_is_two_blocks_with_shared_weights():
    def loss(variables, batch, key):
        x = batch["x"] @ variables["first"]
        for _ in range(3):
            x = mark_layer(layer, variables["layers"][0], x)
        return head(variables, x)

    variables = make_variables()
    cut = cut_model(loss, variables, BATCH, KEY)
    assert cut.num_blocks == 5
    assert find_shared_weights(cut) == {"layers/0/w": (1, 2, 3), "layers/0/b": (1, 2, 3)}
    check_against_uncut(loss, variables, cut)


def test_a_gradient_that_both_backward_tasks_need_is_not_donated_to_the_first():
    def call(number, weights, x):
        return mark_layer(lambda w, x: x @ w["w"], weights, x)

    loss = functools.partial(loss_of_layers, call=call)
    cut = cut_model(loss, make_variables(), BATCH, KEY)
    assert not cut.kinds[1].donates_g
    check_against_uncut(loss, make_variables(), cut)


class RematLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Sequence(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.Sequential(*(RematLayer(rngs) for _ in range(LAYERS)))

    def __call__(self, x):
        return self.layers(self.first(x))


def test_nnx_layers_with_remat_of_their_own_are_blocks():
    graph, params = nnx.split(Sequence(nnx.Rngs(0)))

    def loss(variables, batch, key, change=mark_layers):
        return jnp.mean(change(nnx.merge(graph, variables))(batch["x"]) ** 2)

    variables = nnx.to_pure_dict(params)
    cut = cut_model(loss, variables, BATCH, KEY)
    assert [block.kind for block in cut.blocks] == [0, 1, 1, 1, 2]
    check_against_uncut(functools.partial(loss, change=lambda net: net), variables, cut)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(WIDTH)(x))


class LinenSetup(nn.Module):
    def setup(self):
        self.first = nn.Dense(WIDTH)
        self.layers = [nn.remat(LinenLayer)() for _ in range(LAYERS)]

    def __call__(self, x):
        x = self.first(x)
        for each in self.layers:
            x = each(x)
        return jnp.mean(x**2)


def test_linen_layers_with_remat_of_their_own_are_blocks():
    model = LinenSetup()
    variables = model.init(KEY, BATCH["x"])
    loss = lambda variables, batch, key: model.apply(variables, batch["x"])  # noqa: E731
    cut = cut_model(loss, variables, BATCH, KEY)
    assert [block.kind for block in cut.blocks] == [0, 1, 1, 1, 2]
    check_against_uncut(loss, variables, cut)


def test_the_layers_are_the_largest_family_of_numbered_paths_with_equal_parameters():
    shapes = {
        "a/0/w": (2,),
        "a/1/w": (2,),
        "b/0/w": (3,),
        "b/1/w": (3,),
        "b/2/w": (3,),
        "c_0/w": (1,),
        "c_1/w": (2,),
    }
    assert find_layer_paths(shapes) == {"b/0", "b/1", "b/2"}


def unmarked(variables, batch, key):
    return loss_of_layers(variables, batch, key, lambda number, weights, x: layer(weights, x))


def in_scan(variables, batch, key):
    def body(total, row):
        return total + loss_of_layers(variables, {"x": row[None]}, key), None

    return jax.lax.scan(body, jnp.zeros(()), batch["x"])[0]


def in_one_remat(variables, batch, key):
    return jax.checkpoint(loss_of_layers)(variables, batch, key)


REFUSALS = {
    "no layers": (unmarked, "found no layers at which the model could be cut, expected a Linen model"),
    "remat": (in_one_remat, r"inside a jax.checkpoint \(remat\) around several layers"),
    "scan": (in_scan, "inside a lax.scan, expected the calls of layers outside"),
    "no scalar": (lambda v, b, k: b["x"] @ v["first"], r"found float32\[3,4\] as its result, expected one"),
    "no number": (lambda v, b, k: 1, "found int as its result, expected one"),
    "no weights": (
        lambda v, b, k: (loss_of_layers(v, b, k), mark_layer(jnp.mean, b["x"]))[1],
        "does not depend on both the variables and the batch",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_loss_that_cannot_be_cut_is_refused_in_words(case):
    loss, words = REFUSALS[case]
    with pytest.raises(CallerError, match=words):
        cut_model(loss, make_variables(), BATCH, KEY)
