"""A plan as a value: what runs where, what it is estimated to take, and why it was chosen."""

import dataclasses

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig
from resilient_jax.planning.host_pool import Composition
from resilient_jax.planning.memory import DeviceMemory
from resilient_jax.planning.placement import HostRange
from resilient_jax.planning.plan_request import PlanRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step on its slowest replica, by term; of exchanges what does not hide under computing.

    Attributes:
        compute_s: of the slowest stage, all its microbatches.
        tensor_s, sequence_s, expert_s, fsdp_s: its exchanges along these axes.
        transfer_s: between stages.
        bubble_s: the pipeline filled and drained: `(P - 1) / rounds` microbatches.
        replica_s: sum of the gradients over replicas.
        optimizer_s: the update, and the overhead of a step.
    """

    compute_s: float
    tensor_s: float
    sequence_s: float
    expert_s: float
    fsdp_s: float
    transfer_s: float
    bubble_s: float
    replica_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """All terms: the step."""
        return sum(self.by_term().values())

    def by_term(self) -> dict[str, float]:
        """Each term by its name without the unit, in order."""
        return {
            field.name.removesuffix("_s"): getattr(self, field.name) for field in dataclasses.fields(self)
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaClass:
    """Replicas that stand on the same kinds of hosts.

    Attributes:
        replicas: how many.
        speeds: (part of the healthy speed, hosts or parts of hosts) of one replica, fastest first.
        layers: of each stage.
        quotas: (replicas, microbatches of each), those with more first.
        microbatch_s: of its slowest stage.
    """

    replicas: int
    speeds: tuple[tuple[float, int], ...]
    layers: tuple[int, ...]
    quotas: tuple[tuple[int, int], ...]
    microbatch_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train on the devices at hand. Made by `search`; a value, and small whatever the number of devices.

    Attributes:
        model: name of the profile.
        topology: name of the topology.
        devices: of the topology, used or not.
        global_batch: sequences in a step.
        layout: axes of a replica, and how they stand on the links.
        batch: sequences of a microbatch on each device, and whether layers are rematerialised.
        blocks: of replicas, see `Layout`.
        rounds: chunks of layers on each stage.
        teams: replicas with their quotas, fastest first.
        hosts: that are used, in the topology's order, which is the order of their devices.
        spares: devices that are left out.
        step: its estimate by term.
        memory: of the fullest device by term.
        usable_bytes: what a program can have of a device.
        tokens_per_s: of all; None if the program's examples are no sequences.
        model_flops_utilization: FLOPs of the program without those done again, of the peak of all devices of the
        topology,
            spares too.
        reasons: why this one, what limits it, what is next best.
        order: what teams stand on, fastest first: where replicas are placed follows from it.
        question: what it is the answer to: program, topology, batch, constants.

    Example:
        >>> import resilient_jax as rj
        >>> from resilient_jax.planning.model_file import load_model_shape
        >>> from resilient_jax.planning.transformer_cost import analyze_transformer
        >>> topology = rj.load_topology("meshes/h100_32x8.toml")  # doctest: +SKIP
        >>> profile = analyze_transformer(load_model_shape("configs/llama3_8b.toml").transformer)  # doctest: +SKIP
        >>> rj.search(profile, topology, global_batch=1024).sizes[Axis.REPLICA]  # doctest: +SKIP
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

    @property
    def step_time_s(self) -> float:
        """Of one step, estimated."""
        return self.step_breakdown.total_s

    @property
    def reason(self) -> str:
        """Why this plan, in sentences."""
        return " ".join(self.reasons)

    @property
    def replicas(self) -> int:
        """Complete copies of the model."""
        return self.blocks * self.layout.replicas_per_block

    @property
    def axis_sizes(self) -> dict[Axis, int]:
        """Of each axis, innermost first: the order of devices."""
        axes = self.layout.axes
        return {axis: getattr(axes, axis) for axis in _IN_GROUP} | {Axis.REPLICA: self.replicas}

    @property
    def devices_used(self) -> int:
        """By all replicas."""
        return self.replicas * self.layout.axes.devices

    @property
    def devices_spare(self) -> int:
        """Left out."""
        return self.device_count - self.devices_used

    @property
    def microbatch_sequences(self) -> int:
        """In one microbatch of a replica."""
        return self.microbatch.sequences * self.layout.axes.fsdp

    @property
    def microbatches(self) -> int:
        """In a step, of all replicas together."""
        return self.global_batch // self.microbatch_sequences

    @property
    def quotas(self) -> tuple[int, ...]:
        """Microbatches of each replica in a step, in the order of replicas; their sum is `microbatches`."""
        return tuple(
            n for team in self.replica_classes for replicas, n in team.quotas for _ in range(replicas)
        )

    @property
    def shape(self) -> str:
        """Its axes in words, those of size 1 left out, such as "replica 4 x fsdp 8 x tensor 8"."""
        named = [f"{axis} {size}" for axis, size in reversed(self.axis_sizes.items()) if size > 1]
        return " x ".join(named) or "one device"


_IN_GROUP = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT, Axis.FSDP, Axis.PIPELINE)
