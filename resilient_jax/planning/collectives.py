"""The time of a collective on the levels of links that it crosses.

The k devices of a group are arranged as `k = q_0 q_1 ... q_n`: q_0 in a host, q_1 such hosts in a domain around them,
and so on. A hierarchical collective works level by level, and only `1 / (q_0 ... q_(l-1))` of the array crosses level
l on each device (Chan et al. 2007, https://doi.org/10.1002/cpe.1206). Large arrays are sent in pieces, so that the
links within a host and those between hosts work at the same time and the slower ones count. All levels between hosts
start at the same adapter, so their times add up: where such links are equal, the level at which devices meet does not
matter. The latencies of the levels add up.
"""

import dataclasses
import math
from collections.abc import Sequence

from resilient_jax.planning.columns import count_bits, is_column, maximum, minimum
from resilient_jax.planning.program_cost import CollectiveKind
from resilient_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """One device's share of a level of links: bytes per second each way, and the latency of a message."""

    bytes_per_s: float
    latency_s: float


LevelFactors = tuple[int, ...]
"""The factors q_l of a group's size: how many parts meet at each level, from inside a host outward."""


def find_device_links(
    topology: Topology, efficiency: float, latency_factor: float = 1.0
) -> tuple[DeviceLink, ...]:
    """Return the links of a topology as one device sees them while all devices of its host send.

    Args:
        efficiency: part of the bandwidth that a large collective reaches.
        latency_factor: multiple of the links' latency that a message in a collective has.
    """
    # bandwidth_l = efficiency (a device's bandwidth while all devices of the largest host send) [bytes/s], between
    # hosts that of the slowest host's link; latency_l = latency_factor (latency of the level) [s].
    senders = max(kind.devices for kind in topology.classes)
    slowest = min(host.link_speed for host in topology.hosts)
    return tuple(
        DeviceLink(
            bytes_per_s=level.bandwidth_of_device(senders) * efficiency * (slowest if place else 1.0),
            latency_s=level.latency_s * latency_factor,
        )
        for place, level in enumerate(topology.levels)
    )


def estimate_collective_s(
    kind: CollectiveKind,
    message_bytes: float,
    factors: LevelFactors,
    links: Sequence[DeviceLink],
    pieces: int = 1,
) -> float:
    """Return the seconds of one collective, or of several in sequence that send an array in pieces.

    With q parts at a level, and M bytes of the array left there: all-gather and reduce-scatter send
    `M (q - 1) / q` in `min(q - 1, 2 ceil(log2 q))` messages, the lesser of a ring and a tree; all-reduce is one of
    each. All-to-all sends each of the k devices M / k^2 over the innermost level that has both: at a level
    `(M / k) below (q - 1) / k`, with `below` the devices inside it, in at most as many messages.

    Args:
        message_bytes: M, the complete array over the group.
        factors: factors of the group's size; a missing level has one part.
        links: links of the levels, from inside outward.
        pieces: number of collectives that the array is divided over; each pays for latency.

    >>> link = DeviceLink(bytes_per_s=1e9, latency_s=1e-6)
    >>> round(estimate_collective_s(CollectiveKind.ALL_GATHER, 4e9, (4,), [link]), 6)
    3.000003
    >>> round(estimate_collective_s(CollectiveKind.ALL_REDUCE, 4e9, (4,), [link]), 6)
    6.000006
    """
    # t = max(t_0, t_1 + ... + t_n) + sum_l n_l latency_l, with t_l = sent_l / bandwidth_l and
    # n_l = min(q_l - 1, 2 ceil(log2 q_l)); level 0 is inside a host. With below_l = q_0 ... q_(l-1):
    #     gather and scatter    sent_l = M / below_l (q_l - 1) / q_l
    #     all-to-all            sent_l = M / k below_l (q_l - 1) / k
    message, devices, below = message_bytes / pieces, math.prod(factors), 1
    inside = between = latency = 0.0
    for level, (parts, link) in enumerate(zip(factors, links, strict=False)):
        if not is_column(parts) and parts == 1:
            continue
        if kind is CollectiveKind.ALL_TO_ALL:
            sent = message / devices * below * (parts - 1) / devices
            below = below * parts
        else:
            sent = message * (parts - 1) / parts
            message = message / parts
        time = sent / link.bytes_per_s
        inside, between = (inside, between + time) if level else (time, 0.0)
        latency = latency + minimum(parts - 1, 2 * count_bits(parts - 1)) * link.latency_s
    # An all-reduce is a reduce-scatter and an all-gather.
    rounds = 2 * pieces if kind is CollectiveKind.ALL_REDUCE else pieces
    return rounds * (maximum(inside, between) + latency)


def estimate_send_s(message_bytes: float, factors: LevelFactors, links: Sequence[DeviceLink]) -> float:
    """Return the seconds of a message between neighbors along an axis, over the slowest link that the axis crosses."""
    # max_l (latency_l + M / bandwidth_l) over the crossed levels: the slowest pair of neighbors counts.
    crossed = [link for parts, link in zip(factors, links, strict=False) if parts > 1]
    return max((link.latency_s + message_bytes / link.bytes_per_s for link in crossed), default=0.0)
