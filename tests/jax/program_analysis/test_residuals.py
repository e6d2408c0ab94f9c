"""The residuals of a program: what JAX keeps for the backward pass, without what XLA recomputes."""

import jax
import jax.numpy as jnp
import pytest

from resilient_jax.planning.axes import AXIS_BY_LOGICAL_NAME
from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.program_analysis.operations import trace_operations
from resilient_jax.program_analysis.residuals import compute_residuals, count_residual_bytes
from resilient_jax.program_analysis.sharding_propagation import propagate_sharding

ROWS, WIDTH, HIDDEN = 8, 16, 24
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
PARAMS = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in {
        "down": (HIDDEN, WIDTH),
        "gate": (WIDTH, HIDDEN),
        "square": (WIDTH, WIDTH),
        "up": (WIDTH, HIDDEN),
    }.items()
}
FOUR_SQUARES = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32)

NARROW, WIDE = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN
"""Bytes of an activation of the model's width and of the hidden width."""


def kept(loss, params=PARAMS):
    operations = trace_operations(lambda p, others, x: compute_residuals(loss, p, others, x), params, {}, X)
    batch = frozenset(operations.inputs[-1:])
    parts = [ModelPart.LAYER] * len(operations.operations)
    return sum(
        count_residual_bytes(
            operations, propagate_sharding(operations, parts, {}, batch, AXIS_BY_LOGICAL_NAME)
        ).values()
    )


def gated(p, others, x):
    return ((jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]).sum()


def residual(p, others, x):
    return ((x @ p["square"] + x) @ p["square"] + 2 * (x + 1)).sum()


def loop(p, others, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0].sum()


PROGRAMS = {
    "no more than the batch, which is there anyway": (lambda p, o, x: (x @ p["up"]).sum(), PARAMS, 0),
    "the result of tanh, which its derivative and the next product need": (
        lambda p, o, x: (jnp.tanh(x @ p["up"]) @ p["down"]).sum(),
        PARAMS,
        WIDE,
    ),
    "of a gate both results, the logistic function, and what goes down": (gated, PARAMS, 4 * WIDE),
    "a sum, not what was added": (residual, PARAMS, NARROW),
    "nothing of what is done in a rematerialized part": (
        lambda p, o, x: jax.checkpoint(lambda x: gated(p, o, x))(x @ p["square"]),
        PARAMS,
        NARROW,
    ),
    "of a loop what each turn keeps": (loop, FOUR_SQUARES, 2 * 4 * NARROW),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_the_bytes_kept_for_backward_are(case):
    loss, params, expected = PROGRAMS[case]
    found = kept(loss, params)
    if case == "of a loop what each turn keeps":
        # Input and result of each iteration, and on some versions of JAX the derivative too.
        assert found in (expected, expected + 4 * NARROW)
    else:
        assert found == expected
