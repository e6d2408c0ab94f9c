"""What a plan needs of the memory of one device, by term.

Stage i of P with L layers keeps F_i microbatches of activations (Chameleon, arXiv 2508.21613, with its terms taken
apart, and the in-flight bound of the schedule that hosts run, `pipeline_schedule.tasks.DEFAULT_SCHEDULE`):

    parameters  = L p                    p, g, o: bytes of a layer's parameters, gradients and optimizer state
    gradients   = L g                        on this device; the ends add those of the embedding and the head
    optimizer   = L o
    activations = F_i (L a + ends) + x   a: residuals of a layer, x: the most that one part's backward adds
    F_i         = min(P, N)              N: microbatches of a replica in a step
"""

import dataclasses
from typing import NamedTuple

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.columns import choose, maximum, minimum
from resilient_jax.planning.device_cost import compute_device_share, is_collective_needed
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.program_cost import AmountByAxis, CollectiveKind, ModelPart, PartCost, ProgramCost
from resilient_jax.planning.state_bytes import PartBytes, StateBytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on the fullest device.

    Attributes:
        parameters, gradients, optimizer: bytes of the device's part of each. Gradients are the sum over microbatches; 0
            where a program was measured and no replica has more than one microbatch: nothing is accumulated then.
        activations: residuals from forward to backward, of all microbatches in flight, and a part's working memory.
        working: what a measured program needs in addition: together with `activations` it is
            `max(copies of gradients, fixed + activations)`, since gradients reuse the memory of activations.
        gathers: parameters that FSDP has gathered, of a layer in use and the next, and a layer's gradients before they
            are scattered; without FSDP a layer's parameters in the dtype of matrix products, unless that was measured.
        staging: buffers for the copy of a snapshot to the host.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    gathers: float
    staging: float

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def with_one_microbatch(self) -> "DeviceMemory":
        """Return the memory of a measured program that accumulates nothing: its one gradient is in `working`."""
        return dataclasses.replace(self, gradients=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """What a compiler was measured to need.

    Attributes:
        fixed_share: bytes besides activations, whatever the batch, for each byte of parameters.
        has_blocking_collectives: whether a collective is done when it is called. If so, FSDP gathers a layer only
            when the layer runs, and gradients are summed before they are scattered: those of all layers at the end, or
            those of each iteration of a loop after it.
        has_scanned_layers: the layers are iterations of a loop.
        gradient_copies: copies of what is summed at once: 2 where the sum is written to a new buffer.
    """

    fixed_share: float
    has_blocking_collectives: bool
    has_scanned_layers: bool
    gradient_copies: int


def read_measured_memory(program_cost: ProgramCost) -> MeasuredMemory | None:
    """Return what was measured with a program; None for a closed form."""
    if program_cost.backend is None:
        return None
    return MeasuredMemory(
        fixed_share=program_cost.fixed_bytes / max(program_cost.parameter_bytes, 1),
        has_blocking_collectives=program_cost.has_blocking_collectives,
        has_scanned_layers=program_cost.has_scanned_layers,
        gradient_copies=2 if program_cost.has_blocking_collectives else 1,
    )


class ActivationBytes(NamedTuple):
    """Bytes of one microbatch on one device.

    Attributes:
        embedding, layer, head: residuals of one such part.
        extra: bytes besides the residuals while one part's backward runs: the most of any part.
    """

    embedding: float
    layer: float
    head: float
    extra: float


def count_activations(
    program_cost: ProgramCost, axes: ReplicaAxes, microbatch: MicrobatchConfig
) -> ActivationBytes:
    """Return the residuals that the parts keep of a microbatch.

    With remat a layer keeps its input, and one layer at a time has all its residuals as well. The result of an
    all-reduce is kept where the collectives of the backend block; in a loop, and on a stage of a pipeline, JAX's own
    list of residuals has it.
    """
    # Bytes per microbatch of b sequences: kept = b share(residuals) + b (results of all-reduces, where they are
    # kept); extra = max over parts of b share(working). Remat keeps the input as residual, and the residuals are
    # working bytes.
    keeps_sums = program_cost.has_blocking_collectives and not program_cost.has_scanned_layers
    kept = dict.fromkeys(ModelPart, 0.0)
    extra = 0.0
    for cost in program_cost.parts:
        is_remat = microbatch.remat and cost.part is ModelPart.LAYER
        is_block = axes.pipeline > 1 and cost.block_residual_bytes is not None
        amounts, more = _describe_part(cost, is_block=is_block, is_remat=is_remat)
        kept[cost.part] = compute_device_share(program_cost, amounts, axes) * microbatch.sequences
        if keeps_sums and not is_remat and not is_block:
            reduced = _count_reduced(program_cost, cost, axes)
            kept[cost.part] = kept[cost.part] + reduced * microbatch.sequences
        extra = maximum(extra, compute_device_share(program_cost, more, axes) * microbatch.sequences)
    return ActivationBytes(
        embedding=kept[ModelPart.EMBEDDING],
        layer=kept[ModelPart.LAYER],
        head=kept[ModelPart.HEAD],
        extra=extra,
    )


def _describe_part(cost: PartCost, *, is_block: bool, is_remat: bool) -> tuple[AmountByAxis, AmountByAxis]:
    """Return what a part keeps of an example, and what its backward needs for a time."""
    if not is_block:
        if not is_remat:
            return cost.residual_bytes, cost.working_bytes
        working = cost.remat_working_bytes
        return cost.remat_residual_bytes, working or cost.working_bytes + cost.residual_bytes
    assert cost.block_residual_bytes is not None
    if not is_remat:
        return cost.block_residual_bytes, cost.working_bytes
    return AmountByAxis(replicated=cost.input_bytes), cost.working_bytes + cost.block_residual_bytes


def _count_reduced(program_cost: ProgramCost, cost: PartCost, axes: ReplicaAxes) -> float:
    """Return the bytes that a part's forward all-reduces return, for one sequence on one device."""
    return sum(
        # sum_c count_c M_c / s: each device has the complete result of an all-reduce, but for the s parts of a
        # sequence.
        collective.forward_count
        * collective.message_bytes
        / axes.sequence
        * is_collective_needed(program_cost, collective, axes)
        for collective in cost.collectives
        if collective.kind is CollectiveKind.ALL_REDUCE
    )


def count_in_flight(stage: int, stages: int, microbatches: int, repeats: int = 1) -> float:
    """Return how many microbatches a stage keeps activations of: `min(P, N)` with weight gradients in gaps.

    Interleaved in r repeats stage i, from 0, has `P - i + (P - 1) / r`: each chunk has its own.
    """
    # Weight gradients that wait for a gap keep their inputs, so every stage has as many as the first of 1F1B
    # (`pipeline_schedule.task_orders`, rule 2). Interleaved, the first has P (1 + (P - 1) / (P r)) = P + (P - 1) / r
    # (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198), and stage i has i fewer.
    return minimum(stages - stage + (stages - 1) / repeats if repeats > 1 else stages, microbatches)


class StagePosition(NamedTuple):
    """A pipeline stage: how many layers it has, its index from 0, and the number of stages."""

    layers: int
    stage: int
    stages: int

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.stage == self.stages - 1


def estimate_stage_memory(
    state: StateBytes,
    activations: ActivationBytes,
    constants: Calibration,
    position: StagePosition,
    *,
    in_flight: float,
    has_gathers: bool,
    measured: MeasuredMemory | None = None,
) -> DeviceMemory:
    """Return the memory of a device of one stage; the module has the formula.

    Args:
        in_flight: microbatches in flight on this stage.
        measured: what a compiler was measured to need; None for a closed form.
    """
    # Bytes: L p, L g, L o each with the ends; activations = F_i (L a + ends) + x.
    is_first, is_last = position.is_first, position.is_last
    held = state.count_stage(position.layers, is_first=is_first, is_last=is_last)
    kept = position.layers * activations.layer
    kept += activations.embedding * is_first + activations.head * is_last
    active = in_flight * kept + activations.extra
    gathers = _count_gathers(state, is_first or is_last, has_gathers, measured)
    return DeviceMemory(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=active,
        working=0.0 if measured is None else _count_working(state, held, measured, active, gathers),
        gathers=gathers,
        staging=constants.staging_bytes,
    )


def _count_gathers(
    state: StateBytes, has_end: bool, has_gathers: bool, measured: MeasuredMemory | None
) -> float:
    # Asynchronous FSDP has the layer in use and the next one gathered, and one layer's gradients before the scatter.
    # Blocking collectives gather a layer when it runs, and what their gradients need is in `_count_working`.
    parts: list[PartBytes] = [state.layer, state.layer]
    if has_end:
        parts += [state.embedding.plus(state.tied), state.head.plus(state.tied)]
    used = maximum(*(part.gathered for part in parts))
    gathered = used
    if measured is None or not measured.has_blocking_collectives:
        gathered = used + state.layer.gathered + maximum(*(part.gathered_gradients for part in parts))
    return choose(has_gathers, gathered, used if measured is None else 0.0)


def _count_working(
    state: StateBytes, held: PartBytes, measured: MeasuredMemory, active: float, gathers: float
) -> float:
    """Return what a measured program needs beyond its activations and gathers."""
    # peak = parameters + max(copies of gradients, fixed + activations): what XLA's buffer assignment was seen to do,
    # since activations are free by the time that the last gradients are written. Without blocking collectives the
    # gradients are scattered one by one. With them, all are summed at the end; in a loop, those of one iteration.
    copies = measured.gradient_copies
    fixed = measured.fixed_share * held.parameters
    if not measured.has_blocking_collectives:
        return maximum(fixed, copies * held.gradients - active)
    if not measured.has_scanned_layers:
        return maximum(fixed, copies * held.gathered_gradients - active - gathers)
    iteration = maximum(*(part.gathered_gradients for part in state))
    summed = maximum(copies * iteration, copies * held.gradients - active)
    return maximum(fixed, summed - gathers)
