"""Weights, gradients and results of the blocks of a `CutModel` as the trees of the whole model, and back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from resilient_jax.blocks.cut_model import CutModel
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import BlockState, UnitState

Weights = Mapping[str, Any]


def split_variables(cut: CutModel, variables: Any) -> list[dict[str, Any]]:
    """Return the weights of each block, by name."""
    weights = cut.trace.table.split(variables)
    return [{weight.name: weights[weight.name] for weight in block.weights} for block in cut.blocks]


def join_variables(cut: CutModel, weights: Sequence[Weights]) -> Any:
    """Return the tree of the weights of blocks; a shared weight is taken from the first block that has it."""
    return cut.trace.table.join({name: value for part in reversed(weights) for name, value in part.items()})


def join_gradients(cut: CutModel, gradients: Sequence[Weights]) -> Any:
    """Return the tree of the gradients of blocks; those of a shared weight are added in the order of blocks."""
    found: dict[str, Any] = {}
    for part in gradients:
        for name, gradient in part.items():
            found[name] = found[name] + gradient if name in found else gradient
    return cut.trace.table.join(found)


def join_results(cut: CutModel, results: Sequence[Mapping[str, Any]]) -> Any:
    """Return the auxiliary output of the loss."""
    found = {name: value for part in results for name, value in part.items()}
    return cut.trace.aux_treedef.unflatten(found[name] for name in cut.trace.result_names[1:])


def find_shared_weights(cut: CutModel) -> dict[str, tuple[int, ...]]:
    """Return the blocks of each weight that belongs to several."""
    holders: dict[str, tuple[int, ...]] = {}
    for block in cut.blocks:
        for weight in block.weights:
            holders[weight.name] = (*holders.get(weight.name, ()), block.number)
    return {name: numbers for name, numbers in holders.items() if len(numbers) > 1}


def init_units(
    state: BlockState,
    optimizer: optax.GradientTransformation,
    weights: Weights,
    host: HostName,
    holders: Sequence[Collection[HostName]],
) -> None:
    """Make the initial state of the units that a host holds, from the weights of the model."""
    init = optax.with_extra_args_support(optimizer).init
    made = {}
    for number, unit in enumerate(state.units):
        if host in unit.list_holders(holders):
            own = {weight.name: jnp.asarray(weights[weight.name]) for weight in unit.weights}
            made[number] = UnitState(own, init(unit.join(own)))
    state.replace(made)
