"""A permutation of range(n) that is computed, not stored: O(1) memory for any n.

A Feistel network permutes [0, 2**bits), the first power of two that is at least n, whatever its round function is;
positions that are mapped outside of range(n) are mapped again until they are inside (cycle walking: Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002). That takes fewer than two passes on average. An odd number
of bits has halves that differ by one bit; equal halves would need a power of four, and twice the passes. The round
function is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014). This is a shuffle, not a cipher.

The order of the training data depends on every constant here: the tests pin it, and it may never change. That is why
this is not Grain's `shuffle`: a job that is resumed with a newer version must go on with the same order, and Grain does
not guarantee its order across versions, though its tests keep it in practice (https://github.com/google/grain/pull/1250).
A Grain dataset is read in the order that it has; see `grain_data`.
"""

import numpy as np
import numpy.typing as npt

from resilient_jax.data.microbatch_rows import check_integers
from resilient_jax.errors import DataError

ROUNDS = 12
"""Four make a good shuffle of a large range (Luby and Rackoff); a range of five needs twelve to make all orders equally
likely."""
WEYL_INCREMENT = 0x9E3779B97F4A7C15
"""SplitMix64's step: 2**64 divided by the golden ratio, made odd."""
MAX_UINT64 = 2**64 - 1
MAX_LENGTH = 2**62
"""Positions are int64."""

Uint64Array = npt.NDArray[np.uint64]


def permute(positions: npt.ArrayLike, n: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return where the permutation of range(n) for (seed, epoch) maps each of the positions.

    A pure function of its arguments, the same on every machine and in every version.

    Args:
        positions: integers in range(n), one-dimensional.
        n: length of the range, from 1 to 2**62.
        seed: seed from 0 to 2**64 - 1.
        epoch: number of the epoch, from 0; each epoch has its own order.

    Returns:
        int64, as many as there are positions. For all of range(n) together: each of range(n) once.

    Raises:
        DataError: a number is out of its range, or not an integer.

    >>> permute(range(6), 6, seed=0, epoch=0).tolist()
    [3, 5, 4, 1, 0, 2]
    """
    check_integers(n=n, seed=seed, epoch=epoch)
    values = np.array(positions, np.int64, ndmin=1)
    if not 1 <= n <= MAX_LENGTH or (values.size and not 0 <= values.min() <= values.max() < n):
        raise DataError(f"permute: found positions {values} and n = {n}, expected positions from 0 to n - 1")
    if not 0 <= seed <= MAX_UINT64 or not 0 <= epoch <= MAX_UINT64:
        raise DataError(f"permute: found seed {seed} and epoch {epoch}, expected both from 0 to 2**64 - 1")
    keys = _round_keys(seed, epoch)
    bits = (n - 1).bit_length()
    words = _encipher(values.astype(np.uint64), bits, keys)
    while (outside := words >= n).any():
        words[outside] = _encipher(words[outside], bits, keys)
    return words.astype(np.int64)


def _encipher(words: Uint64Array, bits: int, keys: Uint64Array) -> Uint64Array:
    """Permute [0, 2**bits): each round changes one half as a function of the other, so it is invertible."""
    # word = left 2^right_bits + right. A pair of rounds: left ^= f(right + key), right ^= f(left + next key), f being
    # the low bits of `mix_words`. A round is its own inverse, whatever f is.
    right_bits = bits // 2
    left_bits = bits - right_bits
    shift, right_mask, left_mask = (np.uint64(n) for n in (right_bits, 2**right_bits - 1, 2**left_bits - 1))
    left, right = words >> shift, words & right_mask
    for to_left, to_right in keys.reshape(-1, 2):
        left = left ^ (mix_words(right + to_left) & left_mask)
        right = right ^ (mix_words(left + to_right) & right_mask)
    return left << shift | right


def _round_keys(seed: int, epoch: int) -> Uint64Array:
    # Mixed one after the other: with `seed + epoch`, epoch 1 of seed 0 would be epoch 0 of seed 1.
    key = mix_words(np.array([seed], np.uint64))
    key = mix_words(key + np.array([epoch], np.uint64))
    return mix_words(key + np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(WEYL_INCREMENT))


def mix_words(words: Uint64Array) -> Uint64Array:
    """Apply SplitMix64's finalizer, a permutation of the 64-bit words. uint64[n] with n >= 1 to uint64[n]."""
    # Arrays wrap around silently, as this needs; scalars would warn.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
