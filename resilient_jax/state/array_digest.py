"""Digests that a host makes of arrays: of all their bits, with names, dtypes and shapes.

`state_digest` makes those that devices make, of which sums over shards are digests, too.
"""

import hashlib
from typing import Any, Protocol

import jax
import numpy as np

from resilient_jax.state.leaf_kinds import is_random_key


class Digest(Protocol):
    """A digest of `hashlib`."""

    def update(self, data: memoryview | bytes, /) -> None:
        """Add bytes to the digest."""


def add_array(digest: Digest, name: str, value: Any) -> None:  # noqa: ANN401 - what NumPy can make an array of
    """Add an array, or a scalar, to a digest; of random keys their data.

    Args:
        digest: digest of the arrays before this one.
        name: in a state or a batch.
        value: complete on this host, of any dtype without Python objects.
    """
    has_keys = isinstance(value, jax.Array) and is_random_key(value)
    array = np.asarray(jax.random.key_data(value) if has_keys else value)
    digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
    # As bytes, since bfloat16 and its kin have no buffers of their own; in the order of indexes, whatever memory's is.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def digest_tree(tree: Any) -> str:  # noqa: ANN401 - any pytree
    """Return the SHA-256, in hex, of a tree's elements with their paths, dtypes and shapes.

    Two digests are equal only if the trees are, bit for bit.

    Args:
        tree: arrays or scalars, each complete on this host.

    >>> import numpy as np
    >>> digest_tree({"a": np.zeros(2)}) == digest_tree({"a": np.zeros(2)})
    True
    >>> digest_tree({"a": np.zeros(2)}) == digest_tree({"b": np.zeros(2)})
    False
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        add_array(found, jax.tree_util.keystr(path), leaf)
    return found.hexdigest()
