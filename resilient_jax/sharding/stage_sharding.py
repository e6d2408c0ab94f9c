"""How a stage of a pipeline is on the devices of its host: weights by their specs, values by the examples in them.

A mesh of four axes over the devices of one host: `data` and `fsdp` share the examples of a microbatch; `fsdp`, `expert`
and `tensor` shard weights, with their gradients and optimizer state. Programs gather what `fsdp` shards before they use
it. Left to itself XLA may shard activations along the dims of the weights instead (see `activation_constraints`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.planning.axes import Axis

STAGE_DATA_AXIS: Final = "data"
"""Of the same name as the axis of a replica that has no axes of its own (`step.assignment.DATA_AXIS`)."""
STAGE_AXES: Final = (STAGE_DATA_AXIS, Axis.FSDP.value, Axis.EXPERT.value, Axis.TENSOR.value)
"""Axes of the mesh, outermost first."""
EXAMPLE_AXES: Final = (STAGE_DATA_AXIS, Axis.FSDP.value)
"""Those that share examples."""

Tree = Any
"""A pytree of arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSharding:
    """The sharding of weights, and of what programs compute of them.

    Attributes:
        mesh: mesh of `STAGE_AXES`, over the devices of one host or without devices.
        weight_specs: specs of weights by name; weights without a spec are replicated.
        num_examples: examples of a microbatch. Values whose first dim has so many rows are sharded along it.
    """

    mesh: Mesh | AbstractMesh
    weight_specs: Mapping[str, P]
    num_examples: int

    def with_mesh(self, mesh: Mesh | AbstractMesh) -> Self:
        """Return the same over another mesh of this shape, with or without devices."""
        return dataclasses.replace(self, mesh=mesh)

    def with_examples(self, num_examples: int) -> Self:
        """Return the same for microbatches of so many examples; 0: they are on each device."""
        return dataclasses.replace(self, num_examples=num_examples)

    @property
    def num_example_shares(self) -> int:
        """Among how many devices the examples of a microbatch are shared."""
        return math.prod(self.mesh.shape[axis] for axis in EXAMPLE_AXES)

    def shard(self, spec: P) -> NamedSharding:
        """Return the sharding of a spec."""
        return NamedSharding(self.mesh, spec)

    def place(self, spec: P) -> Sharding:
        """Return where an array of this spec is on this host; of a mesh with devices."""
        assert isinstance(self.mesh, Mesh)
        # On one device arrays are as they are without a mesh, so that their programs are, too.
        if self.mesh.size == 1:
            return SingleDeviceSharding(self.mesh.devices.flat[0])
        return self.shard(spec)

    def find_weight_spec(self, name: str) -> P:
        """Return the spec of a weight between programs."""
        return self.weight_specs.get(name, P())

    def find_gathered_spec(self, name: str) -> P:
        """Return the spec of a weight within a program: not sharded by the axes that share examples."""
        return P(*(_drop_axes(entry) for entry in self.find_weight_spec(name)))

    def find_value_spec(self, shape: tuple[int, ...]) -> P:
        """Return the spec of a value that crosses a cut, or of an array of a batch."""
        is_shared = any(self.mesh.shape[axis] > 1 for axis in EXAMPLE_AXES)
        has_examples = bool(shape) and shape[0] == self.num_examples
        return P(EXAMPLE_AXES) if is_shared and has_examples else P()

    def place_values(self, values: Tree) -> Tree:
        """Return a batch, or values that cross a cut, on the devices of the mesh."""
        return jax.tree.map(
            lambda value: jax.device_put(value, self.place(self.find_value_spec(np.shape(value)))), values
        )


def make_abstract_stage_mesh(sizes: Mapping[str, int], devices: Sequence[Device] = ()) -> AbstractMesh:
    """Return the mesh of a stage without devices.

    Args:
        sizes: sizes by axis of `STAGE_AXES`; a missing axis has size 1.
        devices: devices of a host. JAX has the kind of devices in the type of what is traced with such a mesh, so
            devices must be given if the stage has several.
    """
    shape = tuple(sizes.get(axis, 1) for axis in STAGE_AXES)
    abstract = AbstractMesh(shape, STAGE_AXES, axis_types=(AxisType.Auto,) * len(STAGE_AXES))
    return make_stage_mesh(abstract, devices).abstract_mesh if len(devices) > 1 else abstract


def make_stage_mesh(mesh: Mesh | AbstractMesh, devices: Sequence[Device]) -> Mesh:
    """Return a mesh of the shape of another one, over these devices."""
    return Mesh(np.array(devices).reshape(tuple(mesh.shape.values())), STAGE_AXES)


def make_single_device_stage() -> StageSharding:
    """Return the sharding of a stage that computes on the first device of this host."""
    mesh = make_stage_mesh(make_abstract_stage_mesh({}), jax.local_devices()[:1])
    return StageSharding(mesh=mesh, weight_specs={}, num_examples=0)


def _drop_axes(entry: Any) -> Any:  # noqa: ANN401 - an entry of a PartitionSpec
    if entry is None:
        return None
    left = tuple(
        axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis not in EXAMPLE_AXES
    )
    return left or None
