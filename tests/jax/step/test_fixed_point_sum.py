"""Sums in fixed point: the same bits in any order, within the documented bound; what does not fit is noticed."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.fixed_point_sum import (
    HEADROOM_BITS,
    MAX_ADDENDS,
    NOT_FINITE,
    OF_ZEROS,
    FixedPointFormat,
    FixedPointSum,
    add_fixed_point,
    choose_limits,
    count_shares,
    find_exponent,
    find_misfits,
    read_fixed_point,
    to_fixed_point,
)
from resilient_jax.step.running_total import (
    NO_LIMITS,
    add_to_total,
    find_exponents,
    is_exact,
    list_formats,
    merge_totals,
    read_total,
    start_total,
)

SIZE = 64
find = jax.jit(find_exponent)


@functools.partial(jax.jit, static_argnums=1)
def make_all(rows, format, limit):
    return to_fixed_point(rows, format, limit)


def sum_of(rows, format, limit):
    """Return the total of all rows, which are added one after the other."""
    units = np.asarray(make_all(rows, format, limit).units)
    totals = [FixedPointSum(row, format) for row in units]
    return functools.reduce(add_fixed_point, totals)


def limit_of(rows, format, count):
    return np.int32(choose_limits(np.asarray(find(rows[0]))[None], [format], count)[0])


def do_fit(rows, limit):
    exponents = np.array([find(row) for row in rows])[:, None]
    return not find_misfits(count_shares(exponents, np.array([limit])))[0]


def draw_addends(random, count, kind):
    """Return float32[count, SIZE] of which all fit."""
    rows = random.standard_normal((count, SIZE))
    match kind:
        case "wide":
            rows *= np.exp2(random.integers(-40, 0, (count, SIZE)))
        case "cancelling":
            rows = np.concatenate([rows, -rows])[:count] + 1e-9 * rows
        case "tiny":
            rows *= 2.0**-120
        case "huge":
            rows *= 2.0**115
        case "as large as fits":
            rows = np.full((count, SIZE), 2.0 ** (HEADROOM_BITS - 1) * 0.999)
            rows[0] = 0.51
        case "zeros":
            rows *= random.random((count, SIZE)) < 0.1
    rows[0, 0] = np.max(np.abs(rows[0])) if kind == "as large as fits" else np.max(np.abs(rows))
    return rows.astype(np.float32)


KINDS = ["normal", "wide", "cancelling", "tiny", "huge", "as large as fits", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 16, 63, 64, 1000])
def test_the_sum_is_within_its_bound_in_any_order_and_grouping(kind, count):
    random = np.random.default_rng(count)
    rows = draw_addends(random, count, kind)
    format = FixedPointFormat.for_addends(jnp.float32)
    limit = limit_of(rows, format, count)
    assert do_fit(rows, limit)
    total = sum_of(rows, format, limit)
    for _ in range(3):
        cut, shuffled = random.integers(0, count), random.permutation(rows)
        halves = [sum_of(half, format, limit) for half in (shuffled[:cut], shuffled[cut:]) if len(half)]
        other = functools.reduce(add_fixed_point, halves)
        assert np.asarray(other.units).tobytes() == np.asarray(total.units).tobytes()
    exact = np.array([math.fsum(column) for column in rows.astype(np.float64).T])
    # Half a unit for each addend, and one rounding of the sum. What is below 2**-126 counts as nothing.
    power = (count - 1).bit_length() + HEADROOM_BITS - format.limit_bits
    of_addend = max(2.0**power * np.max(np.abs(rows[0])), 2.0**-126)
    error = np.abs(np.asarray(read_fixed_point(total, limit), np.float64) - exact)
    assert np.all(error <= count * of_addend + 2.0**-24 * np.abs(exact) + 2.0**-126)


@given(st.data())
def test_whatever_fits_does_not_overflow(data):
    """Addends of any sizes, all of one sign: their integers are at most what they were counted for."""
    count = data.draw(st.integers(1, MAX_ADDENDS))
    format = FixedPointFormat.for_addends(jnp.float32)
    first = data.draw(st.integers(-120, 120))
    (limit,) = choose_limits(np.array([first]), [format], count)
    sizes = data.draw(st.lists(st.integers(-126, 128), min_size=1, max_size=8))
    times = data.draw(st.lists(st.integers(1, count), min_size=len(sizes), max_size=len(sizes)))
    exponents = np.repeat(sizes, times)[:count]
    if find_misfits(count_shares(exponents[:, None], np.array([limit])))[0]:
        return
    scale = format.limit_bits - int(limit)
    largest = [1 if e + scale <= 0 else 2 ** (int(e) + scale) for e in exponents]
    assert sum(largest) < 2**31


def test_what_does_not_fit_is_found_wherever_it_is_counted():
    format, count = FixedPointFormat.for_addends(jnp.float32), 16
    limit = limit_of(np.array([[1.0, -0.5]]), format, count)
    fitting = [np.array([0.0, -2.0 * 2.0**HEADROOM_BITS * (1 - 2.0**-24)])] * count
    assert do_fit(fitting, limit)
    for value in (2.0 * 2.0**HEADROOM_BITS, 1e30, np.inf, -np.inf, np.nan):
        rows = [*fitting[1:], np.array([0.0, value])]
        assert not do_fit(rows, limit)
        parts = [
            count_shares(np.array([[find(row)] for row in part]), np.array([limit]))
            for part in (rows[:3], rows[3:])
        ]
        assert find_misfits(np.sum(parts, axis=0))[0]
    # One addend may be far larger than all others.
    assert do_fit([np.array([1.0])] * (count - 1) + [np.array([100.0])], limit)
    assert count_shares(np.zeros((0, 2), np.int32), np.zeros(2, np.int32)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("values", "exponent"),
    [
        ([0.5, -0.75], 0),
        ([1.0, 0.0], 1),
        ([-(2.0**127)], 128),
        ([2.0**-126], -125),
        ([2.0**-130], OF_ZEROS),
        ([0.0, -0.0], OF_ZEROS),
        ([], OF_ZEROS),
        ([np.nan, 1.0], NOT_FINITE),
        ([-np.inf], NOT_FINITE),
    ],
)
def test_the_exponent_of_an_array_is_the_least_power_of_two_above_it(values, exponent):
    assert find(np.array(values, np.float32)) == exponent


def test_a_leaf_of_zeros_in_microbatch_0_gets_the_limit_of_the_largest():
    formats = [FixedPointFormat.for_addends(jnp.float32)] * 3
    found = choose_limits(np.array([OF_ZEROS, -3, 5]), formats, 16)
    assert (found - HEADROOM_BITS - 4).tolist() == [5, -3, 5]
    assert choose_limits(np.array([OF_ZEROS] * 3), formats, 16).tolist() == [30 - 126] * 3


def test_float64_is_kept_in_64_bits():
    with jax.enable_x64(True):
        rows = np.random.default_rng(0).standard_normal((50, SIZE)) * 1e-200
        rows[0, 0] = 1e-199
        format = FixedPointFormat.for_addends(jnp.float64)
        limit = limit_of(rows, format, len(rows))
        assert do_fit(rows, limit)
        total = sum_of(rows, format, limit)
        assert total.units.dtype == jnp.int64
        exact = np.array([math.fsum(column) for column in rows.T])
        np.testing.assert_allclose(np.asarray(read_fixed_point(total, limit)), exact, rtol=0, atol=1e-212)
        assert find(np.array([1e-320])) == OF_ZEROS


def draw_microbatch(index):
    random = np.random.default_rng(index)
    parts = random.standard_normal((2, 40, 40))
    return {
        "bfloat16": jnp.asarray(parts[0], jnp.bfloat16),
        "complex": jnp.asarray(parts[0] + 1j * parts[1], jnp.complex64),
        "count": jnp.int32(index),
        "loss": jnp.float32(parts[0, 0, 0] * 1e6),
        "weights": jnp.asarray(parts[1], jnp.float32),
    }


def test_a_tree_of_all_kinds_has_the_same_bits_wherever_its_microbatches_are():
    count = 7
    spec = AccumulationSpec(name="", step=0, num_microbatches=count, reduction="exact")
    parts = [draw_microbatch(index) for index in range(count)]
    formats = list_formats(spec, parts[0])
    limits = choose_limits(np.asarray(find_exponents(spec, parts[0])), formats, count)

    def total_of(indexes):
        total = start_total(spec, jax.tree.map(jnp.zeros_like, parts[0]), limits)
        for index in indexes:
            total, exponents = add_to_total(total, parts[index], limits, donate=True)
            assert np.array_equal(exponents, find_exponents(spec, parts[index]))
        return total

    alone = total_of(range(count))
    assert len(formats) == 3
    assert sum(map(is_exact, jax.tree.leaves(alone, is_leaf=is_exact))) == 4
    merged = merge_totals([total_of([3]), total_of([6, 1, 0]), total_of([]), total_of([2, 5, 4])])
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(merged), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    found = read_total(merged, limits)
    wide = np.sum([np.asarray(part["weights"], np.float64) for part in parts], axis=0)
    np.testing.assert_allclose(found["weights"], wide, rtol=0, atol=2.0**-20)
    imaginary = np.sum([np.imag(np.asarray(part["complex"])).astype(np.float64) for part in parts], axis=0)
    np.testing.assert_allclose(found["complex"][..., 1], imaginary, rtol=0, atol=2.0**-20)
    assert found["count"] == sum(range(count))
    exact_loss = math.fsum(float(part["loss"]) for part in parts)
    assert float(found["loss"]) == pytest.approx(exact_loss, rel=2.0**-23)


@pytest.mark.parametrize(
    ("reduction", "dtype", "expected"),
    [
        ("exact", "float32", 4),
        ("exact_wide", "float32", 9),
        ("exact", "float64", 8),
        ("exact_wide", "float64", 17),
    ],
)
def test_a_total_takes_the_documented_bytes_for_each_element(reduction, dtype, expected):
    spec = AccumulationSpec(name="", step=0, num_microbatches=16, reduction=reduction)
    with jax.enable_x64(True):
        leaf = jnp.zeros((64, 32), dtype)
        total = start_total(spec, leaf, np.zeros(len(list_formats(spec, leaf)), np.int32))
    assert sum(part.nbytes for part in jax.tree.leaves(total)) == expected * leaf.size


def test_only_the_exact_reduction_has_limits():
    like = {"weights": jnp.zeros((40, 40)), "loss": jnp.zeros(())}
    for reduction, count in (("exact", 1), ("exact_wide", 0), ("fast", 0)):
        spec = AccumulationSpec(name="", step=0, num_microbatches=4, reduction=reduction)  # pyright: ignore[reportArgumentType]
        assert len(list_formats(spec, like)) == count
        assert find_exponents(spec, like).shape == NO_LIMITS.shape if not count else (1,)
