"""How long a collective takes on the links that it crosses.

The k devices of a group stand `k = q_0 q_1 ... q_n`: q_0 in a host, q_1 such hosts in a domain around them, and so on.
A hierarchical collective works level by level, and only 1 / (q_0 ... q_(l-1)) of the array crosses level l on each
device (Chan et al. 2007, https://doi.org/10.1002/cpe.1206). Large arrays are sent in pieces, so that the links within
a host and those between hosts work at the same time and the slower is what counts. All levels between hosts begin at
the same adapter, so their times add up: where such links are equal it is no matter at which of them devices meet. Each
level's latency is paid in turn.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import assert_never

from resilient_jax.planning.program_cost import CollectiveKind
from resilient_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """What one device gets of a level of links: bytes per second each way, and the latency of a message."""

    bytes_per_s: float
    latency_s: float


LevelFactors = tuple[int, ...]
"""How many parts of a group meet at each level, from inside a host outward; their product is the group's size."""


def find_device_links(
    topology: Topology, efficiency: float, latency_factor: float = 1.0
) -> tuple[DeviceLink, ...]:
    """Gives the links of a topology as a device sees them while all devices of its host send.

    Args:
        topology: whose.
        efficiency: part of the bandwidth that a large collective reaches.
        latency_factor: of a message in a collective.
    """
    senders = max(kind.devices for kind in topology.classes)
    return tuple(
        DeviceLink(
            bytes_per_s=level.bandwidth_of_device(senders) * efficiency,
            latency_s=level.latency_s * latency_factor,
        )
        for level in topology.levels
    )


def estimate_collective_s(
    kind: CollectiveKind,
    message_bytes: float,
    spread: LevelFactors,
    links: Sequence[DeviceLink],
    pieces: int = 1,
) -> float:
    """Gives the seconds of one collective, or of several after one another that send an array in pieces.

    With q parts at a level, and M bytes of the array left there: all-gather and reduce-scatter send
    `M (q - 1) / q` in `min(q - 1, 2 ceil(log2 q))` messages, the lesser of a ring and a tree; all-reduce is one of
    each. All-to-all sends each of the k devices M / k^2 over the innermost level that has both: at a level
    `(M / k) below (q - 1) / k`, `below` the devices inside it, in `q - 1` messages, at most as many as levels of a
    tree.

    Args:
        kind: the operation.
        message_bytes: M, the complete array over the group.
        spread: of the group; a level that is not named has one part.
        links: of the levels, from inside outward.
        pieces: of the array; each pays for latency.

    >>> link = DeviceLink(bytes_per_s=1e9, latency_s=1e-6)
    >>> round(estimate_collective_s(CollectiveKind.ALL_GATHER, 4e9, (4,), [link]), 6)
    3.000003
    >>> round(estimate_collective_s(CollectiveKind.ALL_REDUCE, 4e9, (4,), [link]), 6)
    6.000006
    """
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return pieces * _gather_s(message_bytes / pieces, spread, links)
        case CollectiveKind.ALL_REDUCE:
            return 2 * pieces * _gather_s(message_bytes / pieces, spread, links)
        case CollectiveKind.ALL_TO_ALL:
            return pieces * _exchange_s(message_bytes / pieces, spread, links)
        case _:
            assert_never(kind)


def _gather_s(message_bytes: float, spread: LevelFactors, links: Sequence[DeviceLink]) -> float:
    inside = between = latency = 0.0
    for level, (parts, link) in enumerate(zip(spread, links, strict=False)):
        if parts > 1:
            time = message_bytes * (parts - 1) / parts / link.bytes_per_s
            inside, between = (inside, between + time) if level else (time, 0.0)
            latency += min(parts - 1, 2 * (parts - 1).bit_length()) * link.latency_s
            message_bytes /= parts
    return max(inside, between) + latency


def _exchange_s(message_bytes: float, spread: LevelFactors, links: Sequence[DeviceLink]) -> float:
    devices = math.prod(spread)
    inside = between = latency = 0.0
    below = 1
    for level, (parts, link) in enumerate(zip(spread, links, strict=False)):
        if parts > 1:
            time = message_bytes / devices * below * (parts - 1) / devices / link.bytes_per_s
            inside, between = (inside, between + time) if level else (time, 0.0)
            latency += min(parts - 1, 2 * (parts - 1).bit_length()) * link.latency_s
            below *= parts
    return max(inside, between) + latency


def estimate_send_s(message_bytes: float, spread: LevelFactors, links: Sequence[DeviceLink]) -> float:
    """Gives the seconds of a message between neighbours along an axis, over the widest link that the axis crosses."""
    crossed = [link for parts, link in zip(spread, links, strict=False) if parts > 1]
    return max((link.latency_s + message_bytes / link.bytes_per_s for link in crossed), default=0.0)
