"""Which host has which microbatches of a step, and which replica computes those that no host has. Pure."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np

from resilient_jax.argument_checks import check_fields
from resilient_jax.errors import CallerError, TooFewHosts
from resilient_jax.step.quotas import distribute_microbatches

DATA_AXIS: Final = "data"
"""The one axis of a replica's mesh, by default."""
AFTER_LOSS: Final = (
    "If hosts have lost devices, set devices_after_loss = 'host' in the job's configuration: then a host without all "
    "of its devices waits in quarantine, and min_hosts says how many others must be there"
)
"""What to do where no live host has the devices of one replica."""
MeshAxes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh, outermost first."""
Reduction = Literal["exact", "exact_wide", "fast"]
"""How the totals of microbatches are added up; see `AccumulationOptions`."""


class DeviceOfProcess(Protocol):
    """A device, as far as it is known here whose it is."""

    @property
    def process_index(self) -> int:
        """The index of its process."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationSpec:
    """What is accumulated. Totals of one specification are invalid for any other.

    Attributes:
        name: what distinguishes it from the step's other accumulations.
        step: number of the step, and so of the state that the gradients are taken at.
        num_microbatches: the constant number in each step, whichever hosts are alive.
        reduction: how the totals of microbatches are added up.
        balance_by_speed: whether microbatches are assigned by measured speed.
    """

    name: str
    step: int
    num_microbatches: int
    reduction: Reduction
    balance_by_speed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """How many hosts a replica spans, or how many replicas a host has.

    The bits of a result depend on it, because programs on different meshes add in different orders: it stays the same
    during a job. Hosts that are too few for one more replica compute no microbatch until others join.

    Hosts may have different numbers of devices: a replica has as many devices as on the host that has most, and a host
    with fewer has fewer replicas, so that all are alike and bits are the same. Only if a host has too few devices for
    one, and `axes` are not given, has it a smaller replica, whose microbatches differ in the last bits. With "devices"
    that cannot be. Devices that are too few for one more replica are not used.

    With `axes_by_devices` the replicas of a host have the axes that suit its number of devices. Then a microbatch's
    bits depend on the host that computes it. All hosts still get the same sums. The same job repeated is equal within
    rounding: it has the same bits only where the same hosts compute the same microbatches, which their speeds decide.

    Attributes:
        hosts: how many hosts a replica spans; 1 if a host has several replicas.
        per_host: how many replicas a host has, or "devices": each device is a replica, and needs no other device to
            compute a microbatch; with `axes` as many replicas as the host has devices for. 1 if a replica spans hosts.
        axes: names and sizes of the axes of a replica's mesh, outermost first, which multiply to its devices. A
            microbatch's examples are sharded over the first. (): one axis "data" over all devices.
        axes_by_devices: (devices of a host, axes of its replicas), in place of `axes`, where hosts differ in axes; with
            `per_host="devices"`. All axes have the same names.

    Raises:
        CallerError: a number below 1, or both above 1; axes that do not fit the rest.
    """

    hosts: int = 1
    per_host: int | Literal["devices"] = 1
    axes: MeshAxes = ()
    axes_by_devices: tuple[tuple[int, MeshAxes], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        many = self.per_host == "devices" or (isinstance(self.per_host, int) and self.per_host > 1)
        is_known = many or self.per_host == 1
        if not is_known or self.hosts < 1 or (many and self.hosts > 1):
            raise CallerError(
                f"replicas: found hosts={self.hosts}, per_host={self.per_host!r}, expected positive numbers (per_host "
                'may be "devices") of which one is 1. A replica spans several hosts, or a host has several replicas'
            )
        if self.axes_by_devices and (self.axes or self.per_host != "devices"):
            raise CallerError(
                f"replicas: found axes_by_devices together with axes={self.axes}, per_host={self.per_host!r}, expected "
                'no axes, and per_host="devices". Give the axes of each number of devices'
            )

    def for_host(self, num_devices: int) -> "ReplicaShape":
        """Return the shape of the replicas of a host with so many devices.

        Raises:
            CallerError: there are `axes_by_devices`, and none for this number.
        """
        if not self.axes_by_devices:
            return self
        by_devices = dict(self.axes_by_devices)
        axes = by_devices.get(num_devices, ())
        if not 0 < math.prod(size for _, size in axes) <= num_devices or not axes:
            raise CallerError(
                f"replicas: found a host of {num_devices} devices, and axes_by_devices {by_devices}, expected axes for "
                f"that number which multiply to it at most. {AFTER_LOSS}"
            )
        return ReplicaShape(per_host="devices", axes=axes)

    def count_devices_per_host(self, device_counts: Sequence[int]) -> int:
        """Return how many devices of a host a replica has, where the host has enough.

        All hosts find the same number, so that replicas on hosts with other numbers of devices are alike.

        Args:
            device_counts: the number of devices of each live host.

        Raises:
            CallerError: no host has enough devices, or those of the host that has most cannot be divided evenly.
        """
        most = max(device_counts)
        if not self.axes:
            count = most if self.per_host == "devices" else self.per_host
            # The hosts of a replica that spans several give equally many: as many as the host with the fewest has.
            return min(device_counts) if self.hosts > 1 else self._divide(most, count)
        width, rest = divmod(math.prod(size for _, size in self.axes), self.hosts)
        most_used = width * (most if self.per_host == "devices" else self.per_host)
        # If the devices of a whole replica would stay unused, the shape was meant for other hosts.
        if rest or most < width or most - most_used >= width:
            # One of the two raises: the axes do not multiply to the devices, or a host has too few or too many.
            self.mesh_axes(most * self.hosts)
            self._divide(most, most + 1)
        return width

    def _divide(self, num_devices: int, count: int) -> int:
        if num_devices < count or num_devices % count:
            raise CallerError(
                f"replicas: found {num_devices} devices on a host, expected a multiple of per_host={self.per_host}. "
                f"Change one. {AFTER_LOSS}"
            )
        return num_devices // count

    def divide_host(self, num_devices: int, width: int) -> tuple[int, int]:
        """Return how many replicas a host has if none spans hosts, and the devices of each.

        A host with too few devices for one replica has one of all its devices, or none if `axes` are given.

        Args:
            num_devices: all that the host has.
            width: what `count_devices_per_host` returns.
        """
        if num_devices < width and not self.axes:
            return 1, num_devices
        count = num_devices // width
        return count if self.per_host == "devices" else min(count, self.per_host), width

    def count_devices(self, num_devices: int, device_counts: Sequence[int]) -> int:
        """Return how many devices a replica has in all, if a host with `num_devices` is one of its hosts.

        Raises:
            CallerError: see `count_devices_per_host`.
        """
        if self.axes_by_devices:
            return self.for_host(num_devices).count_devices(num_devices, [num_devices])
        width = self.count_devices_per_host(device_counts)
        return self.hosts * (width if self.hosts > 1 else self.divide_host(num_devices, width)[1])

    def mesh_axes(self, num_devices: int) -> dict[str, int]:
        """Return the axes of the mesh of a replica with `num_devices` devices.

        Raises:
            CallerError: `axes` do not multiply to that number.
        """
        axes = dict(self.axes) or {DATA_AXIS: num_devices}
        # Hosts have runs of examples each, or several the same one.
        first = next(iter(axes.values()))
        if math.prod(axes.values()) != num_devices or (first % self.hosts and self.hosts % first):
            raise CallerError(
                f"replicas: found axes {axes} for a replica of {num_devices} devices on {self.hosts} hosts, expected "
                "sizes that multiply to its devices, and a first one, over which examples are sharded, that its hosts "
                f"divide, or that divides them. {AFTER_LOSS}"
            )
        return axes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationOptions:
    """How `World.accumulate_microbatches` assigns and adds up microbatches.

    Attributes:
        reduction: "exact": the sum of each element is that of its addends, in whatever order and wherever they are
            computed: the same bits, whichever hosts are alive, as precise as floats added in order; twice the memory
            and traffic of floats (`step.fixed_point_sum`). "exact_wide": the same of any range, so that no sum is ever
            made again, with 9 bytes for an element (`step.binned_sum`). "fast": floats, equal within rounding.
        replica_shape: how many hosts compute a microbatch together, or how many a host computes at a time.
        balance_by_speed: hosts that compute microbatches faster than others get more of them, where a step is then
            done at least a tenth sooner; looked at every 16 steps. Else microbatches are assigned evenly. Exact sums
            have the same bits either way; those of "fast" depend on who computes what, within rounding.

    Raises:
        CallerError: a value is of another type.
    """

    reduction: Reduction = "exact"
    replica_shape: ReplicaShape = ReplicaShape()
    balance_by_speed: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """Where a replica is.

    Attributes:
        host_indexes: positions of its hosts among the live ones. The first one brings the replica's total into the sum.
        slot: number of the replica among those of its host; 0 if it spans several.
        devices: how many it has on each of its hosts.
        axes: names and sizes of its mesh's axes, where hosts differ in axes; else ().
    """

    host_indexes: tuple[int, ...]
    slot: int = 0
    devices: int = 1
    axes: MeshAxes = ()


def count_devices_by_host(devices: Iterable[DeviceOfProcess]) -> tuple[int, ...]:
    """Return the number of devices of each host, in the order of their process indexes."""
    counts = collections.Counter(device.process_index for device in devices)
    return tuple(counts[index] for index in sorted(counts))


class HeldRanks(NamedTuple):
    """The rank whose shards each live host has already, so that as few as possible move when replicas are formed anew.

    Attributes:
        num_ranks: hosts of a replica, as it was.
        by_host: for each live host the rank of the shards that it has; None: it has none.
    """

    num_ranks: int
    by_host: tuple[int | None, ...]


def locate_replicas(
    seats: Sequence[int],
    shape: ReplicaShape,
    device_counts: Sequence[int],
    held: HeldRanks | None = None,
) -> tuple[ReplicaLocation, ...]:
    """Return the replicas that the live hosts can form.

    Hosts of neighboring seats are a replica, and stay together as long as none of them is lost: nothing is compiled
    again for them. The survivors of the others, and hosts that came later, are grouped in order of their seats; where
    they have shards, so that as many as can be keep their ranks, and the fewest shards move. Some hosts may be left
    over.

    Args:
        seats: where the live hosts are in the world, ascending; after a change in place there are gaps.
        shape: what each replica spans.
        device_counts: number of devices of each live host, in the same order.
        held: the shards that they have; None, or of replicas of another number of hosts: these do not matter.

    Raises:
        CallerError: not enough hosts, or devices, for a single replica.
    """
    if shape.axes_by_devices:
        return tuple(_locate_by_devices(shape, device_counts))
    width = shape.count_devices_per_host(device_counts)
    if shape.hosts == 1:
        divided = [shape.divide_host(num_devices, width) for num_devices in device_counts]
        return tuple(
            ReplicaLocation((host,), slot, devices)
            for host, (count, devices) in enumerate(divided)
            for slot in range(count)
        )
    usable = [host for host, count in enumerate(device_counts) if count >= width]
    if len(usable) < shape.hosts:
        raise TooFewHosts(
            f"replicas: found {len(usable)} live hosts, expected at least {shape.hosts}, which one replica "
            "spans. Start more hosts, and set min_hosts in the job's configuration so that the others wait for them",
            shape.hosts,
        )
    # Block = seat // (hosts of a replica), intact if all of its hosts are alive. The hosts of other blocks are
    # regrouped in order, and the last (their number mod hosts of a replica) are left over.
    by_block: dict[int, list[int]] = {}
    for host in usable:
        by_block.setdefault(seats[host] // shape.hosts, []).append(host)
    ranks = held.by_host if held is not None and held.num_ranks == shape.hosts else (None,) * len(seats)
    intact = [
        tuple(block)
        for block in by_block.values()
        if len(block) == shape.hosts and all(ranks[host] in (None, rank) for rank, host in enumerate(block))
    ]
    placed = {host for block in intact for host in block}
    regrouped = _regroup([host for host in usable if host not in placed], ranks, shape.hosts)
    return tuple(ReplicaLocation(hosts, 0, width) for hosts in sorted([*intact, *regrouped]))


def _regroup(hosts: Sequence[int], ranks: Sequence[int | None], num_ranks: int) -> list[tuple[int, ...]]:
    """Return as many replicas of hosts as there can be, with as few hosts as possible that get another rank.

    Hosts without shards come before those that would have to change theirs; those with the highest numbers are left
    over.
    """
    num_replicas = len(hosts) // num_ranks
    columns = [[host for host in hosts if ranks[host] == rank][:num_replicas] for rank in range(num_ranks)]
    placed = {host for column in columns for host in column}
    others = sorted((host for host in hosts if host not in placed), key=lambda host: ranks[host] is not None)
    # In turn by replica, so that without shards neighbors stay together.
    for row in range(num_replicas):
        for column in columns:
            if len(column) <= row:
                column.append(others.pop(0))
    return list(zip(*columns, strict=True))


def list_holders(locations: Sequence[ReplicaLocation]) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank in a replica, the indexes of the hosts with that rank, ascending.

    Where a replica's program is in shards over its hosts, those with the same rank have the same shards.
    """
    by_rank = zip(*[location.host_indexes for location in locations], strict=True)
    return tuple(tuple(sorted(hosts)) for hosts in by_rank)


def _locate_by_devices(shape: ReplicaShape, device_counts: Sequence[int]) -> Iterator[ReplicaLocation]:
    """Yield the replicas of hosts that differ in axes, host by host."""
    for host, num_devices in enumerate(device_counts):
        host_shape = shape.for_host(num_devices)
        count, width = host_shape.divide_host(num_devices, math.prod(size for _, size in host_shape.axes))
        for slot in range(count):
            yield ReplicaLocation((host,), slot, width, host_shape.axes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Which replica computes which microbatches.

    Attributes:
        locations: where each replica is, by its number.
        by_replica: the indexes of the microbatches that each replica computes, ascending: a run of the missing ones.
        owners: index of the host whose total has it, for each microbatch.
    """

    locations: tuple[ReplicaLocation, ...]
    by_replica: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]


def assign_microbatches(
    locations: tuple[ReplicaLocation, ...], claims: np.ndarray, speeds: np.ndarray
) -> Assignment:
    """Leave each microbatch with the host that has it, and assign all others by speed.

    A function of what all hosts have alike: each of them calls it and gets the same assignment, without a message.

    Args:
        claims: bool[hosts, microbatches], which microbatches are in the total of each host; at most one host has one.
        speeds: float[hosts], in any unit.
    """
    num_microbatches = claims.shape[1]
    owners = {int(index): int(host) for host, index in np.argwhere(claims)}
    # What was computed stays where it is: a total cannot be taken apart.
    missing = [index for index in range(num_microbatches) if index not in owners]
    by_replica = distribute_microbatches(missing, replica_speeds(locations, speeds))
    for location, indexes in zip(locations, by_replica, strict=True):
        # All hosts of a replica have its total; the first one brings it into the sum.
        owners |= dict.fromkeys(indexes, location.host_indexes[0])
    return Assignment(
        locations=locations,
        by_replica=by_replica,
        owners=tuple(owners[index] for index in range(num_microbatches)),
    )


def count_by_host(locations: Sequence[ReplicaLocation], shares: Sequence[int], num_hosts: int) -> list[int]:
    """Return how many microbatches each host takes part in, if each replica computes `shares` of them."""
    counts = [0] * num_hosts
    for location, share in zip(locations, shares, strict=True):
        for host in location.host_indexes:
            counts[host] += share
    return counts


def replica_speeds(locations: Sequence[ReplicaLocation], speeds: np.ndarray) -> list[float]:
    """Return the speed of each replica: its part of the speed of its host, or of the slowest of its hosts."""
    # A host's speed is that of all its replicas together, which are alike. The hosts of one replica compute each
    # microbatch together, so all wait for the slowest.
    per_host = collections.Counter(host for location in locations for host in location.host_indexes)
    return [
        min(float(speeds[host]) / per_host[host] for host in location.host_indexes) for location in locations
    ]


def count_working_devices(locations: Sequence[ReplicaLocation], num_hosts: int) -> np.ndarray:
    """Return float[hosts], how many devices of each host compute: its speed, as long as nothing is measured."""
    counts = np.zeros(num_hosts)
    for location in locations:
        counts[list(location.host_indexes)] += location.devices
    return np.maximum(counts, 1.0)  # of a host without a replica no speed is used
