"""Which activations a program reads and writes: cheap operations are fused with what reads their results."""

import jax
import jax.numpy as jnp
import pytest

from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_analysis.memory_traffic import count_bytes_moved
from resilient_jax.program_analysis.operations import trace_operations
from resilient_jax.program_analysis.sharding_propagation import propagate_sharding

ROWS, WIDTH = 8, 16
X = jnp.zeros((ROWS, WIDTH))
W = jnp.zeros((WIDTH, WIDTH))


def count_arrays(function):
    """Return how many arrays as large as the input the function of (parameter, input) reads and writes."""
    trace = trace_operations(function, W, X)
    parts = [ModelPart.LAYER] * len(trace.operations)
    parameter, batch = trace.inputs
    propagated = propagate_sharding(trace, parts, {parameter: (None, None)}, frozenset([batch]), {})
    return sum(count_bytes_moved(trace, propagated).values()) / X.nbytes


def test_cheap_operations_before_another_one_are_part_of_it():
    assert count_arrays(lambda w, x: jnp.exp(2 * x + 1)) == 2, "read once, written once"


def test_what_a_product_reads_is_written_before():
    assert count_arrays(lambda w, x: x @ w) == 2
    assert count_arrays(lambda w, x: (2 * x + 1) @ w) == 4
    assert count_arrays(lambda w, x: x.reshape(2, -1, WIDTH) @ w) == 2, "the same array in memory"


def test_a_sum_of_two_arrays_that_several_operations_read_is_written_once():
    def one(w, x):
        return jnp.exp(jnp.exp(x) + x)

    def two(w, x):
        total = jnp.exp(x) + x
        return jnp.exp(total), jnp.tanh(total)

    assert count_arrays(one) == 2 + 3
    assert count_arrays(two) == 2 + 3 + 2 + 2


def test_what_is_cheap_to_compute_from_one_array_is_computed_again():
    def both(w, x):
        doubled = 2 * x
        return jnp.exp(doubled), jnp.tanh(doubled)

    assert count_arrays(both) == 4


@pytest.mark.parametrize("iterations", [1, 5])
def test_a_loop_moves_in_each_iteration_what_it_hands_to_the_next(iterations):
    def loop(w, x):
        return jax.lax.fori_loop(0, iterations, lambda _, y: y + x, jnp.exp(x))

    # Before it x is read, and y written. Each iteration reads y and x, and writes y.
    assert count_arrays(loop) == 2 + 3 * iterations
