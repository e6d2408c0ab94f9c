"""A digest of all the bits of a tree."""

import hashlib
from typing import Any

import jax

from resilient_jax.state.array_digest import add_array


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
