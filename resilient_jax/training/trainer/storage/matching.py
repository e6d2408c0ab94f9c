"""A checkpoint's leaves in the tree that the recipe wants."""

import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.errors import StateError
from resilient_jax.training.trainer.state import is_key
from resilient_jax.training.trainer.storage.leaves import Key, Leaf, Tree, name_path, view

REMEDY: Final = "Train with the recipe that saved it, or use another directory"
SHOWN: Final = 3
"""Differences in an error."""


def match(leaves: Iterable[Leaf], memory: mmap.mmap, abstract: Tree, folder: Path) -> Tree:
    """The wanted tree with the numbers that were found, copied: nobody else has their memory.

    Args:
        leaves: of the checkpoint.
        memory: with their numbers.
        abstract: the state's shapes.
        folder: of the checkpoint, for the error.

    Raises:
        StateError: it is another state; names leaves.
    """
    found = {_join(leaf.path): leaf for leaf in leaves if not leaf.empty}
    wanted, structure = jax.tree_util.tree_flatten_with_path(abstract)
    raw = {_join(name_path(path)): _raw(leaf) for path, leaf in wanted}
    _check(folder, {name: leaf for name, leaf in raw.items() if math.prod(leaf.shape)}, found)
    arrays = [
        np.array(view(found[name], memory)) if name in found else np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in raw.items()
    ]
    state = [_from_raw(leaf, array) for (_, leaf), array in zip(wanted, arrays, strict=True)]
    return jax.tree.unflatten(structure, state)


def _check(folder: Path, wanted: Mapping[str, Any], found: Mapping[str, Leaf]) -> None:
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


def _join(path: Iterable[Key]) -> str:
    return "/".join(key.name for key in path)


def _raw(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf


def _from_raw(abstract: jax.ShapeDtypeStruct, found: np.ndarray) -> Any:  # noqa: ANN401 - any array
    if not is_key(abstract):
        return found
    return jax.random.wrap_key_data(
        jnp.asarray(found), impl=str(jax.random.key_impl(jnp.empty((), abstract.dtype)))
    )
