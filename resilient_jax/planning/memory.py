"""What a plan needs of the memory of one device, by term."""

import dataclasses

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.device_cost import compute_device_share, is_collective_needed
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.program_cost import CollectiveKind, ModelPart, PartCost, ProgramCost
from resilient_jax.planning.state_bytes import PartBytes, StateBytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device, the fullest.

    Attributes:
        parameters, gradients, optimizer: the device's part of them. Gradients are the sum over microbatches; 0 where a
            profile was measured and no replica has more than one: nothing is added up then.
        activations: kept from forward to backward, of all microbatches in flight, and what one layer needs beside.
        working: what a program needs beside, if its profile was measured: with `activations` it is
            `max(copies of gradients, fixed + activations)`, since gradients are written where activations were.
        gathers: parameters that FSDP has gathered, of a layer in use and the next, and a layer's gradients before they
            are scattered; without FSDP a layer's parameters in the type of matrix products, unless that was measured.
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
        """All terms."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def with_one_microbatch(self) -> "DeviceMemory":
        """Of a measured program that adds nothing up: its one gradient is in `working`."""
        return dataclasses.replace(self, gradients=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """What a compiler was seen to need.

    Attributes:
        fixed_share: beside activations, whatever the batch, for each byte of parameters.
        waits: for a collective when it is called. So FSDP gathers a layer when it is its turn, and gradients are summed
            before they are cut: those of all layers at the end, or of each turn of a loop after it.
        has_scanned_layers: the layers are turns of a loop.
        gradient_copies: of what is summed at once: 2 where it is written anew.
    """

    fixed_share: float
    has_blocking_collectives: bool
    has_scanned_layers: bool
    gradient_copies: int


def read_measured_memory(profile: ProgramCost) -> MeasuredMemory | None:
    """Gives what was measured with a profile; None: it is a closed form."""
    if profile.backend is None:
        return None
    return MeasuredMemory(
        fixed_share=profile.fixed_bytes / max(profile.parameter_bytes, 1),
        has_blocking_collectives=profile.has_blocking_collectives,
        has_scanned_layers=profile.has_scanned_layers,
        gradient_copies=2 if profile.has_blocking_collectives else 1,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes of one microbatch on one device.

    Attributes:
        embedding, layer, head: kept by one such part.
        extra: beside what is kept, while one part's backward runs: the most of any.
    """

    embedding: float
    layer: float
    head: float
    extra: float


def count_activations(profile: ProgramCost, group: ReplicaAxes, batch: MicrobatchConfig) -> ActivationBytes:
    """Gives what the parts keep of a microbatch.

    With rematerialisation a layer keeps its input, and one layer at a time has all that it needs as well.
    A sum over devices lies in memory where a compiler waits for it, and is kept; in a loop only what JAX says is.
    """
    keeps_sums = profile.has_blocking_collectives and not profile.has_scanned_layers
    kept = dict.fromkeys(ModelPart, 0.0)
    extra = 0.0
    for work in profile.parts:
        again = batch.remat and work.part is ModelPart.LAYER
        amounts = work.remat_residual_bytes if again else work.residual_bytes
        kept[work.part] = compute_device_share(profile, amounts, group) * batch.sequences
        if keeps_sums and not again:
            kept[work.part] += _count_sums(profile, work, group) * batch.sequences
        more = work.working_bytes
        if again:
            more = (
                more + work.residual_bytes if work.remat_working_bytes is None else work.remat_working_bytes
            )
        extra = max(extra, compute_device_share(profile, more, group) * batch.sequences)
    return ActivationBytes(
        embedding=kept[ModelPart.EMBEDDING],
        layer=kept[ModelPart.LAYER],
        head=kept[ModelPart.HEAD],
        extra=extra,
    )


def _count_sums(profile: ProgramCost, work: PartCost, group: ReplicaAxes) -> float:
    """Bytes that come out of a part's forward all-reduces, of one sequence on one device."""
    return sum(
        exchange.forward_count * exchange.message_bytes / group.sequence
        for exchange in work.collectives
        if exchange.kind is CollectiveKind.ALL_REDUCE and is_collective_needed(profile, exchange, group)
    )


def count_in_flight(stage: int, stages: int, microbatches: int, rounds: int = 1) -> float:
    """Gives how many microbatches a stage keeps activations of under 1F1B: `min(P - i, N)`, i from 0.

    With several rounds each chunk has its own: `(1 + (P - 1) / (P rounds))` times as many as there would be at most.
    """
    depth = stages - stage
    if rounds > 1:
        return min(depth + (stages - 1) / rounds, microbatches)
    return min(depth, microbatches)


def estimate_stage_memory(
    state: StateBytes,
    activations: ActivationBytes,
    constants: Calibration,
    *,
    layers: int,
    stage: int,
    stages: int,
    microbatches: float,
    is_gathered: bool,
    measured: MeasuredMemory | None = None,
) -> DeviceMemory:
    """Gives the memory of a device of one stage.

    Formula (Chameleon, arXiv 2508.21613, with the terms apart): `L (2 m_p + m_o) + in_flight L m_a`, and the ends.

    Args:
        state: what a device holds of each part.
        activations: of one microbatch.
        constants: of the snapshot's buffers.
        layers: L, of this stage.
        stage: from 0.
        stages: P.
        microbatches: in flight on this stage.
        is_gathered: FSDP gathers the parameters.
        need: what was measured; None: nothing.
    """
    is_first, is_last = stage == 0, stage == stages - 1
    held = state.count_stage(layers, is_first=is_first, is_last=is_last)
    kept = layers * activations.layer
    kept += activations.embedding * is_first + activations.head * is_last
    shown = microbatches * kept + activations.extra
    gathers = _gathers(state, is_first or is_last, is_gathered, measured)
    working = 0.0 if measured is None else _working(state, held, measured, shown, gathers)
    return DeviceMemory(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=shown,
        working=working,
        gathers=gathers,
        staging=constants.staging_bytes,
    )


def _gathers(state: StateBytes, has_end: bool, is_gathered: bool, need: MeasuredMemory | None) -> float:
    parts: list[PartBytes] = [state.layer]
    if has_end:
        parts += [state.embedding.plus(state.tied), state.head.plus(state.tied)]
    used = max(part.gathered for part in parts)
    if not is_gathered:
        return used if need is None else 0.0
    if need is not None and need.has_blocking_collectives:
        return used
    return used + state.layer.gathered + max(part.gathered_gradients for part in parts)


def _working(state: StateBytes, held: PartBytes, need: MeasuredMemory, shown: float, gathers: float) -> float:
    """Beside the activations and gathers that are shown."""
    copies = need.gradient_copies
    if not need.has_blocking_collectives:
        return max(need.fixed_share * held.parameters, copies * held.gradients - shown)
    if not need.has_scanned_layers:
        return max(need.fixed_share * held.parameters, copies * held.gathered_gradients - shown - gathers)
    turn = max(part.gathered_gradients for part in state)
    summed = max(copies * turn, copies * held.gradients - shown)
    return max(need.fixed_share * held.parameters, summed - gathers)
