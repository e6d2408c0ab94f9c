"""What a plan needs of the memory of one device, by term."""

import dataclasses

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.part_cost import share_of
from resilient_jax.planning.profile import Part, Profile
from resilient_jax.planning.shape import Group, Microbatch
from resilient_jax.planning.state_bytes import PartBytes, StateBytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device, the fullest.

    Attributes:
        parameters, gradients, optimizer: the device's part of them; gradients are the sum over microbatches.
        activations: kept from forward to backward, of all microbatches in flight, and what one layer needs beside.
        gathers: parameters that FSDP has gathered, of a layer in use and the next, and a layer's gradients before they
            are scattered; without FSDP a layer's parameters in the type of matrix products. And what a profile that was
            measured says that the program needs beside.
        staging: buffers for the copy of a snapshot to the host.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathers: float
    staging: float

    @property
    def total(self) -> float:
        """All terms."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.gathers + self.staging
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of one microbatch on one device.

    Attributes:
        embedding, layer, head: kept by one such part.
        extra: beside what is kept, while one part's backward runs: the most of any.
    """

    embedding: float
    layer: float
    head: float
    extra: float


def count_activations(profile: Profile, group: Group, batch: Microbatch) -> Activations:
    """Gives what the parts keep of a microbatch.

    With rematerialisation a layer keeps its input, and one layer at a time has all that it needs as well.
    """
    kept = dict.fromkeys(Part, 0.0)
    extra = 0.0
    for work in profile.work:
        again = batch.rematerialise and work.part is Part.LAYER
        amounts = work.rematerialised_bytes if again else work.kept_bytes
        kept[work.part] = share_of(profile, amounts, group) * batch.sequences
        more = work.working_bytes + work.kept_bytes if again else work.working_bytes
        extra = max(extra, share_of(profile, more, group) * batch.sequences)
    return Activations(
        embedding=kept[Part.EMBEDDING], layer=kept[Part.LAYER], head=kept[Part.HEAD], extra=extra
    )


def in_flight(stage: int, stages: int, microbatches: int, rounds: int = 1) -> float:
    """Gives how many microbatches a stage keeps activations of under 1F1B: `min(P - i, N)`, i from 0.

    With several rounds each chunk has its own: `(1 + (P - 1) / (P rounds))` times as many as there would be at most.
    """
    depth = stages - stage
    if rounds > 1:
        return min(depth + (stages - 1) / rounds, microbatches)
    return min(depth, microbatches)


def memory_of_stage(
    state: StateBytes,
    activations: Activations,
    constants: Calibration,
    *,
    layers: int,
    stage: int,
    stages: int,
    microbatches: float,
    is_gathered: bool,
    fixed_share: float = 0.0,
) -> Memory:
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
        fixed_share: what the program needs beside, for each byte of its parameters.
    """
    is_first, is_last = stage == 0, stage == stages - 1
    held = state.stage(layers, is_first=is_first, is_last=is_last)
    kept = layers * activations.layer
    kept += activations.embedding * is_first + activations.head * is_last
    return Memory(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=microbatches * kept + activations.extra,
        gathers=_gathers(state, is_first or is_last, is_gathered) + fixed_share * held.parameters,
        staging=constants.staging_bytes,
    )


def _gathers(state: StateBytes, has_end: bool, is_gathered: bool) -> float:
    parts: list[PartBytes] = [state.layer]
    if has_end:
        parts += [state.embedding.plus(state.tied), state.head.plus(state.tied)]
    if not is_gathered:
        return max(part.gathered for part in parts)
    used = max(part.gathered for part in parts)
    return used + state.layer.gathered + max(part.gathered_gradients for part in parts)
