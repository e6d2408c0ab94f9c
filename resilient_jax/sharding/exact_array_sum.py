"""The sum of a floating-point array along some dims, with the same bits in any order and however the array is sharded.

Addition of floats is not associative, addition of integers is. With 2**e above all |addends| of a sum, each addend is
cut into K *words*, integers of W bits, rounded to nearest at the last one:

    x  =  2**e sum over k of word_k 2**(-W (k + 1)),    k = 0 .. K - 1

The words are added up as int32, of large arrays dim by dim. With n addends that takes W + log2(n) bits, so W is what n
leaves. After that the carries go to the word above, and that of the first word becomes a word of its own.

The maximum and sums of integers are the same in any order, and each addend is cut on its own, so what is read from the
words depends on the addends alone. K words have the bits of float32 and those that N addends may lose: the error is at
most 2**-26 of the largest |addend|, and an ulp of the sum. Less than 2**-126 (2**-1022) counts as nothing. Addends that
are not finite have the sum that floats have: NaN of a NaN or of infinities of both signs, else the infinity.

Time: the addends are read twice, once for the maximum. Memory: 3 to 8 times that of the array, measured on CPU, where
XLA keeps the words of all addends. Related: `step.binned_sum` and `step.fixed_point_sum`, for addends that come one
after another.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp

INTEGER_BITS: Final = 31
"""Of an int32, without its sign."""
MIN_WORD_BITS: Final = 4
MAX_DIM_SIZE: Final = 2 ** (INTEGER_BITS - 1 - MIN_WORD_BITS)
"""Addends along one dim that words of `MIN_WORD_BITS` bits leave room for."""
MAX_TOGETHER: Final = 2**20
"""Addends that are added up in one stage; of more, one stage for each dim."""
GUARD_BITS: Final = 2
"""Bits of the words beyond those of a float and of the number of addends."""


def sum_exactly(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Return the sum along dims, in float32 at least (float64 where the array is).

    Args:
        x: floating-point, of at most `MAX_DIM_SIZE` elements along each of the dims.
        dims: not negative, each once.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, info = x.astype(dtype), jnp.finfo(dtype)
    integer = jnp.dtype(f"int{8 * dtype.itemsize}")
    size = math.prod(x.shape[dim] for dim in dims)
    if not size:
        return jnp.sum(x, axis=tuple(dims))
    # Together, with fewer operations to compile, where words of a good size leave room for all addends.
    # Largest first: of the words of a stage's sums all are in memory.
    largest_first = sorted(dims, key=lambda dim: x.shape[dim], reverse=True)
    stages = [tuple(dims)] if size <= MAX_TOGETHER else [(dim,) for dim in largest_first]
    most = max(math.prod(x.shape[dim] for dim in stage) for stage in stages)
    word_bits = INTEGER_BITS - 1 - (most - 1).bit_length()
    num_words = -(-(info.nmant + 1 + GUARD_BITS + (size - 1).bit_length()) // word_bits)
    # The largest x and -x as integers: NaN is larger than infinity, both are larger than all others.
    bits = jax.lax.bitcast_convert_type(x, integer)
    highest, lowest = (
        jnp.max(found, axis=tuple(dims), keepdims=True) for found in (bits, bits ^ jnp.iinfo(integer).min)
    )
    # The exponent of the largest |addend|.
    biased = jnp.maximum(highest, lowest) >> info.nmant
    is_finite = biased < 2**info.nexp - 1
    # e, of which 2**(2 - e) and 2**(e - 1) are normal numbers, though not 2**e and 2**-e.
    exponent = jnp.where(is_finite, jnp.maximum(biased, 1), 1) + info.minexp
    rest = (
        jnp.where(jnp.abs(x) >= info.smallest_normal, x, 0) * _power(2 - exponent, dtype) * dtype.type(0.25)
    )
    # The first bits of an addend, down to each word: powers of 2 and differences of such are exact.
    scales = [dtype.type(2.0 ** (word_bits * (index + 1))) for index in range(num_words)]
    heads = [jnp.rint(rest * scale) for scale in scales]
    cut = [heads[0], *(low - high * scales[0] for high, low in itertools.pairwise(heads))]
    words, count = [word.astype(jnp.int32) for word in cut], 1
    for stage in stages:
        total = jnp.sum(jnp.stack(words), axis=tuple(dim + 1 for dim in stage), keepdims=True)
        words = _carry(list(total), word_bits)
        # Words above the first are 0 where the sum of so many |addends| < 2**e cannot reach them.
        count *= math.prod(x.shape[dim] for dim in stage)
        words = words[-(num_words - (-(count.bit_length() + 2) // word_bits)) :]
    # Horner's rule from the lowest word, so that roundings are of bits that count least: all factors are powers of 2.
    value = jnp.zeros(exponent.shape, dtype)
    for word in reversed(words):
        value = value * dtype.type(2.0**-word_bits) + word.astype(dtype)
    value = value * dtype.type(2.0 ** (word_bits * (len(words) - num_words - 1) + 1))
    total = jnp.where(is_finite, value * _power(exponent - 1, dtype), _add_infinities(highest, lowest, dtype))
    return jnp.squeeze(total, tuple(dims))


def _add_infinities(highest: jax.Array, lowest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sum of addends of which some are not finite.

    Args:
        highest: the bits of the largest addend, a NaN or infinity if there is one.
        lowest: those of the largest of the negated addends.
        dtype: of the sum.
    """
    infinity = (2 ** jnp.finfo(dtype).nexp - 1) << jnp.finfo(dtype).nmant
    is_nan = jnp.maximum(highest, lowest) > infinity
    one = jnp.where(highest == infinity, dtype.type(jnp.inf), dtype.type(-jnp.inf))
    return jnp.where(is_nan | (highest == lowest), dtype.type(jnp.nan), one)


def _carry(words: Sequence[jax.Array], word_bits: int) -> list[jax.Array]:
    """Return words of W bits with the same value, one more than these, the highest first."""
    found, carry = [], jnp.zeros_like(words[-1])
    for word in reversed(words):
        total = word + carry
        carry = (total + (1 << (word_bits - 1))) >> word_bits
        found.append(total - (carry << word_bits))
    return [carry, *reversed(found)]


def _power(exponent: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return 2**exponent, a normal number."""
    info = jnp.finfo(dtype)
    biased = exponent.astype(f"int{8 * dtype.itemsize}") + (1 - info.minexp)
    return jax.lax.bitcast_convert_type(biased << info.nmant, dtype)
