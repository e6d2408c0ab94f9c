"""The comparison of arrays from a committed state, a snapshot or a checkpoint with the wanted tree."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from resilient_jax.errors import StateError
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.sharding.raveled_array import RaveledArray, is_raveled
from resilient_jax.state.flat_state import ShardingRule
from resilient_jax.state.leaf_kinds import (
    HOST_KINDS,
    AbstractHostLeaf,
    find_abstract_kind,
    find_program_dtype,
    give_back,
    is_random_key,
    place_spec,
    unwrap_key,
)

Tree = TypeVar("Tree")
PathFormat = Callable[[Any], str]
"""Formats a path of `jax.tree_util` in the manner of the found arrays' paths."""
MAX_SHOWN: Final = 3
"""Differences that an error message lists."""


class MatchedLeaf(NamedTuple):
    """An array that is to be filled in.

    Attributes:
        spec: spec of the array as it is given back, with the dtype and kind that were found.
        sharding: sharding of the array, or of the data of a random key, or of the vector of a raveled array; None for a
            leaf in host memory.
        is_raveled: whether the array is wanted as a vector.
    """

    spec: LeafSpec
    sharding: Sharding | None
    is_raveled: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MatchedTree(Generic[Tree]):
    """The wanted tree, with the spec and the sharding of each array that is to be filled in.

    Attributes:
        leaves: leaves in the tree's order.
        tree: the wanted tree of abstract arrays, with the found strings.
    """

    leaves: tuple[MatchedLeaf, ...]
    tree: Tree

    def build(self, arrays: Sequence[jax.Array | np.ndarray]) -> Tree:
        """Return the tree with these arrays, in the order of `leaves`: raw data of random keys, vectors of raveled
        arrays."""
        values = iter(_give_back(*pair) for pair in zip(self.leaves, arrays, strict=True))
        return jax.tree_util.tree_map(
            lambda leaf: leaf if isinstance(leaf, str) else next(values), self.tree, is_leaf=is_raveled
        )


def _give_back(leaf: MatchedLeaf, array: jax.Array | np.ndarray) -> Any:  # noqa: ANN401 - a leaf of any kind
    found = give_back(leaf.spec, array)
    return RaveledArray(found, leaf.spec.shape) if leaf.is_raveled else found


def make_leaf_spec(path: str, leaf: Any) -> LeafSpec:  # noqa: ANN401 - an array, or an abstract one
    """Return the spec of a leaf; for a random key, the spec of its raw data."""
    key_impl = None
    if is_random_key(leaf):
        found: list[str] = []

        def unwrap(key: jax.Array) -> jax.Array:
            data, impl = unwrap_key(key)
            found.append(impl or "")
            return data

        # Traced, because an abstract key has no data whose shape could be read.
        leaf = jax.eval_shape(unwrap, leaf)
        (key_impl,) = found
    kind = find_abstract_kind(leaf.vector if is_raveled(leaf) else leaf)
    return LeafSpec(path, np.dtype(leaf.dtype).name, tuple(leaf.shape), key_impl, kind)


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
    is_initial: bool = False,
) -> MatchedTree[Tree]:
    """Return the wanted tree with the found strings, and the spec and sharding of each of its arrays.

    A leaf may have another kind than the wanted one, such as an array in place of a Python number: it is given back as
    it was found. Only what a program would see must be the same.

    Args:
        abstract: the wanted tree of abstract arrays and strings.
        found: specs of the found arrays, in any order.
        strings: the found strings, by path.
        sharding: sharding of each array, by its path as `jax.tree_util.keystr` writes it and its abstract value.
        source: where the arrays are from, for the error.
        expected: what was expected, and what to do, for the error.
        is_initial: whether leaves in host memory that have a sharding are placed by that sharding, as before step 0.
            Later such leaves are where the script has put them.

    Raises:
        StateError: a path, shape, dtype or key implementation differs; the message names the first. A leaf cannot be
            placed without the loss of bits.
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(abstract, is_leaf=is_raveled)
    wanted = list_leaf_specs(abstract, format_path)
    wanted_strings = {format_path(path) for path, leaf in paths_and_leaves if isinstance(leaf, str)}
    differences = _find_differences(wanted, found) + _find_other_paths(wanted_strings, strings.keys())
    if differences:
        count = f" ({len(differences)} differences)" if len(differences) > MAX_SHOWN else ""
        raise StateError(f"{source}: found {'; '.join(differences[:MAX_SHOWN])}{count}, expected {expected}")
    found_by_path = {spec.path: spec for spec in found}
    arrays = [(path, leaf) for path, leaf in paths_and_leaves if not isinstance(leaf, str)]
    leaves = tuple(
        _match_leaf(found_by_path[spec.path], leaf, _choose_sharding(sharding, path, leaf), is_initial)
        for spec, (path, leaf) in zip(wanted, arrays, strict=True)
    )
    tree = structure.unflatten([strings.get(format_path(path), leaf) for path, leaf in paths_and_leaves])
    return MatchedTree(leaves, tree)


def _choose_sharding(rule: ShardingRule | None, path: Any, leaf: Any) -> Sharding | None:  # noqa: ANN401 - of a tree
    if not callable(rule):
        return rule
    # A rule sees shapes and dtypes, whatever the leaf is in host memory.
    return rule(
        jax.tree_util.keystr(path), leaf.make_placed() if isinstance(leaf, AbstractHostLeaf) else leaf
    )


def _match_leaf(
    found: LeafSpec,
    leaf: Any,  # noqa: ANN401 - an abstract leaf
    sharding: Sharding | None,
    is_initial: bool,
) -> MatchedLeaf:
    # A vector is made to be placed, even where it was not given a sharding.
    if is_raveled(leaf) or (is_initial and sharding is not None):
        found = place_spec(found)
    return MatchedLeaf(found, None if found.kind in HOST_KINDS else sharding, is_raveled(leaf))


def _find_differences(wanted: Sequence[LeafSpec], found: Sequence[LeafSpec]) -> list[str]:
    wanted_by_path = {spec.path: spec for spec in wanted}
    found_by_path = {spec.path: spec for spec in found}
    return _find_other_paths(wanted_by_path.keys(), found_by_path.keys()) + [
        f"{found_by_path[path]} at {path} instead of {spec}"
        for path, spec in wanted_by_path.items()
        if path in found_by_path and _describe(found_by_path[path]) != _describe(spec)
    ]


def _describe(spec: LeafSpec) -> tuple[Any, ...]:
    """Return what a program sees of a leaf."""
    return find_program_dtype(spec), spec.shape, spec.key_impl


def _find_other_paths(wanted: Any, found: Any) -> list[str]:  # noqa: ANN401 - two sets of paths
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    return [f"no {path}" for path in missing] + [f"{path}, which is not in it" for path in unknown]
