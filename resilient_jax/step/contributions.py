"""What this host has accumulated for the step in flight: kept when a peer dies, until the step is committed.

A partial sum is a running total over some microbatches. A reproducible accumulation has one for each unit, over the
first microbatches of the unit, in order; a fast accumulation has pooled ones, over whatever a replica computed.
"""

import dataclasses
from typing import Any, Final

import jax
import numpy as np

from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError
from resilient_jax.step.assignment import AccumulationSpec

Tree = Any
"""A pytree of arrays."""
PROGRESS_PADDING: Final = 256
"""Progress is exchanged in vectors of a multiple of this size: mostly the same size for fewer hosts, so that the
all-reduce is compiled already."""


def pad_progress_size(size: int) -> int:
    """Return the size of the vector in which progress of `size` elements is exchanged."""
    return -(-size // PROGRESS_PADDING) * PROGRESS_PADDING


@dataclasses.dataclass(frozen=True, slots=True)
class PartialSum:
    """A running total.

    Attributes:
        count: the number of microbatches of its unit, from the first, that are in it.
        total: their sum.
    """

    count: int
    total: Tree


@dataclasses.dataclass(slots=True)
class Contributions:
    """The partial sums of one accumulation on this host.

    Attributes:
        spec: of the accumulation.
        partial_sums: by unit. Those of a pooled accumulation have keys from -1 downwards: each time work is assigned,
            every replica begins another one.
        pooled_units: the units in the pooled partial sums.
    """

    spec: AccumulationSpec
    partial_sums: dict[int, PartialSum] = dataclasses.field(default_factory=dict)
    pooled_units: set[int] = dataclasses.field(default_factory=set)

    def clear(self) -> None:
        """Drop all partial sums: of the step in flight nothing counts as accumulated here."""
        self.partial_sums.clear()
        self.pooled_units.clear()

    def drop_unusable(self) -> None:
        """Drop partial sums that were donated by a user's function that failed, or that were never computed because a
        collective of their program was broken. Of a pooled accumulation all are dropped: which units were in the
        unusable ones is unknown.
        """
        unusable = [key for key, partial in self.partial_sums.items() if not _is_usable(partial.total)]
        if unusable and self.spec.is_pooled:
            self.clear()
        for key in unusable:
            self.partial_sums.pop(key, None)

    def move_to_host(self) -> None:
        """Copy every partial sum to host memory, before the devices' backend is destroyed."""
        # First, because to copy an array that was donated, or whose collective broke, would raise.
        self.drop_unusable()
        for key, partial in self.partial_sums.items():
            # np.array copies. On CPU np.asarray would be a view of a buffer that the backend owns.
            self.partial_sums[key] = PartialSum(partial.count, jax.tree.map(np.array, partial.total))

    def move_to_devices(self, like: Tree) -> None:
        """Give partial sums in host memory the shardings of the leaves of `like`."""
        for key, partial in self.partial_sums.items():
            placed = jax.tree.map(
                lambda leaf, origin: (
                    jax.device_put(leaf, origin.sharding) if isinstance(leaf, np.ndarray) else leaf
                ),
                partial.total,
                like,
            )
            self.partial_sums[key] = PartialSum(partial.count, placed)

    def count_progress(self) -> np.ndarray:
        """Return int32[units]: the number of microbatches of each unit that are accumulated here."""
        progress = np.zeros(self.spec.num_units, np.int32)
        for unit in self.pooled_units:
            progress[unit] = len(self.spec.microbatches_of(unit))
        for key, partial in self.partial_sums.items():
            # Negative keys are pooled sums, whose units are counted above.
            if key >= 0:
                progress[key] = partial.count
        return progress


def _is_usable(total: Tree) -> bool:
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(total)):
        return False
    try:
        jax.block_until_ready(total)
    except (JaxRuntimeError, ValueError):  # jit's fast path raises gloo's errors as ValueError
        return False
    return True
