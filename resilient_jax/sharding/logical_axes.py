"""Logical names of the dims of a model's parameters, from Flax metadata or from rules on their paths."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import PartitionSpec

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import AXIS_BY_LOGICAL_NAME, LAYERS, Axis

Tree = Any
"""A pytree."""
LogicalNames = tuple[str | None, ...]
"""The logical name of each dim of an array; None: it has none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalAxisRules:
    """The logical names of a model's dims, and the mesh axis that shards each name.

    Attributes:
        names_by_path: pairs of a pattern of a path and the names of the dims there, such as
            `("*/query/kernel", ("embed", "heads"))`; `*` matches anything, also several parts of a path. The first
            pattern that matches counts, before the model's own metadata.
        mesh_axes: maps a logical name to the axis that shards its dims; None: no axis but FSDP.
        max_shards: maps a logical name to the most shards of a dim, where these are fewer than its size: the number of
            heads, if one dim holds the elements of all heads.
    """

    names_by_path: Sequence[tuple[str, LogicalNames]] = ()
    mesh_axes: Mapping[str, Axis | None] = dataclasses.field(default_factory=lambda: AXIS_BY_LOGICAL_NAME)
    max_shards: Mapping[str, int] = dataclasses.field(default_factory=dict)


def format_path(key_path: Sequence[Any]) -> str:
    """Return a leaf's path in a tree as `layers/0/kernel`."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator="/")


def get_nnx_names(state: nnx.State) -> dict[str, LogicalNames]:
    """Return the names in the metadata of NNX variables, by path; variables without names are left out."""
    return _names_of_specs(nnx.to_pure_dict(nnx.get_partition_spec(state)))


def get_linen_names(variables: Tree) -> dict[str, LogicalNames]:
    """Return the names in the metadata of Linen variables (`nn.Partitioned` and similar boxes), by path."""
    return _names_of_specs(nn.get_partition_spec(variables))


def _names_of_specs(specs: Tree) -> dict[str, LogicalNames]:
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return {format_path(path): tuple(spec) for path, spec in leaves if spec is not None and len(spec)}


def name_dims(
    path: str,
    shape: tuple[int, ...],
    metadata_names: Mapping[str, LogicalNames],
    logical_axis_rules: LogicalAxisRules,
) -> LogicalNames:
    """Return the name of each dim of a parameter.

    Args:
        path: path of the parameter in the model's tree.
        metadata_names: names in the model's metadata, by path.

    Raises:
        CallerError: there are more names than dims, or a name without an entry in `mesh_axes`.
    """
    ruled = next(
        (names for pattern, names in logical_axis_rules.names_by_path if fnmatch.fnmatchcase(path, pattern)),
        None,
    )
    names = tuple(metadata_names.get(path, ()) if ruled is None else ruled)
    if len(names) > len(shape):
        raise CallerError(
            f"{path}: found {len(names)} logical names {names} for a parameter of shape {shape}, expected at most one "
            f"for each dim. Correct {'the rule that matches it' if ruled is not None else 'its metadata'}"
        )
    for name in names:
        if name is not None and name != LAYERS and name not in logical_axis_rules.mesh_axes:
            raise CallerError(
                f"{path}: found the logical name {name!r}, expected one of "
                f"{', '.join(sorted(logical_axis_rules.mesh_axes))}, {LAYERS}. Give it a mesh axis, or None: "
                f"LogicalAxisRules(mesh_axes={{**AXIS_BY_LOGICAL_NAME, {name!r}: Axis.TENSOR}})"
            )
    return names + (None,) * (len(shape) - len(names))


def get_max_shards(
    names: LogicalNames, shape: tuple[int, ...], logical_axis_rules: LogicalAxisRules
) -> tuple[int, ...]:
    """Return the most shards of each dim, a divisor of its size."""
    return tuple(
        math.gcd(size, logical_axis_rules.max_shards.get(name or "", size))
        for name, size in zip(names, shape, strict=True)
    )
