"""How the arrays of a training state and of a batch are cut over a plan's mesh.

By `planning.tensor_partition.cut`, which the estimate of memory and traffic uses too. Which dims a leaf has is known
from, in
this order: the plan's profile (by the end of the path, and the shape), so that what was estimated is what runs; rules
on the ends of paths; the leaf's own Flax metadata.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from resilient_jax.errors import CallerError
from resilient_jax.planning.axes import LAYERS, Axis
from resilient_jax.planning.program_cost import ModelPart, ProgramCost, StateTensor, TensorRole
from resilient_jax.planning.tensor_partition import partition_tensor
from resilient_jax.sharding.layer_stacks import LayerPosition
from resilient_jax.sharding.logical_axes import LogicalAxisRules, LogicalNames, Tree, format_path, name_dims
from resilient_jax.sharding.state_tensors import ParameterInfo, make_tensor

BATCH_AXES: Final = (Axis.REPLICA.value, Axis.FSDP.value)
"""They cut the examples of a batch."""
STATE_AXES: Final = (Axis.TENSOR, Axis.EXPERT, Axis.FSDP)
"""They cut tensors of the state."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedLeaf:
    """An array of a state: its path without what Flax wraps around it, its shape, the names in its metadata."""

    path: str
    shape: tuple[int, ...]
    names: LogicalNames
    is_key: bool


class StatePartitioner:
    """Gives the `PartitionSpec` of each array of a state that belongs to a profile's program.

    Args:
        profile: whose tensors name the dims.
        sizes: of a plan's axes.
        naming: for what the profile does not have.
    """

    def __init__(
        self, profile: ProgramCost, sizes: Mapping[Axis, int], naming: LogicalAxisRules | None = None
    ) -> None:
        self._sizes = {axis: sizes.get(axis, 1) for axis in STATE_AXES}
        self._naming = naming or LogicalAxisRules()
        self._tensors = [(_pattern_of(tensor.path), tensor) for tensor in profile.tensors]

    def specs(self, state: Tree) -> Tree:
        """The state's tree, each array replaced by its spec.

        Raises:
            CallerError: an axis of the plan cuts no array; names do not fit.
        """
        leaves = list_leaves(state)
        specs = [self.spec(leaf) for leaf in leaves]
        used = {axis for spec in specs for axis in _axes_in(spec)}
        for axis, size in self._sizes.items():
            if size > 1 and axis not in used:
                raise CallerError(
                    f"shardings: found no array in the state that {axis} {size} cuts, expected at least one among "
                    f"{', '.join(leaf.path for leaf in leaves[:3])}, ... Give dims names: Flax metadata in the model, "
                    "Naming(rules=...), or a plan for profile_of(model, ...), which knows them"
                )
        return jax.tree.unflatten(jax.tree.structure(state), specs)

    def spec(self, leaf: NamedLeaf) -> PartitionSpec:
        """Of one array; what nobody names is cut by FSDP alone."""
        if leaf.is_key:
            return PartitionSpec()
        tensor = self._tensor_of(leaf)
        dims = [_as_entry(axes) for axes in partition_tensor(tensor, self._sizes)]
        if tensor.stacked_dim is not None:
            dims.insert(tensor.stacked_dim, None)
        while dims and dims[-1] is None:
            dims.pop()
        return PartitionSpec(*dims)

    def _tensor_of(self, leaf: NamedLeaf) -> StateTensor:
        fitting = [
            tensor
            for pattern, tensor in self._tensors
            if pattern.search(leaf.path) and _stacked_shape(tensor) == leaf.shape
        ]
        if fitting:
            return max(fitting, key=lambda tensor: len(tensor.path))
        # Optimizers keep a parameter's metadata on what has fewer dims than it.
        own = leaf.names if len(leaf.names) <= len(leaf.shape) else ()
        ruled = self._find_rule(leaf)
        return self._tensor_of_names(leaf, own if ruled is None else ruled)

    def _find_rule(self, leaf: NamedLeaf) -> LogicalNames | None:
        """Rules are for parameters; optimizer state has the names of the parameter that ends its path, the longest that
        a rule knows."""
        keys = leaf.path.split("/")
        for start in range(len(keys)):
            end = "/".join(keys[start:])
            for pattern, names in self._naming.names_by_path:
                if len(names) <= len(leaf.shape) and fnmatch.fnmatchcase(end, pattern):
                    return names
        return None

    def _tensor_of_names(self, leaf: NamedLeaf, given: LogicalNames) -> StateTensor:
        plain = dataclasses.replace(self._naming, names_by_path=())
        names = name_dims(leaf.path, leaf.shape, {leaf.path: given}, plain)
        dim = names.index(LAYERS) if LAYERS in names else None
        place = LayerPosition(path=leaf.path, copies=1 if dim is None else leaf.shape[dim], stack_dim=dim)
        info = ParameterInfo(path=leaf.path, shape=leaf.shape, itemsize=1, names=names, position=place)
        return make_tensor(info, leaf.path, TensorRole.OTHER, (ModelPart.LAYER,), self._naming)


def list_leaves(state: Tree) -> list[NamedLeaf]:
    """Gives the arrays of a state, in the order of the tree's leaves."""
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_wrapper):
        arrays = jax.tree.leaves(node) if _is_wrapper(node) else [node]  # of a variable without a value: none
        found.extend(
            NamedLeaf(
                path=format_path(path),
                shape=tuple(jnp.shape(array)),
                names=_names_in_metadata(node) if len(arrays) == 1 else (),
                is_key=jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key),
            )
            for array in arrays
        )
    return found


def make_batch_specs(batch: Tree, sizes: Mapping[Axis, int], sequence_tokens: int | None) -> Tree:
    """Gives the spec of each array of a batch: examples over replica and fsdp, tokens over sequence.

    Args:
        batch: arrays or their shapes; the first dim of each is the examples'.
        sizes: of the plan's axes.
        sequence_tokens: of an example; dims of this size are those that the axis `sequence` cuts.

    Raises:
        CallerError: an axis does not divide the examples, or the sequence axis finds no dim.
    """
    examples = sizes.get(Axis.REPLICA, 1) * sizes.get(Axis.FSDP, 1)
    sequence = sizes.get(Axis.SEQUENCE, 1)
    cuts_tokens = False

    def spec(path: Sequence[Any], leaf: Any) -> PartitionSpec:  # noqa: ANN401 - an array or its shape
        nonlocal cuts_tokens
        shape = tuple(jnp.shape(leaf))
        if not shape or shape[0] % examples:
            raise CallerError(
                f"batch/{format_path(path)}: found the shape {shape}, expected a first dim that replica x fsdp = "
                f"{examples} divides: the examples that all replicas compute at a time"
            )
        dims: list[Any] = [BATCH_AXES]
        is_sequence = sequence > 1 and len(shape) > 1 and shape[1] == sequence_tokens
        cuts_tokens |= is_sequence
        return PartitionSpec(*dims, *([Axis.SEQUENCE.value] if is_sequence else []))

    specs = jax.tree_util.tree_map_with_path(spec, batch)
    if sequence > 1 and not cuts_tokens:
        raise CallerError(
            f"batch: found no array whose second dim has {sequence_tokens} tokens, expected at least one for the axis "
            f"sequence {sequence} to cut. Give inputs and targets as two arrays of whole sequences"
        )
    return specs


def _is_wrapper(node: object) -> bool:
    return isinstance(node, nnx.Variable | nn.meta.AxisMetadata)


def _names_in_metadata(node: object) -> LogicalNames:
    if isinstance(node, nnx.Variable):
        specs = jax.tree.leaves(nnx.get_partition_spec(node), is_leaf=_is_spec)
        return tuple(specs[0]) if specs and specs[0] is not None else ()
    if isinstance(node, nn.meta.AxisMetadata):
        specs = jax.tree.leaves(nn.get_partition_spec(node), is_leaf=_is_spec)
        return tuple(specs[0])
    return ()


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _pattern_of(path: str) -> re.Pattern[str]:
    """Finds the profile's path at the end of another; `*` stands for the number of a layer."""
    return re.compile(r"(^|/)" + re.escape(path).replace(r"\*", r"\d+") + "$")


def _stacked_shape(tensor: StateTensor) -> tuple[int, ...]:
    shape = list(tensor.shape)
    if tensor.stacked_dim is not None:
        shape.insert(tensor.stacked_dim, tensor.copies)
    return tuple(shape)


def _as_entry(axes: tuple[Axis, ...]) -> Any:  # noqa: ANN401 - an entry of a PartitionSpec
    values = tuple(axis.value for axis in axes)
    return None if not values else values[0] if len(values) == 1 else values


def _axes_in(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        if entry is not None:
            yield from entry if isinstance(entry, tuple) else (entry,)
