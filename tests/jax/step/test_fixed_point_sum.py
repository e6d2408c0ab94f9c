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
    HEADROOM_OF_ZEROS_BITS,
    MAX_ADDENDS,
    NOT_FINITE,
    OF_ZEROS,
    FixedPointFormat,
    FixedPointSum,
    add_fixed_point,
    choose_limits,
    compute_exponent,
    find_misfits,
    measure_fit,
    read_fixed_point,
    to_fixed_point,
)
from resilient_jax.step.running_total import (
    NO_LIMITS,
    add_to_total,
    compute_exponents,
    is_exact,
    list_formats,
    merge_totals,
    read_total,
    start_total,
)

SIZE = 64
find = jax.jit(compute_exponent)


@functools.partial(jax.jit, static_argnums=1)
def make_all(rows, format, limit):
    return to_fixed_point(rows, format, limit)


def convert(rows, format, limit):
    """Return each row in fixed point, by one program."""
    limbs = np.stack([np.asarray(limb) for limb in make_all(rows, format, limit).limbs], axis=1)
    return [FixedPointSum(tuple(row), format) for row in limbs]


def sum_of(rows, format, limit):
    """Return the total of all rows, which are added one after the other."""
    return functools.reduce(add_fixed_point, convert(rows, format, limit))


def bytes_of(total):
    return b"".join(np.asarray(limb).tobytes() for limb in total.limbs)


def limit_of(rows, format, count):
    return np.int32(choose_limits(np.asarray(find(rows[0]))[None], [format], count)[0])


def fit_of(rows, limit, format):
    exponents = np.array([find(row) for row in rows])[:, None]
    return measure_fit(exponents, np.array([limit]), [format])


def do_fit(rows, limit, format):
    return not find_misfits(fit_of(rows, limit, format))[0]


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
    format = FixedPointFormat.for_addends(jnp.float32, count)
    limit = limit_of(rows, format, count)
    assert do_fit(rows, limit, format)
    total = sum_of(rows, format, limit)
    for _ in range(3):
        cut, shuffled = random.integers(0, count), convert(random.permutation(rows), format, limit)
        halves = [
            functools.reduce(add_fixed_point, half) for half in (shuffled[:cut], shuffled[cut:]) if half
        ]
        other = functools.reduce(add_fixed_point, halves)
        assert bytes_of(other) == bytes_of(total)
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
    format = FixedPointFormat.for_addends(jnp.float32, count)
    first = data.draw(st.integers(-120, 120))
    (limit,) = choose_limits(np.array([first]), [format], count)
    sizes = data.draw(st.lists(st.integers(-126, 128), min_size=1, max_size=8))
    times = data.draw(st.lists(st.integers(1, count), min_size=len(sizes), max_size=len(sizes)))
    exponents = np.repeat(sizes, times)[:count]
    if find_misfits(measure_fit(exponents[:, None], np.array([limit]), [format]))[0]:
        return
    scale = format.high_bits - int(limit)
    largest = [1 if e + scale <= 0 else 2 ** (int(e) + scale) for e in exponents]
    assert sum(largest) < 2**31
    assert count * 2 ** (format.low_bits - 1) <= 2**30, "and room for the carry"


def test_what_does_not_fit_is_found_wherever_it_is_counted():
    format, count = FixedPointFormat.for_addends(jnp.float32, 16), 16
    limit = limit_of(np.array([[1.0, -0.5]]), format, count)
    fitting = [np.array([0.0, -2.0 * 2.0**HEADROOM_BITS * (1 - 2.0**-24)])] * count
    assert do_fit(fitting, limit, format)
    for value in (2.0 * 2.0**HEADROOM_BITS, 1e30, np.inf, -np.inf, np.nan):
        rows = [*fitting[1:], np.array([0.0, value])]
        assert not do_fit(rows, limit, format)
        parts = [fit_of(part, limit, format) for part in (rows[:3], rows[3:])]
        assert find_misfits(np.sum(parts, axis=0))[0]
    # One addend may be far larger than all others.
    assert do_fit([np.array([1.0])] * (count - 1) + [np.array([100.0])], limit, format)
    assert not measure_fit(np.zeros((0, 2), np.int32), np.zeros(2, np.int32), [format] * 2).any()


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


@pytest.mark.parametrize("count", [4, 16, 256, 512, 4096])
def test_a_limit_that_is_too_high_is_found_as_one_that_is_too_low(count):
    """Of a leaf that is zero in microbatch 0. Within the slack the sum is no worse than one of floats."""
    format = FixedPointFormat.for_addends(jnp.float32, count)
    first = np.array([OF_ZEROS, -3, 5])
    limits = choose_limits(first, [format] * 3, count)
    power = (count - 1).bit_length()
    assert (limits - power).tolist() == [5 + HEADROOM_OF_ZEROS_BITS, -3 + HEADROOM_BITS, 5 + HEADROOM_BITS]

    def find_wrong(exponent):
        addends = np.full((count, 3), OF_ZEROS)
        addends[0], addends[-1, 0] = first, exponent
        halves = [measure_fit(half, limits, [format] * 3) for half in (addends[:1], addends[1:])]
        return find_misfits(np.sum(halves, axis=0)).tolist()

    lowest, highest = int(limits[0]) - format.slack, int(limits[0])
    assert find_wrong(OF_ZEROS) == [False] * 3, "of zeros the sum is zero"
    assert highest - lowest >= 8
    for exponent, is_wrong in ((lowest - 1, True), (lowest, False), (highest, False), (highest + 1, True)):
        assert find_wrong(exponent) == [is_wrong, False, False]


def test_numbers_below_the_lowest_limit_count_as_nothing_and_are_no_misfit():
    formats = [FixedPointFormat.for_addends(jnp.float32, 16)] * 3
    limits = choose_limits(np.array([OF_ZEROS] * 3), formats, 16)
    assert limits.tolist() == [30 - 126] * 3
    assert not find_misfits(measure_fit(np.array([[-120, -110, OF_ZEROS]]), limits, formats)).any()


def ratio_of_errors(parts, is_zero_at_first):
    """Return the error of an exact sum over that of a float32 sum in order, both of all elements of each size."""
    count = len(parts)
    spec = AccumulationSpec(name="", step=0, num_microbatches=count, reduction="exact")
    other = np.full(parts.shape[1], 2.0**6, np.float32)
    addends = [
        {"largest": other, "this": np.where(is_zero_at_first and index == 0, 0, part).astype(np.float32)}
        for index, part in enumerate(parts)
    ]
    formats = list_formats(spec, addends[0])
    found = [np.asarray(compute_exponents(spec, addend)) for addend in addends]
    limits = choose_limits(found[0], formats, count)
    assert not find_misfits(measure_fit(np.array(found), limits, formats)).any()
    total, ordered = start_total(spec, addends[0], limits), np.asarray(addends[0]["this"])
    for addend in addends[1:]:
        total, _ = add_to_total(total, addend, limits, donate=True)
        ordered = ordered + addend["this"]
    true = np.sum([addend["this"].astype(np.longdouble) for addend in addends], axis=0)

    def error_of(sums):
        """By the size of elements, which grows along the array."""
        wrong = np.asarray(sums, np.longdouble) - true
        return np.sqrt(np.mean(np.square(wrong).reshape(8, -1), axis=1))

    return error_of(read_total(total, limits)["this"]) / error_of(ordered)


@pytest.mark.parametrize("is_zero_at_first", [False, True])
@pytest.mark.parametrize("count", [4, 16, 256, 512, pytest.param(4096, marks=pytest.mark.full)])
def test_elements_of_any_size_are_as_precise_as_a_float32_sum_in_order(count, is_zero_at_first):
    """Six orders of magnitude within an array; an array that is zero in microbatch 0 and far below the largest one."""
    random = np.random.default_rng(count)
    sizes = np.repeat(10.0 ** np.linspace(-6, 0, 8), 256)
    parts = (random.standard_normal((count, sizes.size)) * sizes).astype(np.float32)
    assert np.all(ratio_of_errors(parts, is_zero_at_first) <= 1.0)


def test_float64_is_kept_in_64_bits():
    with jax.enable_x64(True):
        rows = np.random.default_rng(0).standard_normal((50, SIZE)) * 1e-200
        rows[0, 0] = 1e-199
        format = FixedPointFormat.for_addends(jnp.float64, len(rows))
        limit = limit_of(rows, format, len(rows))
        assert do_fit(rows, limit, format)
        total = sum_of(rows, format, limit)
        assert {limb.dtype for limb in total.limbs} == {jnp.dtype("int64")}
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
    limits = choose_limits(np.asarray(compute_exponents(spec, parts[0])), formats, count)

    def total_of(indexes):
        total = start_total(spec, jax.tree.map(jnp.zeros_like, parts[0]), limits)
        for index in indexes:
            total, exponents = add_to_total(total, parts[index], limits, donate=True)
            assert np.array_equal(exponents, compute_exponents(spec, parts[index]))
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
        ("exact", "float32", 8),
        ("exact_wide", "float32", 9),
        ("exact", "float64", 16),
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
        assert compute_exponents(spec, like).shape == NO_LIMITS.shape if not count else (1,)
