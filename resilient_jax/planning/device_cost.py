"""The cost of one microbatch on one device in one part of the model: computing, and each collective.

Roofline without overlap: a device with peak F FLOP/s and memory bandwidth B computes f FLOPs of matrix products and a
of attention and moves b bytes in `(f + a / e_attention) / (F e_matrix) + b / (B e_memory) + kernels overhead`. Every
amount of the program is divided by the axes that shard it; collectives follow `collectives`.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import DeviceLink, LevelFactors, estimate_collective_s
from resilient_jax.planning.columns import is_column
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
    """What a device computes and moves in one part for one microbatch, forward and backward.

    Attributes:
        flops: FLOPs of matrix products, without those of attention.
        moved_bytes: bytes to and from the device's memory: activations, gathered parameters, gradients.
        kernels: kernels of all passes: forward, backward, and recompute.
    """

    flops: float
    attention_flops: float
    moved_bytes: float
    kernels: int


def compute_device_share(program_cost: ProgramCost, amounts: AmountByAxis, axes: ReplicaAxes) -> float:
    """Return a device's share of an amount; `AmountByAxis` defines which axes divide each kind."""
    # share = (replicated + (tensor + attention) / t + vocabulary / t_v + expert / (e t)) / s, with t, e and s devices
    # along tensor, expert and sequence, and t_v = t if tensor shards the vocabulary, else 1.
    vocabulary = count_parts(program_cost, Axis.TENSOR, "vocab", axes.tensor)
    return (
        amounts.replicated
        + (amounts.tensor + amounts.attention) / axes.tensor
        + amounts.vocabulary / vocabulary
        + amounts.expert / (axes.expert * axes.tensor)
    ) / axes.sequence


def is_partitioned(program_cost: ProgramCost, axis: Axis, name: str | None, size: int) -> bool:
    """Return whether an axis of this size shards the dims of a logical name; True for a name without rules."""
    rules = program_cost.divisibility_rules_by_dim.get((axis, name), ()) if name else ()
    return functools.reduce(operator.and_, (is_divisible(rule, size) for rule in rules), True)


def count_parts(program_cost: ProgramCost, axis: Axis, name: str, size: int) -> int:
    """Return into how many parts an axis of this size divides the dims of a logical name."""
    return 1 + (size - 1) * is_partitioned(program_cost, axis, name, size)


def count_device_work(
    program_cost: ProgramCost,
    cost: PartCost,
    state: PartBytes,
    axes: ReplicaAxes,
    microbatch: MicrobatchConfig,
) -> DeviceWork:
    """Return what a device does in one copy of a part.

    Formula: each amount's share times the sequences. Parameters are read in each pass, and a gradient is added to its
    sum (read and written).
    """
    # Remat repeats the forward pass: its FLOPs, its bytes moved, its kernels, and a third read of the parameters.
    is_remat = microbatch.remat & (cost.part is ModelPart.LAYER)
    products = cost.step_flops + cost.remat_flops.scaled(is_remat)
    moved = compute_device_share(program_cost, cost.step_bytes, axes)
    moved = moved + is_remat * compute_device_share(program_cost, cost.forward_bytes, axes)
    attention = compute_device_share(program_cost, AmountByAxis(attention=products.attention), axes)
    flops = compute_device_share(program_cost, products, axes) - attention
    passes = 2 + is_remat
    return DeviceWork(
        flops=flops * microbatch.sequences,
        attention_flops=attention * microbatch.sequences,
        moved_bytes=moved * microbatch.sequences + passes * state.gathered + 2 * state.gradients,
        kernels=(passes + 1) * cost.kernels,
    )


def estimate_compute_s(
    cost: DeviceWork, peak_flops_per_s: float, memory_bytes_per_s: float, constants: Calibration
) -> float:
    """Return the seconds that a device at its healthy speed computes.

    Formula: `(flops + attention_flops / attention_efficiency) / (peak matrix_efficiency)
    + moved / (bandwidth memory_efficiency) + kernels kernel_overhead_s`. Matrix products and element-wise kernels run
    one after another, so the terms add up.
    """
    return (
        (cost.flops + cost.attention_flops / constants.attention_efficiency)
        / (peak_flops_per_s * constants.matrix_efficiency)
        + cost.moved_bytes / (memory_bytes_per_s * constants.memory_efficiency)
        + cost.kernels * constants.kernel_overhead_s
    )


def estimate_collectives(
    program_cost: ProgramCost,
    cost: PartCost,
    state: PartBytes,
    axes: ReplicaAxes,
    microbatch: MicrobatchConfig,
    factors: Mapping[Axis, LevelFactors],
    links: Sequence[DeviceLink],
) -> dict[Axis, float]:
    """Return the seconds of one copy's collectives along each axis, before overlap.

    Activations follow the program cost's list. Devices along `SEQUENCE` have the same parameters, so their gradients
    are all-reduced; FSDP gathers parameters and scatters gradients.
    """
    # An array of activations is M b / (product of the axes that shard it besides the collective's own), b sequences:
    # all but sequence collectives see a sequence's share, and keys and values are sharded by tensor, too.
    totals: dict[Axis, float] = {Axis.TENSOR: 0.0, Axis.SEQUENCE: 0.0, Axis.EXPERT: 0.0, Axis.FSDP: 0.0}
    is_remat = microbatch.remat & (cost.part is ModelPart.LAYER)
    for collective in cost.collectives:
        axis = collective.axis
        times = collective.forward_count * (1 + is_remat) + collective.backward_count
        needed = times * is_collective_needed(program_cost, collective, axes)
        if not is_column(needed) and not needed:
            continue
        message = collective.message_bytes * microbatch.sequences
        if axis is not Axis.SEQUENCE:
            message = message / axes.sequence
        else:
            message = message / count_parts(program_cost, Axis.TENSOR, "kv_heads", axes.tensor)
        taken = estimate_collective_s(collective.kind, message, factors[axis], links)
        totals[axis] = totals[axis] + needed * taken
    # An axis of one device sends nothing.
    reduced = estimate_collective_s(CollectiveKind.ALL_REDUCE, state.gradients, factors[Axis.SEQUENCE], links)
    totals[Axis.SEQUENCE] = totals[Axis.SEQUENCE] + (state.gradients > 0) * reduced
    sent = sum(
        message.times
        * estimate_collective_s(message.kind, message.bytes, factors[Axis.FSDP], links, message.pieces)
        for message in list_fsdp_collectives(program_cost, cost.part, state)
    )
    totals[Axis.FSDP] = totals[Axis.FSDP] + (state.gathered > 0) * sent
    return totals


def is_collective_needed(
    program_cost: ProgramCost, collective: ActivationCollective, axes: ReplicaAxes
) -> bool:
    """Return whether a plan with these axes runs the collective."""
    size = getattr(axes, collective.axis)
    return (size > 1) & is_partitioned(program_cost, collective.axis, collective.logical_name, size)


class FsdpCollective(NamedTuple):
    """An array that FSDP sends so many times, each time divided over `pieces` collectives."""

    times: int
    kind: CollectiveKind
    bytes: float
    pieces: int


def list_fsdp_collectives(
    program_cost: ProgramCost, part: ModelPart, state: PartBytes
) -> tuple[FsdpCollective, FsdpCollective]:
    """Return what FSDP sends for a microbatch: a part's parameters as often as they are gathered, and its gradients.

    Where gradients are summed before they are scattered (see `memory.MeasuredMemory`), that was measured to be as
    fast as a reduce-scatter.
    """
    # Asynchronous: 2 gathers of a layer (forward, backward) and one scatter: 3 n / s' (s - 1) / s bytes per device
    # (Zhao et al. 2023, https://arxiv.org/abs/2304.11277). Blocking backends keep what they gathered, unless layers
    # loop.
    passes, pieces = program_cost.fsdp_gathers[part]
    return (
        FsdpCollective(passes, CollectiveKind.ALL_GATHER, state.gathered, pieces),
        FsdpCollective(1, CollectiveKind.REDUCE_SCATTER, state.gathered_gradients, 1),
    )
