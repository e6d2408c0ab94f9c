"""The axes of one replica, its microbatch, and how its devices are laid out on the links."""

from collections.abc import Iterable
from typing import NamedTuple

from resilient_jax.pipeline_schedule.makespan import UNLIMITED
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import LevelFactors
from resilient_jax.planning.columns import find_common_divisor


class ReplicaAxes(NamedTuple):
    """Sizes of the axes of one replica; what each device holds follows from them."""

    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    fsdp: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        """Devices of one replica: the product of all axes."""
        return self.tensor * self.sequence * self.expert * self.fsdp * self.pipeline

    @property
    def state_axis_sizes(self) -> dict[Axis, int]:
        """Sizes of the axes that shard the training state, for `partition_tensor`."""
        return {Axis.TENSOR: self.tensor, Axis.EXPERT: self.expert, Axis.FSDP: self.fsdp}


class MicrobatchConfig(NamedTuple):
    """What a replica computes at a time.

    `sequences` are those of one device, so a replica's microbatch has `fsdp` times as many. With `remat`, layers are
    recomputed in the backward pass.
    """

    sequences: int = 1
    remat: bool = False


class StageLayerLimits(NamedTuple):
    """The most layers that a stage may have, by its position in the pipeline; the least of them for a single stage."""

    first: int = UNLIMITED
    middle: int = UNLIMITED
    last: int = UNLIMITED

    def per_stage(self, stages: int) -> tuple[int, ...]:
        """Return the limit of each stage."""
        if stages == 1:
            return (min(self),)
        return (self.first, *[self.middle] * (stages - 2), self.last)


NO_LAYER_LIMITS = StageLayerLimits()


class DeviceLayout(NamedTuple):
    """How a plan's devices are laid out on the topology.

    Innermost to outermost: tensor, sequence, expert, fsdp, pipeline, replica. Of each axis as much as fits is inside a
    host, the rest inside one domain of a level, so that collectives of the inner axes have the fast links. Replicas may
    be placed in blocks of `block_size`, each inside one domain: then less crosses the links between domains.

    Attributes:
        axes_in_host: part of each axis that is inside a host.
        replicas_per_slot: replicas that share a slot of a host; 1 where a replica has more than one slot.
        level: index of the topology's level whose domains contain a replica each.
        block_size: slots of replicas that are in one domain together.
        outermost_level: index of the level that connects all hosts.
        layer_limits: layers of a stage. Limits below the fastest split leave the fullest stage less to all-reduce and
            to update.
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
        """Devices of a host that are used together: part of one replica, or several complete replicas."""
        return self.axes_in_host.devices * self.replicas_per_slot

    @property
    def host_slots(self) -> int:
        """Slots of one replica, or 1 if several replicas share a slot: the number of hosts that a replica spans."""
        # devices of a replica / devices of it in a host.
        return self.axes.devices // self.axes_in_host.devices

    @property
    def replicas_per_block(self) -> int:
        """Replicas that are placed together, in one domain."""
        return self.replicas_per_slot * self.block_size

    @property
    def is_contiguous(self) -> bool:
        """Whether each host has a run of a replica's devices, in the order of the mesh: innermost axes first."""
        # Outside of an axis that a host has a part of, hosts have one index of each axis.
        pairs = list(zip(self.axes, self.axes_in_host, strict=True))
        first = next((place for place, (size, inside) in enumerate(pairs) if inside != size), len(pairs))
        return all(inside == 1 for _, inside in pairs[first + 1 :])

    @property
    def stages_per_host(self) -> int:
        """Pipeline stages that one host has of a replica."""
        return self.axes_in_host.pipeline

    def axis_level_factors(self, axis: Axis) -> LevelFactors:
        """Return the factors of an axis of a replica over the levels."""
        size, inside = getattr(self.axes, axis), getattr(self.axes_in_host, axis)
        return compute_level_factors(size, inside, self.level, self.outermost_level)

    def replica_level_factors(self, blocks: int) -> LevelFactors:
        """Return the factors of the replica axis over the levels, for this number of blocks."""
        # q_0 = replicas per slot, q_level = replica slots per block, q_outermost = blocks; their product is R.
        parts = [1] * (self.outermost_level + 1)
        parts[0] = self.replicas_per_slot
        parts[self.level] *= self.block_size
        parts[self.outermost_level] *= blocks
        return tuple(parts)


def compute_level_factors(size: int, inside: int, level: int, outermost: int) -> LevelFactors:
    """Return the factors of an axis with `inside` of its devices in each host and the rest at one level."""
    # q_0 = devices inside a host, q_level = size / q_0, all other levels 1; their product is the size of the axis.
    parts = [1] * (outermost + 1)
    parts[0] = inside
    parts[level] = parts[level] * (size // inside)
    return tuple(parts)


def fill_host(sizes: Iterable[int], devices: int) -> tuple[list[int], int]:
    """Return the part of each axis inside a host of `devices` devices, and how many devices are left.

    Axes are filled from the innermost outward.

    >>> fill_host((2, 3), 8)
    ([2, 1], 4)
    """
    inside = []
    for size in sizes:
        # The largest part that divides both the axis and the devices that are left, so that all parts are equal.
        part = find_common_divisor(size, devices)
        inside.append(part)
        devices = devices // part
    return inside, devices


def make_layout(axes: ReplicaAxes, devices: int, level: int, block: int, outermost: int) -> DeviceLayout:
    """Return the layout that uses up to `devices` devices of a host together, filled from the innermost axis outward.

    >>> make_layout(ReplicaAxes(tensor=8, fsdp=4), devices=8, level=1, block=1, outermost=1).host_slots
    4
    >>> make_layout(ReplicaAxes(tensor=2), devices=8, level=1, block=1, outermost=1).replicas_per_slot
    4
    """
    # Only a replica that is completely inside a host leaves its devices to further replicas.
    inside, left = fill_host(axes, devices)
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
    """Return every layout of a replica's axes with blocks of one replica, those that fill hosts first.

    Args:
        devices_per_host: the most devices of a host.
        levels: indexes of the levels to consider, last the one that connects all hosts.
    """
    outermost = levels[-1]
    sizes = range(devices_per_host, 0, -1)
    found = dict.fromkeys(make_layout(axes, devices, outermost, 1, outermost) for devices in sizes)
    return tuple(layout._replace(level=level) for layout in found for level in levels)
