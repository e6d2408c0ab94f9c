"""Which host has which units of a sum, and who computes those that nobody has. Pure."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from resilient_jax.errors import CallerError
from resilient_jax.step.quotas import deal, indexes_of, unit_count

DATA: Final = "data"
"""The one axis of a replica's mesh, if nobody says otherwise."""
MOST_WIDTHS: Final = 4
"""Programs that a sum gets for the loss of a host."""
MOST_LOSSES_OF: Final = 8
"""Of so many hosts every loss is looked at."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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
    microbatches: int
    unit: int
    pooled: bool

    @property
    def units(self) -> int:
        return unit_count(self.microbatches, self.unit)

    def indexes_of(self, number: int) -> range:
        """The microbatches of a unit."""
        return indexes_of(number, self.microbatches, self.unit)


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

    def count_on(self, devices: int) -> int:
        """How many replicas a host with so many devices has, if none spans hosts.

        Raises:
            CallerError: its devices cannot be shared out evenly.
        """
        count = devices if self.per_host == "devices" else self.per_host
        if devices < count or devices % count:
            raise CallerError(
                f"replicas: found {devices} devices on a host, expected a multiple of per_host={count}. Change one"
            )
        return count

    def devices_of(self, devices: int) -> int:
        """How many devices a replica has where each host has so many."""
        return devices * self.hosts // self.count_on(devices)

    def axes_on(self, devices: int) -> dict[str, int]:
        """The axes of the mesh of a replica that has so many devices.

        Raises:
            CallerError: they have others than `axes`.
        """
        axes = dict(self.axes) or {DATA: devices}
        if math.prod(axes.values()) != devices or next(iter(axes.values())) % self.hosts:
            raise CallerError(
                f"replicas: found axes {axes} for a replica of {devices} devices on {self.hosts} hosts, expected sizes "
                "that multiply to its devices, and a first one, which cuts examples, that its hosts divide"
            )
        return axes


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """Where a replica is: the places of its hosts among the live ones, and which of its host's replicas it is."""

    hosts: tuple[int, ...]
    slot: int = 0


def seat_replicas(process_indexes: Sequence[int], shape: ReplicaShape, devices: int = 1) -> tuple[Seat, ...]:
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
        return tuple(Seat((place,), slot) for place in places for slot in range(shape.count_on(devices)))
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
    return tuple(Seat(hosts) for hosts in sorted([*whole, *anew]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Who computes which units.

    Attributes:
        seats: of the replicas.
        dealt: the units that each replica computes.
        owners: of each unit, the place of the host whose total counts.
    """

    seats: tuple[Seat, ...]
    dealt: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]


def assign(job: Job, seats: tuple[Seat, ...], progress: np.ndarray, speeds: np.ndarray) -> Assignment:
    """What is complete stays where it is; the rest is dealt out, begun units to those who began them.

    Args:
        job: the sum.
        seats: of the replicas.
        progress: int[hosts, units], how many microbatches of each unit every host has added up.
        speeds: float[hosts], in any unit.
    """
    owners = {}
    for unit in range(job.units):
        complete = np.flatnonzero(progress[:, unit] == len(job.indexes_of(unit)))
        if complete.size:
            owners[unit] = int(complete[0])
    missing = [unit for unit in range(job.units) if unit not in owners]
    begun = {}
    for unit in missing:
        best = max(range(len(seats)), key=lambda number: common_progress(progress, seats[number], unit))
        if common_progress(progress, seats[best], unit):
            begun[unit] = best
    dealt = deal(missing, speeds_of(seats, speeds), begun)
    for seat, units in zip(seats, dealt, strict=True):
        for turn, unit in enumerate(units):
            owners[unit] = seat.hosts[turn % len(seat.hosts)]
    return Assignment(seats=seats, dealt=dealt, owners=tuple(owners[unit] for unit in range(job.units)))


def widths_after_loss(job: Job, before: tuple[Seat, ...], after: tuple[Seat, ...]) -> set[int]:
    """How many units the host with the most may own where hosts are lost, in the first sum after that.

    As a step begins or ends, and between: one host may have added up all of its units and another none. Of many such
    numbers the least, which are the likeliest.

    Args:
        job: the sum.
        before: the seats of now.
        after: the seats among those that are left.
    """
    hosts, left = _count_hosts(before), _count_hosts(after)
    owners = assign(job, before, np.zeros((hosts, job.units), np.int32), np.ones(hosts)).owners
    sizes = np.array([len(job.indexes_of(unit)) for unit in range(job.units)])
    # Which hosts are lost makes as much of a difference as between the first and the last: most units and fewest.
    ends = range(hosts) if hosts <= MOST_LOSSES_OF else (0, 1, hosts - 2, hosts - 1)
    widths, uneven = set(), set()
    for lost in itertools.combinations(ends, hosts - left):
        survivors = np.setdiff1d(np.arange(hosts), lost)
        at_end = (survivors[:, None] == np.array(owners)) * sizes
        widths |= {_find_width(job, after, progress) for progress in (np.zeros_like(at_end), at_end)}
        first = np.argmax((at_end > 0).sum(1))
        uneven.add(_find_width(job, after, np.where(np.arange(left)[:, None] == first, at_end, 0)))
    least = min(widths)
    return widths | set(range(least, min(max(uneven), least + MOST_WIDTHS - 1) + 1))


def _find_width(job: Job, seats: tuple[Seat, ...], progress: np.ndarray) -> int:
    owners = assign(job, seats, progress, np.ones(_count_hosts(seats))).owners
    return max(Counter(owners).values())


def _count_hosts(seats: tuple[Seat, ...]) -> int:
    return 1 + max(place for seat in seats for place in seat.hosts)


def common_progress(progress: np.ndarray, seat: Seat, unit: int) -> int:
    """How many microbatches of a unit every host of a replica has added up; 0 if they do not all have the same."""
    counts = {int(count) for count in progress[list(seat.hosts), unit]}
    return counts.pop() if len(counts) == 1 else 0


def speeds_of(seats: Sequence[Seat], speeds: np.ndarray) -> list[float]:
    """Of each replica: that of its slowest host."""
    return [float(min(speeds[list(seat.hosts)])) for seat in seats]
