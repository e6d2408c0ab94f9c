"""Random campaigns from published failure rates. Pure: the same draw gives the same manifest.

Each host fails by a Poisson process of its own, so failures of all hosts come at exponential distances, at random
hosts, and now and then into the recovery from the one before. What fails is drawn by the counts that Meta published
for Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, arXiv 2407.21783,
table 5). Only the distances are scaled: so that a campaign takes minutes and not months.
"""

import dataclasses
import random
from collections.abc import Callable, Collection

from resilient_jax.chaos.faults import Exit, Fault, Flip, Kill, Partition, Slow, SlowLink, Stop
from resilient_jax.chaos.manifest import Incident, JobShape, Manifest, Target, TargetPart, Trigger
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE

LEAST_GAP_STEPS = 0.1
MOST_GAP_STEPS = 10_000.0
"""Of the mean distance: a drawn one is at most 37 times as long, and a manifest takes no more than a million steps."""
OVERLAP_STEPS = 1
"""Closer than this to the one before, an incident comes into the recovery from that."""
PLACES = (
    FailPoint.BEFORE_MICROBATCH,
    FailPoint.BEFORE_REDUCE,
    FailPoint.AFTER_REDUCE,
    FailPoint.BEFORE_COMMIT,
    FailPoint.AFTER_COMMIT,
)
PLACED_SHARE = 0.6
"""Of the incidents come at a place in a step; the others whenever."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What is wanted.

    Attributes:
        gap_steps: mean distance of two incidents anywhere in the job, from LEAST_GAP_STEPS to MOST_GAP_STEPS.
        tolerated: hosts that may be lost at once; None: all but one.
    """

    seed: int
    incidents: int
    gap_steps: float = 12.0
    tolerated: int | None = None


Make = Callable[[random.Random], tuple[TargetPart, Fault]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A published cause, how often it came, and what it does to a job here."""

    name: str
    count: int
    make: Make


def _part(part: TargetPart, *faults: Fault) -> Make:
    return lambda chance: (part, chance.choice(faults))


def _software(chance: random.Random) -> tuple[TargetPart, Fault]:
    """Any of our own processes, or the script's."""
    part = chance.choice([TargetPart.WORKER, TargetPart.AGENT, TargetPart.SERVICE, TargetPart.SNAPSHOTS])
    if part is TargetPart.WORKER:
        return part, Exit(code=RESTART_EXIT_CODE)
    return part, Kill()


def _network(chance: random.Random) -> tuple[TargetPart, Fault]:
    return TargetPart.LINK, chance.choice(
        [Partition(for_s=1.0), Partition(for_s=6.0), SlowLink(mbit_s=2.0, for_s=4.0)]
    )


def _silence(chance: random.Random) -> tuple[TargetPart, Fault]:
    """What a broken link looks like where there is none to break: a host that does not answer."""
    part = chance.choice([TargetPart.AGENT, TargetPart.HOST, TargetPart.WORKER, TargetPart.STORE])
    return part, Stop(for_s=chance.choice([0.5, 2.5, 6.0]))


def causes(*, has_links: bool) -> tuple[Cause, ...]:
    """Those that can be made on one machine; the other 2 of 419 are memory, which is counted as a GPU's."""
    worker_dies = _part(TargetPart.WORKER, Kill())
    host_dies = _part(TargetPart.HOST, Kill())
    link = _network if has_links else _silence
    return (
        Cause(name="GPU", count=148, make=_part(TargetPart.WORKER, Kill(), Kill(), Stop())),
        Cause(name="HBM", count=72, make=worker_dies),
        Cause(name="software", count=54, make=_software),
        Cause(name="switch or cable", count=35, make=link),
        Cause(name="unplanned maintenance", count=32, make=host_dies),
        Cause(name="SRAM", count=19, make=worker_dies),
        Cause(name="system processor", count=17, make=worker_dies),
        Cause(name="NIC", count=7, make=link),
        Cause(name="NCCL timeout", count=7, make=_part(TargetPart.WORKER, Stop(for_s=3.0), Stop())),
        Cause(name="silent data corruption", count=6, make=_part(TargetPart.SNAPSHOTS, Flip(count=3))),
        Cause(name="thermal", count=6, make=_part(TargetPart.WORKER, Slow(share=0.3, for_s=4.0))),
        Cause(name="SSD, power, chassis, IO board", count=10, make=host_dies),
        Cause(name="dependency", count=2, make=_part(TargetPart.SERVICE, Kill(), Stop())),
        Cause(name="CPU, memory", count=4, make=worker_dies),
    )


def draw_campaign(shape: JobShape, wanted: Draw) -> Manifest:
    """The manifest.

    Args:
        shape: of the job.
        wanted: seed, how many, how close.
    """
    chance = random.Random(wanted.seed)
    table = causes(has_links=shape.network == "namespaces")
    tolerated = wanted.tolerated if wanted.tolerated is not None else shape.hosts - 1
    hosts = [f"host-{index}" for index in range(shape.hosts)]
    # Of `hosts` processes with the same rate the merged one has `hosts` times the rate, and any host is as likely.
    incidents: list[Incident] = []
    hit: set[str] = set()
    for number in range(wanted.incidents):
        gap = chance.expovariate(1 / wanted.gap_steps)
        cause = chance.choices(table, weights=[cause.count for cause in table])[0]
        part, fault = cause.make(chance)
        host = chance.choice(hosts)
        overlaps = number > 0 and gap < OVERLAP_STEPS and _is_bearable(hit | {host}, tolerated, part)
        hit = {host} | (hit if overlaps else set())
        incidents.append(_place(chance, part, fault, host, gap, overlaps=overlaps))
    about = f"drawn: mean gap {wanted.gap_steps:g} steps, at most {tolerated} hosts lost at once"
    return Manifest(seed=wanted.seed, about=about, job=shape, incidents=tuple(incidents))


def _is_bearable(hit: Collection[str], tolerated: int, part: TargetPart) -> bool:
    return len(hit) <= tolerated and part is not TargetPart.STORE


def _place(
    chance: random.Random, part: TargetPart, fault: Fault, host: str, gap: float, *, overlaps: bool
) -> Incident:
    """When and to whom exactly."""
    target = Target(part=part, hosts=("leader" if part is TargetPart.SERVICE else host,))
    place = chance.choice(PLACES) if chance.random() < PLACED_SHARE or isinstance(fault, Exit) else None
    if overlaps:
        at = Trigger(seconds=round(gap, 2), place=place if isinstance(fault, Exit) else None)
    else:
        at = Trigger(steps=max(1, round(gap)), place=place)
    return Incident(at=at, target=target, fault=fault, overlaps=overlaps)
