"""The time of a step whose lost stages are computed by their peers in other replicas, simulated task by task.

It is the schedule that hosts run, with its transfers. Chameleon's formula (`pipeline.estimate_rerouted_s`) adds up what
the peers of all stages get, as if one waited for the other. In a simulation lost stages of different replicas overlap,
and microbatches are not divided; but peers that serve two pipelines within the memory of one let both wait. So where
some replicas are complete, these may as well compute everything, as a job does that keeps a stage for its host: the
others wait then. That is often faster, and never slower where one stage is lost.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.errors import HoldersLost
from resilient_jax.pipeline_schedule.makespan import share_tasks
from resilient_jax.pipeline_schedule.rerouting import reroute
from resilient_jax.pipeline_schedule.routes import Routes, Team, find_holders, make_routes
from resilient_jax.pipeline_schedule.task_orders import order_tasks
from resilient_jax.pipeline_schedule.tasks import DEFAULT_SCHEDULE, KINDS, TaskKind
from resilient_jax.planning.pipeline import WEIGHT_SHARE, estimate_rerouted_s, time_pipeline

MAX_TASKS: Final = 20_000
"""Tasks of a step that are simulated, in 0.2 to 0.3 s; a search of 16,384 devices takes as long."""

LostStage = tuple[int, int]
"""The index of a replica, and that of its stage."""


def price_rerouted_s(
    stages: int,
    quotas: Sequence[int],
    lost: Collection[LostStage],
    stage_s: float,
    *,
    transfer_s: float = 0.0,
    weight_share: float = WEIGHT_SHARE,
) -> float | None:
    """Return the time of all microbatches when the peers of lost stages compute what these would have.

    The peers are those of the lost stages alone, or complete replicas compute everything, whichever is faster. Where a
    step has more than `MAX_TASKS` tasks it is estimated by Chameleon's formula.

    Args:
        stages: P; all take the same time.
        quotas: microbatches of each replica, in the order of replicas.
        stage_s: time of a microbatch on a stage, without transfers.
        transfer_s: time until another host has the result of a task.
        weight_share: part of weight gradients in `stage_s`.

    Returns:
        Seconds; None if all replicas lost a stage.
    """
    broken = {replica for replica, _ in lost}
    complete = [quota for replica, quota in enumerate(quotas) if replica not in broken]
    if sum(quotas) * stages * len(KINDS[DEFAULT_SCHEDULE]) > MAX_TASKS:
        failed = [sum(1 for _, stage in lost if stage == i) for i in range(stages)]
        time = time_pipeline(stages, stage_s, transfer_s, weight_share=weight_share)
        rerouted_s = estimate_rerouted_s(stages, max(quotas), len(quotas), failed, time)
        if rerouted_s is None or not sum(complete):
            return rerouted_s
        most = math.ceil(sum(quotas) * max(complete) / sum(complete))
        return min(rerouted_s, float(most * time.microbatch_s + time.fill_s))
    teams: list[Team] = [
        [(_name(replica, stage), 1) for stage in range(stages)] for replica in range(len(quotas))
    ]
    dead = [_name(*stage) for stage in lost]
    try:
        found = reroute(make_routes(teams, quotas), (), find_holders(teams), dead, schedule=DEFAULT_SCHEDULE)
    except HoldersLost:
        return None
    options = [found.routes]
    if broken and sum(complete):
        weights = [0 if replica in broken else quota for replica, quota in enumerate(quotas)]
        options.append(make_routes(teams, share_tasks(sum(quotas), weights)))
    return min(_simulate_s(routes, stage_s, transfer_s, weight_share) for routes in options)


def _simulate_s(routes: Routes, stage_s: float, transfer_s: float, weight_share: float) -> float:
    # A weight gradient has as many FLOPs as a forward pass; where that is computed again, the input gradient has it.
    seconds = {
        TaskKind.FORWARD: weight_share * stage_s,
        TaskKind.INPUT_GRADIENT: (1 - 2 * weight_share) * stage_s,
        TaskKind.WEIGHT_GRADIENT: weight_share * stage_s,
    }
    return order_tasks(
        routes,
        lambda _host, kind, _block: seconds[kind],
        schedule=DEFAULT_SCHEDULE,
        transfer_s=lambda _source, _destination: transfer_s,
    ).makespan_s


def _name(replica: int, stage: int) -> HostName:
    return HostName(f"replica {replica:06} stage {stage:04}")
