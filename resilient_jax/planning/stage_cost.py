"""The time of one microbatch on a pipeline stage, by term.

A stage of L layers takes `ends + L layer`. FSDP's collectives overlap with computing, others do not unless calibrated:
`fsdp_s = max(0, collectives - fsdp_overlap compute)`, `tensor_s = (1 - activation_overlap) collectives`, and so on. A
slow host divides computing by its speed; its links stay as they are.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import DeviceLink, estimate_send_s
from resilient_jax.planning.columns import maximum, minimum
from resilient_jax.planning.device_cost import (
    DeviceWork,
    count_device_work,
    estimate_collectives,
    estimate_compute_s,
)
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.host_pool import HostKind
from resilient_jax.planning.program_cost import ModelPart, ProgramCost
from resilient_jax.planning.state_bytes import PartBytes, StateBytes

_AXES = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT, Axis.FSDP, Axis.PIPELINE)


class StageTime(NamedTuple):
    """Seconds of one microbatch, forward and backward, on one stage.

    Of collectives only the part that computing does not hide.
    """

    compute_s: float = 0.0
    tensor_s: float = 0.0
    sequence_s: float = 0.0
    expert_s: float = 0.0
    fsdp_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of all terms."""
        return sum(self)

    def plus(self, other: "StageTime") -> "StageTime":
        """Return the sum of both, term by term."""
        return StageTime(*map(operator.add, self, other))


class PartTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the model's parts on one host kind."""

    embedding: StageTime
    layer: StageTime
    head: StageTime
    transfer_s: float
    """Time until one neighbor has the result of a task."""

    def estimate_stage(self, layers: int, stage: int, stages: int) -> StageTime:
        """Return the time of one stage with so many layers."""
        # t = L layer + embedding (first stage) + head (last stage), in s.
        time = StageTime(*[layers * term for term in self.layer])
        if stage == 0:
            time = time.plus(self.embedding)
        if stage == stages - 1:
            time = time.plus(self.head)
        return time


class LeastTimes(NamedTuple):
    """Bounds of the times of a layer, of both ends together, and of a transfer."""

    layer_s: float
    ends_s: float
    transfer_s: float


def bound_part_times(parts: Sequence[PartTimes]) -> LeastTimes:
    """Return the least times on any of several host kinds or layouts."""
    return LeastTimes(
        functools.reduce(minimum, (part.layer.total_s for part in parts)),
        functools.reduce(minimum, (part.embedding.total_s + part.head.total_s for part in parts)),
        parts[0].transfer_s,
    )


class PartLoad(NamedTuple):
    """A part's work and its collectives: all that is the same on every host kind."""

    device_work: DeviceWork
    collectives_s: dict[Axis, float]


MicrobatchLoad = Mapping[ModelPart, PartLoad]
"""What a microbatch demands of the devices of a replica, on any host kind."""


def count_microbatch_load(
    program_cost: ProgramCost,
    state: StateBytes,
    layout: DeviceLayout,
    microbatch: MicrobatchConfig,
    links: tuple[DeviceLink, ...],
) -> MicrobatchLoad:
    """Return what one microbatch demands of each device, with the times of its collectives.

    The result is the same for all pipelines of two or more stages.
    """
    axes = layout.axes
    factors = {axis: layout.axis_level_factors(axis) for axis in _AXES}
    totals = {part: PartLoad(DeviceWork(0.0, 0.0, 0.0, 0), {}) for part in ModelPart}
    state_by_part = {ModelPart.LAYER: state.layer, **_share_tied(state, axes)}
    for cost in program_cost.parts:
        held = state_by_part[cost.part]
        totals[cost.part] = PartLoad(
            count_device_work(program_cost, cost, held, axes, microbatch),
            estimate_collectives(program_cost, cost, held, axes, microbatch, factors, links),
        )
    return totals


def estimate_transfer_s(
    program_cost: ProgramCost,
    layout: DeviceLayout,
    microbatch: MicrobatchConfig,
    links: tuple[DeviceLink, ...],
) -> float:
    """Return the time until a neighboring stage has a result; each stage sends one forward and one backward."""
    if layout.axes.pipeline == 1:
        return 0.0
    sent = count_sent_bytes(program_cost, layout.axes, microbatch)
    return estimate_send_s(sent, layout.axis_level_factors(Axis.PIPELINE), links)


def count_sent_bytes(program_cost: ProgramCost, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> float:
    """Return what a device sends to a neighboring stage: its share of a layer's input."""
    # M = b (bytes of a layer's input) / s bytes: b sequences of which each device along the sequence axis has 1 / s.
    sent = sum(cost.input_bytes for cost in program_cost.parts if cost.part is ModelPart.LAYER)
    return sent * microbatch.sequences / axes.sequence


def _share_tied(state: StateBytes, axes: ReplicaAxes) -> dict[ModelPart, PartBytes]:
    """Return the state of both ends, each with the tensors that they share; on one stage these have one gradient."""
    # On one stage both uses of a tied tensor add to one gradient, so only the head's copy counts it.
    once = state.tied._replace(gradients=0.0, gathered_gradients=0.0) if axes.pipeline == 1 else state.tied
    return {
        ModelPart.EMBEDDING: state.embedding.plus(once),
        ModelPart.HEAD: state.head.plus(state.tied),
    }


def estimate_part_times(
    load: MicrobatchLoad, sending_s: float, kind: HostKind, peak_flops_per_s: float, constants: Calibration
) -> PartTimes:
    """Return the times of the parts on hosts of a kind."""
    bandwidth = kind.accelerator.memory_bandwidth_bytes_per_s

    # In s per microbatch, with c = compute / speed:
    #     tensor, sequence, expert = (1 - activation_overlap) collectives
    #     fsdp = max(0, collectives - fsdp_overlap c)
    # Only computing depends on the host's speed. Activations are needed at once, so their collectives are exposed but
    # for the calibrated overlap; FSDP prefetches, so only what exceeds the overlapped part of computing is exposed.
    def time(part: PartLoad) -> StageTime:
        computing = estimate_compute_s(part.device_work, peak_flops_per_s, bandwidth, constants) / kind.speed
        shown = 1 - constants.activation_overlap
        by_axis = part.collectives_s
        return StageTime(
            compute_s=computing,
            tensor_s=shown * by_axis.get(Axis.TENSOR, 0.0),
            sequence_s=shown * by_axis.get(Axis.SEQUENCE, 0.0),
            expert_s=shown * by_axis.get(Axis.EXPERT, 0.0),
            fsdp_s=maximum(0.0, by_axis.get(Axis.FSDP, 0.0) - constants.fsdp_overlap * computing),
        )

    return PartTimes(
        embedding=time(load[ModelPart.EMBEDDING]),
        layer=time(load[ModelPart.LAYER]),
        head=time(load[ModelPart.HEAD]),
        transfer_s=sending_s,
    )
