"""Sums of floating-point arrays along some dims, with the same bits in any order and however the arrays are sharded.

Addition of floats is not associative, addition of integers is. With 2**e above all |addends| of a sum, each addend is
cut into K *words*, integers of W bits, rounded to nearest at the last one:

    x  =  2**(e + 1) sum over k of word_k 2**(-W (k + 1)),    |word_k| <= 2**(W - 1),    k = 0 .. K - 1

The words are added up as int32: first along the last dims, then, cut into *digits* of fewer bits and with the carries
as digits above them, along the others. With n addends that takes W - 1 + log2(n) bits, so W is what n leaves.

The maximum and sums of integers are the same in any order, and each addend is cut on its own, so what is read from the
digits depends on the addends alone. K words have the bits of float32 and those that N addends may lose: the error is at
most 2**-26 of the largest |addend|, and an ulp of the sum. Less than 2**-126 (2**-1022) counts as nothing. Addends that
are not finite have the sum that floats have: NaN of a NaN or of infinities of both signs, else the infinity.

The integers of a stage are added up by one reduction of several arrays. XLA's compiler for CPUs makes one loop of it,
with all that computes its addends; reductions of one array it rewrites into a tree, for which it writes the words of
all addends to memory (measured: 30 times the time). What is left are a few integers of each sum. Those of all sums of
scalar result are put together and read at once: an operation for 60 arrays takes as long to compile as one for one.

Time: the addends are read twice, once for the maximum. Related: `step.binned_sum` and `step.fixed_point_sum`, for
addends that come one after another.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

INTEGER_BITS: Final = 31
"""Of an int32, without its sign."""
MIN_WORD_BITS: Final = 4
MAX_WORD_BITS: Final = 28
"""Few addends leave more; but the sum of a word, a carry and the half of a word is an int32, too."""
MAX_DIM_SIZE: Final = 2 ** (INTEGER_BITS - 1 - MIN_WORD_BITS)
"""Addends along one dim that words of `MIN_WORD_BITS` bits leave room for."""
GUARD_BITS: Final = 2
"""Bits of the words beyond those of a float and of the number of addends."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Format:
    """How the sums of one shape are held: what the digits of a sum mean, and along which dims they are added up when.

    Attributes:
        inner: dims along which words are added up.
        outer: dims along which digits are added up after the words; may be empty.
        num_words: K, words of an addend.
        word_bits: W, bits of a word.
        digits_per_word: digits of a word after the words are added up. 1: where `outer` is empty, words are the digits.
        num_carries: digits above those of the first word; none where `outer` is empty.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]
    num_words: int
    word_bits: int
    digits_per_word: int
    num_carries: int

    @property
    def digit_bits(self) -> int:
        """Return the bits of a digit."""
        return self.word_bits // self.digits_per_word


@dataclasses.dataclass(frozen=True, slots=True)
class _Integers:
    """What is known of sums before they are floats again.

    Attributes:
        highest: bits of the largest addend; of a NaN or infinity if there is one.
        lowest: bits of the largest negated addend.
        digits: int32 digits of the sums, the highest first.
    """

    highest: jax.Array
    lowest: jax.Array
    digits: list[jax.Array]


jax.tree_util.register_dataclass(_Integers, ["highest", "lowest", "digits"], [])


def sum_exactly(sums: Sequence[tuple[jax.Array, Sequence[int]]]) -> list[jax.Array]:
    """Return sums of arrays along dims, in float32 at least (float64 where an array is).

    Together they are a program of fewer operations than one by one, with the same bits.

    Args:
        sums: pairs of a floating-point array, of at most `MAX_DIM_SIZE` elements along each of the dims, and these
            dims: not negative, each once.
    """
    found: dict[int, jax.Array] = {}
    groups = collections.defaultdict[Any, list[int]](list)
    formats: list[_Format | None] = []
    for index, (x, dims) in enumerate(sums):
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        if not dims or not x.size:
            found[index] = jnp.sum(x.astype(dtype), axis=tuple(dims))
            formats.append(None)
            continue
        form = _choose_format(x.shape, tuple(sorted(dims)), dtype)
        formats.append(form)
        # Sums that are scalars are read together; large ones would only be copied.
        is_scalar = len(dims) == x.ndim
        meaning = dataclasses.replace(form, inner=(), outer=())
        groups[(meaning, dtype) if is_scalar else index].append(index)
    for members in groups.values():
        form = formats[members[0]]
        assert form is not None
        parts = [_add_up(sums[index][0], formats[index]) for index in members]
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
        dtype = jnp.promote_types(sums[members[0]][0].dtype, jnp.float32)
        found |= dict(zip(members, _read(together, form, dtype), strict=True))
    return [found[index] for index in range(len(sums))]


@functools.cache
def _choose_format(shape: tuple[int, ...], dims: tuple[int, ...], dtype: jnp.dtype) -> _Format:
    """Return the format of fewest words, each of which takes time for every addend."""
    bits = jnp.finfo(dtype).nmant + 1 + GUARD_BITS + 1 + _log2(math.prod(shape[dim] for dim in dims))
    found = []
    for split in reversed(range(len(dims))):
        inner, outer = dims[split:], dims[:split]
        num_inner = math.prod(shape[dim] for dim in inner)
        num_outer = math.prod(shape[dim] for dim in outer)
        most = min(INTEGER_BITS - _log2(num_inner), MAX_WORD_BITS)
        room = INTEGER_BITS - 1 - _log2(num_outer)
        if min(most, room) < MIN_WORD_BITS:
            continue
        digits_per_word = -(-most // room) if outer else 1
        word_bits = most // digits_per_word * digits_per_word
        num_carries = -(-(_log2(num_inner) + 2) // (word_bits // digits_per_word)) if outer else 0
        num_words = -(-bits // word_bits)
        found.append(_Format(inner, outer, num_words, word_bits, digits_per_word, num_carries))
    return min(found, key=lambda form: form.num_words)


def _log2(number: int) -> int:
    return (number - 1).bit_length()


@functools.partial(jax.jit, static_argnames="form")
def _add_up(x: jax.Array, form: _Format) -> _Integers:
    """Return the digits of the sums; of arrays of one shape this is traced and lowered once."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, info = x.astype(dtype), jnp.finfo(dtype)
    integer = np.dtype(f"int{8 * dtype.itemsize}")
    dims = form.outer + form.inner
    # The largest x and -x as integers: NaN is larger than infinity, both are larger than all others.
    bits, lowest_integer = jax.lax.bitcast_convert_type(x, integer), jnp.iinfo(integer).min
    highest, lowest = _reduce(jnp.maximum, lowest_integer, [bits, bits ^ lowest_integer], dims)
    exponent = jnp.expand_dims(_find_exponent(highest, lowest, dtype), dims)
    # 2**(2 - e) is a normal number, though not 2**-e.
    rest = jnp.where(jnp.abs(x) >= info.smallest_normal, x, 0) * _power(2 - exponent, dtype)
    rest = rest * dtype.type(2.0 ** (form.word_bits - 3))
    words = []
    for _ in range(form.num_words):
        # Differences of a float and the next integer, and products with powers of 2, are exact.
        word = jnp.rint(rest)
        words.append(word.astype(jnp.int32))
        rest = (rest - word) * dtype.type(2.0**form.word_bits)
    words = _reduce(jnp.add, 0, words, form.inner)
    if not form.outer:
        return _Integers(highest, lowest, words)
    return _Integers(highest, lowest, _reduce(jnp.add, 0, _cut(words, form), form.outer))


def _reduce(
    operation: Callable[..., jax.Array], initial: int, arrays: Sequence[jax.Array], dims: tuple[int, ...]
) -> list[jax.Array]:
    """Return arrays reduced along dims, by one reduction of all of them."""

    def combine(left: Any, right: Any) -> tuple[jax.Array, ...]:  # noqa: ANN401 - tuples of numbers
        return tuple(map(operation, left, right))

    initials = tuple(np.array(initial, array.dtype) for array in arrays)
    return list(jax.lax.reduce(tuple(arrays), initials, combine, dims))


def _cut(words: Sequence[jax.Array], form: _Format) -> list[jax.Array]:
    """Return the digits of words, the highest first; all are at least 0, but the first."""
    digit_bits, found, carry = form.digit_bits, list[jax.Array](), jnp.zeros_like(words[-1])
    for word in reversed(words):
        total = word + carry
        found += [_get_digit(total, index, digit_bits) for index in range(form.digits_per_word)]
        carry = total >> form.word_bits
    found += [_get_digit(carry, index, digit_bits) for index in range(form.num_carries - 1)]
    return [carry >> (digit_bits * (form.num_carries - 1)), *reversed(found)]


def _get_digit(word: jax.Array, index: int, digit_bits: int) -> jax.Array:
    return (word >> (digit_bits * index)) & ((1 << digit_bits) - 1)


def _find_exponent(highest: jax.Array, lowest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return e, of which 2**(2 - e) and 2**(e - 1) are normal numbers; 1 above the least where not all is finite."""
    info = jnp.finfo(dtype)
    biased = jnp.maximum(highest, lowest) >> info.nmant
    return jnp.where(_is_finite(highest, lowest, dtype), jnp.maximum(biased, 1), 1) + info.minexp


def _is_finite(highest: jax.Array, lowest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    info = jnp.finfo(dtype)
    return jnp.maximum(highest, lowest) >> info.nmant < 2**info.nexp - 1


def _read(integers: _Integers, form: _Format, dtype: jnp.dtype) -> jax.Array:
    """Return the sums as floats."""
    digit_bits, num_carries = form.digit_bits, form.num_carries
    exponent = _find_exponent(integers.highest, integers.lowest, dtype)
    # Horner's rule from the lowest digit, so that roundings are of bits that count least: all factors are powers of 2.
    value = jnp.zeros(exponent.shape, dtype)
    for digit in reversed(_carry(integers.digits, digit_bits)):
        value = value * dtype.type(2.0**-digit_bits) + digit.astype(dtype)
    value = value * dtype.type(2.0 ** (digit_bits * num_carries + 2))
    return jnp.where(
        _is_finite(integers.highest, integers.lowest, dtype),
        value * _power(exponent - 1, dtype),
        _add_infinities(integers.highest, integers.lowest, dtype),
    )


def _add_infinities(highest: jax.Array, lowest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the sum of addends of which some are not finite."""
    infinity = (2 ** jnp.finfo(dtype).nexp - 1) << jnp.finfo(dtype).nmant
    is_nan = jnp.maximum(highest, lowest) > infinity
    one = jnp.where(highest == infinity, dtype.type(jnp.inf), dtype.type(-jnp.inf))
    return jnp.where(is_nan | (highest == lowest), dtype.type(jnp.nan), one)


def _carry(digits: Sequence[jax.Array], digit_bits: int) -> list[jax.Array]:
    """Return digits with the same value, of both signs so that a small sum has small ones; one more, highest first."""
    found, carry = [], jnp.zeros_like(digits[-1])
    for digit in reversed(digits):
        total = digit + carry
        carry = (total + (1 << (digit_bits - 1))) >> digit_bits
        found.append(total - (carry << digit_bits))
    return [carry, *reversed(found)]


def _power(exponent: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return 2**exponent, a normal number."""
    info = jnp.finfo(dtype)
    biased = exponent.astype(f"int{8 * dtype.itemsize}") + (1 - info.minexp)
    return jax.lax.bitcast_convert_type(biased << info.nmant, dtype)
