"""A candidate of the search made a plan: terms, hosts, quotas."""

from collections.abc import Sequence

from resilient_jax.planning.branch_and_bound import Candidate
from resilient_jax.planning.cost_model import Price, Pricing, Team
from resilient_jax.planning.placement import find_ranges, place_replicas
from resilient_jax.planning.plan import Plan, ReplicaTeam, StepTime


def compose(pricing: Pricing, candidate: Candidate) -> Plan:
    """Gives the plan of a candidate, with every term of its estimate."""
    question, layout = pricing.question, candidate.layout
    teams = pricing.teams(layout, candidate.batch)
    price = pricing.price(layout, candidate.batch, teams, candidate.blocks)
    used = _used_teams(teams, candidate.blocks)
    step = _explain(pricing, candidate, used, price)
    memory = max((team.time.memory for team in used), key=lambda memory: memory.total)
    most = max(number for shares in price.dealt.shares for _, number in shares)
    if most == 1 and question.profile.backend is not None:
        memory = memory.with_one_microbatch()
    placed = place_replicas(
        question.topology, question.pool, layout, [team.composition for team in teams], candidate.blocks
    )
    hosts = question.topology.hosts
    devices = [0] * len(hosts)
    for replica in placed:
        for place in replica:
            devices[place] += layout.cell_devices
    tokens = question.profile.sequence_tokens
    return Plan(
        question=question,
        order=tuple(team.composition for team in teams),
        model=question.profile.name,
        topology=question.topology.name,
        devices=question.topology.device_count,
        global_batch=question.global_batch,
        layout=layout,
        batch=candidate.batch,
        blocks=candidate.blocks,
        rounds=question.rounds,
        teams=_describe_teams(pricing, candidate, used, price),
        hosts=find_ranges(hosts, devices),
        spares=find_ranges(hosts, [host.devices - used for host, used in zip(hosts, devices, strict=True)]),
        step=step,
        memory=memory,
        usable_bytes=pricing.usable_bytes,
        tokens_per_s=tokens * question.global_batch / step.total_s if tokens else None,
        model_flops_utilization=_utilization(pricing, step.total_s),
    )


def _used_teams(teams: Sequence[Team], blocks: int) -> list[Team]:
    used = []
    for team in teams:
        if blocks > 0:
            used.append(team)
        blocks -= team.blocks
    return used


def _explain(pricing: Pricing, candidate: Candidate, teams: Sequence[Team], price: Price) -> StepTime:
    """The terms of the replica that is done last."""
    fill = (candidate.layout.group.pipeline - 1) / pricing.question.rounds
    counts = [shares[0][1] for shares in price.dealt.shares]
    last = max(
        range(len(counts)), key=lambda i: (counts[i] + fill) * teams[i].time.slot_s if counts[i] else 0.0
    )
    stage, number = teams[last].time.slowest, counts[last]
    return StepTime(
        compute_s=number * stage.compute_s,
        tensor_s=number * stage.tensor_s,
        sequence_s=number * stage.sequence_s,
        expert_s=number * stage.expert_s,
        fsdp_s=number * stage.fsdp_s,
        transfer_s=number * stage.transfer_s,
        bubble_s=fill * stage.total_s,
        replica_s=price.replica_s,
        optimizer_s=price.optimizer_s,
    )


def _describe_teams(
    pricing: Pricing, candidate: Candidate, teams: Sequence[Team], price: Price
) -> tuple[ReplicaTeam, ...]:
    kinds = pricing.question.pool.kinds
    takers = pricing.takers(candidate.layout, teams, candidate.blocks)
    return tuple(
        ReplicaTeam(
            replicas=taken.count,
            speeds=tuple((kinds[kind].speed, number) for kind, number in team.composition),
            layers=tuple(layers for stages, layers in team.time.split for _ in range(stages)),
            quotas=shares,
            microbatch_s=team.time.slot_s,
        )
        for team, taken, shares in zip(teams, takers, price.dealt.shares, strict=True)
    )


def _utilization(pricing: Pricing, step_s: float) -> float:
    question = pricing.question
    flops = (question.profile.forward_flops + question.profile.backward_flops).total * question.global_batch
    peak = sum(
        kind.device_count * kind.accelerator.peak_flops_per_s(question.number_format)
        for kind in question.topology.classes
    )
    return flops / (step_s * peak)
