"""The comparison of arrays from a committed state, a snapshot or a checkpoint with the wanted tree."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from resilient_jax.errors import StateError
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.sharding.raveled_array import RaveledArray, is_raveled
from resilient_jax.state.flat_state import ShardingRule, is_random_key

Tree = TypeVar("Tree")
PathFormat = Callable[[Any], str]
"""Formats a path of `jax.tree_util` in the manner of the found arrays' paths."""
MAX_SHOWN: Final = 3
"""Differences that an error message lists."""


class MatchedLeaf(NamedTuple):
    """An array that is to be filled in.

    Attributes:
        spec: of the array.
        sharding: of the array, or of the data of a random key, or of the vector of a raveled array.
        is_raveled: whether it is wanted as a vector.
    """

    spec: LeafSpec
    sharding: Sharding | None
    is_raveled: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MatchedTree(Generic[Tree]):
    """The wanted tree, with the spec and the sharding of each array that is to be filled in.

    Attributes:
        leaves: in the tree's order.
        tree: the wanted tree of abstract arrays, with the found strings.
    """

    leaves: tuple[MatchedLeaf, ...]
    tree: Tree

    def build(self, arrays: Sequence[jax.Array | np.ndarray]) -> Tree:
        """Return the tree with these arrays, in the order of `leaves`: raw data of random keys, vectors of raveled
        arrays."""
        values = iter(_wrap(*pair) for pair in zip(self.leaves, arrays, strict=True))
        return jax.tree_util.tree_map(
            lambda leaf: leaf if isinstance(leaf, str) else next(values), self.tree, is_leaf=is_raveled
        )


def _wrap(leaf: MatchedLeaf, array: jax.Array | np.ndarray) -> Any:  # noqa: ANN401 - an array of any kind
    if leaf.is_raveled:
        return RaveledArray(array, leaf.spec.shape)
    if leaf.spec.key_impl is not None:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.spec.key_impl)
    return array


def make_leaf_spec(path: str, leaf: Any) -> LeafSpec:  # noqa: ANN401 - an array, or an abstract one
    """Return the spec of a leaf; for a random key, the spec of its raw data."""
    key_impl = None
    if is_random_key(leaf):
        found: list[str] = []

        def unwrap(key: jax.Array) -> jax.Array:
            found.append(str(jax.random.key_impl(key)))
            return jax.random.key_data(key)

        # Traced, because an abstract key has no data whose shape could be read.
        leaf = jax.eval_shape(unwrap, leaf)
        (key_impl,) = found
    return LeafSpec(path, np.dtype(leaf.dtype).name, tuple(leaf.shape), key_impl)


def list_leaf_specs(abstract: Any, format_path: PathFormat = jax.tree_util.keystr) -> list[LeafSpec]:  # noqa: ANN401
    """Return the specs of a tree's arrays, in the tree's order; strings are left out."""
    return [
        make_leaf_spec(format_path(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract, is_leaf=is_raveled)
        if not isinstance(leaf, str)
    ]


def match_tree(
    abstract: Tree,
    found: Sequence[LeafSpec],
    strings: Mapping[str, str],
    sharding: ShardingRule | None,
    *,
    source: str,
    expected: str,
    format_path: PathFormat = jax.tree_util.keystr,
) -> MatchedTree[Tree]:
    """Return the wanted tree with the found strings, and the spec and sharding of each of its arrays.

    Args:
        abstract: the wanted tree of abstract arrays and strings.
        found: specs of the found arrays, in any order.
        strings: the found strings, by path.
        sharding: of each array, by its path as `jax.tree_util.keystr` writes it and its abstract value.
        source: for the error: where the arrays are from.
        expected: for the error: what was expected, and what to do.
        format_path: how the paths of `found` are formatted.

    Raises:
        StateError: a path, shape, dtype or key implementation differs; names the first that do.
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(abstract, is_leaf=is_raveled)
    wanted = list_leaf_specs(abstract, format_path)
    wanted_strings = {format_path(path) for path, leaf in paths_and_leaves if isinstance(leaf, str)}
    differences = _find_differences(wanted, found) + _find_other_paths(wanted_strings, strings.keys())
    if differences:
        count = f" ({len(differences)} differences)" if len(differences) > MAX_SHOWN else ""
        raise StateError(f"{source}: found {'; '.join(differences[:MAX_SHOWN])}{count}, expected {expected}")
    arrays = [(path, leaf) for path, leaf in paths_and_leaves if not isinstance(leaf, str)]
    leaves = tuple(
        MatchedLeaf(
            spec,
            sharding(jax.tree_util.keystr(path), leaf) if callable(sharding) else sharding,
            is_raveled(leaf),
        )
        for spec, (path, leaf) in zip(wanted, arrays, strict=True)
    )
    tree = structure.unflatten([strings.get(format_path(path), leaf) for path, leaf in paths_and_leaves])
    return MatchedTree(leaves, tree)


def _find_differences(wanted: Sequence[LeafSpec], found: Sequence[LeafSpec]) -> list[str]:
    wanted_by_path = {spec.path: spec for spec in wanted}
    found_by_path = {spec.path: spec for spec in found}
    return _find_other_paths(wanted_by_path.keys(), found_by_path.keys()) + [
        f"{found_by_path[path]} at {path} instead of {spec}"
        for path, spec in wanted_by_path.items()
        if path in found_by_path and found_by_path[path] != spec
    ]


def _find_other_paths(wanted: Any, found: Any) -> list[str]:  # noqa: ANN401 - two sets of paths
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    return [f"no {path}" for path in missing] + [f"{path}, which is not in it" for path in unknown]
