"""What this host has accumulated for the step in flight: kept when a peer dies, until the step is committed."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import numpy as np

from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError
from resilient_jax.state.state_digest import DIGEST_WORDS
from resilient_jax.step.assignment import AccumulationSpec, ReplicaShape
from resilient_jax.step.running_total import reshard_total

Tree = Any
"""A pytree of arrays."""
CLAIMS_PADDING: Final = 256
"""Claims are exchanged in vectors of a multiple of this size: mostly the same size for fewer hosts, so that the
all-reduce is compiled already."""


def pad_claims_size(num_hosts: int, num_microbatches: int) -> int:
    """Return the size of the vector in which hosts exchange their claims, each with a digest of its state."""
    size = num_hosts * (num_microbatches + DIGEST_WORDS)
    return -(-size // CLAIMS_PADDING) * CLAIMS_PADDING


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
    """A total of some microbatches, on this host.

    Attributes:
        total: as `step.running_total` has it.
        microbatches: the indexes of those that are in it.
        is_counted: whether this host brings it into the sum. Of a replica on several hosts all have the total, and the
            first host counts; the others keep theirs in case that the first dies.
    """

    total: Tree
    microbatches: frozenset[int]
    is_counted: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Contributions:
    """What one accumulation has on this host.

    Attributes:
        spec: of the accumulation.
        parts: by number: those of the present generation's replicas, and earlier ones. No two have the same microbatch.
        replica_shape: of the replicas that have computed them.
    """

    spec: AccumulationSpec
    parts: dict[int, Contribution] = dataclasses.field(default_factory=dict)
    replica_shape: ReplicaShape = dataclasses.field(default_factory=ReplicaShape)

    def clear(self) -> None:
        """Drop everything: of the step in flight nothing counts as accumulated here."""
        self.parts.clear()

    def drop_unusable(self) -> None:
        """Drop totals that were donated to a program that failed, or never computed because a collective broke."""
        self._replace({number: part for number, part in self.parts.items() if _is_usable(part.total)})

    def move_to_host(self) -> None:
        """Copy every total to host memory, before the devices' backend is destroyed."""
        # First, because to copy an array that was donated, or whose collective broke, would raise.
        self.drop_unusable()
        # np.array copies. On CPU np.asarray would be a view of a buffer that the backend owns.
        self._transform(lambda total: jax.tree.map(np.array, total))

    def move_to_devices(self, like: Tree, replica_shape: ReplicaShape) -> "Contributions":
        """Return these for replicas of a shape, on the devices of `like`, whose tree is a prefix of theirs.

        Totals in host memory, and those of replicas of another shape, get the shardings of the leaves of `like`.
        """

        def move(total: Tree) -> Tree:
            is_here = not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(total))
            if is_here and replica_shape == self.replica_shape:
                return total
            return reshard_total(total, like)

        self._transform(move)
        return dataclasses.replace(self, replica_shape=replica_shape)

    def list_claims(self) -> np.ndarray:
        """Return int32[microbatches]: which part has each, from 1; 0 for none."""
        claims = np.zeros(self.spec.num_microbatches, np.int32)
        for position, part in enumerate(self.parts.values(), start=1):
            claims[list(part.microbatches)] = position
        return claims

    def keep_accepted(self, claims: np.ndarray) -> None:
        """Drop the parts whose claims, as `list_claims` gave them, were refused; all others count from now on."""
        accepted = set(claims.tolist())
        self._replace(
            {
                number: dataclasses.replace(part, is_counted=True)
                for position, (number, part) in enumerate(self.parts.items(), start=1)
                if position in accepted
            }
        )

    def _transform(self, function: Callable[[Tree], Tree]) -> None:
        self._replace(
            {
                number: dataclasses.replace(part, total=function(part.total))
                for number, part in self.parts.items()
            }
        )

    def _replace(self, parts: dict[int, Contribution]) -> None:
        self.parts.clear()
        self.parts.update(parts)


def _is_usable(total: Tree) -> bool:
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(total)):
        return False
    try:
        jax.block_until_ready(total)
    except (JaxRuntimeError, ValueError):  # jit's fast path raises gloo's errors as ValueError
        return False
    return True
