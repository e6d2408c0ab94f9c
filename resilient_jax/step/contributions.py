"""What this host has accumulated for the step in flight: kept when a peer dies, until the step is committed.

It consists of *parts*: disjoint sets of microbatches, each set with its total. A microbatch is added to a total as soon
as the limits of the step are known. Before that it is a part on its own, whose total is *not started*: it can be
claimed, but not added.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np

from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError
from resilient_jax.step.assignment import AccumulationSpec, ReplicaShape
from resilient_jax.step.fixed_point_sum import FixedPointFormat, measure_fit
from resilient_jax.step.running_total import add_to_total, compute_exponents, reshard_total, start_total

Tree = Any
"""A pytree of arrays."""
FIRST_MICROBATCH: Final = 0
"""The index of the microbatch from which the limits of leaves in fixed point are chosen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
    """One part of this host's contribution: a total of some microbatches, or a single one that is not started.

    Attributes:
        total: exact sums, see `step.running_total`; or the gradients and values of the single microbatch.
        microbatches: the indexes of those that are in it.
        exponents: int32[leaves in fixed point] for each microbatch, in any order.
        is_started: whether `total` is a total.
        is_counted: whether this host brings the part into the sum. Where all hosts of a replica have the same total,
            the first host counts; the others keep theirs in case that the first dies.
    """

    total: Tree
    microbatches: frozenset[int]
    exponents: tuple[Any, ...] = ()
    is_started: bool = True
    is_counted: bool = True


@dataclasses.dataclass(slots=True)
class Contributions:
    """What one accumulation has on this host.

    Attributes:
        spec: what is accumulated; parts of another accumulation, or of another step, cannot be added to these.
        parts: by number: those of the present generation's replicas, and earlier ones. No two have the same microbatch.
        replica_shape: the shape of the replicas that have computed them.
        rank: number of this host among those of its replica, where totals are in shards; see `AccumulationLayout`.
        in_shards: whether they are.
        limits: int32[leaves in fixed point]; None while they are not known. Without them no part is a total.
        shard_sums: this host's shards of the sum over all hosts, from when they are added up until the commit; None:
            they are not, or the sum has no shards.
    """

    spec: AccumulationSpec
    parts: dict[int, Contribution] = dataclasses.field(default_factory=dict)
    replica_shape: ReplicaShape = dataclasses.field(default_factory=ReplicaShape)
    rank: int | None = 0
    in_shards: bool = False
    limits: np.ndarray | None = None
    shard_sums: list[Any] | None = None
    _waiting_numbers: Iterator[int] = dataclasses.field(
        default_factory=lambda: itertools.count(-1, -1), init=False, repr=False, compare=False
    )

    def clear(self) -> None:
        """Drop everything: of the step in flight nothing counts as accumulated here."""
        self.parts.clear()
        self.limits = self.shard_sums = None

    def drop_totals(self) -> None:
        """Drop totals, and the limits that they were made with; single microbatches stay."""
        if self.limits is not None:
            self.clear()

    def drop_unusable(self) -> None:
        """Drop totals that were donated to a program that failed, or never computed because a collective broke.

        Their microbatches are then claimed by nobody, so they are computed again.
        """
        self._replace(
            {number: part for number, part in self.parts.items() if _is_usable((part.total, part.exponents))}
        )

    def has(self, microbatch: int) -> bool:
        """Return whether a microbatch is in any part."""
        parts = tuple(self.parts.values())  # at once: threads of other replicas add theirs meanwhile
        return any(microbatch in part.microbatches for part in parts)

    def add(
        self,
        number: int,
        microbatch: int,
        result: Tree,
        move: Callable[[Tree], Tree] = lambda total: total,
        *,
        is_counted: bool = True,
    ) -> None:
        """Add a microbatch, which no part has, to the part of a number; without such a part it is a new one.

        The limits are known. The total so far is donated, so that a step needs the memory of one total. If the program
        fails, the total is lost with it: `drop_unusable` notices that.

        Args:
            result: what was computed of it.
            move: returns the total so far on the devices of the result.
        """
        assert self.limits is not None
        part, exponents = self.parts.get(number), None
        if part is None:
            total = start_total(self.spec, result, self.limits)
            if self.limits.size:
                exponents = compute_exponents(self.spec, result)
        else:
            total, exponents = add_to_total(move(part.total), result, self.limits, donate=True)
        # The total and the list of what is in it are replaced by one assignment: wherever this thread ends, a total has
        # the microbatches that it claims, or it was donated, and is dropped.
        self.parts[number] = Contribution(
            total,
            (part.microbatches if part else frozenset()) | {microbatch},
            (*(part.exponents if part else ()), exponents) if self.limits.size else (),
            is_counted=is_counted,
        )

    def draw_waiting_number(self) -> int:
        """Return a number that no part has or gets otherwise; each thread that asks gets another."""
        # A counter, and not the least number minus one: threads add parts while others ask. `next` is atomic.
        return next(self._waiting_numbers)

    def find_first_exponents(self) -> np.ndarray | None:
        """Return the exponents of microbatch 0, if it is here and counts, and its total is not started."""
        for part in self.parts.values():
            if part.is_counted and not part.is_started and FIRST_MICROBATCH in part.microbatches:
                return np.asarray(part.exponents[0])
        return None

    def start_totals(self, limits: np.ndarray) -> None:
        """Set the limits, and make totals of what was computed before they were known."""
        # On one thread while all others wait for the limits: see `LimitExchange`.
        self.limits = limits
        for number, part in self.parts.items():
            if not part.is_started:
                total = start_total(self.spec, part.total, limits)
                self.parts[number] = dataclasses.replace(part, total=total, is_started=True)

    def measure_fit(self, formats: Sequence[FixedPointFormat]) -> np.ndarray:
        """Return how the microbatches of the parts that count fit the limits; see `fixed_point_sum.measure_fit`."""
        assert self.limits is not None
        # Not of parts that another host counts, or their microbatches would have twice their shares of the limit.
        rows = [np.asarray(row) for part in self.parts.values() if part.is_counted for row in part.exponents]
        exponents = np.array(rows, np.int32).reshape(len(rows), self.limits.size)
        return measure_fit(exponents, self.limits, formats)

    @property
    def limits_digest(self) -> int:
        """A number of 32 bits that tells limits apart, for all hosts alike; 0: there are none."""
        return 0 if self.limits is None else (zlib.crc32(self.limits.astype("<i4").tobytes()) or 1)

    def move_to_host(self) -> None:
        """Copy every total to host memory, before the devices' backend is destroyed."""
        # First, because to copy an array that was donated, or whose collective broke, would raise.
        self.drop_unusable()
        self.shard_sums = None  # the step that needs them is finished before
        # np.array copies. On CPU np.asarray would be a view of a buffer that the backend owns.
        self._replace(
            {
                number: dataclasses.replace(
                    part,
                    total=jax.tree.map(np.array, part.total),
                    exponents=tuple(map(np.array, part.exponents)),
                )
                for number, part in self.parts.items()
            }
        )

    def move_to_devices(
        self, like: Tree, replica_shape: ReplicaShape, rank: int | None, *, in_shards: bool
    ) -> None:
        """Move these to the devices of `like`, whose tree is a prefix of theirs, for replicas of a shape.

        Totals in host memory, and those of replicas of another shape, get the shardings of the leaves of `like`. Those
        in shards are dropped if this host is to have others, or, as the only one of its replica, whole ones.
        """
        is_cut_alike = (replica_shape, rank) == (self.replica_shape, self.rank)
        if in_shards != self.in_shards or (in_shards and not is_cut_alike):
            self.clear()
        self.rank, self.in_shards = rank, in_shards
        for number, part in self.parts.items():
            is_here = not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(part.total))
            if not is_here or replica_shape != self.replica_shape:
                self.parts[number] = dataclasses.replace(part, total=reshard_total(part.total, like))
        self.replica_shape = replica_shape

    def list_claims(self) -> np.ndarray:
        """Return int32[microbatches]: which part has each, from 1; 0 for none."""
        claims = np.zeros(self.spec.num_microbatches, np.int32)
        for position, part in enumerate(self.parts.values(), start=1):
            claims[list(part.microbatches)] = position
        return claims

    def keep_accepted(self, claims: np.ndarray) -> None:
        """Drop the parts whose claims, as `list_claims` gave them, were refused; all others count from now on.

        A claim is accepted from one host alone, so a part that two hosts have kept comes into the sum once. It may be
        that of the second host of a replica, whose first one has died.
        """
        accepted = set(claims.tolist())
        self._replace(
            {
                number: dataclasses.replace(part, is_counted=True)
                for position, (number, part) in enumerate(self.parts.items(), start=1)
                if position in accepted
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
