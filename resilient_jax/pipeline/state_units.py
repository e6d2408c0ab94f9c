"""The parts that a model's state and its gradient sums have: the weights that the same blocks use.

A *unit* is the weights of one block alone, or those that several blocks share (tied embeddings). A host that holds any
of a unit's blocks holds the unit. Each unit has an optimizer state and an update program of its own, so a shared weight
has the same bits on all of its holders, whichever other blocks they have.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.blocks.model_weights import Tree, Weight, WeightTable
from resilient_jax.ids import HostName


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateUnit:
    """Weights that the same blocks use.

    Attributes:
        blocks: numbers of the blocks that use the weights, ascending; several only of shared weights.
        weights: every weight of the unit, in the order of the model's table.
        table: table of all weights of the model.
        params_table: table of the model's trained weights alone, for the tree that the optimizer sees; its leaves are
            the first ones of `table`.
    """

    blocks: tuple[int, ...]
    weights: tuple[Weight, ...]
    table: WeightTable
    params_table: WeightTable

    @property
    def trained_names(self) -> tuple[str, ...]:
        """The names of the weights that get gradients."""
        return tuple(weight.name for weight in self.weights if weight.is_trained)

    def list_holders(self, holders: Sequence[Collection[HostName]]) -> frozenset[HostName]:
        """Return the hosts that have the unit, from the holders of each block."""
        return frozenset().union(*(holders[block] for block in self.blocks))

    def join(self, values: Mapping[str, Any]) -> Tree:
        """Return values by the names of trained weights as the user's tree, with None for all other leaves.

        A leaf that is stacked over layers has only the unit's layers.
        """
        return self.params_table.join({name: values[name] for name in self.trained_names})

    def split(self, tree: Tree) -> dict[str, Any]:
        """Return the values of trained weights by name; the inverse of `join`."""
        leaves, found, seen = self.params_table.treedef.flatten_up_to(tree), {}, {}
        for weight in self.weights:
            if weight.is_trained:
                place = seen[weight.leaf] = seen.get(weight.leaf, -1) + 1
                leaf = leaves[weight.leaf]
                found[weight.name] = leaf if weight.layer is None else leaf[place]
        return found


def list_state_units(cut: CutModel, params: Tree | None = None) -> tuple[StateUnit, ...]:
    """Return the units of a model in the order of their blocks; each block has one of its own, maybe an empty one.

    Args:
        params: tree of the trained variables, whose leaves are the first of the model's; None: all are trained.
    """
    table = params_table = cut.trace.table
    if params is not None:
        treedef = jax.tree.structure(params)
        params_table = WeightTable(
            treedef, tuple(weight for weight in table.weights if weight.leaf < treedef.num_leaves)
        )
    users: dict[str, tuple[int, ...]] = {}
    for block in cut.blocks:
        for weight in block.weights:
            users[weight.name] = (*users.get(weight.name, ()), block.number)
    members: dict[tuple[int, ...], list[Weight]] = {(block.number,): [] for block in cut.blocks}
    for weight in cut.trace.table.weights:
        if weight.name in users:
            members.setdefault(users[weight.name], []).append(weight)
    return tuple(
        StateUnit(blocks=blocks, weights=tuple(weights), table=table, params_table=params_table)
        for blocks, weights in sorted(members.items())
    )
