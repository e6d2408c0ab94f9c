"""A program as a flat list of operations, and XLA's count with all iterations of its loops."""

import jax
import jax.numpy as jnp
import pytest

from resilient_jax.program_analysis.operations import has_while_loop, trace_operations
from resilient_jax.program_analysis.sharding_propagation import count_matmul_flops
from resilient_jax.program_analysis.xla_cost import compile_and_analyze, count_flops

X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
W = jax.ShapeDtypeStruct((6, 32, 32), jnp.float32)
PRODUCT = 2 * 16 * 32 * 32


def turn(x, w):
    return jnp.tanh(x @ w)


def loop(x, ws, unroll=1):
    return jax.lax.scan(lambda x, w: (turn(x, w), None), x, ws, unroll=unroll)[0].sum()


def one_by_one(x, ws):
    for index in range(6):
        x = turn(x, ws[index])
    return x.sum()


def loop_in_loop(x, ws):
    pairs = ws.reshape(3, 2, 32, 32)
    outer = jax.lax.scan(
        lambda x, two: (jax.lax.scan(lambda x, w: (turn(x, w), None), x, two)[0], None), x, pairs
    )
    return outer[0].sum()


def chosen(x, ws):
    return jax.lax.cond(x[0, 0] > 0, lambda: x.sum(), lambda: one_by_one(x, ws))


def remat(x, ws):
    return jax.checkpoint(one_by_one)(x, ws)


PROGRAMS = {
    "one by one": one_by_one,
    "a loop": loop,
    "a loop whose turns are spelled out in pairs": lambda x, ws: loop(x, ws, 2),
    "a loop with a rest": lambda x, ws: loop(x, ws, 4),
    "a loop in a loop": loop_in_loop,
    "compiled apart": lambda x, ws: jax.jit(loop)(x, ws),
    "remat": remat,
}


def flops_of(program):
    analysis = jax.jit(program).lower(X, W).cost_analysis()
    assert analysis is not None
    return analysis["flops"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_count_has_every_iteration_of_a_loop(name):
    expected = flops_of(one_by_one)
    assert count_flops(PROGRAMS[name], X, W) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["one by one", "a loop", "a loop in a loop"])
def test_the_count_has_every_iteration_of_the_gradient_of_a_loop(name):
    expected = flops_of(jax.grad(one_by_one))
    assert count_flops(jax.grad(PROGRAMS[name]), X, W) == pytest.approx(expected, rel=0.02)


def test_every_iteration_of_a_compiled_loop_moves_bytes():
    four, eight, sixteen = (
        compile_and_analyze(loop, X, jax.ShapeDtypeStruct((turns, 32, 32), jnp.float32)).cost.bytes_moved
        for turns in (4, 8, 16)
    )
    assert sixteen - eight == pytest.approx(2 * (eight - four), rel=0.01)
    assert eight - four > 4 * 32 * 32 * 4


@pytest.mark.parametrize("name", [*PROGRAMS, "one of two branches"])
def test_matrix_products_are_counted_in_calls_loops_and_branches(name):
    program = PROGRAMS.get(name, chosen)
    assert count_matmul_flops(trace_operations(program, X, W)) == 6 * PRODUCT


def test_a_gradient_has_three_times_the_products_of_the_forward_pass():
    both = trace_operations(jax.grad(loop, argnums=(0, 1)), X, W)
    assert count_matmul_flops(both) == 3 * 6 * PRODUCT


def test_a_convolution_counts_as_a_product():
    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME")

    images = jax.ShapeDtypeStruct((2, 3, 8, 8), jnp.float32)
    kernel = jax.ShapeDtypeStruct((5, 3, 3, 3), jnp.float32)
    assert count_matmul_flops(trace_operations(convolve, images, kernel)) == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_a_while_loop_is_detected():
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    assert has_while_loop(jax.make_jaxpr(jax.jit(until))(X).jaxpr)
    assert not has_while_loop(jax.make_jaxpr(loop)(X, W).jaxpr)
