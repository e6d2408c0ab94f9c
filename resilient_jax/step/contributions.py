"""What this host has added up for the step in flight: kept when a peer dies, until the step is committed.

A part is a running sum over some microbatches. With reproducible reduction there is one part for each unit, and it
holds a beginning of the unit, in order; with fast reduction parts are pooled, over whatever a replica computed.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError
from resilient_jax.step.assignment import AccumulationSpec

Tree = Any
"""A pytree of arrays."""


@dataclasses.dataclass(frozen=True, slots=True)
class PartialSum:
    """A running sum.

    Attributes:
        count: how many microbatches of its unit, from the first, are in it.
        total: their sum.
    """

    count: int
    total: Tree


@dataclasses.dataclass(slots=True)
class Contributions:
    """The parts of one job on this host.

    Attributes:
        parts: by unit. Those of a pooled job count down from -1: each time work is dealt out every replica begins
            another one.
        pooled: the units in the pooled parts.
    """

    spec: AccumulationSpec
    partial_sums: dict[int, PartialSum] = dataclasses.field(default_factory=dict)
    pooled_units: set[int] = dataclasses.field(default_factory=set)

    def clear(self) -> None:
        """Begins again with nothing."""
        self.partial_sums.clear()
        self.pooled_units.clear()

    def drop_unusable(self) -> None:
        """Forgets what is gone, donated by the user's function before it failed, or was never computed: its program was
        handed to the devices, and their collective was broken. Of a pooled job nobody could say which units that were.
        """
        unusable = [number for number, part in self.partial_sums.items() if not _is_usable(part.total)]
        if unusable and self.spec.is_pooled:
            self.clear()
        for number in unusable:
            self.partial_sums.pop(number, None)

    def move_to_host(self) -> None:
        """Copies every part to host memory: the devices' backend is about to go."""
        self.drop_unusable()
        for number, part in self.partial_sums.items():
            self.partial_sums[number] = PartialSum(part.count, jax.tree.map(np.array, part.total))

    def move_to_devices(self, like: Tree) -> None:
        """Puts parts that lie in host memory where the leaves of `like` lie."""
        for number, part in self.partial_sums.items():
            placed = jax.tree.map(
                lambda leaf, origin: (
                    jax.device_put(leaf, origin.sharding) if isinstance(leaf, np.ndarray) else leaf
                ),
                part.total,
                like,
            )
            self.partial_sums[number] = PartialSum(part.count, placed)

    def count_progress(self) -> np.ndarray:
        """int32[units]: how many microbatches of each unit are added up here."""
        found = np.zeros(self.spec.num_units, np.int32)
        for unit in self.pooled_units:
            found[unit] = len(self.spec.microbatches_of(unit))
        for unit, part in self.partial_sums.items():
            if unit >= 0:
                found[unit] = part.count
        return found


def _is_usable(total: Tree) -> bool:
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(total)):
        return False
    try:
        jax.block_until_ready(total)
    except (JaxRuntimeError, ValueError):  # jit's fast path raises gloo's errors as ValueError
        return False
    return True
