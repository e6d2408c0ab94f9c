"""How much of a state this host has, for the event `state.sharded`."""

from typing import Any, NamedTuple

import jax

from resilient_jax.sharding.raveled_array import is_raveled
from resilient_jax.state.leaf_kinds import is_random_key


class ShardSizes(NamedTuple):
    """Bytes of a state.

    Attributes:
        bytes_here: bytes of the distinct shards on this host, padding included.
        bytes_everywhere: bytes of the arrays that this host has complete, which are not sharded.
    """

    bytes: int
    bytes_here: int
    bytes_everywhere: int


def measure_shards(state: Any) -> ShardSizes:  # noqa: ANN401 - any pytree
    """Return how much of a state, of which leaves may be raveled, this host has."""
    leaves = jax.tree.leaves(state, is_leaf=is_raveled)
    here = [_count_local_bytes(leaf) for leaf in leaves]
    sizes = [_unwrap(leaf).nbytes for leaf in leaves]
    whole = sum(own for own, size in zip(here, sizes, strict=True) if own == size)
    return ShardSizes(sum(sizes), sum(here), whole)


def _unwrap(leaf: Any) -> Any:  # noqa: ANN401 - an array of any kind
    """Return the raw data of a random key; other leaves as they are."""
    return leaf if is_raveled(leaf) or not is_random_key(leaf) else jax.random.key_data(leaf)


def _count_local_bytes(leaf: Any) -> int:  # noqa: ANN401 - an array of any kind
    """Return the bytes of the distinct shards of a leaf on this host, padding included."""
    array = leaf.vector if is_raveled(leaf) else _unwrap(leaf)
    pieces = {
        tuple(
            cut.indices(size) for cut, size in zip(shard.index, array.shape, strict=True)
        ): shard.data.nbytes
        for shard in array.addressable_shards
    }
    return sum(pieces.values())
