"""All variables of a model as one tree, as a pipeline cuts them: the trained ones first, then the others.

Trained variables keep the paths that they have by themselves; others have their collection in front.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp

from resilient_jax.errors import CallerError
from resilient_jax.trainer.model_adapters import Variables
from resilient_jax.trainer.training_state import Tree


class VariableTree:
    """Joins the variables of a model to a tree, and splits such a tree.

    Attributes:
    """

    def __init__(self, abstract: Variables) -> None:
        """Take the shapes of the variables.

        Raises:
            CallerError: a variable is a random key, which has no bits to be sent.
        """
        self._names = sorted(abstract.collections)
        params = abstract.params if isinstance(abstract.params, dict) else {}
        # A key that no trained variable has.
        self._keys = {name: name if name not in params else f"variables of {name}" for name in self._names}
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.collections):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise CallerError(
                    f"pipeline: found the variable {jax.tree_util.keystr(path)}, which is a random key, expected "
                    "numbers. A parameter of loss_fn called key gets a new one for each microbatch"
                )

    def join(self, variables: Variables) -> Tree:
        """Return the tree; without variables that are not trained the trained ones as they are."""
        if not self._names:
            return variables.params
        return collections.OrderedDict(
            [(key, variables.params[key]) for key in sorted(variables.params)]
            + list(self.join_collections(variables.collections).items())
        )

    def join_collections(self, found: dict[str, Tree]) -> dict[str, Tree]:
        """Return collections by their keys in the tree."""
        return {self._keys[name]: found[name] for name in self._names}

    def split(self, tree: Tree) -> Variables:
        """Return the variables; the inverse of `join`."""
        if not self._names:
            return Variables(tree, {})
        others = set(self._keys.values())
        return Variables(
            {key: value for key, value in tree.items() if key not in others},
            {name: tree[self._keys[name]] for name in self._names},
        )

    def is_trained(self, path: str, leaf: Any) -> bool:  # noqa: ANN401 - an array or its shape
        """Return whether the leaf of a path in the tree is trained."""
        return path.split("/")[0] not in self._keys.values()
