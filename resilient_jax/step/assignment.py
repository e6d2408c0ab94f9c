"""Which host has which microbatches of a step, and which replica computes those that no host has. Pure."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from resilient_jax.argument_checks import check_fields
from resilient_jax.errors import CallerError
from resilient_jax.step.quotas import distribute_microbatches

DATA_AXIS: Final = "data"
"""The one axis of a replica's mesh, by default."""
Reduction = Literal["exact", "exact_wide", "fast"]
"""How the totals of microbatches are added up; see `AccumulationOptions`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationSpec:
    """What is accumulated. Totals of one specification are invalid for any other.

    Attributes:
        name: of the accumulation within the step.
        step: of the state that the gradients are taken at.
        num_microbatches: of the step.
        reduction: how they are added up.
        balance_by_speed: whether they are assigned by measured speed.
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
    """How `World.accumulate_microbatches` assigns and adds up microbatches.

    Attributes:
        reduction: "exact": the sum of each element is that of its addends, in whatever order and wherever they are
            computed: the same bits, whichever hosts are alive; as much memory and traffic as floats (see
            `step.fixed_point_sum` for its bound). "exact_wide": the same promise, finer than floats for every element,
            of any range, with 9 bytes for an element (`step.binned_sum`). "fast": floats, equal within rounding.
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
    """Which replica computes which microbatches.

    Attributes:
        locations: of the replicas.
        by_replica: the indexes of the microbatches that each replica computes.
        owners: of each microbatch, the index of the host whose total has it.
    """

    locations: tuple[ReplicaLocation, ...]
    by_replica: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]


def assign_microbatches(
    locations: tuple[ReplicaLocation, ...], claims: np.ndarray, speeds: np.ndarray
) -> Assignment:
    """Leave each microbatch with the host that has it, and assign all others by speed.

    Args:
        locations: of the replicas.
        claims: bool[hosts, microbatches], which microbatches are in the total of each host; at most one host has one.
        speeds: float[hosts], in any unit.
    """
    num_microbatches = claims.shape[1]
    owners = {int(index): int(host) for host, index in np.argwhere(claims)}
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
    """Return the speed of each replica: that of its slowest host."""
    # Its hosts compute each microbatch together, so all wait for the slowest.
    return [float(min(speeds[list(location.host_indexes)])) for location in locations]
