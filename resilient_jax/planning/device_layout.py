"""What a plan decides for one replica, and where its devices stand on the links."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import LevelFactors
from resilient_jax.planning.makespan import UNLIMITED


class ReplicaAxes(NamedTuple):
    """The axes of one replica: what each device holds follows from them."""

    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    fsdp: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.tensor * self.sequence * self.expert * self.fsdp * self.pipeline

    @property
    def state_axis_sizes(self) -> dict[Axis, int]:
        """The axes that cut tensors of the state, for `cut`."""
        return {Axis.TENSOR: self.tensor, Axis.EXPERT: self.expert, Axis.FSDP: self.fsdp}


class MicrobatchConfig(NamedTuple):
    """What a replica computes at a time.

    `sequences` are those of one device, so `fsdp` times as many are in the microbatch of a replica.
    """

    sequences: int = 1
    remat: bool = False


class StageLayerLimits(NamedTuple):
    """How many layers a stage may have, by where it is in its pipeline; of one stage all hold."""

    first: int = UNLIMITED
    middle: int = UNLIMITED
    last: int = UNLIMITED

    def per_stage(self, stages: int) -> tuple[int, ...]:
        """Stage by stage."""
        if stages == 1:
            return (min(self),)
        return (self.first, *[self.middle] * (stages - 2), self.last)


NO_LAYER_LIMITS = StageLayerLimits()


class DeviceLayout(NamedTuple):
    """How a plan's devices stand on the topology.

    Innermost to outermost: tensor, sequence, expert, fsdp, pipeline, replica. Of each axis as much as fits lies
    inside a host, the rest inside one domain of a level. So collectives of the inner axes have the fast links.
    Replicas may stand in blocks of `block`, each inside one domain: less crosses the links between domains then.

    Attributes:
        group: axes of a replica.
        inside: of each axis of `group`, in that order, the part that lies inside a host.
        replicas_per_slot: replicas inside a host; 1 where a replica is more than that.
        level: index of the topology's level in one domain of which a replica lies.
        block: such hosts of replicas that lie in one domain together.
        outermost: index of the level that has all hosts.
        most: layers of a stage. Fewer than the fastest microbatch wants leave less to sum up and to update on the
            stage that has most.
    """

    axes: ReplicaAxes
    axes_in_host: ReplicaAxes
    replicas_per_slot: int
    level: int
    block_size: int
    outermost_level: int
    layer_limits: StageLayerLimits = NO_LAYER_LIMITS

    @property
    def devices_per_slot(self) -> int:
        """Devices of a host that are used together: of one replica, or of several whole ones."""
        return self.axes_in_host.devices * self.replicas_per_slot

    @property
    def host_slots(self) -> int:
        """Of one replica, or of as many as share a host: how many hosts it has a part of."""
        return self.axes.devices // self.axes_in_host.devices

    @property
    def replicas_per_block(self) -> int:
        """Replicas that are placed together."""
        return self.replicas_per_slot * self.block_size

    @property
    def stages_per_host(self) -> int:
        """Stages of a pipeline in one host."""
        return self.axes_in_host.pipeline

    def axis_level_factors(self, axis: Axis) -> LevelFactors:
        """How an axis of a replica crosses the levels."""
        size, inside = getattr(self.axes, axis), getattr(self.axes_in_host, axis)
        return compute_level_factors(size, inside, self.level, self.outermost_level)

    def replica_level_factors(self, blocks: int) -> LevelFactors:
        """How the replica axis crosses the levels, if there are so many blocks."""
        parts = [1] * (self.outermost_level + 1)
        parts[0] = self.replicas_per_slot
        parts[self.level] *= self.block_size
        parts[self.outermost_level] *= blocks
        return tuple(parts)


def compute_level_factors(size: int, inside: int, level: int, outermost: int) -> LevelFactors:
    """Gives how an axis crosses the levels if so many of its devices are inside each host and the rest at one level."""
    parts = [1] * (outermost + 1)
    parts[0] = inside
    parts[level] *= size // inside
    return tuple(parts)


def fill_host(sizes: Iterable[int], room: int) -> tuple[list[int], int]:
    """Gives what of each axis lies inside a host of so many devices, filled from the innermost axis outward, and how
    many devices are left.

    >>> fill_host((2, 3), 8)
    ([2, 1], 4)
    """
    inside = []
    for size in sizes:
        part = math.gcd(size, room)
        inside.append(part)
        room //= part
    return inside, room


def make_layout(axes: ReplicaAxes, room: int, level: int, block: int, outermost: int) -> DeviceLayout:
    """Gives the layout that uses up to `room` devices of a host together, filled from the innermost axis outward.

    >>> make_layout(ReplicaAxes(tensor=8, fsdp=4), room=8, level=1, block=1, outermost=1).host_slots
    4
    >>> make_layout(ReplicaAxes(tensor=2), room=8, level=1, block=1, outermost=1).replicas_per_slot
    4
    """
    inside, left = fill_host(axes, room)
    filled = ReplicaAxes(*inside)
    return DeviceLayout(
        axes=axes,
        axes_in_host=filled,
        replicas_per_slot=left if filled == axes else 1,
        level=level,
        block_size=block,
        outermost_level=outermost,
    )


def enumerate_layouts(
    axes: ReplicaAxes, devices_per_host: int, levels: tuple[int, ...]
) -> tuple[DeviceLayout, ...]:
    """Gives every layout of a replica's axes with blocks of one, those that fill hosts first.

    Args:
        group: the axes.
        devices_per_host: the most that a host has.
        levels: indexes of levels that are worth staying inside, and last the one that has all hosts.
    """
    outermost = levels[-1]
    rooms = range(devices_per_host, 0, -1)
    found = dict.fromkeys(make_layout(axes, room, outermost, 1, outermost) for room in rooms)
    return tuple(layout._replace(level=level) for layout in found for level in levels)
