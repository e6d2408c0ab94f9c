"""Digests of all the bits that a host has of a state, computed on its devices: cheap enough to compare while training.

The bits of each element are mixed with its index, and the mixtures are added modulo 2**32, in two lanes. Integer sums
do not depend on their order, so equal states have equal digests on any number and kind of devices. It finds damage and
mistakes, not an attacker.

Of the leaves that a host has completely there is one digest, and one of its shards of the others. Each comes with a
*key*, which says what it is the digest of: hosts with equal keys have copies of the same elements.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.state.flat_state import FlatLeaf, FlatState
from resilient_jax.state.index_box import IndexBox, box_from_index, whole_box

DIGEST_WORDS: Final = 2
"""int32 words of a digest."""
NO_DIGEST: Final = (0,) * DIGEST_WORDS
"""In place of the digest of what is not compared."""
STATE_DIGEST_WORDS: Final = 2 * (1 + DIGEST_WORDS)
"""int32 words of a state's digests: key and digest of its complete leaves, key and digest of its shards of others."""
KEY_OF_COMPLETE_STATE: Final = 1


def make_no_digest() -> np.ndarray:
    """Return `NO_DIGEST` as an array, int32[DIGEST_WORDS]."""
    return np.array(NO_DIGEST, np.int32)


def make_no_state_digest() -> np.ndarray:
    """Return int32[STATE_DIGEST_WORDS], in place of the digests of a state that is not compared."""
    return np.zeros(STATE_DIGEST_WORDS, np.int32)


def digest_state(state: FlatState) -> np.ndarray:
    """Return int32[STATE_DIGEST_WORDS], the digests of what this host has of a state; zeros if it was donated."""
    values = [leaf.value for leaf in state.leaves]
    if any(isinstance(value, jax.Array) and value.is_deleted() for value in values):
        return make_no_state_digest()
    complete, shards = _Part(), _Part()
    # All are dispatched before the first is read.
    for leaf in map(_view_words, state.leaves):
        parts = _list_parts(leaf.value)
        if sum(box.size for box in parts) < math.prod(leaf.value.shape):
            shards.add(leaf, parts, str(sorted(parts)))
        else:
            complete.add(leaf, parts, "")
    if not shards.digests:
        # Hosts that have everything are compared, whatever each has made of the state.
        complete.key = KEY_OF_COMPLETE_STATE
    return np.concatenate([complete.read(), shards.read()])


class _Part:
    """The digest of some leaves, or of shards of them, and its key."""

    def __init__(self) -> None:
        self.key = 0
        self.digests: list[Any] = []

    def add(self, leaf: FlatLeaf, parts: Mapping[IndexBox, Any], which: str) -> None:
        seed = _make_seed(leaf)
        self.key = zlib.crc32(f"{seed} {which}".encode(), self.key)
        self.digests += [_digest_part(part, box, leaf.value.shape, seed) for box, part in parts.items()]

    def read(self) -> np.ndarray:
        """Return int32[1 + DIGEST_WORDS]."""
        lanes = np.array(jax.device_get(self.digests), np.uint32).reshape(-1, DIGEST_WORDS)
        return np.array([self.key, *lanes.sum(axis=0, dtype=np.uint32)], np.uint32).view(np.int32)


def find_differing_copies(digests: np.ndarray) -> tuple[list[int], bool]:
    """Return which hosts have other bits than most that have the same elements, and whether there are most everywhere.

    Args:
        digests: int32[hosts, STATE_DIGEST_WORDS].
    """
    differing: set[int] = set()
    has_majority = True
    for part in np.split(digests, 2, axis=1):
        for key in {int(key) for key in part[:, 0]}:
            hosts = np.flatnonzero(part[:, 0] == key)
            found, is_clear = find_differing(part[hosts, 1:].tolist())
            differing.update(int(hosts[index]) for index in found)
            has_majority &= is_clear
    return sorted(differing), has_majority


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


def _view_words(leaf: FlatLeaf) -> FlatLeaf:
    """Return a leaf whose elements a device can take: of 64 bits in host memory, which it may not have, the words."""
    value = leaf.value
    if not isinstance(value, np.ndarray) or jax.dtypes.canonicalize_dtype(value.dtype) == value.dtype:
        return leaf
    # A dim first, since a scalar has none that could be divided.
    words = np.ascontiguousarray(value)[..., np.newaxis].view(np.uint32)
    return dataclasses.replace(leaf, path=f"{leaf.path} {value.dtype}", value=words)


def _list_parts(value: jax.Array | np.ndarray) -> dict[IndexBox, Any]:
    """Return the distinct shards that this host has of an array, of equal ones that on its first device."""
    if isinstance(value, np.ndarray):
        return {whole_box(value.shape): value}
    shards = reversed(value.addressable_shards)
    return {box_from_index(shard.index, value.shape): shard.data for shard in shards}


def _digest_part(part: Any, box: IndexBox, shape: tuple[int, ...], seed: int) -> Any:  # noqa: ANN401 - an array
    """Return uint32[DIGEST_WORDS] of some elements of an array of a shape; of all, the sum over its shards."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    # The indexes are arguments, so all shards of a shape have one program.
    wrapped = [number % 2**32 for number in (*strides, first, seed)]
    # On one device, else there would be a program for each.
    return _mix_part()(jax.device_put(part, jax.local_devices()[0]), np.array(wrapped, np.uint32))


@functools.cache
def _mix_part() -> Any:  # noqa: ANN401 - a jitted function
    """Return the program of a shard. Made at its first use: this module is imported where no JAX may run."""

    @jax.jit
    def mix(part: jax.Array, numbers: jax.Array) -> jax.Array:
        words, dims = _to_words(part), part.ndim
        # The index in the complete array, modulo 2**32, without a reshape.
        index = jnp.broadcast_to(numbers[dims], words.shape)
        for dim in range(dims):
            index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * numbers[dim]
        if words.ndim > dims:  # an element has several words
            index *= jnp.uint32(words.shape[-1])
            index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dims)
        seed = numbers[dims + 1]
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
