"""Sums with the same bits in any order and grouping, as exact as their documented bound."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.step.binned_sum import (
    BinnedFormat,
    add_binned,
    make_binned_zero,
    merge_binned,
    read_binned,
)

add = jax.jit(add_binned)
merge = jax.jit(merge_binned)
read = jax.jit(read_binned)

SIZE = 64


def sum_of(rows, grid):
    return functools.reduce(add, rows, make_binned_zero(np.shape(rows[0]) if len(rows) else (SIZE,), grid))


def bits_of(x):
    return np.asarray(x).tobytes()


def draw_addends(random: np.random.Generator, count: int, kind: str) -> np.ndarray:
    """Return float32[count, SIZE] that are hard to add."""
    normal = random.standard_normal((count, SIZE))
    match kind:
        case "wide":
            found = normal * np.exp2(random.integers(-60, 60, (count, SIZE)))
        case "everything":
            found = normal * np.exp2(random.integers(-126, 118, (count, SIZE)))
        case "cancelling":
            found = np.concatenate([normal, -normal])[:count] + 1e-9 * normal
        case "one huge":
            found = normal
            found[random.integers(count)] *= 2.0**90
        case "zeros":
            found = normal * (random.random((count, SIZE)) < 0.1)
        case "powers of 2":
            found = np.exp2(random.integers(-126, 110, (count, SIZE))) * random.choice([-1, 1], (count, SIZE))
        case _:
            found = normal
    return found.astype(np.float32)


KINDS = ["normal", "wide", "everything", "cancelling", "one huge", "zeros", "powers of 2"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_slots", [2, 3])
def test_any_order_and_any_grouping_give_the_same_bits(kind, num_slots):
    random = np.random.default_rng(0)
    rows = draw_addends(random, 24, kind)
    grid = BinnedFormat.for_addends(jnp.float32, len(rows), num_slots)
    expected = read(sum_of(rows, grid))
    for _ in range(20):
        shuffled = random.permutation(rows)
        cuts = np.sort(random.integers(0, len(rows) + 1, 3))
        parts = [sum_of(part, grid) for part in np.split(shuffled, cuts)]
        total = functools.reduce(merge, [parts[i] for i in random.permutation(len(parts))])
        assert bits_of(read(total)) == bits_of(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 16, 63, 64, 1000])
def test_the_error_of_an_element_is_within_the_documented_bound(kind, count):
    rows = draw_addends(np.random.default_rng(count), count, kind)
    grid = BinnedFormat.for_addends(jnp.float32, count)
    found = np.asarray(read(sum_of(rows, grid)), np.float64)
    exact = np.array([math.fsum(column) for column in rows.astype(np.float64).T])
    largest = np.abs(rows).max(axis=0).astype(np.float64)
    bound = count * (2.0**-grid.bin_bits * largest + 2.0**-126) + 2.0**-23 * np.abs(exact)
    assert np.all(np.abs(found - exact) <= bound)


def test_a_single_number_is_read_as_it_was_added():
    rows = draw_addends(np.random.default_rng(1), 1, "wide")
    found = read(sum_of(rows, BinnedFormat.for_addends(jnp.float32, 1024)))
    np.testing.assert_allclose(np.asarray(found), rows[0], rtol=2.0**-21)
    assert bits_of(read(sum_of(rows, BinnedFormat.for_addends(jnp.float32, 64)))) == bits_of(rows[0])


def test_sums_of_many_like_numbers_are_more_precise_than_floats_in_order():
    rows = draw_addends(np.random.default_rng(3), 64, "normal")
    found = np.asarray(read(sum_of(rows, BinnedFormat.for_addends(jnp.float32, 64))), np.float64)
    exact = rows.astype(np.float64).sum(0)
    in_order = functools.reduce(np.add, rows).astype(np.float64)
    assert np.median(np.abs(found - exact)) <= np.median(np.abs(in_order - exact))


@pytest.mark.parametrize("count", [2**14, 2**20])
def test_the_largest_sums_do_not_overflow(count):
    grid = BinnedFormat.for_addends(jnp.float32, count)
    # The largest slices of both bins, as often as there may be addends: by doubling, without so many additions.
    x = np.full(4, np.float32(1 - 2.0**-20) * np.float32(2.0) ** (grid.bin_bits - 1), np.float32)
    x[1] *= -1
    x[2] *= np.float32(1 + 2.0**-10)
    total, added = add(make_binned_zero((4,), grid), x), 1
    while 2 * added <= count:
        total, added = merge(total, total), 2 * added
    expected = x.astype(np.float64) * added
    np.testing.assert_allclose(np.asarray(read(total)), expected, rtol=count * 2.0**-24)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_an_addend_that_is_not_finite_makes_its_element_nan_wherever_it_comes(wrong):
    rows = draw_addends(np.random.default_rng(5), 8, "normal")
    rows[3, 7] = wrong
    grid = BinnedFormat.for_addends(jnp.float32, 8)
    for order in (range(8), reversed(range(8))):
        found = np.asarray(read(sum_of(rows[list(order)], grid)))
        assert np.flatnonzero(np.isnan(found)).tolist() == [7]


def test_nothing_is_zero_and_narrow_floats_are_added_as_float32():
    grid = BinnedFormat.for_addends(jnp.bfloat16, 8)
    assert not np.asarray(read(make_binned_zero((3,), grid))).any()
    x = jnp.array([1.5, -3.0, 2.0**-100], jnp.bfloat16)
    found = read(sum_of([x, x], grid))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found), 2 * np.asarray(x, np.float32))


def test_float64_has_wider_slots():
    with jax.enable_x64(True):
        random = np.random.default_rng(6)
        rows = random.standard_normal((48, SIZE)) * np.exp2(random.integers(-200, 200, (48, SIZE)))
        grid = BinnedFormat.for_addends(jnp.float64, 48)
        expected = jax.jit(read_binned)(
            functools.reduce(jax.jit(add_binned), rows, make_binned_zero((SIZE,), grid))
        )
        assert expected.dtype == jnp.float64
        other = functools.reduce(jax.jit(add_binned), rows[::-1], make_binned_zero((SIZE,), grid))
        assert bits_of(jax.jit(read_binned)(other)) == bits_of(expected)
        exact = np.array([math.fsum(column) for column in rows.T])
        np.testing.assert_allclose(np.asarray(expected), exact, rtol=2.0**-50)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_any_numbers_in_any_order(numbers, random):
    grid = BinnedFormat.for_addends(jnp.float32, 12)
    shuffled = random.sample(numbers, len(numbers))
    # Padded with zeros, which change nothing, so that a few programs serve all lists.
    columns = [np.array([a, b], np.float32) for a, b in zip(numbers, shuffled, strict=True)]
    found = np.asarray(read(sum_of(columns, grid)))
    assert bits_of(found[0]) == bits_of(found[1])
