"""What one microbatch costs one device in one part of the program: computing, and each kind of exchange."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import DeviceLink, LevelFactors, estimate_collective_s
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.program_cost import (
    ActivationCollective,
    AmountByAxis,
    CollectiveKind,
    ModelPart,
    PartCost,
    ProgramCost,
)
from resilient_jax.planning.state_bytes import PartBytes
from resilient_jax.planning.tensor_partition import is_divisible


class DeviceWork(NamedTuple):
    """What a device does in one part for one microbatch, forward and backward.

    Attributes:
        flops: of matrix products.
        moved_bytes: to and from its memory: activations, gathered parameters, gradients.
        passes: through the part: forward, backward, and forward again.
    """

    flops: float
    moved_bytes: float
    passes: int


def compute_device_share(program_cost: ProgramCost, amounts: AmountByAxis, axes: ReplicaAxes) -> float:
    """Gives a device's share of an amount: what cuts each kind is said at `Amounts`."""
    vocabulary = axes.tensor if is_partitioned(program_cost, Axis.TENSOR, "vocab", axes.tensor) else 1
    return (
        amounts.replicated
        + (amounts.tensor + amounts.attention) / axes.tensor
        + amounts.vocabulary / vocabulary
        + amounts.expert / (axes.expert * axes.tensor)
    ) / axes.sequence


def is_partitioned(program_cost: ProgramCost, axis: Axis, name: str, size: int) -> bool:
    """Whether an axis of this size cuts the dims of a name; a program that does not list it has it cut."""
    return all(
        is_divisible(divisor, size)
        for divisor in program_cost.divisibility_rules_by_dim.get((axis, name), ())
    )


def count_device_work(
    program_cost: ProgramCost,
    work: PartCost,
    state: PartBytes,
    axes: ReplicaAxes,
    microbatch: MicrobatchConfig,
) -> DeviceWork:
    """Gives what a device does in one copy of a part.

    Formula: each amount's share, times the sequences. Parameters are read in each pass, and a gradient is added to its
    sum (read and written).
    """
    again = microbatch.remat and work.part is ModelPart.LAYER
    flops = compute_device_share(program_cost, work.step_flops, axes)
    moved = compute_device_share(program_cost, work.step_bytes, axes)
    if again:
        flops += compute_device_share(program_cost, work.remat_flops, axes)
        moved += compute_device_share(program_cost, work.forward_bytes, axes)
    passes = 3 if again else 2
    return DeviceWork(
        flops=flops * microbatch.sequences,
        moved_bytes=moved * microbatch.sequences + passes * state.gathered + 2 * state.gradients,
        passes=passes,
    )


def estimate_compute_s(
    work: DeviceWork, peak_flops_per_s: float, memory_bytes_per_s: float, constants: Calibration
) -> float:
    """Gives the seconds that a healthy device computes.

    Formula: `flops / (peak matrix_efficiency) + moved / (bandwidth memory_efficiency) + passes layer_overhead_s`.
    Matrix products and element-wise kernels follow one another, so the terms add up.
    """
    return (
        work.flops / (peak_flops_per_s * constants.matrix_efficiency)
        + work.moved_bytes / (memory_bytes_per_s * constants.memory_efficiency)
        + work.passes * constants.layer_overhead_s
    )


def estimate_exposed_collectives(
    program_cost: ProgramCost,
    work: PartCost,
    state: PartBytes,
    axes: ReplicaAxes,
    microbatch: MicrobatchConfig,
    spreads: Mapping[Axis, LevelFactors],
    links: Sequence[DeviceLink],
) -> dict[Axis, float]:
    """Gives the seconds of one copy's exchanges along each axis, before anything hides them.

    Activations as the profile lists them. Devices along `SEQUENCE` have the same parameters, so they add up their
    gradients.
    """
    found: dict[Axis, float] = {Axis.TENSOR: 0.0, Axis.SEQUENCE: 0.0, Axis.EXPERT: 0.0, Axis.FSDP: 0.0}
    again = microbatch.remat and work.part is ModelPart.LAYER
    for exchange in work.collectives:
        axis = exchange.axis
        if not is_collective_needed(program_cost, exchange, axes):
            continue
        message = exchange.message_bytes * microbatch.sequences
        if axis is not Axis.SEQUENCE:
            message /= axes.sequence
        elif is_partitioned(program_cost, Axis.TENSOR, "kv_heads", axes.tensor):
            message /= axes.tensor
        times = exchange.forward_count * (2 if again else 1) + exchange.backward_count
        if times:
            found[axis] += times * estimate_collective_s(exchange.kind, message, spreads[axis], links)
    if axes.sequence > 1 and state.gradients:
        reduced = estimate_collective_s(
            CollectiveKind.ALL_REDUCE, state.gradients, spreads[Axis.SEQUENCE], links
        )
        found[Axis.SEQUENCE] += reduced
    if axes.fsdp > 1 and state.gathered:
        found[Axis.FSDP] += sum(
            estimate_collective_s(message.kind, message.bytes, spreads[Axis.FSDP], links, message.pieces)
            for message in list_fsdp_collectives(program_cost, work.part, state)
        )
    return found


def is_collective_needed(
    program_cost: ProgramCost, exchange: ActivationCollective, axes: ReplicaAxes
) -> bool:
    """Whether these axes ask for it."""
    size = getattr(axes, exchange.axis)
    return size > 1 and (
        not exchange.logical_name or is_partitioned(program_cost, exchange.axis, exchange.logical_name, size)
    )


class FsdpCollective(NamedTuple):
    """An array that devices exchange, in so many collectives."""

    kind: CollectiveKind
    bytes: float
    pieces: int


def list_fsdp_collectives(
    program_cost: ProgramCost, part: ModelPart, state: PartBytes
) -> tuple[FsdpCollective, ...]:
    """Gives what FSDP sends for a microbatch: the part's parameters as often as they are gathered, and its gradients.

    Where gradients are summed before they are cut (see `memory.Need`), that was measured to be as fast as a scatter.
    """
    passes, pieces = program_cost.fsdp_gathers[part]
    gathered = FsdpCollective(CollectiveKind.ALL_GATHER, state.gathered, pieces)
    return (*[gathered] * passes, FsdpCollective(CollectiveKind.REDUCE_SCATTER, state.gathered_gradients, 1))
