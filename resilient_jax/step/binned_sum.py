"""Sums of floating-point numbers that have the same bits in any order and any grouping, element by element.

Addition of floats is not associative, addition of integers is. So each addend is cut into integers on a grid that
depends on nothing: the exponents are divided into *bins* of W bits, and a *slice* of an addend is its part, rounded to
nearest, in units of 2**(W bin). An element of a total keeps the sums of the slices of its K highest bins, as integers,
and the number of its highest bin, which only grows. When an addend needs a higher bin, the lowest one is dropped: its
slices would not have been kept either, had that addend come first. So a total is a function of the set of its addends.

With M addends at most, a slice has W bits where M 2**(W - 1) < 2**31 (2**63 for float64): no sum overflows. To round
an addend to the lowest bin kept costs at most 2**(-W (K - 1)) times the largest |addend| of this element, and an ulp of
the total is added when it is read. With K = 2 and float32 that is 2**-25 for 64 addends (2**-24 is float32's own
rounding), 2**-21 for 1,024; of more addends K is 3. Less than 2**-126 (2**-1022) counts as nothing; where an addend is
not finite, the total is NaN.

Memory: K integers of the addend's size and a byte, for each element: 9 bytes for float32, 13 of more than 1,024
addends. Related: binned sums of Demmel and Nguyen (2013), fixed-point sums in molecular dynamics.
"""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

NUM_SLOTS, MANY_SLOTS = 2, 3
"""K, of the sums of a step, and of those of more than `MANY_ADDENDS`."""
MANY_ADDENDS: Final = 2**10
"""With more addends slices are so small that a float32 sum in order would be more precise than two of them."""
SPARE_BITS: Final = 5
"""At least so many bits of a slot are above those of a single slice, so that carries fit when a total is read."""
NOT_FINITE: Final = 127
"""Stands for the highest bin where an addend was not finite. It is above all bins, so it stays."""


@dataclasses.dataclass(frozen=True, slots=True)
class BinnedFormat:
    """The grid of a total.

    Attributes:
        float_dtype: float32 or float64: the type of addends, and of the total that is read.
        bin_bits: width of a bin, W.
        num_slots: how many bins an element keeps, K.
    """

    float_dtype: Any
    bin_bits: int
    num_slots: int

    @classmethod
    def for_addends(cls, dtype: Any, max_addends: int, num_slots: int | None = None) -> "BinnedFormat":  # noqa: ANN401
        """Return the grid for sums of up to `max_addends` numbers of a dtype, of which narrow ones become float32."""
        if num_slots is None:
            num_slots = NUM_SLOTS if max_addends <= MANY_ADDENDS else MANY_SLOTS
        wide = jnp.promote_types(dtype, jnp.float32)
        largest_sum = np.iinfo(f"int{8 * wide.itemsize}").max
        bin_bits = (int(largest_sum) // max_addends).bit_length()
        return cls(wide, min(bin_bits, 8 * wide.itemsize - SPARE_BITS), num_slots)

    @property
    def integer_dtype(self) -> Any:  # noqa: ANN401 - what jnp takes for a dtype
        """The dtype of the slots."""
        return jnp.dtype(f"int{8 * self.float_dtype.itemsize}")

    @property
    def lowest_bin(self) -> int:
        """The highest bin of an empty total: that of the smallest normal numbers, or the next above."""
        return -(-self._min_exponent // self.bin_bits)

    @property
    def highest_bin(self) -> int:
        """The highest bin whose unit has a reciprocal."""
        return -self._min_exponent // self.bin_bits

    @property
    def _min_exponent(self) -> int:
        return int(jnp.finfo(self.float_dtype).minexp)

    def scale(self, exponent: jax.Array) -> jax.Array:
        """Return 2**exponent, which must be a normal number."""
        info = jnp.finfo(self.float_dtype)
        biased = exponent.astype(self.integer_dtype) + (1 - info.minexp)
        return jax.lax.bitcast_convert_type(biased << info.nmant, self.float_dtype)

    def compute_bin(self, x: jax.Array) -> jax.Array:
        """Return int32 of the lowest bin b with |x| < 2**(W (b + 1) - 1), within the bins there are."""
        info, bits = jnp.finfo(self.float_dtype), jax.lax.bitcast_convert_type(x, self.integer_dtype)
        # 2**exponent <= |x| < 2**(exponent + 1), so b = ceil((exponent + 2) / W) - 1 = floor((exponent + 1) / W).
        biased = ((bits >> info.nmant) & (2**info.nexp - 1)).astype(jnp.int32)
        shift = self.bin_bits * (1 - self.lowest_bin)  # what is divided is positive
        quotient = jax.lax.div(biased + (info.minexp + shift), jnp.int32(self.bin_bits)) - (
            1 - self.lowest_bin
        )
        bins = jnp.maximum(quotient, self.lowest_bin)
        return jnp.where((biased == 2**info.nexp - 1) | (bins > self.highest_bin), NOT_FINITE, bins)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("slots", "top"), meta_fields=("format",))
@dataclasses.dataclass(frozen=True, slots=True)
class BinnedSum:
    """The total of an array.

    Attributes:
        slots: K integer arrays in the shape of the array. Slot p has the slices of the bin that is p modulo K, of the K
            bins from `top` downwards.
        top: int8 in that shape, the highest bin; `NOT_FINITE` where there is no total.
        format: the grid that all addends are cut on.
    """

    slots: tuple[jax.Array, ...]
    top: jax.Array
    format: BinnedFormat

    def slot_bins(self, top: jax.Array) -> list[jax.Array]:
        """Return the bin that each slot has when this is the highest."""
        count = self.format.num_slots
        # What is divided is positive: all bins, and slots, are above -127.
        return [top - jax.lax.rem(top + (127 * count - slot), jnp.int32(count)) for slot in range(count)]

    def raise_top(self, top: jax.Array) -> "BinnedSum":
        """Return this total with a higher bin on top (int32); the slices of bins that are too low then are dropped."""
        before, after = self.slot_bins(self.top.astype(jnp.int32)), self.slot_bins(top)
        slots = tuple(
            jnp.where(old == new, slot, 0) for slot, old, new in zip(self.slots, before, after, strict=True)
        )
        return BinnedSum(slots, top.astype(jnp.int8), self.format)


def make_binned_zero(shape: tuple[int, ...], format: BinnedFormat) -> BinnedSum:
    """Return the total of nothing, as numpy arrays."""
    slots = tuple(np.zeros(shape, format.integer_dtype) for _ in range(format.num_slots))
    return BinnedSum(slots, np.full(shape, format.lowest_bin, np.int8), format)  # pyright: ignore[reportArgumentType]


def add_binned(total: BinnedSum, x: jax.Array) -> BinnedSum:
    """Return the total with one more addend, of the same shape."""
    grid = total.format
    x = x.astype(grid.float_dtype)
    top = jnp.maximum(total.top, grid.compute_bin(x).astype(jnp.int8))
    # Else XLA computes the bin again for every slot: on a CPU core all of it would take twice as long.
    top = jax.lax.optimization_barrier(top).astype(jnp.int32)
    raised = total.raise_top(top)
    # Multiplying by powers of 2 and taking off the part that was rounded are exact: only the last slice is rounded off.
    rest = x * grid.scale(-grid.bin_bits * jnp.clip(top, grid.lowest_bin, grid.highest_bin))
    slices = []
    for _ in range(grid.num_slots):
        slices.append(jnp.rint(rest))
        rest = (rest - slices[-1]) * grid.float_dtype.type(2.0**grid.bin_bits)
    bins = raised.slot_bins(top)
    slots = tuple(
        slot + jax.lax.select_n(top - own, *slices).astype(grid.integer_dtype)
        for slot, own in zip(raised.slots, bins, strict=True)
    )
    return BinnedSum(slots, raised.top, grid)


def merge_binned(one: BinnedSum, other: BinnedSum) -> BinnedSum:
    """Return the total of the addends of both."""
    top = jnp.maximum(one.top, other.top).astype(jnp.int32)
    one, other = one.raise_top(top), other.raise_top(top)
    return BinnedSum(tuple(map(jnp.add, one.slots, other.slots)), one.top, one.format)


def read_binned(total: BinnedSum) -> jax.Array:
    """Return the total as floats, within an ulp of what its slots hold."""
    grid = total.format
    width, half = grid.bin_bits, 4 * grid.float_dtype.itemsize
    is_finite = total.top != NOT_FINITE
    top = jnp.where(is_finite, total.top.astype(jnp.int32), 0)
    by_depth = [
        jax.lax.select_n(
            jax.lax.rem(top - depth + 127 * grid.num_slots, jnp.int32(grid.num_slots)), *total.slots
        )
        for depth in range(grid.num_slots)
    ]
    # From the lowest slice upwards: what exceeds half a unit of the next bin is carried there, so that no two parts
    # cancel. A carry has few bits; the highest slice is cut in halves, so that it can take one without an overflow.
    value, carry = jnp.zeros(top.shape, grid.float_dtype), jnp.zeros(top.shape, grid.integer_dtype)
    for slot in reversed(by_depth[1:]):
        high, low = slot >> width, (slot & ((1 << width) - 1)) + carry  # slot = high 2**W + low
        over = (low + (1 << (width - 1))) >> width
        value = (value + (low - (over << width)).astype(grid.float_dtype)) * grid.float_dtype.type(
            2.0**-width
        )
        carry = high + over
    high = ((by_depth[0] >> (half - 1)) + 1) >> 1  # rounded, so that the halves do not cancel either
    low = by_depth[0] - (high << half) + carry
    value = value + low.astype(grid.float_dtype)
    value = value + high.astype(grid.float_dtype) * grid.float_dtype.type(2.0**half)
    return jnp.where(is_finite, value * grid.scale(grid.bin_bits * top), jnp.nan)
