"""Variables of the user in the initial state, such as pretrained weights, matched with those of the model."""

import difflib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from resilient_jax.argument_checks import describe_value, find_refused_call
from resilient_jax.errors import CallerError
from resilient_jax.trainer.model_adapters import PARAMS, Variables

Tree = Any
"""A pytree of arrays."""
Path = tuple[str, ...]
GivenLeaves = dict[int, np.ndarray]
"""Arrays by their position among the leaves of the model's variables."""


def check_initial_variables(given: object) -> Callable[[], Tree] | None:
    """Return the user's function that makes variables; None: there is none.

    Raises:
        CallerError: `given` is no function without parameters.
    """
    if given is None:
        return None
    if not callable(given) or find_refused_call(given, 0) is not None:
        raise CallerError(
            f"initial_variables: found {describe_value(given)}, expected a function without parameters that returns a "
            "tree of arrays, called on every host when a job begins: initial_variables=lambda: load(path)"
        )
    return given


def match_variables(variables: Variables, given: Tree) -> GivenLeaves:
    """Return the given arrays in the dtypes of the model's variables.

    Args:
        variables: abstract variables of the model.
        given: an `nnx.Module`, `nnx.State` or tree with the paths of an `nnx` model; the parameters of a Linen model or
            a dict of its collections; the tree of a function. Variables that are not given keep their initial values.

    Raises:
        CallerError: an array is at no path of the model, or has another shape or kind.
    """
    if isinstance(given, nnx.Module):
        given = nnx.state(given, nnx.Not(nnx.RngState))
    leaves = jax.tree.leaves(variables)
    places = dict(reversed(list(_list_names(variables))))  # of two variables with one name the first counts
    matched = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        name = _name(path)
        if name not in places:
            raise CallerError(
                f"initial_variables: found {'/'.join(name)}, expected paths of the model's variables, such as "
                f"{_suggest(name, places)}. Rename it, or leave it out"
            )
        matched[places[name]] = _convert("/".join(name), leaf, leaves[places[name]])
    if not matched:
        raise CallerError(
            "initial_variables: found a tree without arrays, expected some of the model's variables"
        )
    return matched


def replace_leaves(variables: Variables, given: GivenLeaves) -> Variables:
    """Return the variables with the given ones in place of their own."""
    leaves, treedef = jax.tree.flatten(variables)
    return jax.tree.unflatten(treedef, [given.get(place, leaf) for place, leaf in enumerate(leaves)])


def _list_names(variables: Variables) -> Iterator[tuple[Path, int]]:
    """Yield the names of each variable, and its position: its path, with its collection and without."""
    paths = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)]
    for place, (field, *path) in enumerate(paths):
        collection, path = (PARAMS, path) if field == "params" else (path[0], path[1:])
        yield (collection, *path), place
        yield tuple(path), place


def _name(path: tuple[Any, ...]) -> Path:
    """Return a path as strings, without the boxes of Flax, which have their array under `value`."""
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        parts.pop()
    return tuple(parts)


def _convert(name: str, leaf: Any, like: jax.ShapeDtypeStruct) -> np.ndarray:  # noqa: ANN401 - anything
    found = np.asarray(leaf)
    kinds = (jnp.inexact, jnp.integer, jnp.bool_)
    is_same_kind = any(
        jnp.issubdtype(found.dtype, kind) and jnp.issubdtype(like.dtype, kind) for kind in kinds
    )
    if found.shape != like.shape or not is_same_kind:
        raise CallerError(
            f"initial_variables: found {found.dtype}{list(found.shape)} at {name}, expected "
            f"{like.dtype}{list(like.shape)} as in the model. Convert it, or leave it out"
        )
    return found.astype(like.dtype)


def _suggest(name: Path, places: dict[Path, int]) -> str:
    known = ["/".join(path) for path in places]
    return ", ".join(difflib.get_close_matches("/".join(name), known, cutoff=0.0))
