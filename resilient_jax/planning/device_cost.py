"""What one microbatch costs one device in one part of the program: computing, and each kind of exchange."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import Link, Spread, time_of
from resilient_jax.planning.device_layout import Group, Microbatch
from resilient_jax.planning.program_cost import Amounts, Exchange, ExchangeKind, Part, Profile, Work
from resilient_jax.planning.state_bytes import PartBytes
from resilient_jax.planning.tensor_partition import divides


class PartWork(NamedTuple):
    """What a device does in one part for one microbatch, forward and backward.

    Attributes:
        flops: of matrix products.
        moved_bytes: to and from its memory: activations, gathered parameters, gradients.
        passes: through the part: forward, backward, and forward again.
    """

    flops: float
    moved_bytes: float
    passes: int


def share_of(profile: Profile, amounts: Amounts, group: Group) -> float:
    """Gives a device's share of an amount: what cuts each kind is said at `Amounts`."""
    vocabulary = group.tensor if cuts_dim(profile, Axis.TENSOR, "vocab", group.tensor) else 1
    return (
        amounts.whole
        + (amounts.tensor + amounts.attention) / group.tensor
        + amounts.vocabulary / vocabulary
        + amounts.expert / (group.expert * group.tensor)
    ) / group.sequence


def cuts_dim(profile: Profile, axis: Axis, name: str, size: int) -> bool:
    """Whether an axis of this size cuts the dims of a name; a program that does not list it has it cut."""
    return all(divides(divisor, size) for divisor in profile.divisors_of.get((axis, name), ()))


def count_work(profile: Profile, work: Work, state: PartBytes, group: Group, batch: Microbatch) -> PartWork:
    """Gives what a device does in one copy of a part.

    Formula: each amount's share, times the sequences. Parameters are read in each pass, and a gradient is added to its
    sum (read and written).
    """
    again = batch.rematerialise and work.part is Part.LAYER
    flops = share_of(profile, work.step_flops, group)
    moved = share_of(profile, work.step_bytes, group)
    if again:
        flops += share_of(profile, work.recomputed_flops, group)
        moved += share_of(profile, work.forward_bytes, group)
    passes = 3 if again else 2
    return PartWork(
        flops=flops * batch.sequences,
        moved_bytes=moved * batch.sequences + passes * state.gathered + 2 * state.gradients,
        passes=passes,
    )


def compute_s(
    work: PartWork, peak_flops_per_s: float, memory_bytes_per_s: float, constants: Calibration
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


def exchange_s(
    profile: Profile,
    work: Work,
    state: PartBytes,
    group: Group,
    batch: Microbatch,
    spreads: Mapping[Axis, Spread],
    links: Sequence[Link],
) -> dict[Axis, float]:
    """Gives the seconds of one copy's exchanges along each axis, before anything hides them.

    Activations as the profile lists them. Devices along `SEQUENCE` have the same parameters, so they add up their
    gradients.
    """
    found: dict[Axis, float] = {Axis.TENSOR: 0.0, Axis.SEQUENCE: 0.0, Axis.EXPERT: 0.0, Axis.FSDP: 0.0}
    again = batch.rematerialise and work.part is Part.LAYER
    for exchange in work.exchanges:
        axis = exchange.axis
        if not is_exchanged(profile, exchange, group):
            continue
        message = exchange.message_bytes * batch.sequences
        if axis is not Axis.SEQUENCE:
            message /= group.sequence
        elif cuts_dim(profile, Axis.TENSOR, "kv_heads", group.tensor):
            message /= group.tensor
        times = exchange.forward * (2 if again else 1) + exchange.backward
        if times:
            found[axis] += times * time_of(exchange.kind, message, spreads[axis], links)
    if group.sequence > 1 and state.gradients:
        reduced = time_of(ExchangeKind.ALL_REDUCE, state.gradients, spreads[Axis.SEQUENCE], links)
        found[Axis.SEQUENCE] += reduced
    if group.fsdp > 1 and state.gathered:
        found[Axis.FSDP] += sum(
            time_of(message.kind, message.bytes, spreads[Axis.FSDP], links, message.pieces)
            for message in fsdp_messages(profile, work.part, state)
        )
    return found


def is_exchanged(profile: Profile, exchange: Exchange, group: Group) -> bool:
    """Whether these axes ask for it."""
    size = getattr(group, exchange.axis)
    return size > 1 and (not exchange.dim or cuts_dim(profile, exchange.axis, exchange.dim, size))


class Message(NamedTuple):
    """An array that devices exchange, in so many collectives."""

    kind: ExchangeKind
    bytes: float
    pieces: int


def fsdp_messages(profile: Profile, part: Part, state: PartBytes) -> tuple[Message, ...]:
    """Gives what FSDP sends for a microbatch: the part's parameters as often as they are gathered, and its gradients.

    Where gradients are summed before they are cut (see `memory.Need`), that was measured to be as fast as a scatter.
    """
    passes, pieces = profile.gathers_of[part]
    gathered = Message(ExchangeKind.ALL_GATHER, state.gathered, pieces)
    return (*[gathered] * passes, Message(ExchangeKind.REDUCE_SCATTER, state.gathered_gradients, 1))
