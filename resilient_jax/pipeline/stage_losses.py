"""What the loss of each host, of two, or of more would make of a pipeline, for the leader that chooses then. Pure.

Two ways to go on: the stage is kept for the host, and its replica computes nothing until it is back, so no block moves;
or the model is cut anew over the hosts that are left, so all of them work, and blocks move, now and when it is back.
A third way, by which the peers of the lost stage compute its part of some microbatches of its replica in each step, is
as fast as the first at best (docs/benchmarks.md): the peers have that work either way.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.pipeline.layer_speeds import price_cut
from resilient_jax.pipeline.stage_assignment import assign_stages
from resilient_jax.pipeline_schedule.routes import Team, list_stages
from resilient_jax.pipeline_schedule.tasks import KINDS, PipelineSchedule, TaskKind
from resilient_jax.pipeline_schedule.teams import list_complete_teams, make_teams, share_microbatches
from resilient_jax.protocol.state_records import StageLoss, StageOutlook


class StageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline as it is, and what the estimate needs to know of its blocks.

    Attributes:
        teams: the replicas.
        quotas: microbatches of each replica.
        absent: the hosts whose stages are kept for them.
        num_stages: hosts of a replica, as the job was started with.
        block_costs: relative time of each block, by which the model is cut whatever its tasks are measured to take.
        block_seconds: what the tasks of each block take, in any unit of time.
        block_bytes: size of the state of each block.
        bytes_per_s: rate at which a host gets blocks.
        device_speeds: speed of each host that has fewer devices than others, as a fraction of the others' speed.
    """

    teams: tuple[Team, ...]
    quotas: tuple[int, ...]
    absent: frozenset[HostName]
    num_stages: int
    schedule: PipelineSchedule
    block_costs: tuple[float, ...]
    block_seconds: tuple[Mapping[TaskKind, float], ...]
    block_bytes: tuple[float, ...]
    bytes_per_s: float
    device_speeds: Mapping[HostName, float] = {}

    def get_speed(self, host: HostName) -> float:
        """Return the speed of a host as a fraction of that of a host with most devices."""
        return self.device_speeds.get(host, 1.0)


def count_unlike_tasks(layout: StageLayout) -> int:
    """Return how many tasks replicas have that differ by stages, speeds or microbatches; what an estimate takes."""
    unlike = {
        (quota, *((count, layout.get_speed(host)) for host, count in team))
        for team, quota in zip(layout.teams, layout.quotas, strict=True)
    }
    return sum(quota * len(stages) for quota, *stages in unlike) * len(KINDS[layout.schedule])


def estimate_stage_losses(layout: StageLayout, most_lost: int = 1) -> tuple[StageLoss, ...]:
    """Return, for each host that is there, what its loss would make of the pipeline; then for each two, if wanted.

    Hosts are taken for as fast as they have devices. The speed after a cut is approximate: it is estimated once for
    all hosts with as many devices, though where a slower host stands in its replica depends on which of them is lost.

    Args:
        layout: the pipeline.
        most_lost: how many hosts are lost at one moment at most, 1 or 2.
    """
    hosts = [host for team in layout.teams for host, _ in team if host not in layout.absent]
    if len(hosts) < 2:
        return ()
    most_lost = min(most_lost, len(hosts) - 1)
    present_s = _price(layout, layout.teams, layout.quotas)
    num_microbatches = sum(layout.quotas)
    costs = layout.block_costs
    before = [host for team in layout.teams for host, _ in team]

    def cut_without(lost: Collection[HostName]) -> list[Team]:
        left = assign_stages([host for host in hosts if host not in lost], before, costs, layout.num_stages)
        return make_teams(left, costs, layout.num_stages, layout.device_speeds)

    cut_s: dict[tuple[float, ...], float] = {}
    moved_bytes: dict[tuple[object, ...], float] = {}
    complete_now = list_complete_teams(layout.teams, layout.absent)
    team_of = {host: number for number, team in enumerate(layout.teams) for host, _ in team}
    places = {
        host: (len(team), place, number in complete_now, layout.get_speed(host))
        for number, team in enumerate(layout.teams)
        for place, (host, _) in enumerate(team)
    }
    held = dict(list_stages(layout.teams))
    kept: dict[tuple[tuple[float, ...], ...], float] = {}
    losses = []
    for lost in itertools.chain.from_iterable(
        itertools.combinations(hosts, number) for number in range(1, most_lost + 1)
    ):
        absent = {*layout.absent, *lost}
        complete = tuple(
            sorted(
                tuple(layout.get_speed(host) for host, _ in layout.teams[team])
                for team in list_complete_teams(layout.teams, absent)
            )
        )
        if complete not in kept:  # replicas of as many hosts with as many devices are alike
            quotas = share_microbatches(layout.teams, num_microbatches, absent, layout.device_speeds)
            kept[complete] = present_s / _price(layout, layout.teams, quotas) if complete else 0.0
        speeds = tuple(sorted(map(layout.get_speed, lost)))
        if speeds not in cut_s:
            cut = cut_without(lost)
            quotas = share_microbatches(cut, num_microbatches, speeds=layout.device_speeds)
            cut_s[speeds] = _price(layout, cut, quotas)
        # So are hosts at the same place in them.
        place = (*sorted(places[host] for host in lost), len({team_of[host] for host in lost}))
        if place not in moved_bytes:
            moved_bytes[place] = max(
                sum(layout.block_bytes[block] for block in blocks if block not in held[host])
                for host, blocks in list_stages(cut_without(lost))
            )
        losses.append(
            StageLoss(
                hosts=lost,
                kept=round(kept[complete], 4),
                cut=round(present_s / cut_s[speeds], 4),
                move_s=round(moved_bytes[place] / layout.bytes_per_s, 4),
            )
        )
    return tuple(losses)


def estimate_stage_outlook(layout: StageLayout, most_lost: int) -> StageOutlook | None:
    """Return what the loss of any hosts would make of the pipeline, by their number alone; None: nobody would be left.

    It errs on the side of what is lost: the fastest replicas break first, and no host has blocks that it needs.

    Args:
        layout: the pipeline.
        most_lost: how many hosts are lost at one moment at most.
    """
    complete = list_complete_teams(layout.teams, layout.absent)
    replicas = [[host for host, _ in layout.teams[number]] for number in sorted(complete)]
    hosts = [host for team in layout.teams for host, _ in team if host not in layout.absent]
    if len(hosts) < 2:
        return None
    present_s, num_microbatches = _price(layout, layout.teams, layout.quotas), sum(layout.quotas)
    kept = [1.0]
    by_speed = sorted(replicas, key=lambda replica: -sum(map(layout.get_speed, replica)))
    for number in range(1, min(most_lost, len(replicas)) + 1):
        absent = layout.absent.union(*by_speed[:number])
        quotas = share_microbatches(layout.teams, num_microbatches, absent, layout.device_speeds)
        kept.append(present_s / _price(layout, layout.teams, quotas) if any(quotas) else 0.0)
    costs = layout.block_costs
    cut, move_s = [1.0], [0.0]
    for number in range(1, min(most_lost, len(hosts) - 1) + 1):
        teams = make_teams(hosts[number:], costs, layout.num_stages, layout.device_speeds)
        quotas = share_microbatches(teams, num_microbatches, speeds=layout.device_speeds)
        cut.append(present_s / _price(layout, teams, quotas))
        largest = max(sum(layout.block_bytes[block] for block in blocks) for _, blocks in list_stages(teams))
        move_s.append(largest / layout.bytes_per_s)
    idle = tuple(host for host in hosts if not any(host in replica for replica in replicas))
    return StageOutlook(
        replicas=tuple(map(tuple, replicas)),
        idle=idle,
        kept=_round(kept),
        cut=_round(cut),
        move_s=_round(move_s),
    )


def _round(numbers: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(number, 4) for number in numbers)


def make_even_seconds(
    block_costs: Sequence[float], schedule: PipelineSchedule
) -> tuple[Mapping[TaskKind, float], ...]:
    """Return what tasks take, as long as none was measured: their operations, in equal parts by kind."""
    kinds = KINDS[schedule]
    return tuple({kind: cost / len(kinds) for kind in kinds} for cost in block_costs)


def _price(layout: StageLayout, teams: Sequence[Team], quotas: Sequence[int]) -> float:
    factors = {host: 1 / speed for host, speed in layout.device_speeds.items()}
    return price_cut(teams, [quotas], layout.block_seconds, factors, layout.schedule)
