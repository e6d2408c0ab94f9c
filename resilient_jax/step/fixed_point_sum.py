"""Sums in fixed point: an integer for each element, and an exponent for each array. The same bits in any order.

An addend is rounded to a multiple of a *unit*, a power of two, and what is added are integers: the order does not
matter. The unit follows from an exponent: every addend is below 2**exponent, and M of them fit into an integer. With N
bits that is 2**(exponent - b), where b = floor(log2((2**(N - 1) - 1) / M)).

The exponent is chosen from one addend, microbatch 0 of the step, before anything is added: its largest |element|, and
`HEADROOM_BITS` above. So it is a function of the committed state and the data, it is the same on all hosts whichever
they are, and there is no history to keep. An addend that does not fit is noticed by its own largest |element|; then the
sum is made again in bins (`step.binned_sum`), which take any range.

To round an addend costs at most half a unit, 2**(HEADROOM_BITS - b) times the largest |element| of microbatch 0: with
float32, 2**-22 of it for 16 addends, 2**-20 for 64. Floats are finer for elements that are much smaller than the
largest of their array, bins for all. Less than 2**-126 (2**-1022) counts as nothing. Memory: as much as floats take.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

HEADROOM_BITS: Final = 4
"""An addend may be 2**HEADROOM_BITS times as large as the largest of microbatch 0, at least."""
NOT_FINITE: Final = 2**14
"""In place of the exponent of an array with such an element: it fits nowhere."""
OF_ZEROS: Final = -(2**14)
"""In place of the exponent of an array without any other number: it fits everywhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class FixedPointFormat:
    """How numbers of a dtype are kept.

    Attributes:
        float_dtype: of addends and of the total that is read; float32 or float64.
        addend_bits: b, of the integer of one addend, without the sign.
    """

    float_dtype: Any
    addend_bits: int

    @classmethod
    def for_addends(cls, dtype: Any, max_addends: int) -> "FixedPointFormat":  # noqa: ANN401 - what jnp takes for one
        """Return the format for up to `max_addends` numbers of a dtype, of which narrow ones become float32."""
        wide = jnp.promote_types(dtype, jnp.float32)
        largest_sum = int(np.iinfo(f"int{8 * wide.itemsize}").max)
        return cls(wide, (largest_sum // max_addends).bit_length() - 1)

    @property
    def integer_dtype(self) -> Any:  # noqa: ANN401 - what jnp takes for a dtype
        """The dtype of the integers."""
        return jnp.dtype(f"int{8 * self.float_dtype.itemsize}")

    def clip(self, exponent: int) -> int:
        """Return the nearest exponent whose unit, and one over it, are normal floats."""
        largest = -int(jnp.finfo(self.float_dtype).minexp)
        return min(max(exponent, self.addend_bits - largest), self.addend_bits + largest)

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


def to_fixed_point(x: jax.Array, format: FixedPointFormat, exponent: ArrayLike) -> FixedPointSum:
    """Return the total of one addend, whose elements must be below 2**exponent; else it is any number."""
    scaled = x.astype(format.float_dtype) * format.power(format.addend_bits - exponent)
    return FixedPointSum(jnp.rint(scaled).astype(format.integer_dtype), format)


def add_fixed_point(one: FixedPointSum, other: FixedPointSum) -> FixedPointSum:
    """Return the total of the addends of both."""
    return FixedPointSum(one.units + other.units, one.format)


def read_fixed_point(total: FixedPointSum, exponent: ArrayLike) -> jax.Array:
    """Return the total as floats, rounded once."""
    format = total.format
    return total.units.astype(format.float_dtype) * format.power(exponent - format.addend_bits)


def find_exponent(x: jax.Array) -> jax.Array:
    """Return int32[], the least exponent with |x| < 2**exponent everywhere; `NOT_FINITE`, or `OF_ZEROS`."""
    # The maximum is an expression of its own: XLA's CPU compiler makes a loop of it that is six times as fast.
    largest = jnp.max(jnp.abs(x), initial=0)
    info, bits = jnp.finfo(x.dtype), jax.lax.bitcast_convert_type(largest, f"int{8 * x.dtype.itemsize}")
    biased = (bits >> info.nmant).astype(jnp.int32)
    exponent = jnp.where(biased == 2**info.nexp - 1, NOT_FINITE, biased + info.minexp)
    return jnp.where(biased == 0, OF_ZEROS, exponent)


def choose_exponents(found: np.ndarray, formats: Sequence[FixedPointFormat]) -> np.ndarray:
    """Return int32[n], the exponents for arrays of these formats, from those of microbatch 0.

    An array of zeros (a layer that these examples did not use) gets the exponent of the largest.
    """
    largest = np.max(found, where=found != NOT_FINITE, initial=OF_ZEROS)
    wanted = np.where(found == OF_ZEROS, largest, found) + HEADROOM_BITS
    return np.array(
        [format.clip(int(exponent)) for format, exponent in zip(formats, wanted, strict=True)], np.int32
    )
