"""Partition specs of the arrays of a training state and of a batch over a plan's mesh.

`planning.tensor_partition` decides, as it does for the estimates of memory and traffic. The logical names of a leaf's
dims come from, in this order: the plan's program cost (matched by the end of the path, and the shape), so that what was
estimated is what runs; rules on the ends of paths; the leaf's own Flax metadata.
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
from resilient_jax.planning.program_cost import ModelPart, StateTensor, TensorRole
from resilient_jax.planning.tensor_partition import partition_tensor
from resilient_jax.sharding.layer_stacks import LayerPosition
from resilient_jax.sharding.logical_axes import LogicalAxisRules, LogicalNames, Tree, format_path, name_dims
from resilient_jax.sharding.state_tensors import ParameterInfo, make_tensor

BATCH_AXES: Final = (Axis.REPLICA.value, Axis.FSDP.value)
"""Mesh axes that shard the batch dim."""
STATE_AXES: Final = (Axis.TENSOR, Axis.EXPERT, Axis.FSDP)
"""Mesh axes that shard tensors of the state."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedLeaf:
    """An array of a state.

    Attributes:
        path: path without the wrappers that Flax adds.
        names: names of the dims in the array's metadata.
        is_key: whether the array holds random keys, which are never sharded.
    """

    path: str
    shape: tuple[int, ...]
    names: LogicalNames
    is_key: bool


class StatePartitioner:
    """Makes the `PartitionSpec` of each array of a program's state.

    Args:
        tensors: tensors of the program, which name the dims.
        logical_axis_rules: rules for what is none of these tensors.
    """

    def __init__(
        self,
        tensors: Sequence[StateTensor],
        sizes: Mapping[Axis, int],
        logical_axis_rules: LogicalAxisRules | None = None,
    ) -> None:
        self._sizes = {axis: sizes.get(axis, 1) for axis in STATE_AXES}
        self._rules = logical_axis_rules or LogicalAxisRules()
        self._tensors = [(_compile_pattern(tensor.path), tensor) for tensor in tensors]

    def specs(self, state: Tree) -> Tree:
        """Return the state's tree, each array replaced by its spec.

        Raises:
            CallerError: an axis of the plan shards no array, or names do not fit.
        """
        leaves = list_leaves(state)
        specs = [self.spec(leaf) for leaf in leaves]
        used = {axis for spec in specs for axis in _axes_in(spec)}
        for axis, size in self._sizes.items():
            if size > 1 and axis not in used:
                raise CallerError(
                    f"shardings: found no array in the state that {axis} {size} shards, expected at least one among "
                    f"{', '.join(leaf.path for leaf in leaves[:3])}, ... Name the dims: Flax metadata in the model, "
                    "LogicalAxisRules(names_by_path=...), or a plan for analyze_program(model, ...), which knows them"
                )
        return jax.tree.unflatten(jax.tree.structure(state), specs)

    def spec(self, leaf: NamedLeaf) -> PartitionSpec:
        """Return the spec of one array; an array without names is sharded by FSDP alone."""
        if leaf.is_key:
            return PartitionSpec()
        tensor = self._get_tensor(leaf)
        dims = [_make_entry(axes) for axes in partition_tensor(tensor, self._sizes)]
        if tensor.stacked_dim is not None:
            dims.insert(tensor.stacked_dim, None)
        while dims and dims[-1] is None:
            dims.pop()
        return PartitionSpec(*dims)

    def _get_tensor(self, leaf: NamedLeaf) -> StateTensor:
        # The program cost comes first, so that a state is sharded as it was estimated; the longest path is the most
        # specific.
        fitting = [
            tensor
            for pattern, tensor in self._tensors
            if pattern.search(leaf.path) and _stacked_shape(tensor) == leaf.shape
        ]
        if fitting:
            return max(fitting, key=lambda tensor: len(tensor.path))
        # Optimizers keep a parameter's metadata also on arrays with fewer dims.
        own = leaf.names if len(leaf.names) <= len(leaf.shape) else ()
        ruled = self._find_rule(leaf)
        return self._make_tensor(leaf, own if ruled is None else ruled)

    def _find_rule(self, leaf: NamedLeaf) -> LogicalNames | None:
        """Return the names by the first rule that matches an end of the path, the longest end first.

        Rules are written for parameters, and the path of optimizer state ends with its parameter's.
        """
        keys = leaf.path.split("/")
        for start in range(len(keys)):
            end = "/".join(keys[start:])
            for pattern, names in self._rules.names_by_path:
                if len(names) <= len(leaf.shape) and fnmatch.fnmatchcase(end, pattern):
                    return names
        return None

    def _make_tensor(self, leaf: NamedLeaf, metadata_names: LogicalNames) -> StateTensor:
        plain = dataclasses.replace(self._rules, names_by_path=())
        names = name_dims(leaf.path, leaf.shape, {leaf.path: metadata_names}, plain)
        dim = names.index(LAYERS) if LAYERS in names else None
        position = LayerPosition(path=leaf.path, copies=1 if dim is None else leaf.shape[dim], stack_dim=dim)
        info = ParameterInfo(path=leaf.path, shape=leaf.shape, itemsize=1, names=names, position=position)
        return make_tensor(info, leaf.path, TensorRole.OTHER, (ModelPart.LAYER,), self._rules)


def list_leaves(state: Tree) -> list[NamedLeaf]:
    """Return the arrays of a state, in the order of the tree's leaves."""
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_wrapper):
        # A variable without a value has no leaves.
        arrays = jax.tree.leaves(node) if _is_wrapper(node) else [node]
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
    """Return the spec of each array of a batch: examples over replica and fsdp, tokens over sequence.

    Args:
        batch: arrays or their shapes; the first dim of each is the batch dim.
        sequence_tokens: tokens of an example; the axis `sequence` shards second dims of this size. None: examples are
            no sequences.

    Raises:
        CallerError: an axis does not divide the examples, or the sequence axis shards no array.
    """
    examples = sizes.get(Axis.REPLICA, 1) * sizes.get(Axis.FSDP, 1)
    sequence = sizes.get(Axis.SEQUENCE, 1)
    shards_tokens = False

    def spec(path: Sequence[Any], leaf: Any) -> PartitionSpec:  # noqa: ANN401 - an array or its shape
        nonlocal shards_tokens
        shape = tuple(jnp.shape(leaf))
        if not shape or shape[0] % examples:
            raise CallerError(
                f"batch/{format_path(path)}: found the shape {shape}, expected a first dim that replica x fsdp = "
                f"{examples} divides: the examples of all replicas' microbatches"
            )
        dims: list[Any] = [BATCH_AXES]
        is_sequence = sequence > 1 and len(shape) > 1 and shape[1] == sequence_tokens
        shards_tokens |= is_sequence
        return PartitionSpec(*dims, *([Axis.SEQUENCE.value] if is_sequence else []))

    specs = jax.tree_util.tree_map_with_path(spec, batch)
    if sequence > 1 and not shards_tokens:
        raise CallerError(
            f"batch: found no array whose second dim has {sequence_tokens} tokens, expected at least one for the axis "
            f"sequence {sequence} to shard. Give inputs and targets as two arrays of complete sequences"
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


def _compile_pattern(path: str) -> re.Pattern[str]:
    """Return a pattern of paths that end with a tensor's path; `*` stands for the number of a layer."""
    # A path of optimizer state ends with the path of its parameter.
    return re.compile(r"(^|/)" + re.escape(path).replace(r"\*", r"\d+") + "$")


def _stacked_shape(tensor: StateTensor) -> tuple[int, ...]:
    shape = list(tensor.shape)
    if tensor.stacked_dim is not None:
        shape.insert(tensor.stacked_dim, tensor.copies)
    return tuple(shape)


def _make_entry(axes: tuple[Axis, ...]) -> Any:  # noqa: ANN401 - an entry of a PartitionSpec
    values = tuple(axis.value for axis in axes)
    return None if not values else values[0] if len(values) == 1 else values


def _axes_in(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        if entry is not None:
            yield from entry if isinstance(entry, tuple) else (entry,)
