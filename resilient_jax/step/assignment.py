"""Which host has which units of an accumulation, and which replica computes those that no host has. Pure."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from resilient_jax.argument_checks import check_fields
from resilient_jax.errors import CallerError
from resilient_jax.step.quotas import count_units, distribute_units, microbatches_of_unit

DATA_AXIS: Final = "data"
"""The one axis of a replica's mesh, by default."""
MAX_WIDTHS: Final = 4
"""Programs that are compiled ahead for one accumulation and the loss of a host."""
MAX_HOSTS_FOR_ALL_LOSSES: Final = 8
"""Up to this many hosts the loss of each is considered."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationSpec:
    """What is accumulated. Partial sums of one specification are invalid for any other.

    Attributes:
        name: of the accumulation within the step.
        step: of the state that the gradients are taken at.
        num_microbatches: of the step.
        unit_size: how many consecutive microbatches one host accumulates in one go.
        is_pooled: whether all units of a replica are added into one total.
    """

    name: str
    step: int
    num_microbatches: int
    unit_size: int
    is_pooled: bool

    @property
    def num_units(self) -> int:
        """The number of units; the last may be smaller."""
        return count_units(self.num_microbatches, self.unit_size)

    def microbatches_of(self, unit: int) -> range:
        """Return the indexes of the microbatches of a unit."""
        return microbatches_of_unit(unit, self.num_microbatches, self.unit_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """How many hosts a replica spans, or how many replicas a host has.

    The bits of a result depend on it, because programs on different meshes add in different orders: it stays the same
    during a job. Hosts that are too few for one more replica compute no microbatch until others join.

    Attributes:
        hosts: how many hosts a replica spans; 1 if a host has several replicas.
        per_host: how many replicas a host has, or "devices": each device is a replica, and needs no other device to
            compute a microbatch. 1 if a replica spans hosts.
        axes: names and sizes of the axes of a replica's mesh, outermost first, which multiply to its devices. A
            microbatch's examples are sharded over the first. (): one axis "data" over all devices.

    Raises:
        CallerError: a number below 1, or both above 1.
    """

    hosts: int = 1
    per_host: int | Literal["devices"] = 1
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        many = self.per_host == "devices" or (isinstance(self.per_host, int) and self.per_host > 1)
        is_known = many or self.per_host == 1
        if not is_known or self.hosts < 1 or (many and self.hosts > 1):
            raise CallerError(
                f"replicas: found hosts={self.hosts}, per_host={self.per_host!r}, expected positive numbers (per_host "
                'may be "devices") of which one is 1. A replica spans several hosts, or a host has several replicas'
            )

    def count_replicas_per_host(self, devices_per_host: int) -> int:
        """Return how many replicas a host has, if none spans hosts.

        Raises:
            CallerError: the host's devices cannot be divided evenly.
        """
        count = devices_per_host if self.per_host == "devices" else self.per_host
        if devices_per_host < count or devices_per_host % count:
            raise CallerError(
                f"replicas: found {devices_per_host} devices on a host, expected a multiple of per_host={count}. "
                "Change one"
            )
        return count

    def count_devices(self, devices_per_host: int) -> int:
        """Return how many devices a replica has."""
        # (devices of a host) hosts / (replicas per host); `hosts` or the replicas per host is 1.
        return devices_per_host * self.hosts // self.count_replicas_per_host(devices_per_host)

    def mesh_axes(self, num_devices: int) -> dict[str, int]:
        """Return the axes of the mesh of a replica with `num_devices` devices.

        Raises:
            CallerError: `axes` do not multiply to that number.
        """
        axes = dict(self.axes) or {DATA_AXIS: num_devices}
        if math.prod(axes.values()) != num_devices or next(iter(axes.values())) % self.hosts:
            raise CallerError(
                f"replicas: found axes {axes} for a replica of {num_devices} devices on {self.hosts} hosts, expected "
                "sizes that multiply to its devices, and a first one, over which examples are sharded, that its hosts "
                "divide"
            )
        return axes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationOptions:
    """How `World.accumulate_microbatches` groups, assigns and reduces microbatches.

    Attributes:
        unit_size: how many consecutive microbatches one host accumulates in one go. A reproducible accumulation keeps
            every unit's total until the end: a smaller unit loses less in a failure and balances better, a larger one
            takes less memory and traffic. The bits of the result depend on it.
        reproducible: add in an order that depends on the indexes only: the same bits, whichever hosts are alive. Else
            one all-reduce of each host's total: less memory and traffic, equal within rounding.
        replica_shape: how many hosts compute a microbatch together, or how many a host computes at a time.
        balance_by_speed: assign units in proportion to measured speed; else evenly.

    Raises:
        CallerError: a value is of another type.
    """

    unit_size: int = 1
    reproducible: bool = True
    replica_shape: ReplicaShape = ReplicaShape()
    balance_by_speed: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """Where a replica is.

    Attributes:
        host_indexes: of its hosts among the live ones.
        slot: which of its host's replicas it is.
    """

    host_indexes: tuple[int, ...]
    slot: int = 0


def locate_replicas(
    process_indexes: Sequence[int], shape: ReplicaShape, devices_per_host: int = 1
) -> tuple[ReplicaLocation, ...]:
    """Return the replicas that the live hosts can form.

    Replicas that span hosts keep their hosts: those that have lost none stay together, so that nothing is compiled
    again for them, and the survivors of broken ones are regrouped, in order. Some hosts may be left over.

    Args:
        process_indexes: of the live hosts, ascending; after a shrink they have gaps.
        shape: of a replica.
        devices_per_host: of each host.

    Raises:
        CallerError: not enough hosts for a single replica.
    """
    host_indexes = range(len(process_indexes))
    if shape.hosts == 1:
        return tuple(
            ReplicaLocation((host,), slot)
            for host in host_indexes
            for slot in range(shape.count_replicas_per_host(devices_per_host))
        )
    if len(process_indexes) < shape.hosts:
        raise CallerError(
            f"replicas: found {len(process_indexes)} live hosts, expected at least {shape.hosts}, which one replica "
            "spans. Start more hosts, and set min_hosts in the job's configuration so that the others wait for them"
        )
    # Block = process index // (hosts of a replica), intact if all of its hosts are alive. The hosts of other blocks are
    # regrouped in order, and the last (their number mod hosts of a replica) are left over.
    by_block: dict[int, list[int]] = {}
    for host, process_index in enumerate(process_indexes):
        by_block.setdefault(process_index // shape.hosts, []).append(host)
    intact = [tuple(block) for block in by_block.values() if len(block) == shape.hosts]
    rest = [host for block in by_block.values() if len(block) < shape.hosts for host in block]
    regrouped = [tuple(rest[i : i + shape.hosts]) for i in range(0, len(rest) - shape.hosts + 1, shape.hosts)]
    return tuple(ReplicaLocation(hosts) for hosts in sorted([*intact, *regrouped]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Which replica computes which units.

    Attributes:
        locations: of the replicas.
        units_by_replica: the units that each replica computes.
        owners: of each unit, the index of the host whose total is reduced.
    """

    locations: tuple[ReplicaLocation, ...]
    units_by_replica: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]


def assign_units(
    spec: AccumulationSpec, locations: tuple[ReplicaLocation, ...], progress: np.ndarray, speeds: np.ndarray
) -> Assignment:
    """Assign complete units to a host that has them, units in progress to their replica, and all others by speed.

    Args:
        spec: of the accumulation.
        locations: of the replicas.
        progress: int[hosts, units], how many microbatches of each unit every host has accumulated.
        speeds: float[hosts], in any unit.
    """
    owners = {}
    for unit in range(spec.num_units):
        # A unit is complete on each host whose progress equals its size; the first such host owns it.
        complete = np.flatnonzero(progress[:, unit] == len(spec.microbatches_of(unit)))
        if complete.size:
            owners[unit] = int(complete[0])
    missing = [unit for unit in range(spec.num_units) if unit not in owners]
    replica_of_begun_unit = {}
    for unit in missing:
        # A unit in progress stays with the replica that is furthest: the most microbatches that all of its hosts have.
        counts = [find_common_progress(progress, location, unit) for location in locations]
        if max(counts):
            replica_of_begun_unit[unit] = counts.index(max(counts))
    assigned = distribute_units(missing, replica_speeds(locations, speeds), replica_of_begun_unit)
    for location, units in zip(locations, assigned, strict=True):
        for position, unit in enumerate(units):
            # A replica's units are owned by its hosts in turn, so that each reduces about as many.
            owners[unit] = location.host_indexes[position % len(location.host_indexes)]
    return Assignment(
        locations=locations,
        units_by_replica=assigned,
        owners=tuple(owners[unit] for unit in range(spec.num_units)),
    )


def predict_widths_after_loss(
    spec: AccumulationSpec, before: tuple[ReplicaLocation, ...], after: tuple[ReplicaLocation, ...]
) -> set[int]:
    """Return likely widths of the first reduction after a loss: the number of units of the host that owns the most.

    The loss may come as the step begins, as it ends, or between, where one host may have accumulated all of its units
    and another none. If there are many such widths, the smallest, which are the likeliest, are returned.

    Args:
        spec: of the accumulation.
        before: the replicas of now.
        after: the replicas that the remaining hosts can form.
    """
    num_hosts, num_left = _count_hosts(before), _count_hosts(after)
    no_progress = np.zeros((num_hosts, spec.num_units), np.int32)
    owners = assign_units(spec, before, no_progress, np.ones(num_hosts)).owners
    sizes = np.array([len(spec.microbatches_of(unit)) for unit in range(spec.num_units)])
    # Which hosts are lost matters only as far as the first ones own the most units and the last ones the fewest.
    candidates = range(num_hosts)
    if num_hosts > MAX_HOSTS_FOR_ALL_LOSSES:
        candidates = (0, 1, num_hosts - 2, num_hosts - 1)
    widths, uneven = set(), set()
    for lost in itertools.combinations(candidates, num_hosts - num_left):
        survivors = np.setdiff1d(np.arange(num_hosts), lost)
        # int[survivors, units]: the size of a unit on its owner, else 0.
        at_end = (survivors[:, None] == np.array(owners)) * sizes
        widths |= {_find_width(spec, after, progress) for progress in (np.zeros_like(at_end), at_end)}
        first = np.argmax((at_end > 0).sum(1))
        uneven.add(_find_width(spec, after, np.where(np.arange(num_left)[:, None] == first, at_end, 0)))
    # From the smallest width to that of the most uneven progress any may occur; MAX_WIDTHS of these are added.
    smallest = min(widths)
    return widths | set(range(smallest, min(max(uneven), smallest + MAX_WIDTHS - 1) + 1))


def _find_width(spec: AccumulationSpec, locations: tuple[ReplicaLocation, ...], progress: np.ndarray) -> int:
    owners = assign_units(spec, locations, progress, np.ones(_count_hosts(locations))).owners
    return max(Counter(owners).values())


def _count_hosts(locations: tuple[ReplicaLocation, ...]) -> int:
    return 1 + max(host for location in locations for host in location.host_indexes)


def find_common_progress(progress: np.ndarray, location: ReplicaLocation, unit: int) -> int:
    """Return how many microbatches of a unit every host of a replica has; 0 if the hosts differ."""
    counts = {int(count) for count in progress[list(location.host_indexes), unit]}
    # Hosts that differ have totals of different microbatches: there is none that all of them could continue from.
    return counts.pop() if len(counts) == 1 else 0


def replica_speeds(locations: Sequence[ReplicaLocation], speeds: np.ndarray) -> list[float]:
    """Return the speed of each replica: that of its slowest host."""
    # Its hosts compute each microbatch together, so all wait for the slowest.
    return [float(min(speeds[list(location.host_indexes)])) for location in locations]
