"""A small decoder, written in NNX, in Linen and with a scan over its layers, as a chain of blocks."""

import hashlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.blocks.cut_model import cut_model
from resilient_jax.sharding.jaxprs import iterate_equations
from tests.support.cut_variables import (
    find_shared_weights,
    join_gradients,
    join_results,
    join_variables,
    split_variables,
)
from tests.support.small_decoders import KEY, LAYERS, MAKERS, ROWS, TOKENS, WIDTH, make_batch

BATCH = make_batch()
TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 0.05}
"""Relative to the largest element of a leaf. In bfloat16 XLA rounds less often inside a fusion, and fuses more where
there is one program: it is far from the blocks, not the blocks from the truth."""
each_decoder = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(scope="module")
def cuts():
    """Cut models and their decoders, by name and dtype; each is made once."""
    made = {}

    def get(name, dtype=jnp.float32):
        if (name, dtype) not in made:
            decoder = MAKERS[name](dtype)
            made[name, dtype] = cut_model(decoder.loss, decoder.variables, BATCH, KEY), decoder
        return made[name, dtype]

    return get


def run_forward(cut, variables, batch=BATCH, key=KEY):
    """Return (loss, auxiliary output, residuals of each block)."""
    weights, results, residuals = split_variables(cut, variables), [], []
    x: tuple[Any, ...] = ()
    for block, own in zip(cut.blocks, weights, strict=True):
        x, made, kept = block.programs.forward(own, x, batch, key)
        results.append(made)
        residuals.append(kept)
    return x[0], join_results(cut, results), residuals


def run_backward(cut, variables, residuals):
    """Return the gradients of each block."""
    weights, g, gradients = split_variables(cut, variables), cut.loss_gradient, {}
    for block in reversed(cut.blocks):
        found, g = block.programs.backward(weights[block.number], residuals[block.number], g)
        gradients[block.number] = found
    return [gradients[number] for number in range(cut.num_blocks)]


def count_compiled(program):
    return getattr(program, "_cache_size")()  # noqa: B009 - jax does not declare this method


def digest(tree):
    leaves = jax.tree.leaves(tree)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


@each_decoder
def test_a_decoder_is_an_embedding_its_layers_and_a_head_and_its_layers_are_of_one_kind(cuts, name):
    cut, _ = cuts(name)
    assert [block.kind for block in cut.blocks] == [0, *[1] * LAYERS, 2]
    assert len(cut.kinds) == 3


@each_decoder
def test_only_the_hidden_state_crosses_a_cut(cuts, name):
    cut, _ = cuts(name)
    crossing = [[value.shape for value in block.x] for block in cut.blocks]
    assert crossing == [[], *[[(ROWS, TOKENS, WIDTH)]] * (LAYERS + 1)]
    assert [block.y for block in cut.blocks[:-1]] == [block.x for block in cut.blocks[1:]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
@each_decoder
def test_loss_and_gradients_are_those_of_the_uncut_program(cuts, name, dtype):
    cut, decoder = cuts(name, dtype)
    loss, aux, residuals = run_forward(cut, decoder.variables)
    gradients = join_gradients(cut, run_backward(cut, decoder.variables, residuals))
    whole = jax.jit(jax.value_and_grad(decoder.plain, has_aux=True))
    (expected_loss, expected_aux), expected = whole(decoder.variables, BATCH, KEY)
    assert float(loss) == pytest.approx(float(expected_loss), rel=TOLERANCE[dtype])
    assert aux.keys() == expected_aux.keys() == {"accuracy", "spread"}
    for metric, value in aux.items():
        assert float(value) == pytest.approx(float(expected_aux[metric]), rel=TOLERANCE[dtype])
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        largest = np.abs(np.asarray(wanted, np.float64)).max()
        assert largest > 0
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * largest)


@each_decoder
def test_gradients_have_the_same_bits_whichever_way_the_tasks_are_ordered(cuts, name):
    cut, decoder = cuts(name, jnp.bfloat16)
    _, _, residuals = run_forward(cut, decoder.variables)
    expected = digest(run_backward(cut, decoder.variables, residuals))
    weights, g, kept = split_variables(cut, decoder.variables), cut.loss_gradient, {}
    for block in reversed(cut.blocks):
        own = weights[block.number]
        g, kept[block.number] = block.programs.backward_input(own, residuals[block.number], g)
    gradients = [
        block.programs.backward_weights(weights[block.number], kept[block.number]) for block in cut.blocks
    ]
    assert digest(gradients) == expected


@each_decoder
def test_values_that_travelled_through_host_memory_change_no_bit(cuts, name):
    cut, decoder = cuts(name)
    loss, _, residuals = run_forward(cut, decoder.variables)
    expected = digest((loss, run_backward(cut, decoder.variables, residuals)))
    weights, logged = split_variables(cut, decoder.variables), []
    x: tuple[Any, ...] = ()
    for block in cut.blocks:
        logged.append(tuple(np.array(value) for value in x))
        x = block.programs.forward(weights[block.number], logged[-1], BATCH, KEY).y
    g, gradients = cut.loss_gradient, []
    for block in reversed(cut.blocks):
        # Forward again, as a host does that takes over from one that died.
        again = block.programs.forward(weights[block.number], logged[block.number], BATCH, KEY)
        found, g = block.programs.backward(
            weights[block.number], again.residuals, [np.array(value) for value in g]
        )
        gradients.insert(0, found)
    assert digest((x[0], gradients)) == expected


@each_decoder
def test_no_matrix_product_is_computed_twice(cuts, name):
    cut, _ = cuts(name)
    total = 0
    for kind in cut.kinds:
        derivative = kind.kind.derivative
        counts = [
            sum(equation.primitive.name == "dot_general" for equation in iterate_equations(program))
            for program in (
                derivative.backward_jaxpr,
                jax.make_jaxpr(derivative.backward_input)(*derivative.backward_shapes),
                jax.make_jaxpr(derivative.backward_weights)(*derivative.backward_weights_shapes),
            )
        ]
        assert counts[0] == counts[1] + counts[2]
        total += counts[0]
    assert total > 0


@each_decoder
def test_residuals_hold_no_weights_nor_casts_of_them(cuts, name):
    cut, decoder = cuts(name, jnp.bfloat16)
    weights = split_variables(cut, decoder.variables)
    _, _, residuals = run_forward(cut, decoder.variables)
    for own, kept in zip(weights, residuals, strict=True):
        shapes = {weight.shape for weight in own.values()} | {weight.T.shape for weight in own.values()}
        assert shapes.isdisjoint(value.shape for value in kept)
        addresses = {weight.unsafe_buffer_pointer() for weight in own.values()}
        assert addresses.isdisjoint(value.unsafe_buffer_pointer() for value in kept)


@each_decoder
def test_a_kind_is_compiled_once_for_all_its_blocks_and_microbatches(name):
    decoder = MAKERS[name]()
    cut = cut_model(decoder.loss, decoder.variables, BATCH, KEY)
    losses = set()
    for seed in range(2):
        loss, _, residuals = run_forward(cut, decoder.variables, make_batch(seed), jax.random.key(seed))
        run_backward(cut, decoder.variables, residuals)
        losses.add(float(loss))
    assert len(losses) == 2
    for kind in cut.kinds:
        programs = kind.forward, kind.backward_input, kind.backward_weights
        assert [count_compiled(program) for program in programs] == [1, 1, 1]


@each_decoder
def test_variables_that_are_split_into_blocks_and_joined_are_the_same(cuts, name):
    cut, decoder = cuts(name)
    for variables in (decoder.variables, jax.tree.map(np.asarray, decoder.variables)):
        weights = split_variables(cut, variables)
        joined = join_variables(cut, weights)
        assert jax.tree.structure(joined) == jax.tree.structure(variables)
        for one, other in zip(jax.tree.leaves(joined), jax.tree.leaves(variables), strict=True):
            assert type(one) is type(other)
            np.testing.assert_array_equal(one, other)
        # Every layer has its own, by names that no other block has, but for the tied embeddings.
        names = list(itertools.chain.from_iterable(own.keys() for own in weights))
        assert len(names) == len(set(names)) + 1


@each_decoder
def test_tied_embeddings_belong_to_the_first_and_the_last_block(cuts, name):
    cut, decoder = cuts(name)
    ((tied, holders),) = find_shared_weights(cut).items()
    assert tied.endswith("embedding")
    assert holders == (0, LAYERS + 1)
    _, _, residuals = run_forward(cut, decoder.variables)
    first, *_, last = run_backward(cut, decoder.variables, residuals)
    joined = join_gradients(cut, [first, last])
    total = next(
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(joined) if "embedding" in str(path)
    )
    np.testing.assert_array_equal(total, first[tied] + last[tied])
    assert np.any(first[tied]), "a gradient of the embedding"


@each_decoder
def test_with_remat_a_block_keeps_its_input_and_the_microbatch_only(cuts, name):
    _, decoder = cuts(name)
    cut = cut_model(decoder.loss, decoder.variables, BATCH, KEY, remat=True)
    loss, _, residuals = run_forward(cut, decoder.variables)
    hidden = 4 * ROWS * TOKENS * WIDTH
    for kept in residuals[1:-1]:
        floats = [value for value in kept if jnp.issubdtype(value.dtype, jnp.inexact)]
        assert sum(value.nbytes for value in floats) == hidden
    gradients = join_gradients(cut, run_backward(cut, decoder.variables, residuals))
    (expected_loss, _), expected = jax.jit(jax.value_and_grad(decoder.plain, has_aux=True))(
        decoder.variables, BATCH, KEY
    )
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_a_donated_gradient_that_came_from_host_memory_leaves_that_memory_alone(cuts):
    cut, decoder = cuts("nnx")
    _, _, residuals = run_forward(cut, decoder.variables)
    block, weights = cut.blocks[1], split_variables(cut, decoder.variables)
    assert block.programs.kind.donates_g
    logged = np.ones((ROWS, TOKENS, WIDTH), np.float32)
    block.programs.backward_input(weights[1], residuals[1], (jax.device_put(logged),))
    np.testing.assert_array_equal(logged, 1)
