"""Sums in fixed point: integers for each element, and a limit for each array. The same bits in any order.

An addend is rounded to a multiple of a *unit*, a power of two, and what is added are integers: the order does not
matter. The unit follows from the limit of the array: 2**limit is more than the largest |elements| of all addends
together. Below the limit a float32 keeps 54 bits, cut into *limbs*, integers of the size of a float: the first has
the highest 30 bits, with its sign, each other one `low_bits` more, rounded to nearest. Each limb is added up on its
own, without carries: with M addends at most, low_bits + log2(M) is no more than an integer has. So a sum has the same
bits in any order and any grouping, and hosts add up limbs as they add up any integers.

The limit is chosen from one addend, microbatch 0 of the step, before anything is added: as if all addends had its
largest |element|, and `HEADROOM_BITS` above. So it is a function of the committed state and the data, it is the same on
all hosts whichever they are, and there is no history to keep. Whether the limit was right is known when all addends
are. Each has a *share* of it, and shares that add up to more say that it was too low. If no addend is within
`FixedPointFormat.slack` of it, it was too high, and smaller elements have lost digits: that happens to arrays that are
zero in microbatch 0. Neither depends on the order. Then the sum is made again in bins (`step.binned_sum`), which take
any range.

To round an addend costs at most half a unit. What fits has a smaller error, of each element down to 2**-`RANGE_BITS` of
the largest of its array, than a float32 sum in order may be expected to have; see `slack`. Less than 2**-126 (2**-1022)
counts as nothing. Memory: two integers for each float, three where there are more than 128 addends.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

HEADROOM_BITS: Final = 3
"""On average an addend's largest |element| may be 2**HEADROOM_BITS times that of microbatch 0, at least. Measured in
training: of 400 steps 391 had less than 2**2 in every leaf, 400 less than 2**3."""
HEADROOM_OF_ZEROS_BITS: Final = -3
"""The same, of an array that is zero in microbatch 0, and the largest array of all. Most arrays have smaller elements
than that, by some powers of two; between this and `FixedPointFormat.slack` there is room for most of them."""
RANGE_BITS: Final = 23
"""Elements of one array may differ by six orders of magnitude, the largest of all and what is usual for the smallest:
these are as precise as a float32 sum in order, too."""
MAX_ADDENDS: Final = 2**12
MAX_ADDENDS_OF_TWO_LIMBS: Final = 2**7
SHARE_BITS: Final = 14
"""A limit has 2**SHARE_BITS shares. The shares of 2**16 hosts are added as int32."""
FIT_WORDS: Final = 3
"""Numbers that say how the addends of one array fit its limit; see `measure_fit`."""
NOT_FINITE: Final = 2**14
"""Stands for the exponent of an array with an element that is not finite: its share is too large."""
OF_ZEROS: Final = -(2**14)
"""Stands for the exponent of an array of zeros: its share is nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class FixedPointFormat:
    """How numbers of a dtype are kept.

    Attributes:
        float_dtype: float32 or float64: the type of addends, and of the total that is read.
        low_bits: width of an addend's part in each limb but the first, in bits.
        num_limbs: two or more.
        max_addends_bits: logarithm of the largest number of addends to base 2, rounded up.
    """

    float_dtype: Any
    low_bits: int
    num_limbs: int
    max_addends_bits: int

    @classmethod
    def for_addends(cls, dtype: Any, max_addends: int) -> "FixedPointFormat":  # noqa: ANN401 - what jnp takes for one
        """Return the format for up to `max_addends` numbers of a dtype, of which narrow ones become float32."""
        wide = jnp.promote_types(dtype, jnp.float32)
        addends_bits = (max_addends - 1).bit_length()
        # No more than floats have: the carry of a sum that is read is exact.
        low_bits = min(jnp.finfo(wide).nmant + 1, 8 * wide.itemsize - 1 - addends_bits)
        return cls(wide, low_bits, 2 if max_addends <= MAX_ADDENDS_OF_TWO_LIMBS else 3, addends_bits)

    @property
    def high_bits(self) -> int:
        """The unit of the first limb is 2**-high_bits of the limit: a bit less than it has, as addends are rounded."""
        return 8 * self.float_dtype.itemsize - 2

    @property
    def limit_bits(self) -> int:
        """The unit is 2**-limit_bits of the limit."""
        return self.high_bits + (self.num_limbs - 1) * self.low_bits

    @property
    def integer_dtype(self) -> Any:  # noqa: ANN401 - what jnp takes for a dtype
        """The dtype of the limbs."""
        return jnp.dtype(f"int{8 * self.float_dtype.itemsize}")

    @property
    def slack(self) -> int:
        """The largest |element| of all addends may be 2**-slack of the limit.

        An element 2**-RANGE_BITS as large is then 2**(P - A/2) units, of floats of P bits and 2**A addends. Rounding so
        many addends makes an error of some 2**(A/2) / sqrt(12) units. A sum of floats in order has one of some
        2**(A - P) / sqrt(12) times the element: of as many units.
        """
        precision = int(jnp.finfo(self.float_dtype).nmant) + 1
        return self.limit_bits - precision - RANGE_BITS + self.max_addends_bits // 2

    @property
    def lowest_limit(self) -> int:
        """The least limit whose unit, that of the first limb, is a normal float."""
        return self.high_bits + int(jnp.finfo(self.float_dtype).minexp)

    def clip(self, limit: int) -> int:
        """Return the nearest limit for which that unit, and one over it, are normal floats."""
        return min(max(limit, self.lowest_limit), 2 * self.high_bits - self.lowest_limit)

    def power(self, exponent: ArrayLike) -> jax.Array:
        """Return 2**exponent, a normal number."""
        info = jnp.finfo(self.float_dtype)
        biased = jnp.asarray(exponent, self.integer_dtype) + (1 - info.minexp)
        return jax.lax.bitcast_convert_type(biased << info.nmant, self.float_dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("limbs",), meta_fields=("format",))
@dataclasses.dataclass(frozen=True, slots=True)
class FixedPointSum:
    """The total of an array.

    Attributes:
        limbs: arrays of integers in the shape of the array, the highest first.
        format: how all addends are kept.
    """

    limbs: tuple[jax.Array, ...]
    format: FixedPointFormat


def to_fixed_point(x: jax.Array, format: FixedPointFormat, limit: ArrayLike) -> FixedPointSum:
    """Return the total of one addend, whose elements must be below 2**limit; else it is any number."""
    rest, limbs = x.astype(format.float_dtype) * format.power(format.high_bits - limit), []
    for _ in range(format.num_limbs):
        # Powers of two, and what is left after rounding, are exact.
        whole = jnp.rint(rest)
        limbs.append(whole.astype(format.integer_dtype))
        rest = (rest - whole) * format.float_dtype.type(2.0**format.low_bits)
    return FixedPointSum(tuple(limbs), format)


def add_fixed_point(one: FixedPointSum, other: FixedPointSum) -> FixedPointSum:
    """Return the total of the addends of both."""
    return FixedPointSum(tuple(map(operator.add, one.limbs, other.limbs)), one.format)


def read_fixed_point(total: FixedPointSum, limit: ArrayLike) -> jax.Array:
    """Return the total as floats, rounded to nearest, or next to it."""
    return scale_units(read_units(total), total.format, limit)


def scale_units(units: jax.Array, format: FixedPointFormat, limit: ArrayLike) -> jax.Array:
    """Return the total whose `read_units` these are."""
    return units * format.power(limit - format.high_bits)


def read_units(total: FixedPointSum) -> jax.Array:
    """Return the total as floats, in units of the first limb: the same for any limit."""
    format = total.format
    dtype, low_bits = format.float_dtype, format.low_bits
    limbs = list(total.limbs)
    for position in range(format.num_limbs - 1, 0, -1):
        carry = (limbs[position] + (1 << (low_bits - 1))) >> low_bits
        limbs[position] -= carry << low_bits
        limbs[position - 1] += carry
    # The first limb has more bits than a float: what is left of it goes to the next, which has room for it.
    high = limbs[0].astype(dtype)
    limbs[1] += (limbs[0] - high.astype(format.integer_dtype)) << low_bits
    value = jnp.zeros_like(high)
    for limb in reversed(limbs[1:]):  # from the lowest: roundings are of bits that count least
        value = (value + limb.astype(dtype)) * dtype.type(2.0**-low_bits)
    return high + value


def compute_exponent(x: jax.Array) -> jax.Array:
    """Return int32[], the least exponent with |x| < 2**exponent everywhere; `NOT_FINITE`, or `OF_ZEROS`."""
    # The maximum is an expression of its own: XLA's CPU compiler makes a loop of it that is six times as fast.
    largest = jnp.max(jnp.abs(x), initial=0)
    info, bits = jnp.finfo(x.dtype), jax.lax.bitcast_convert_type(largest, f"int{8 * x.dtype.itemsize}")
    biased = (bits >> info.nmant).astype(jnp.int32)
    exponent = jnp.where(biased == 2**info.nexp - 1, NOT_FINITE, biased + info.minexp)
    return jnp.where(biased == 0, OF_ZEROS, exponent)


def choose_limits(exponents: np.ndarray, formats: Sequence[FixedPointFormat], num_addends: int) -> np.ndarray:
    """Return int32[n], the limits of arrays of these formats, from their exponents in microbatch 0."""
    largest = np.max(exponents, where=exponents != NOT_FINITE, initial=OF_ZEROS)
    of_zeros = exponents == OF_ZEROS  # a layer that these examples did not use
    wanted = np.where(of_zeros, largest + HEADROOM_OF_ZEROS_BITS, exponents + HEADROOM_BITS)
    wanted += (num_addends - 1).bit_length()
    return np.array(
        [format.clip(int(limit)) for format, limit in zip(formats, wanted, strict=True)], np.int32
    )


def measure_fit(exponents: np.ndarray, limits: np.ndarray, formats: Sequence[FixedPointFormat]) -> np.ndarray:
    """Return int32[FIT_WORDS * n], how some addends fit limits; those of several groups of addends add up.

    Of each array: the shares of its limit that they take, how many of them are within the slack of it, and how many
    are not zero.

    Args:
        exponents: int32[addends, n].
        limits: int32[n].
        formats: one for each of the n arrays.
    """
    is_something = exponents != OF_ZEROS
    # Rounded up, so that many tiny addends cannot overflow either; one share too many is as bad as any number.
    relative = np.clip(exponents - limits + SHARE_BITS, 0, SHARE_BITS + 1)
    shares = np.where(is_something, 1 << relative, 0).sum(axis=0, dtype=np.int64)
    slack = np.array([format.slack for format in formats], np.int32)
    # No limit is lower: smaller numbers count as nothing.
    is_lowest = limits <= np.array([format.lowest_limit for format in formats], np.int32)
    is_near = is_something & (is_lowest | (exponents >= limits - slack))
    found = np.minimum(shares, 2**SHARE_BITS + 1), is_near.sum(axis=0), is_something.sum(axis=0)
    return np.concatenate(found).astype(np.int32)


def find_misfits(fit: np.ndarray) -> np.ndarray:
    """Return bool[n]: of which arrays the limit was too low or too high for the sum, by the fit of all addends."""
    shares, num_near, num_not_zero = fit.reshape(FIT_WORDS, -1)
    return (shares > 1 << SHARE_BITS) | ((num_near == 0) & (num_not_zero > 0))
