"""A plan made from a candidate of the search: terms of the step, hosts, quotas."""

from collections.abc import Sequence

from resilient_jax.planning.candidates import PlanCandidate
from resilient_jax.planning.cost_model import BlockClass, CostModel, PlanCost
from resilient_jax.planning.pipeline import PipelineTime
from resilient_jax.planning.placement import find_host_ranges, place_replicas
from resilient_jax.planning.plan import Plan, ReplicaClass, StepTime


def build_plan(cost_model: CostModel, candidate: PlanCandidate) -> Plan:
    """Return the plan of a candidate, with every term of its estimate."""
    request, layout = cost_model.request, candidate.layout
    classes = cost_model.find_block_classes(layout, candidate.microbatch)
    cost = cost_model.estimate_plan(layout, candidate.microbatch, classes, candidate.blocks)
    used = _select_used(classes, candidate.blocks)
    step = _find_terms(used, cost)
    memory = max((block_class.time.memory for block_class in used), key=lambda memory: memory.total)
    # A measured program that computes one microbatch per step accumulates nothing.
    most_microbatches = max(number for shares in cost.assignment.task_counts for _, number in shares)
    if most_microbatches == 1 and request.program_cost.backend is not None:
        memory = memory.with_one_microbatch()
    placed = place_replicas(
        request.topology,
        request.pool,
        layout,
        [block_class.composition for block_class in classes],
        candidate.blocks,
    )
    hosts = request.topology.hosts
    devices = [0] * len(hosts)
    for replica in placed:
        for place in replica:
            devices[place] += layout.devices_per_slot
    # tokens per second = (tokens of a sequence) B / step.
    tokens = request.program_cost.sequence_tokens
    return Plan(
        request=request,
        compositions=tuple(block_class.composition for block_class in classes),
        model_name=request.program_cost.name,
        topology_name=request.topology.name,
        device_count=request.topology.device_count,
        global_batch=request.global_batch,
        layout=layout,
        microbatch=candidate.microbatch,
        blocks=candidate.blocks,
        pipeline_repeats=request.pipeline_repeats,
        replica_classes=_describe_classes(cost_model, candidate, used, cost),
        hosts=find_host_ranges(hosts, devices),
        spares=find_host_ranges(
            hosts, [host.devices - used for host, used in zip(hosts, devices, strict=True)]
        ),
        step_breakdown=step,
        memory=memory,
        usable_bytes=cost_model.memory.usable_bytes,
        tokens_per_s=tokens * request.global_batch / step.total_s if tokens else None,
        model_flops_utilization=_estimate_mfu(cost_model, step.total_s),
    )


def _select_used(classes: Sequence[BlockClass], blocks: int) -> list[BlockClass]:
    used = []
    for block_class in classes:
        if blocks > 0:
            used.append(block_class)
        blocks -= block_class.blocks
    return used


def _find_terms(classes: Sequence[BlockClass], cost: PlanCost) -> StepTime:
    """Return the terms of the replica that is done last."""
    # The replica that is done last: argmax_i n_i p_i + fill_i. Its terms are n_i times those of its slowest stage, the
    # bubble, and the transfers n_i (p_i - t_i) + sending, so all terms sum to the step.
    counts = [shares[0][1] for shares in cost.assignment.task_counts]
    last = max(
        range(len(counts)),
        key=lambda i: _finish_s(classes[i].time.pipeline, counts[i]) if counts[i] else 0.0,
    )
    stage, number, pipeline = classes[last].time.slowest_stage, counts[last], classes[last].time.pipeline
    return StepTime(
        compute_s=number * stage.compute_s,
        tensor_s=number * stage.tensor_s,
        sequence_s=number * stage.sequence_s,
        expert_s=number * stage.expert_s,
        fsdp_s=number * stage.fsdp_s,
        transfer_s=number * (pipeline.microbatch_s - stage.total_s) + pipeline.sending_s,
        bubble_s=pipeline.bubble_s,
        gradient_all_reduce_s=cost.gradient_all_reduce_s,
        optimizer_s=cost.optimizer_s,
    )


def _finish_s(pipeline: PipelineTime, microbatches: int) -> float:
    return microbatches * pipeline.microbatch_s + pipeline.fill_s


def _describe_classes(
    cost_model: CostModel, candidate: PlanCandidate, classes: Sequence[BlockClass], cost: PlanCost
) -> tuple[ReplicaClass, ...]:
    kinds = cost_model.request.pool.kinds
    takers = cost_model.list_machines(candidate.layout, classes, candidate.blocks)
    return tuple(
        ReplicaClass(
            replicas=taken.count,
            speeds=tuple((kinds[kind].speed, number) for kind, number in block_class.composition),
            layers=tuple(layers for stages, layers in block_class.time.layer_split for _ in range(stages)),
            quotas=shares,
            stage_s=block_class.time.slowest_stage.total_s,
            transfer_s=block_class.time.transfer_s,
        )
        for block_class, taken, shares in zip(classes, takers, cost.assignment.task_counts, strict=True)
    )


def _estimate_mfu(cost_model: CostModel, step_s: float) -> float:
    """Return the model FLOPs utilization of all devices of the topology."""
    request = cost_model.request
    # MFU = B (forward + backward FLOPs of a sequence, without remat) / (step sum of peaks); spares count as devices.
    flops = (
        request.program_cost.forward_flops + request.program_cost.backward_flops
    ).total * request.global_batch
    peak = sum(
        kind.device_count * kind.accelerator.peak_flops_per_s(request.number_format)
        for kind in request.topology.classes
    )
    return flops / (step_s * peak)
