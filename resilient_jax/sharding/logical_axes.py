"""Logical names of the dims of a model's parameters: from Flax metadata, or from rules on their paths."""

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogicalAxisRules:
    """What the dims of a model's parameters are called, where the model does not say it or says it in other words.

    Attributes:
        rules: pairs of a pattern of a path and the names of the dims there, such as
            `("*/query/kernel", ("embed", "heads"))`; `*` stands for anything, also for several parts of a path. The
            first that matches holds, before the model's own metadata.
        axes: which axis cuts a dim of a name; None: none but FSDP.
        units: by name, into how many pieces a dim may be cut at most, where that is less than its size: the number of
            heads, if one dim holds the numbers of all heads.
    """

    names_by_path: Sequence[tuple[str, LogicalNames]] = ()
    mesh_axes: Mapping[str, Axis | None] = dataclasses.field(default_factory=lambda: AXIS_BY_LOGICAL_NAME)
    max_shards: Mapping[str, int] = dataclasses.field(default_factory=dict)


def format_path(key_path: Sequence[Any]) -> str:
    """Gives a leaf's place in a tree as `layers/0/kernel`."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator="/")


def get_nnx_names(state: nnx.State) -> dict[str, LogicalNames]:
    """Gives the names in the metadata of NNX variables, by path; those without are left out."""
    return _names_of_specs(nnx.to_pure_dict(nnx.get_partition_spec(state)))


def get_linen_names(variables: Tree) -> dict[str, LogicalNames]:
    """Gives the names in the metadata of Linen variables (`nn.Partitioned` and its kin), by path."""
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
    """Gives the name of each dim of a parameter.

    Args:
        path: of the parameter.
        shape: of it.
        given: names in the model's metadata, by path.
        naming: the rules, and the known names.

    Raises:
        CallerError: there are more names than dims, or one that no axis is known for.
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
                f"{path}: found the logical name {name!r}, expected one of {', '.join(sorted(logical_axis_rules.mesh_axes))}, "
                f"{LAYERS}. Say which axis cuts it: Naming(axes={{**AXIS_BY_LOGICAL_NAME, {name!r}: Axis.TENSOR}}), or None"
            )
    return names + (None,) * (len(shape) - len(names))


def get_max_shards(
    names: LogicalNames, shape: tuple[int, ...], logical_axis_rules: LogicalAxisRules
) -> tuple[int, ...]:
    """Gives into how many pieces each dim may be cut at most; divides the dim."""
    return tuple(
        math.gcd(size, logical_axis_rules.max_shards.get(name or "", size))
        for name, size in zip(names, shape, strict=True)
    )
