"""The shards of an array that a host's devices need, or have, as distinct boxes, and the array that is made of them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.sharding.raveled_array import compute_padded_size
from resilient_jax.state.flat_state import FlatLeaf
from resilient_jax.state.index_box import IndexBox, box_from_index, intersect_boxes, whole_box


def copy_held_boxes(leaf: FlatLeaf) -> dict[IndexBox, np.ndarray]:
    """Return the boxes of a leaf that this host has, without padding; of arrays on devices copies."""
    if isinstance(leaf.value, np.ndarray):
        return {whole_box(leaf.value.shape): leaf.value}
    stored = whole_box(leaf.stored_shape)
    held: dict[IndexBox, np.ndarray] = {}
    for shard in leaf.value.addressable_shards:
        box = box_from_index(shard.index, leaf.value.shape)
        kept = intersect_boxes(box, stored)
        if kept is not None and kept not in held:
            held[kept] = np.array(np.asarray(shard.data)[(*kept.index_within(box), ...)])
    return held


class HostShards:
    """The boxes of one array, under one sharding, that this host needs.

    Attributes:
        boxes: the distinct boxes, sorted.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding) -> None:
        """Find the boxes of this host's devices; the sharding may span several hosts, or others alone."""
        self._shape = shape
        self._dtype = dtype
        self._sharding = sharding
        self._box_of: dict[Device, IndexBox] = {
            device: whole_box(shape) if index is None else box_from_index(index, shape)
            for device, index in sharding.addressable_devices_indices_map(shape).items()
        }
        self.boxes = sorted(set(self._box_of.values()))

    @classmethod
    def of_vector(cls, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding) -> "HostShards":
        """Return the shards of a raveled array of this shape: ranges of its vector, padding included."""
        return cls((compute_padded_size(shape, len(sharding.device_set)),), dtype, sharding)

    @property
    def num_elements(self) -> int:
        """Number of elements in all boxes."""
        return sum(box.size for box in self.boxes)

    def assemble(self, buffers: Mapping[IndexBox, np.ndarray]) -> jax.Array:
        """Return the array. Its shards may share the buffers, which must not be used otherwise from now on.

        XLA never writes to memory that it does not own, so several devices may share a buffer.
        """
        kind = self._sharding.memory_kind
        shards = [
            jax.device_put(buffers[box], SingleDeviceSharding(device, memory_kind=kind))
            for device, box in self._box_of.items()
        ]
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, shards, dtype=self._dtype
        )
