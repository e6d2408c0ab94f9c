"""Draws campaigns from published failure rates. Pure: the same options give the same manifest.

Each host fails by a Poisson process of its own. So the failures of all hosts are separated by exponential gaps, hit
random hosts, and sometimes come during the recovery from the previous one. The cause is drawn with the counts that Meta
published for Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, arXiv
2407.21783, table 5). Only the gaps are scaled, so that a campaign takes minutes instead of months.
"""

import dataclasses
import random
from collections.abc import Callable, Collection

from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.worker_messages import RESTART_EXIT_CODE
from tests.chaos.faults import (
    BitFlip,
    Fault,
    NetworkPartition,
    ProcessExit,
    ProcessKill,
    ProcessStop,
    SlowLink,
    SlowProcess,
)
from tests.chaos.manifest import (
    CampaignManifest,
    ChaosJob,
    FaultTarget,
    Incident,
    TargetPart,
    Trigger,
)

MIN_GAP_STEPS = 0.1
MAX_GAP_STEPS = 10_000.0
"""Bound of the mean gap: a drawn gap is at most 37 times as long, and a manifest has at most a million steps."""
OVERLAP_STEPS = 1
"""An incident that is closer to the previous one comes during the recovery from the previous one."""
FAILPOINTS = (
    FailPoint.BEFORE_MICROBATCH,
    FailPoint.BEFORE_REDUCE,
    FailPoint.AFTER_REDUCE,
    FailPoint.BEFORE_COMMIT,
    FailPoint.AFTER_COMMIT,
)
FAILPOINT_SHARE = 0.6
"""The share of incidents at a failpoint in a step; the others come at any place in a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomCampaign:
    """The options of a random campaign.

    Attributes:
        gap_steps: mean gap between two incidents of the job, from MIN_GAP_STEPS to MAX_GAP_STEPS.
        max_hosts_lost: the most hosts that are lost at once; None: all but one.
    """

    seed: int
    incidents: int
    gap_steps: float = 12.0
    max_hosts_lost: int | None = None


FaultFactory = Callable[[random.Random], tuple[TargetPart, Fault]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """A published cause of failures, its count, and the fault that represents the cause here."""

    name: str
    count: int
    make_fault: FaultFactory


def _part(part: TargetPart, *faults: Fault) -> FaultFactory:
    return lambda rng: (part, rng.choice(faults))


def _software(rng: random.Random) -> tuple[TargetPart, Fault]:
    """Return the death of one of this package's processes, or of the script."""
    part = rng.choice([TargetPart.WORKER, TargetPart.AGENT, TargetPart.SERVICE, TargetPart.SNAPSHOTS])
    if part is TargetPart.WORKER:
        return part, ProcessExit(code=RESTART_EXIT_CODE)
    return part, ProcessKill()


def _network(rng: random.Random) -> tuple[TargetPart, Fault]:
    return TargetPart.LINK, rng.choice(
        [
            NetworkPartition(duration_s=1.0),
            NetworkPartition(duration_s=6.0),
            SlowLink(mbit_per_s=2.0, duration_s=4.0),
        ]
    )


def _silence(rng: random.Random) -> tuple[TargetPart, Fault]:
    """Return a host that does not answer: the effect of a broken link on a machine without links to break."""
    part = rng.choice([TargetPart.AGENT, TargetPart.HOST, TargetPart.WORKER, TargetPart.STORE])
    return part, ProcessStop(duration_s=rng.choice([0.5, 2.5, 6.0]))


def list_causes(*, has_links: bool) -> tuple[FailureCause, ...]:
    """Return the causes of all 419 interruptions, each with its fault; `has_links`: hosts have links to break."""
    worker_dies = _part(TargetPart.WORKER, ProcessKill())
    host_dies = _part(TargetPart.HOST, ProcessKill())
    link = _network if has_links else _silence
    return (
        FailureCause(
            name="GPU",
            count=148,
            make_fault=_part(TargetPart.WORKER, ProcessKill(), ProcessKill(), ProcessStop()),
        ),
        FailureCause(name="HBM", count=72, make_fault=worker_dies),
        FailureCause(name="software", count=54, make_fault=_software),
        FailureCause(name="switch or cable", count=35, make_fault=link),
        FailureCause(name="unplanned maintenance", count=32, make_fault=host_dies),
        FailureCause(name="SRAM", count=19, make_fault=worker_dies),
        FailureCause(name="system processor", count=17, make_fault=worker_dies),
        FailureCause(name="NIC", count=7, make_fault=link),
        FailureCause(
            name="NCCL timeout",
            count=7,
            make_fault=_part(TargetPart.WORKER, ProcessStop(duration_s=3.0), ProcessStop()),
        ),
        FailureCause(
            name="silent data corruption", count=6, make_fault=_part(TargetPart.SNAPSHOTS, BitFlip(count=3))
        ),
        FailureCause(
            name="thermal",
            count=6,
            make_fault=_part(TargetPart.WORKER, SlowProcess(share=0.3, duration_s=4.0)),
        ),
        FailureCause(name="SSD, power, chassis, IO board", count=10, make_fault=host_dies),
        FailureCause(
            name="dependency", count=2, make_fault=_part(TargetPart.SERVICE, ProcessKill(), ProcessStop())
        ),
        FailureCause(name="CPU, memory", count=4, make_fault=worker_dies),
    )


def draw_campaign(job: ChaosJob, options: RandomCampaign) -> CampaignManifest:
    """Return the manifest of a random campaign.

    Args:
        job: the job, of which hosts and network are used.
        options: seed, number and mean gap of the incidents.
    """
    rng = random.Random(options.seed)
    table = list_causes(has_links=job.network == "namespaces")
    max_hosts_lost = options.max_hosts_lost if options.max_hosts_lost is not None else job.hosts - 1
    hosts = [f"host-{index}" for index in range(job.hosts)]
    # Merging H Poisson processes of the same rate gives one of H times the rate, in which each host is equally likely.
    incidents: list[Incident] = []
    hit: set[str] = set()
    for number in range(options.incidents):
        gap = rng.expovariate(1 / options.gap_steps)
        cause = rng.choices(table, weights=[cause.count for cause in table])[0]
        part, fault = cause.make_fault(rng)
        host = rng.choice(hosts)
        overlaps = number > 0 and gap < OVERLAP_STEPS and _is_tolerable(hit | {host}, max_hosts_lost, part)
        hit = {host} | (hit if overlaps else set())
        incidents.append(_place(rng, part, fault, host, gap, overlaps=overlaps))
    about = f"drawn: mean gap {options.gap_steps:g} steps, at most {max_hosts_lost} hosts lost at once"
    return CampaignManifest(seed=options.seed, about=about, job=job, incidents=tuple(incidents))


def _is_tolerable(hit: Collection[str], max_hosts_lost: int, part: TargetPart) -> bool:
    return len(hit) <= max_hosts_lost and part is not TargetPart.STORE


def _place(
    rng: random.Random, part: TargetPart, fault: Fault, host: str, gap: float, *, overlaps: bool
) -> Incident:
    """Return the incident with its trigger and its target."""
    target = FaultTarget(part=part, hosts=("leader" if part is TargetPart.SERVICE else host,))
    place = (
        rng.choice(FAILPOINTS) if rng.random() < FAILPOINT_SHARE or isinstance(fault, ProcessExit) else None
    )
    if overlaps:
        at = Trigger(after_s=round(gap, 2), failpoint=place if isinstance(fault, ProcessExit) else None)
    else:
        at = Trigger(after_steps=max(1, round(gap)), failpoint=place)
    return Incident(trigger=at, target=target, fault=fault, overlaps=overlaps)
