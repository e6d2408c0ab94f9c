"""A compute function of which nothing is known is compared by tracing a call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.state.state_digest import make_no_digest
from resilient_jax.step.traced_call import describe_call, digest_call

COUNT = 4


@jax.jit
def square(params, rows):
    return jnp.sum((params * rows) ** 2)


@jax.jit
def root(params, rows):
    return jnp.sum(jnp.sqrt(params * rows))


def make_call(program=square, read=lambda step, index: np.full(3, step + index, np.float32), params=None):
    params = jnp.ones(3) if params is None else params
    return lambda step, index: program(params, jax.device_put(read(step, index)))


def describe(call):
    found = describe_call(call)
    assert found is not None
    return found


def test_a_call_is_described_without_what_it_reads():
    digest = describe(make_call()).digest
    assert describe(make_call(read=lambda step, index: np.zeros(3, np.float32))).digest == digest
    assert describe(make_call(params=jnp.zeros(3))).digest == digest


@pytest.mark.parametrize(
    "call",
    [
        make_call(root),
        make_call(read=lambda step, index: np.zeros(3, np.float16)),
        lambda step, index: square(jnp.ones(3), jnp.ones(3)) * 2,
    ],
    ids=["operation", "dtype", "constant"],
)
def test_another_program_has_another_description(call):
    described, other = describe(make_call()), describe(call)
    assert other.digest != described.digest
    assert other.lines != described.lines


def test_a_constant_of_a_jitted_function_counts():
    def close_over(value):
        table = np.full(3, value, np.float32)
        return make_call(jax.jit(lambda params, rows: jnp.sum(params * rows * table)))

    assert describe(close_over(1)).digest == describe(close_over(1)).digest
    assert describe(close_over(1)).digest != describe(close_over(2)).digest


def test_what_needs_its_own_values_or_changes_from_call_to_call_is_not_compared():
    assert describe_call(lambda step, index: float(square(jnp.ones(3), jnp.ones(3)))) is None
    assert describe_call(lambda step, index: jnp.ones(3) * np.random.default_rng().random()) is None


def test_a_digest_tells_what_a_microbatch_reads_and_no_parameters():
    digest = digest_call(make_call(), 1, 2, COUNT)
    np.testing.assert_array_equal(digest, digest_call(make_call(), 1, 2, COUNT))
    np.testing.assert_array_equal(digest, digest_call(make_call(params=jnp.zeros(3)), 1, 2, COUNT))
    assert (digest != digest_call(make_call(), 1, 1, COUNT)).any()
    assert (digest != digest_call(make_call(), 2, 2, COUNT)).any()


@pytest.mark.parametrize(
    "call",
    [
        make_call(read=lambda step, index: np.random.default_rng().random(3).astype(np.float32)),
        lambda step, index: square(jnp.ones(3), jnp.ones(3)) * np.random.default_rng().random(),
        lambda step, index: jax.random.normal(jax.random.key(np.random.default_rng().integers(2**31)), (3,)),
    ],
    ids=["array", "number", "key"],
)
def test_data_that_are_drawn_anew_have_another_digest(call):
    assert (digest_call(call, 0, 0, COUNT) != digest_call(call, 0, 0, COUNT)).any()


def test_random_keys_are_digested_unless_all_microbatches_share_them():
    def read_key(seed):
        return lambda step, index: jax.random.normal(jax.random.key(seed + index), (3,))

    assert (digest_call(read_key(0), 0, 0, COUNT) != digest_call(read_key(1), 0, 0, COUNT)).any()
    keys = [jax.random.split(jax.random.key(seed), COUNT) for seed in range(2)]
    first, second = (lambda step, index, each=each: jax.random.uniform(each[index]) for each in keys)
    np.testing.assert_array_equal(digest_call(first, 0, 0, COUNT), digest_call(second, 0, 0, COUNT))
    held = [[key for key in each] for each in keys]
    first, second = (lambda step, index, each=each: jax.random.uniform(each[index]) for each in held)
    assert (digest_call(first, 0, 0, COUNT) != digest_call(second, 0, 0, COUNT)).any()


def test_a_step_of_one_microbatch_is_digested():
    assert (digest_call(make_call(), 0, 0, 1) != digest_call(make_call(), 1, 0, 1)).any()


def test_a_call_that_cannot_be_traced_has_no_digest():
    def fail(step, index):
        raise ValueError("a bug")

    np.testing.assert_array_equal(digest_call(fail, 0, 0, COUNT), make_no_digest())
    assert describe_call(fail) is None


def test_a_trace_costs_the_call_that_computes_nothing():
    traces = []

    @jax.jit
    def program(params, rows):
        traces.append(1)
        return jnp.sum(params * rows)

    call = make_call(program)
    describe_call(call)
    assert len(traces) == 1
    call(0, 0)
    digest_call(call, 0, 0, COUNT)
    assert len(traces) == 1
    kept: Any = program  # JAX has no public API for it
    assert kept._cache_size() == 1, "a traced call is not kept"
