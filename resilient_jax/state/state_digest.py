"""A digest of all the bits of a state, computed on a device: cheap enough to compare hosts while they train.

The bits of each element are mixed with its index, and the mixtures are added modulo 2**32, in two lanes. Integer sums
do not depend on their order, so equal states have equal digests on any number and kind of devices. It finds damage and
mistakes, not an attacker.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.state.flat_state import FlatLeaf, FlatState, assemble_array

DIGEST_WORDS: Final = 2
"""int32 words of a digest."""
NO_DIGEST: Final = (0,) * DIGEST_WORDS
"""In place of the digest of what is not compared."""


def make_no_digest() -> np.ndarray:
    """Return `NO_DIGEST` as an array, int32[DIGEST_WORDS]."""
    return np.array(NO_DIGEST, np.int32)


def digest_state(state: FlatState) -> np.ndarray:
    """Return int32[DIGEST_WORDS], the digest of a state of which this host has everything; of others `NO_DIGEST`."""
    values = [leaf.value for leaf in state.leaves]
    is_donated = any(isinstance(value, jax.Array) and value.is_deleted() for value in values)
    if is_donated or not state.is_complete:
        return make_no_digest()
    # All are dispatched before the first is read.
    found = [_mix_leaf()(_get_whole(leaf), np.uint32(_make_seed(leaf))) for leaf in state.leaves]
    lanes = np.array(jax.device_get(found), np.uint32).reshape(-1, DIGEST_WORDS)
    return lanes.sum(axis=0, dtype=np.uint32).view(np.int32)


def find_differing(digests: Sequence[Sequence[int]]) -> tuple[list[int], bool]:
    """Return which digests differ, by index, and whether most are equal, so that these are the wrong ones.

    Without a majority all are returned. `NO_DIGEST` differs from none.

    >>> find_differing([(1, 2), (1, 2), (3, 4)])
    ([2], True)
    >>> find_differing([(1, 2), (3, 4)])
    ([0, 1], False)
    """
    compared = [index for index, digest in enumerate(digests) if tuple(digest) != NO_DIGEST]
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in compared:
        groups.setdefault(tuple(digests[index]), []).append(index)
    largest = max(groups.values(), key=len, default=[])
    if 2 * len(largest) <= len(compared) and len(groups) > 1:
        return compared, False
    return [index for index in compared if index not in largest], True


def _make_seed(leaf: FlatLeaf) -> int:
    return zlib.crc32(f"{leaf.path} {leaf.value.dtype} {leaf.value.shape} {leaf.key_impl}".encode())


def _get_whole(leaf: FlatLeaf) -> Any:  # noqa: ANN401 - an array on one device
    """Return all of an array on one device: so the program does not depend on how the state is sharded."""
    value, device = leaf.value, jax.local_devices()[0]
    if isinstance(value, jax.Array):
        if value.is_fully_replicated:
            shards = {shard.device: shard.data for shard in value.addressable_shards}
            return shards.get(device, next(iter(shards.values())))
        if not value.is_fully_addressable:  # sharded over each host's devices, with a copy on every host
            value = assemble_array(leaf.path, value)
    return jax.device_put(value, device)


@functools.cache
def _mix_leaf() -> Any:  # noqa: ANN401 - a jitted function
    """Return the program of a leaf. Made at its first use: this module is imported where no JAX may run."""

    @jax.jit
    def mix(leaf: jax.Array, seed: jax.Array) -> jax.Array:
        words = _to_words(leaf)
        # The index in the array, modulo 2**32, without a reshape.
        strides = [math.prod(words.shape[dim + 1 :]) for dim in range(words.ndim)]
        index = functools.reduce(
            jnp.add,
            [
                jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
                for dim, stride in enumerate(strides)
            ],
            jnp.zeros(words.shape, jnp.uint32),
        )
        # Odd numbers and shifts of well-known integer hashes (xxHash32, MurmurHash3).
        mixed = words * jnp.uint32(0x9E3779B1) + index * jnp.uint32(0x85EBCA77) + seed
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE3D)
        mixed = mixed ^ (mixed >> 13)
        again = (mixed ^ (mixed >> 16)) * jnp.uint32(0x27D4EB2F)
        return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(again, dtype=jnp.uint32)])

    return mix


def _to_words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array's elements as uint32, with one more dim where an element has several words."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    if leaf.dtype.itemsize >= np.dtype(np.uint32).itemsize:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    bits = jnp.finfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.floating) else 8 * leaf.dtype.itemsize
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint32)
