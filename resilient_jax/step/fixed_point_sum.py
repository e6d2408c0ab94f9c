"""Sums in fixed point: an integer for each element, and a limit for each array. The same bits in any order.

An addend is rounded to a multiple of a *unit*, a power of two, and what is added are integers: the order does not
matter. The unit follows from the limit of the array: 2**limit is more than the largest |elements| of all addends
together, so with N bits a unit of 2**(limit - N + 2) lets no sum overflow.

The limit is chosen from one addend, microbatch 0 of the step, before anything is added: as if all addends had its
largest |element|, and `HEADROOM_BITS` above. So it is a function of the committed state and the data, it is the same on
all hosts whichever they are, and there is no history to keep. Whether the limit was high enough is known when all
addends are: each has a *share* of it, and whether the shares add up to more does not depend on the order either. Then
the sum is made again in bins (`step.binned_sum`), which take any range.

To round an addend costs at most half a unit, M 2**(HEADROOM_BITS - N + 2) times the largest |element| of microbatch 0
where M is a power of two: with float32, 2**-23 of it for 16 addends, 2**-21 for 64. Floats are finer for elements that
are much smaller than the largest of their array, bins for all. Less than 2**-126 (2**-1022) counts as nothing. Memory:
as much as floats take.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

HEADROOM_BITS: Final = 3
"""On average an addend's largest |element| may be 2**HEADROOM_BITS times that of microbatch 0, at least. Measured in
training: of 400 steps 391 had less than 2**2 in every leaf, 400 less than 2**3."""
MAX_ADDENDS: Final = 2**12
SHARE_BITS: Final = 16
"""A limit has 2**SHARE_BITS shares."""
NOT_FINITE: Final = 2**14
"""In place of the exponent of an array with such an element: its share is too large."""
OF_ZEROS: Final = -(2**14)
"""In place of the exponent of an array without any other number: its share is nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class FixedPointFormat:
    """How numbers of a dtype are kept.

    Attributes:
        float_dtype: of addends and of the total that is read; float32 or float64.
    """

    float_dtype: Any

    @classmethod
    def for_addends(cls, dtype: Any) -> "FixedPointFormat":  # noqa: ANN401 - what jnp takes for one
        """Return the format for numbers of a dtype, of which narrow ones become float32."""
        return cls(jnp.promote_types(dtype, jnp.float32))

    @property
    def limit_bits(self) -> int:
        """The unit is 2**-limit_bits of the limit: one bit less than an integer has, since each addend is rounded."""
        return 8 * self.float_dtype.itemsize - 2

    @property
    def integer_dtype(self) -> Any:  # noqa: ANN401 - what jnp takes for a dtype
        """The dtype of the integers."""
        return jnp.dtype(f"int{8 * self.float_dtype.itemsize}")

    def clip(self, limit: int) -> int:
        """Return the nearest limit whose unit, and one over it, are normal floats."""
        largest = -int(jnp.finfo(self.float_dtype).minexp)
        return min(max(limit, self.limit_bits - largest), self.limit_bits + largest)

    def power(self, exponent: ArrayLike) -> jax.Array:
        """Return 2**exponent, a normal number."""
        info = jnp.finfo(self.float_dtype)
        biased = jnp.asarray(exponent, self.integer_dtype) + (1 - info.minexp)
        return jax.lax.bitcast_convert_type(biased << info.nmant, self.float_dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("units",), meta_fields=("format",))
@dataclasses.dataclass(frozen=True, slots=True)
class FixedPointSum:
    """The total of an array.

    Attributes:
        units: integers in the shape of the array.
        format: of all its addends.
    """

    units: jax.Array
    format: FixedPointFormat


def to_fixed_point(x: jax.Array, format: FixedPointFormat, limit: ArrayLike) -> FixedPointSum:
    """Return the total of one addend, whose elements must be below 2**limit; else it is any number."""
    scaled = x.astype(format.float_dtype) * format.power(format.limit_bits - limit)
    return FixedPointSum(jnp.rint(scaled).astype(format.integer_dtype), format)


def add_fixed_point(one: FixedPointSum, other: FixedPointSum) -> FixedPointSum:
    """Return the total of the addends of both."""
    return FixedPointSum(one.units + other.units, one.format)


def read_fixed_point(total: FixedPointSum, limit: ArrayLike) -> jax.Array:
    """Return the total as floats, rounded once."""
    format = total.format
    return total.units.astype(format.float_dtype) * format.power(limit - format.limit_bits)


def find_exponent(x: jax.Array) -> jax.Array:
    """Return int32[], the least exponent with |x| < 2**exponent everywhere; `NOT_FINITE`, or `OF_ZEROS`."""
    # The maximum is an expression of its own: XLA's CPU compiler makes a loop of it that is six times as fast.
    largest = jnp.max(jnp.abs(x), initial=0)
    info, bits = jnp.finfo(x.dtype), jax.lax.bitcast_convert_type(largest, f"int{8 * x.dtype.itemsize}")
    biased = (bits >> info.nmant).astype(jnp.int32)
    exponent = jnp.where(biased == 2**info.nexp - 1, NOT_FINITE, biased + info.minexp)
    return jnp.where(biased == 0, OF_ZEROS, exponent)


def choose_limits(exponents: np.ndarray, formats: Sequence[FixedPointFormat], num_addends: int) -> np.ndarray:
    """Return int32[n], the limits of arrays of these formats, from their exponents in microbatch 0.

    An array of zeros (a layer that these examples did not use) gets the limit of the largest.
    """
    largest = np.max(exponents, where=exponents != NOT_FINITE, initial=OF_ZEROS)
    wanted = (
        np.where(exponents == OF_ZEROS, largest, exponents) + HEADROOM_BITS + (num_addends - 1).bit_length()
    )
    return np.array(
        [format.clip(int(limit)) for format, limit in zip(formats, wanted, strict=True)], np.int32
    )


def count_shares(exponents: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return int32[n], what some addends take of each limit.

    Args:
        exponents: int32[addends, n].
        limits: int32[n].
    """
    # Rounded up, so that many tiny addends cannot overflow either; one share too many is as bad as any number.
    relative = np.clip(exponents - limits + SHARE_BITS, 0, SHARE_BITS + 1)
    shares = np.where(exponents == OF_ZEROS, 0, 1 << relative).sum(axis=0, dtype=np.int64)
    return np.minimum(shares, 2 << SHARE_BITS).astype(np.int32)


def find_misfits(shares: np.ndarray) -> np.ndarray:
    """Return bool[n]: of which arrays the shares of all addends are more than the limit."""
    return shares > 1 << SHARE_BITS
