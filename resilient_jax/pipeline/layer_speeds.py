"""What slow hosts cost a pipeline, and what another division of its layers, or of its hosts, would make of it. Pure.

What a block takes on a sound host follows from what the tasks of all hosts take now, each as long as its blocks cost
together and as many times as long as the host is slow. From that any other cut of the model is priced, as the longest
path of the schedule that it would have.

A slow link is in no task's time. What it costs is how much longer steps take since it is slow, beyond what slow tasks
explain; no other division of layers helps against it.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.pipeline.step_division import (
    StepDivision,
    TaskSeconds,
    divide_by_speed,
    price_division,
    spread_over_blocks,
)
from resilient_jax.pipeline_schedule.routes import Team, list_stages
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, TaskKind
from resilient_jax.pipeline_schedule.teams import combine_speeds, make_teams, share_microbatches
from resilient_jax.protocol.slow_hosts import HostSpeeds, Slowdown
from resilient_jax.step.slowdown_estimate import LeaveOut, compare_actions

MAX_STEPS: Final = 512
"""Whose durations are kept."""
NEWEST_STEPS: Final = 16
"""Whose median is what a step takes now."""
MIN_STEPS: Final = 8
"""Before and after; fewer say nothing."""
StepDurations = Sequence[tuple[int, float]]
"""What the last steps of a generation took, in seconds from the begin of one to that of the next, by their numbers."""
ComputeGrowth = Callable[[int], float]
BlockTable = Sequence[Mapping[TaskKind, float]]
"""Of each block the seconds of its tasks on a sound host."""
LAYERED = frozenset({FindingKind.COMPUTE, FindingKind.MEMORY})
"""What fewer layers help against. They are found by a measurement of devices, which says when they are over, too."""


class PipelineShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a division of layers follows from, beside speeds.

    Attributes:
        hosts: members of the generation, in the order in which they make replicas.
        block_costs: the relative time of each block.
        num_stages: hosts of one replica.
        num_microbatches: microbatches of one step, over all replicas.
        is_balanced: whether replicas share microbatches by speed.
        device_speeds: speed of each host that has fewer devices than others, as a fraction of the others' speed.
    """

    hosts: tuple[HostName, ...]
    block_costs: tuple[float, ...]
    num_stages: int
    num_microbatches: int
    schedule: PipelineSchedule
    is_balanced: bool = True
    device_speeds: Mapping[HostName, float] = {}


def estimate_pipeline_slowdown(
    generation: GenerationNumber,
    shape: PipelineShape,
    findings: Sequence[Finding],
    present: HostSpeeds,
    measured: TaskSeconds,
    *,
    leave_out: LeaveOut = lambda found: "",
    compute_growth: ComputeGrowth = lambda since_step: 1.0,
) -> Slowdown | None:
    """Return what slow hosts, or layers divided as if hosts were slow, cost; None: nothing is slow, or not known.

    Args:
        generation: generation in which tasks were measured.
        findings: one for each slow host.
        present: the speeds by which layers are divided.
        measured: seconds of tasks on every host; nothing is known while those of one host are missing.
        leave_out: says what the slowest host would do without slow devices.
        compute_growth: returns how many times as long steps take now as before a step.
    """
    factors = {HostName(one.host): one.factor for one in findings if one.kind in LAYERED}
    growths = {
        HostName(one.host): compute_growth(one.since_step) for one in findings if one.kind is FindingKind.LINK
    }
    links = {host: growth for host, growth in growths.items() if growth > 1}
    if not (factors or present or links) or any(not measured.get(host) for host in shape.hosts):
        return None
    wanted = tuple(sorted((host, round(1 / factor, 3)) for host, factor in factors.items()))
    base = estimate_block_seconds(
        _divide(shape, present), shape.block_costs, measured, _slow_down(shape, factors)
    )
    tasks_s = _price_cut(shape, present, base, factors)
    full_s = _price_cut(shape, (), base, {})
    # Some of what steps take longer is that of slow tasks, if these became slow at the same time.
    of_links = {host: max(1.0, growth * full_s / tasks_s) for host, growth in links.items()}
    speeds = _Speeds(shape=shape, base=base, present=present, factors=factors, links=of_links, full_s=full_s)
    slowdown = Slowdown(
        generation=generation,
        kept=speeds.compute(present),
        redivided=speeds.compute(wanted) if wanted != present else 0.0,
        speeds=wanted,
    )
    candidates = [one for one in findings if one.host in factors or one.host in links]
    if not candidates:
        return slowdown
    # Of equal ones the slowest by itself: where two are as slow, to replace one of them may not help.
    candidates.sort(
        key=lambda one: (factors.get(HostName(one.host), of_links.get(HostName(one.host), 1.0)), one.host)
    )
    return compare_actions(
        slowdown,
        candidates[::-1],
        speeds.compute_healed,
        leave_out,
        has_spare=len(shape.hosts) > shape.num_stages,  # else a host would need the memory of two stages
    )


class _Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of a pipeline, as fractions of that with all hosts and links sound.

    Attributes:
        base: seconds of the tasks of each block on a sound host.
        present: the speeds by which layers are divided.
        factors: slow host to how many times as long tasks take on that host.
        links: host with a slow link to how many times as long steps take because of that link.
        full_s: seconds of a step with all hosts and links sound.
    """

    shape: PipelineShape
    base: BlockTable
    present: HostSpeeds
    factors: Mapping[HostName, float]
    links: Mapping[HostName, float]
    full_s: float

    def compute(self, speeds: HostSpeeds) -> float:
        """Return the speed with layers divided by `speeds`."""
        return self._compute(self.shape, speeds, self.factors, self.links)

    def compute_healed(self, host: HostName, share: float) -> float:
        """Return the speed with a sound host, which has a share of the devices, in the place of one; see
        `PredictSpeed`.
        """
        shape = self.shape
        if not share:
            shape = msgspec.structs.replace(shape, hosts=tuple(one for one in shape.hosts if one != host))
        elif share < 1:
            shares = combine_speeds(shape.device_speeds, {host: share})
            shape = msgspec.structs.replace(shape, device_speeds=shares)
        factors, links = (
            {name: factor for name, factor in found.items() if name != host}
            for found in (self.factors, self.links)
        )
        return self._compute(shape, tuple(one for one in self.present if one[0] != host), factors, links)

    def _compute(
        self,
        shape: PipelineShape,
        speeds: HostSpeeds,
        factors: Mapping[HostName, float],
        links: Mapping[HostName, float],
    ) -> float:
        return self.full_s / (
            _price_cut(shape, speeds, self.base, factors) * max(links.values(), default=1.0)
        )


def estimate_block_seconds(
    teams: Sequence[Team],
    block_costs: Sequence[float],
    measured: TaskSeconds,
    factors: Mapping[HostName, float],
) -> BlockTable:
    """Return what each block takes on a sound host: the mean over the replicas.

    >>> measured = {"a": {"F": 1.0}, "b": {"F": 8.0}}
    >>> table = estimate_block_seconds([[("a", 1), ("b", 2)]], [1.0, 1.0, 3.0], measured, {"b": 2.0})
    >>> [block["F"] for block in table]
    [1.0, 1.0, 3.0]
    """
    found: list[dict[TaskKind, list[float]]] = [{} for _ in block_costs]
    for host, blocks in list_stages(teams):
        # seconds of block b = seconds of all tasks / factor * cost_b / sum of costs
        cost = sum(block_costs[block] for block in blocks) * factors.get(host, 1.0)
        for kind, seconds in measured[host].items():
            for block in blocks:
                found[block].setdefault(kind, []).append(seconds * block_costs[block] / cost)
    return [{kind: statistics.fmean(seconds) for kind, seconds in block.items()} for block in found]


def _divide(shape: PipelineShape, speeds: HostSpeeds) -> list[Team]:
    speed_by_host = combine_speeds(dict(speeds), shape.device_speeds)
    return make_teams(shape.hosts, shape.block_costs, shape.num_stages, speed_by_host)


def _slow_down(shape: PipelineShape, slow: Mapping[HostName, float]) -> dict[HostName, float]:
    """Return how many times as long as a sound host with most devices each host takes that takes longer."""
    fewer = {host: 1 / speed for host, speed in shape.device_speeds.items()}
    return combine_speeds(slow, fewer)


def _price_cut(
    shape: PipelineShape, speeds: HostSpeeds, base: BlockTable, slow: Mapping[HostName, float]
) -> float:
    """Return the seconds of a step whose layers are divided by `speeds`, on hosts of which some are slow."""
    teams, factors = _divide(shape, speeds), _slow_down(shape, slow)
    even = share_microbatches(teams, shape.num_microbatches, speeds=shape.device_speeds)
    quotas = {even}
    if shape.is_balanced:
        quotas.add(divide_by_speed(teams, even, _add_up_tasks(teams, base, factors)))
    return price_cut(teams, sorted(quotas), base, factors, shape.schedule)


def price_cut(
    teams: Sequence[Team],
    quotas: Iterable[Sequence[int]],
    base: BlockTable,
    factors: Mapping[HostName, float],
    schedule: PipelineSchedule,
) -> float:
    """Return the seconds of a step of these replicas, with the best of some quotas.

    Args:
        teams: the replicas.
        quotas: microbatches of each replica.
        base: what each block takes on a sound host.
        factors: how many times as long a host takes that takes longer.
    """
    seconds = _add_up_tasks(teams, base, factors)
    by_block = spread_over_blocks(teams, seconds)
    return min(price_division(teams, StepDivision(tuple(one), by_block), seconds, schedule) for one in quotas)


def _add_up_tasks(
    teams: Sequence[Team], base: BlockTable, factors: Mapping[HostName, float]
) -> dict[HostName, dict[TaskKind, float]]:
    """Return what the tasks of each host take, over all of its blocks."""
    seconds: dict[HostName, dict[TaskKind, float]] = {}
    for host, blocks in list_stages(teams):
        total = seconds.setdefault(host, {})
        for block in blocks:
            for kind, one in base[block].items():
                total[kind] = total.get(kind, 0.0) + one * factors.get(host, 1.0)
    return seconds


def compute_growth(durations: StepDurations, since_step: int) -> float:
    """Return how many times as long steps take now as before a step; 1: no longer, or that is not known.

    >>> durations = [(step, 0.1 if step < 20 else 0.3) for step in range(40)]
    >>> round(compute_growth(durations, 20), 2)
    3.0
    """
    before = [seconds for step, seconds in durations if step < since_step]
    newest = [seconds for step, seconds in durations if step >= since_step][-NEWEST_STEPS:]
    if min(len(before), len(newest)) < MIN_STEPS:
        return 1.0
    return max(1.0, statistics.median(newest) / statistics.median(before))
