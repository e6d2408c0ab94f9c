"""A checkpoint's leaves in the tree that the recipe wants, where its leaves shall lie."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp

from resilient_jax.checkpoint.array_reads import ArrayRead, is_empty
from resilient_jax.checkpoint.stored_tree import PathKey, StoredLeaf, Tree, make_orbax_path
from resilient_jax.errors import StateError
from resilient_jax.state.flat_state import ShardingRule, is_random_key

REMEDY: Final = "Train with the recipe that saved it, or use another directory"
SHOWN: Final = 3
"""Differences in an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class MatchedCheckpoint:
    """A checkpoint that fits, still without its numbers.

    Attributes:
        arrays: that are to come, in the order of the wanted leaves.
        abstract: the wanted tree.
    """

    arrays: tuple[ArrayRead, ...]
    abstract: Tree

    def build(self, found: Sequence[Any]) -> Tree:
        """The wanted tree with these arrays, in the order of `arrays`. The raw data of random keys becomes keys."""
        leaves, structure = jax.tree.flatten(self.abstract)
        return jax.tree.unflatten(
            structure, [_from_raw(leaf, array) for leaf, array in zip(leaves, found, strict=True)]
        )


def match_checkpoint(
    leaves: Iterable[StoredLeaf], abstract: Tree, sharding: ShardingRule | None, folder: Path
) -> MatchedCheckpoint:
    """Which stored array goes where.

    Args:
        leaves: of the checkpoint.
        abstract: the state's shapes.
        sharding: where each leaf shall lie; that of a key's data is the key's own. None: in host memory.
        folder: of the checkpoint, for the error.

    Raises:
        StateError: it is another state; names leaves.
    """
    found = {_join(leaf.path): leaf for leaf in leaves if not leaf.empty_container}
    wanted = jax.tree_util.tree_leaves_with_path(abstract)
    raw = {_join(make_orbax_path(path)): _raw(leaf) for path, leaf in wanted}
    _check(folder, {name: leaf for name, leaf in raw.items() if not is_empty(leaf)}, found)
    return MatchedCheckpoint(
        tuple(
            ArrayRead(
                make_orbax_path(path),
                raw[_join(make_orbax_path(path))],
                sharding(jax.tree_util.keystr(path), leaf) if callable(sharding) else sharding,
                is_stored=not is_empty(leaf),
            )
            for path, leaf in wanted
        ),
        abstract,
    )


def _check(folder: Path, wanted: Mapping[str, Any], found: Mapping[str, StoredLeaf]) -> None:
    differences = [f"no {name}" for name in sorted(wanted.keys() - found.keys())]
    differences += [f"{name}, which is not in it" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        leaf, expected = found[name], wanted[name]
        if (leaf.shape, leaf.dtype) != (expected.shape, str(expected.dtype)):
            differences.append(
                f"{leaf.dtype}{list(leaf.shape)} at {name} instead of {expected.dtype}{list(expected.shape)}"
            )
    if differences:
        raise StateError(
            f"the checkpoint {folder}: found {'; '.join(differences[:SHOWN])} ({len(differences)} differences), "
            f"expected the state of this model and optimizer. {REMEDY}"
        )


def _join(path: Iterable[PathKey]) -> str:
    return "/".join(key.name for key in path)


def _raw(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, leaf) if is_random_key(leaf) else leaf


def _from_raw(abstract: jax.ShapeDtypeStruct, found: Any) -> Any:  # noqa: ANN401 - any array
    if not is_random_key(abstract):
        return found
    return jax.random.wrap_key_data(
        jnp.asarray(found), impl=str(jax.random.key_impl(jnp.empty((), abstract.dtype)))
    )
