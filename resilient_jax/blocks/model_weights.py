"""The weights of a model by name, as blocks have them: a leaf of its variables, or one layer of a stacked leaf.

`WeightTable` splits a tree of variables into weights and joins them again, bit for bit.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from resilient_jax.sharding.logical_axes import format_path
from resilient_jax.sharding.placements import ParameterSpecs

Tree = Any
"""A pytree of arrays."""
Weights = Mapping[str, Any]
"""Arrays by the names of weights."""
IsTrained = Callable[[str, Any], bool]
"""Returns whether the leaf of a path is trained: whether it gets a gradient."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A leaf of a model's variables, or one layer of a leaf that is stacked over layers.

    Attributes:
        name: `layers/0/kernel`; of a layer of a stacked leaf `layers/kernel[0]`. Unique in a model.
        path: path of the leaf in the tree of variables.
        leaf: number of the leaf in the tree.
        layer: index along the leaf's first dim; None: the leaf is not stacked.
        shape: shape of the weight, without the first dim of a stacked leaf.
    """

    name: str
    path: str
    leaf: int
    layer: int | None
    shape: tuple[int, ...]
    dtype: Any
    is_trained: bool

    def describe(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the weight, as JAX describes an array that is not there."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightTable:
    """All weights of a model.

    Attributes:
        weights: weights in the order of leaves; those of a stacked leaf in the order of layers.
    """

    treedef: Any
    weights: tuple[Weight, ...]

    def split(self, variables: Tree) -> dict[str, Any]:
        """Return the weights of a tree of variables, or of one that is structured like it.

        Raises:
            ValueError: the tree has another structure.
        """
        leaves = self.treedef.flatten_up_to(variables)
        return {
            weight.name: leaves[weight.leaf] if weight.layer is None else leaves[weight.leaf][weight.layer]
            for weight in self.weights
        }

    def join(self, weights: Weights) -> Tree:
        """Return the tree with these weights; leaves without one are None."""
        leaves: list[Any] = [None] * self.treedef.num_leaves
        stacks: dict[int, list[Any]] = {}
        for weight in self.weights:
            if weight.layer is None:
                leaves[weight.leaf] = weights.get(weight.name)
            elif weight.name in weights:
                stacks.setdefault(weight.leaf, []).append(weights[weight.name])
        for leaf, layers in stacks.items():
            leaves[leaf] = _stack(layers)
        return self.treedef.unflatten(leaves)


def list_leaf_specs(
    table: WeightTable, weights: Sequence[Weight], specs: Callable[[str], P]
) -> ParameterSpecs:
    """Return path, shape and spec of each leaf of a tree that has some of a model's weights.

    Args:
        weights: weights that the tree has; a leaf that is stacked over layers has the layers of these weights alone.
        specs: returns the spec of the weight with a name.
    """
    paths = jax.tree_util.tree_leaves_with_path(table.treedef.unflatten(range(table.treedef.num_leaves)))
    names = {leaf: jax.tree_util.keystr(path) for path, leaf in paths}
    layers: dict[int, list[Weight]] = {}
    for weight in weights:
        layers.setdefault(weight.leaf, []).append(weight)
    found = []
    for leaf, (first, *others) in layers.items():
        spec = specs(first.name)
        if first.layer is None:
            found.append((names[leaf], first.shape, spec))
        else:
            found.append((names[leaf], (1 + len(others), *first.shape), P(None, *spec)))
    return tuple(found)


def list_weights(
    variables: Tree, is_trained: IsTrained, stacked_leaves: Mapping[int, int] | None = None
) -> WeightTable:
    """Return the weights of a model.

    Args:
        variables: arrays or their shapes.
        is_trained: selects the weights with a gradient.
        stacked_leaves: number of layers of each leaf that is stacked over layers, by the number of the leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(variables)
    weights: list[Weight] = []
    for number, (key_path, leaf) in enumerate(leaves):
        path, shape, count = format_path(key_path), tuple(leaf.shape), (stacked_leaves or {}).get(number)
        for layer in [None] if count is None else range(count):
            weights.append(
                Weight(
                    name=path if layer is None else f"{path}[{layer}]",
                    path=path,
                    leaf=number,
                    layer=layer,
                    shape=shape if layer is None else shape[1:],
                    dtype=leaf.dtype,
                    is_trained=is_trained(path, leaf),
                )
            )
    return WeightTable(treedef, tuple(weights))


def is_inexact(path: str, leaf: Any) -> bool:  # noqa: ANN401 - an array or its shape
    """Return whether a leaf has floating-point elements: what is trained if nothing else is said."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _stack(layers: Sequence[Any]) -> Any:  # noqa: ANN401 - an array
    if all(isinstance(layer, np.ndarray | np.generic) for layer in layers):
        return np.stack(layers)
    return jnp.stack(layers)
