"""The tensors of a training state for the planner: equal layers once, every dim with its logical name and axis."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from resilient_jax.planning.axes import LAYERS, Axis
from resilient_jax.planning.program_cost import DivisibilityRule, ModelPart, StateTensor, TensorRole
from resilient_jax.sharding.layer_stacks import LayerPosition, find_layer_positions
from resilient_jax.sharding.logical_axes import (
    LogicalAxisRules,
    LogicalNames,
    Tree,
    format_path,
    get_max_shards,
    name_dims,
)

OPTIONAL_DIMS = frozenset({"kv_heads", "vocab"})
"""Logical names of dims that stay replicated where an axis does not divide them, without an error."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    """A parameter of an abstract model.

    Attributes:
        path: path in the tree of parameters.
        shape: shape with the dim over which layers are stacked, if there is one.
        names: logical names of all dims, those over which layers are stacked included.
        position: position of the parameter among the layers.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    names: LogicalNames
    position: LayerPosition


def describe_parameters(
    params: Tree, metadata_names: Mapping[str, LogicalNames], logical_axis_rules: LogicalAxisRules
) -> tuple[ParameterInfo, ...]:
    """Return the parameters with their names and positions, in the order of the tree's leaves."""
    leaves = [(format_path(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    names = {path: name_dims(path, leaf.shape, metadata_names, logical_axis_rules) for path, leaf in leaves}
    positions = find_layer_positions({path: leaf.shape for path, leaf in leaves}, names)
    return tuple(
        ParameterInfo(
            path=path,
            shape=leaf.shape,
            itemsize=leaf.dtype.itemsize,
            names=names[path],
            position=positions[path],
        )
        for path, leaf in leaves
    )


def make_state_tensors(
    parameters: Sequence[ParameterInfo],
    parts: Mapping[str, tuple[ModelPart, ...]],
    others: Sequence[tuple[Tree, TensorRole]],
    logical_axis_rules: LogicalAxisRules,
) -> tuple[StateTensor, ...]:
    """Return the tensors of a state; one tensor stands for all equal layers.

    Args:
        parts: parts that use each parameter, by path.
        others: trees of the optimizer state and of other variables. A leaf of these trees whose path ends with the path
            of a parameter of the same shape has the names of that parameter.
    """
    tensors = {}
    for info in parameters:
        tensors.setdefault(
            info.position.path,
            make_tensor(info, info.position.path, TensorRole.PARAMETER, parts[info.path], logical_axis_rules),
        )
    for number, (tree, role) in enumerate(others):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            tensor = _other_tensor(format_path(path), leaf, role, parameters, parts, logical_axis_rules)
            tensors.setdefault((number, tensor.path), tensor)
    return tuple(tensors.values())


def make_tensor(
    info: ParameterInfo,
    path: str,
    role: TensorRole,
    parts: tuple[ModelPart, ...],
    logical_axis_rules: LogicalAxisRules,
) -> StateTensor:
    """Return an array of a state as a tensor, without the dim over which its layers are stacked."""
    kept = [dim for dim in range(len(info.shape)) if dim != info.position.stack_dim]
    shape, names = tuple(info.shape[dim] for dim in kept), tuple(info.names[dim] for dim in kept)
    return StateTensor(
        path=path,
        role=role,
        parts=parts,
        shape=shape,
        logical_names=names,
        axes=tuple(
            None if name is None or name == LAYERS else logical_axis_rules.mesh_axes[name] for name in names
        ),
        units=get_max_shards(names, shape, logical_axis_rules),
        dtype_bytes=info.itemsize,
        copies=info.position.copies,
        stacked_dim=info.position.stack_dim,
    )


def _other_tensor(
    path: str,
    leaf: Any,  # noqa: ANN401 - an abstract array
    role: TensorRole,
    parameters: Sequence[ParameterInfo],
    parts: Mapping[str, tuple[ModelPart, ...]],
    logical_axis_rules: LogicalAxisRules,
) -> StateTensor:
    for info in parameters:
        if leaf.shape == info.shape and (path == info.path or path.endswith(f"/{info.path}")):
            stem = path[: len(path) - len(info.path)] + info.position.path
            same = dataclasses.replace(info, itemsize=leaf.dtype.itemsize)
            return make_tensor(same, stem, role, parts[info.path], logical_axis_rules)
    unknown = ParameterInfo(
        path=path,
        shape=leaf.shape,
        itemsize=leaf.dtype.itemsize,
        names=(None,) * len(leaf.shape),
        position=LayerPosition(path=path),
    )
    return make_tensor(unknown, path, role, (ModelPart.EMBEDDING,), logical_axis_rules)


def make_divisibility_rules(
    tensors: Sequence[StateTensor], num_layers: int, sequence_tokens: int | None
) -> tuple[DivisibilityRule, ...]:
    """Return the sizes that axes must divide: of dims with the same name, the greatest common divisor."""
    # gcd(0, n) = n, so the default 0 is the neutral element.
    units: dict[tuple[Axis, str], int] = collections.defaultdict(int)
    for tensor in tensors:
        for axis, name, number in zip(tensor.axes, tensor.logical_names, tensor.units, strict=True):
            if name is not None and (axis is Axis.TENSOR or axis is Axis.EXPERT):
                units[axis, name] = math.gcd(units[axis, name], number)
    numbers = [(axis, name, number, name not in OPTIONAL_DIMS) for (axis, name), number in units.items()]
    if sequence_tokens is not None:
        numbers.append((Axis.SEQUENCE, "tokens", sequence_tokens, True))
    if num_layers > 1:
        numbers.append((Axis.PIPELINE, LAYERS, num_layers, True))
    return tuple(
        DivisibilityRule(axis=a, logical_name=n, dim_size=number, is_required=r)
        for a, n, number, r in numbers
    )
