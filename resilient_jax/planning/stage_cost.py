"""What one microbatch costs a stage of a pipeline, or all of a replica that has one stage: by term."""

import operator
from typing import NamedTuple

import msgspec

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import DeviceLink, estimate_send_s
from resilient_jax.planning.device_cost import (
    DeviceWork,
    count_device_work,
    estimate_compute_s,
    estimate_exposed_collectives,
)
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.host_pool import HostKind
from resilient_jax.planning.program_cost import ModelPart, ProgramCost
from resilient_jax.planning.state_bytes import PartBytes, StateBytes

_AXES = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT, Axis.FSDP, Axis.PIPELINE)


class StageTime(NamedTuple):
    """Seconds of one microbatch, forward and backward, on one stage; exchanges without what hides under computing."""

    compute_s: float = 0.0
    tensor_s: float = 0.0
    sequence_s: float = 0.0
    expert_s: float = 0.0
    fsdp_s: float = 0.0
    transfer_s: float = 0.0
    """To and from the neighbouring stages."""

    @property
    def total_s(self) -> float:
        """All terms."""
        return sum(self)

    def plus(self, other: "StageTime") -> "StageTime":
        """Both together."""
        return StageTime(*map(operator.add, self, other))


class PartTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What parts take on one kind of host: of a stage of L layers `ends + L layer`."""

    embedding: StageTime
    layer: StageTime
    head: StageTime
    transfer_s: float
    """To send to one neighbour and receive from it."""

    def estimate_stage(self, layers: int, stage: int, stages: int) -> StageTime:
        """Of one stage."""
        is_first, is_last = stage == 0, stage == stages - 1
        time = StageTime(*[layers * term for term in self.layer])
        if is_first:
            time = time.plus(self.embedding)
        if is_last:
            time = time.plus(self.head)
        return time._replace(transfer_s=time.transfer_s + (2 - is_first - is_last) * self.transfer_s)


class PartLoad(NamedTuple):
    """A part's work and its exchanges: all that does not depend on the kind of host."""

    work: DeviceWork
    exchanges: dict[Axis, float]


class MicrobatchLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a microbatch asks of the devices of a replica, whichever hosts they are on."""

    embedding: PartLoad
    layer: PartLoad
    head: PartLoad


def count_microbatch_load(
    program_cost: ProgramCost,
    state: StateBytes,
    layout: DeviceLayout,
    microbatch: MicrobatchConfig,
    links: tuple[DeviceLink, ...],
) -> MicrobatchLoad:
    """Gives what one microbatch asks of each device, and what its exchanges take; the same for any two or more
    stages."""
    axes = layout.axes
    spreads = {axis: layout.axis_level_factors(axis) for axis in _AXES}
    found = {part: PartLoad(DeviceWork(0.0, 0.0, 0), {}) for part in ModelPart}
    own = {ModelPart.EMBEDDING: state.embedding, ModelPart.LAYER: state.layer, ModelPart.HEAD: state.head}
    if state.tied.parameters:
        own = {**own, **_with_tied(own, state, axes)}
    for work in program_cost.parts:
        held = own[work.part]
        found[work.part] = PartLoad(
            count_device_work(program_cost, work, held, axes, microbatch),
            estimate_exposed_collectives(program_cost, work, held, axes, microbatch, spreads, links),
        )
    return MicrobatchLoad(
        embedding=found[ModelPart.EMBEDDING], layer=found[ModelPart.LAYER], head=found[ModelPart.HEAD]
    )


def estimate_transfer_s(
    program_cost: ProgramCost,
    layout: DeviceLayout,
    microbatch: MicrobatchConfig,
    links: tuple[DeviceLink, ...],
) -> float:
    """Gives what a stage takes to send to one neighbour and to receive from it, a microbatch forward and backward."""
    if layout.axes.pipeline == 1:
        return 0.0
    sent = sum(work.input_bytes for work in program_cost.parts if work.part is ModelPart.LAYER)
    return estimate_send_s(
        sent * microbatch.sequences / layout.axes.sequence, layout.axis_level_factors(Axis.PIPELINE), links
    )


def _with_tied(
    own: dict[ModelPart, PartBytes], state: StateBytes, axes: ReplicaAxes
) -> dict[ModelPart, PartBytes]:
    """What both ends use: gathered at each, but on one stage it has one gradient."""
    ends = {
        ModelPart.EMBEDDING: own[ModelPart.EMBEDDING].plus(state.tied),
        ModelPart.HEAD: own[ModelPart.HEAD].plus(state.tied),
    }
    if axes.pipeline == 1:
        once = state.tied._replace(gradients=0.0, gathered_gradients=0.0)
        ends[ModelPart.EMBEDDING] = own[ModelPart.EMBEDDING].plus(once)
    return ends


def estimate_part_times(
    asked: MicrobatchLoad, sending_s: float, kind: HostKind, peak_flops_per_s: float, constants: Calibration
) -> PartTimes:
    """Gives what the parts take on hosts of a kind; a slow host computes slowly and its links are as they were."""
    bandwidth = kind.accelerator.memory_bandwidth_bytes_per_s

    def time(part: PartLoad) -> StageTime:
        computing = estimate_compute_s(part.work, peak_flops_per_s, bandwidth, constants) / kind.speed
        shown = 1 - constants.activation_overlap
        by_axis = part.exchanges
        return StageTime(
            compute_s=computing,
            tensor_s=shown * by_axis.get(Axis.TENSOR, 0.0),
            sequence_s=shown * by_axis.get(Axis.SEQUENCE, 0.0),
            expert_s=shown * by_axis.get(Axis.EXPERT, 0.0),
            fsdp_s=max(0.0, by_axis.get(Axis.FSDP, 0.0) - constants.fsdp_overlap * computing),
        )

    return PartTimes(
        embedding=time(asked.embedding),
        layer=time(asked.layer),
        head=time(asked.head),
        transfer_s=sending_s,
    )
