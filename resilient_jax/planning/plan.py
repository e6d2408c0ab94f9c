"""A plan as a value: what runs where, its estimated step time and memory, and why it was chosen.

`sharding.planned_program` turns a plan into a mesh, shardings and a compiled program.
"""

import dataclasses

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig
from resilient_jax.planning.host_pool import Composition
from resilient_jax.planning.memory import DeviceMemory
from resilient_jax.planning.placement import HostRange
from resilient_jax.planning.plan_request import PlanRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step on its slowest replica, by term; of collectives the part that computing does not hide.

    Attributes:
        compute_s: computing of the slowest stage, all its microbatches.
        tensor_s, sequence_s, expert_s, fsdp_s: collectives of the slowest stage along the axis.
        transfer_s: transfers between stages that computing does not hide.
        bubble_s: computing while the pipeline fills and drains, see `pipeline`.
        optimizer_s: the update, and the overhead of a step.
    """

    compute_s: float
    tensor_s: float
    sequence_s: float
    expert_s: float
    fsdp_s: float
    transfer_s: float
    bubble_s: float
    gradient_all_reduce_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The step: the sum of all terms."""
        return sum(self.by_term().values())

    def by_term(self) -> dict[str, float]:
        """Return each term by its name without the unit, in order."""
        return {
            field.name.removesuffix("_s"): getattr(self, field.name) for field in dataclasses.fields(self)
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaClass:
    """Replicas on the same kinds of hosts.

    Attributes:
        speeds: (part of the healthy speed, host slots) of one replica, fastest first.
        quotas: (replicas, microbatches of each), those with more first.
        stage_s: time of a microbatch on the slowest stage, without transfers.
        transfer_s: time until a neighboring stage has a result; 0 for one stage.
    """

    replicas: int
    speeds: tuple[tuple[float, int], ...]
    layers: tuple[int, ...]
    quotas: tuple[tuple[int, int], ...]
    stage_s: float
    transfer_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train on the available devices; small for any number of devices. Made by `search_plan`.

    Attributes:
        model_name: name of the program.
        topology_name: name of the topology that was planned for.
        device_count: devices of the topology, used or not.
        global_batch: sequences in a step.
        layout: axes of a replica, and how they are laid out on the links.
        microbatch: sequences of a microbatch on each device, and whether layers are recomputed (remat).
        blocks: blocks of replicas, see `DeviceLayout`.
        pipeline_repeats: chunks of layers on each stage.
        replica_classes: replicas with their quotas, fastest first.
        hosts: used hosts in the topology's order, which is the order of their devices.
        spares: devices that are left out.
        step_breakdown: estimated step time by term.
        memory: memory of the fullest device by term.
        usable_bytes: bytes of a device that a program can have.
        tokens_per_s: tokens that all devices process in a second; None if the program's examples are no sequences.
        model_flops_utilization: FLOPs of the program without recomputation, over the peak of all devices of the
            topology including spares.
        reasons: why this plan, what limits it, what is next best.
        compositions: hosts of the replica classes, fastest first: the placement of replicas follows from them.
        request: what the plan was searched for: program, topology, batch, constants.

    Example:
        >>> import resilient_jax as rj
        >>> topology = rj.planning.load_topology("meshes/h100_32x8.toml")  # doctest: +SKIP
        >>> shape = rj.planning.load_model_shape("configs/llama3_8b.toml").transformer  # doctest: +SKIP
        >>> cost = rj.planning.analyze_transformer(shape)  # doctest: +SKIP
        >>> rj.planning.search_plan(cost, topology, global_batch=1024).replicas  # doctest: +SKIP
        32
    """

    model_name: str
    topology_name: str
    device_count: int
    global_batch: int
    layout: DeviceLayout
    microbatch: MicrobatchConfig
    blocks: int
    pipeline_repeats: int
    replica_classes: tuple[ReplicaClass, ...]
    hosts: tuple[HostRange, ...]
    spares: tuple[HostRange, ...]
    step_breakdown: StepTime
    memory: DeviceMemory
    usable_bytes: float
    tokens_per_s: float | None
    model_flops_utilization: float
    reasons: tuple[str, ...] = ()
    request: PlanRequest = dataclasses.field(repr=False)
    compositions: tuple[Composition, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        """The plan in a line; `reason` says why, `repr` is complete."""
        return (
            f"{self.model_name} on {self.topology_name}: {self.shape}, {self.step_time_s:.4g} s a step, memory "
            f"{self.memory.total / self.usable_bytes:.0%} full"
        )

    @property
    def step_time_s(self) -> float:
        """The estimated time of one step."""
        return self.step_breakdown.total_s

    @property
    def reason(self) -> str:
        """Why this plan was chosen, in sentences."""
        return " ".join(self.reasons)

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return self.blocks * self.layout.replicas_per_block

    @property
    def axis_sizes(self) -> dict[Axis, int]:
        """Size of each axis, innermost first, as devices are ordered."""
        axes = self.layout.axes
        return {axis: getattr(axes, axis) for axis in _IN_GROUP} | {Axis.REPLICA: self.replicas}

    @property
    def devices_used(self) -> int:
        """The number of devices of all replicas together; `devices_spare` compute nothing."""
        return self.replicas * self.layout.axes.devices

    @property
    def devices_spare(self) -> int:
        """Devices that are left out."""
        return self.device_count - self.devices_used

    @property
    def microbatch_sequences(self) -> int:
        """Sequences in one microbatch of a replica."""
        return self.microbatch.sequences * self.layout.axes.fsdp

    @property
    def microbatches(self) -> int:
        """Microbatches in a step, of all replicas together."""
        return self.global_batch // self.microbatch_sequences

    @property
    def quotas(self) -> tuple[int, ...]:
        """Microbatches of each replica in a step, in the order of replicas; their sum is `microbatches`."""
        return tuple(
            n
            for replica_class in self.replica_classes
            for replicas, n in replica_class.quotas
            for _ in range(replicas)
        )

    @property
    def shape(self) -> str:
        """The axes larger than 1 in words, such as "replica 4 x fsdp 8 x tensor 8"."""
        named = [f"{axis} {size}" for axis, size in reversed(self.axis_sizes.items()) if size > 1]
        return " x ".join(named) or "one device"


_IN_GROUP = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT, Axis.FSDP, Axis.PIPELINE)
