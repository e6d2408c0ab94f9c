"""Which host has which units of a sum, and who computes those that nobody has. Pure."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from resilient_jax.errors import CallerError
from resilient_jax.step.quotas import count_units, distribute_units, microbatches_of_unit

DATA_AXIS: Final = "data"
"""The one axis of a replica's mesh, if nobody says otherwise."""
MAX_WIDTHS: Final = 4
"""Programs that a sum gets for the loss of a host."""
MAX_HOSTS_FOR_ALL_LOSSES: Final = 8
"""Of so many hosts every loss is looked at."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationSpec:
    """What is added up. Parts of another job are of no use.

    Attributes:
        name: of the sum within the step.
        step: of the state that the gradients are taken at.
        microbatches: how many belong to the step.
        unit: how many consecutive ones are added in one go.
        pooled: whether all units of a replica go into one sum.
    """

    name: str
    step: int
    num_microbatches: int
    unit_size: int
    is_pooled: bool

    @property
    def num_units(self) -> int:
        return count_units(self.num_microbatches, self.unit_size)

    def microbatches_of(self, number: int) -> range:
        """The microbatches of a unit."""
        return microbatches_of_unit(number, self.num_microbatches, self.unit_size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """How many hosts a replica spans, or how many replicas a host has.

    Bits depend on it, for programs on different meshes add in different orders: it stays the same for a whole job.
    Hosts that are too few for one more replica compute no microbatch until others come.

    Attributes:
        hosts: of a replica; 1 if a host has several.
        per_host: replicas of a host, or "devices": each device is one, and devices need not talk to each other while
            they compute microbatches. 1 if a replica spans hosts.
        axes: names and sizes of the axes of a replica's mesh, outermost first, which multiply to its devices. The first
            cuts a microbatch's examples. (): one axis "data" over all devices.

    Raises:
        CallerError: a number below 1, or both above 1.
    """

    hosts: int = 1
    per_host: int | Literal["devices"] = 1
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        many = self.per_host == "devices" or (isinstance(self.per_host, int) and self.per_host > 1)
        known = many or self.per_host == 1
        if not known or self.hosts < 1 or (many and self.hosts > 1):
            raise CallerError(
                f"replicas: found hosts={self.hosts}, per_host={self.per_host!r}, expected positive numbers (per_host "
                'may be "devices") of which one is 1. A replica spans several hosts, or a host has several replicas'
            )

    def count_replicas_per_host(self, devices_per_host: int) -> int:
        """How many replicas a host with so many devices has, if none spans hosts.

        Raises:
            CallerError: its devices cannot be shared out evenly.
        """
        count = devices_per_host if self.per_host == "devices" else self.per_host
        if devices_per_host < count or devices_per_host % count:
            raise CallerError(
                f"replicas: found {devices_per_host} devices on a host, expected a multiple of per_host={count}. Change one"
            )
        return count

    def count_devices(self, devices_per_host: int) -> int:
        """How many devices a replica has where each host has so many."""
        return devices_per_host * self.hosts // self.count_replicas_per_host(devices_per_host)

    def mesh_axes(self, num_devices: int) -> dict[str, int]:
        """The axes of the mesh of a replica that has so many devices.

        Raises:
            CallerError: they have others than `axes`.
        """
        axes = dict(self.axes) or {DATA_AXIS: num_devices}
        if math.prod(axes.values()) != num_devices or next(iter(axes.values())) % self.hosts:
            raise CallerError(
                f"replicas: found axes {axes} for a replica of {num_devices} devices on {self.hosts} hosts, expected sizes "
                "that multiply to its devices, and a first one, which cuts examples, that its hosts divide"
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
    """

    unit_size: int = 1
    reproducible: bool = True
    replica_shape: ReplicaShape = ReplicaShape()
    balance_by_speed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """Where a replica is: the places of its hosts among the live ones, and which of its host's replicas it is."""

    host_indexes: tuple[int, ...]
    slot: int = 0


def locate_replicas(
    process_indexes: Sequence[int], shape: ReplicaShape, devices_per_host: int = 1
) -> tuple[ReplicaLocation, ...]:
    """The replicas that the live hosts can form.

    Replicas that span hosts keep their hosts: those that are still whole stay together, so that nothing is compiled
    again for them, and the survivors of broken ones are grouped anew, in order. Some may be left over.

    Args:
        process_indexes: of the live hosts, ascending; after a shrink they have gaps.
        shape: of a replica.
        devices: of each host.

    Raises:
        CallerError: not enough hosts for a single replica.
    """
    places = range(len(process_indexes))
    if shape.hosts == 1:
        return tuple(
            ReplicaLocation((place,), slot)
            for place in places
            for slot in range(shape.count_replicas_per_host(devices_per_host))
        )
    if len(process_indexes) < shape.hosts:
        raise CallerError(
            f"replicas: found {len(process_indexes)} live hosts, expected at least {shape.hosts}, which one replica "
            "spans. Start more hosts, and set min_hosts in the job's configuration so that the others wait for them"
        )
    by_block: dict[int, list[int]] = {}
    for place, index in enumerate(process_indexes):
        by_block.setdefault(index // shape.hosts, []).append(place)
    whole = [tuple(block) for block in by_block.values() if len(block) == shape.hosts]
    rest = [place for block in by_block.values() if len(block) < shape.hosts for place in block]
    anew = [tuple(rest[i : i + shape.hosts]) for i in range(0, len(rest) - shape.hosts + 1, shape.hosts)]
    return tuple(ReplicaLocation(hosts) for hosts in sorted([*whole, *anew]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Who computes which units.

    Attributes:
        seats: of the replicas.
        dealt: the units that each replica computes.
        owners: of each unit, the place of the host whose total counts.
    """

    locations: tuple[ReplicaLocation, ...]
    units_by_replica: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]


def assign_units(
    spec: AccumulationSpec, locations: tuple[ReplicaLocation, ...], progress: np.ndarray, speeds: np.ndarray
) -> Assignment:
    """What is complete stays where it is; the rest is dealt out, begun units to those who began them.

    Args:
        job: the sum.
        seats: of the replicas.
        progress: int[hosts, units], how many microbatches of each unit every host has added up.
        speeds: float[hosts], in any unit.
    """
    owners = {}
    for unit in range(spec.num_units):
        complete = np.flatnonzero(progress[:, unit] == len(spec.microbatches_of(unit)))
        if complete.size:
            owners[unit] = int(complete[0])
    missing = [unit for unit in range(spec.num_units) if unit not in owners]
    begun = {}
    for unit in missing:
        best = max(
            range(len(locations)), key=lambda number: find_common_progress(progress, locations[number], unit)
        )
        if find_common_progress(progress, locations[best], unit):
            begun[unit] = best
    dealt = distribute_units(missing, replica_speeds(locations, speeds), begun)
    for seat, units in zip(locations, dealt, strict=True):
        for turn, unit in enumerate(units):
            owners[unit] = seat.host_indexes[turn % len(seat.host_indexes)]
    return Assignment(
        locations=locations,
        units_by_replica=dealt,
        owners=tuple(owners[unit] for unit in range(spec.num_units)),
    )


def predict_widths_after_loss(
    spec: AccumulationSpec, before: tuple[ReplicaLocation, ...], after: tuple[ReplicaLocation, ...]
) -> set[int]:
    """How many units the host with the most may own where hosts are lost, in the first sum after that.

    As a step begins or ends, and between: one host may have added up all of its units and another none. Of many such
    numbers the least, which are the likeliest.

    Args:
        job: the sum.
        before: the seats of now.
        after: the seats among those that are left.
    """
    hosts, left = _count_hosts(before), _count_hosts(after)
    owners = assign_units(spec, before, np.zeros((hosts, spec.num_units), np.int32), np.ones(hosts)).owners
    sizes = np.array([len(spec.microbatches_of(unit)) for unit in range(spec.num_units)])
    # Which hosts are lost makes as much of a difference as between the first and the last: most units and fewest.
    ends = range(hosts) if hosts <= MAX_HOSTS_FOR_ALL_LOSSES else (0, 1, hosts - 2, hosts - 1)
    widths, uneven = set(), set()
    for lost in itertools.combinations(ends, hosts - left):
        survivors = np.setdiff1d(np.arange(hosts), lost)
        at_end = (survivors[:, None] == np.array(owners)) * sizes
        widths |= {_find_width(spec, after, progress) for progress in (np.zeros_like(at_end), at_end)}
        first = np.argmax((at_end > 0).sum(1))
        uneven.add(_find_width(spec, after, np.where(np.arange(left)[:, None] == first, at_end, 0)))
    least = min(widths)
    return widths | set(range(least, min(max(uneven), least + MAX_WIDTHS - 1) + 1))


def _find_width(job: AccumulationSpec, seats: tuple[ReplicaLocation, ...], progress: np.ndarray) -> int:
    owners = assign_units(job, seats, progress, np.ones(_count_hosts(seats))).owners
    return max(Counter(owners).values())


def _count_hosts(seats: tuple[ReplicaLocation, ...]) -> int:
    return 1 + max(place for seat in seats for place in seat.host_indexes)


def find_common_progress(progress: np.ndarray, location: ReplicaLocation, unit: int) -> int:
    """How many microbatches of a unit every host of a replica has added up; 0 if they do not all have the same."""
    counts = {int(count) for count in progress[list(location.host_indexes), unit]}
    return counts.pop() if len(counts) == 1 else 0


def replica_speeds(locations: Sequence[ReplicaLocation], speeds: np.ndarray) -> list[float]:
    """Of each replica: that of its slowest host."""
    return [float(min(speeds[list(seat.host_indexes)])) for seat in locations]
