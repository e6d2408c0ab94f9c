"""Every plan, one by one, without bounds, classes or memory of what was computed: what `search` must be equal to."""

import heapq
import itertools
import math
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.branch_and_bound import BLOCK_SIZES
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import estimate_collective_s
from resilient_jax.planning.cost_model import CostModel, PlanRequest
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes, make_layout
from resilient_jax.planning.host_pool import build_host_pool
from resilient_jax.planning.memory import count_activations, estimate_stage_memory
from resilient_jax.planning.program_cost import CollectiveKind
from resilient_jax.planning.stage_cost import count_microbatch_load, estimate_part_times, estimate_transfer_s
from resilient_jax.planning.state_bytes import count_state_bytes
from resilient_jax.planning.tensor_partition import find_axis_sizes


def find_least_step_s(profile, topology, global_batch, number_format="bf16", min_replicas=1, axes=None):
    """The least step time of all plans with so many replicas or more, and with these sizes of axes; infinite if none
    fits."""
    fixed = dict(axes or {})
    replicas = fixed.pop(Axis.REPLICA, None)
    best = math.inf
    for memory in sorted({kind.memory_bytes for kind in topology.accelerators}):
        pool = build_host_pool(topology, number_format, memory)
        question = PlanRequest(
            program_cost=profile,
            topology=topology,
            pool=pool,
            global_batch=global_batch,
            calibration=Calibration(),
            number_format=number_format,
        )
        pricing = CostModel(question)
        for layout, batch in _choices(pricing):
            if all(getattr(layout.axes, axis) == size for axis, size in fixed.items()):
                best = min(best, _least_of(pricing, layout, batch, min_replicas, replicas))
    return best


def _choices(pricing):
    question = pricing.question
    devices = question.topology.device_count
    outermost = len(question.topology.levels) - 1
    levels = range(1, outermost + 1) if outermost else [0]
    axes = [find_axis_sizes(question.profile, a, devices) for a in (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT)]
    fsdps = range(1, devices + 1)
    for tensor, sequence, expert, fsdp, pipeline in itertools.product(
        *axes, fsdps, find_axis_sizes(question.profile, Axis.PIPELINE, devices)
    ):
        group = ReplicaAxes(tensor, sequence, expert, fsdp, pipeline)
        if group.devices > devices or question.global_batch % fsdp:
            continue
        rooms = range(1, question.pool.devices_per_host + 1)
        layouts = {
            make_layout(group, room, level, block, outermost)
            for room in rooms
            for level in levels
            for block in (BLOCK_SIZES if level < outermost else [1])
            if block <= devices
        }
        for layout, size, again in itertools.product(
            sorted(layouts), range(1, question.global_batch // fsdp + 1), [False, True]
        ):
            if question.global_batch % (fsdp * size) == 0:
                yield layout, MicrobatchConfig(size, again)


def _least_of(pricing, layout, batch, min_replicas, replicas):
    """Of every limit on what the fullest stage sums up and updates: of each block then the fastest split."""
    blocks = _blocks_that_fit(pricing, layout, batch)
    splits = [split for block in blocks for split in block]
    synced = {split.synced for split in splits}
    updated = {split.updated for split in splits}
    return min(
        (
            _least_within(pricing, layout, batch, min_replicas, replicas, _within(blocks, *most))
            for most in itertools.product(synced, updated)
        ),
        default=math.inf,
    )


def _within(blocks, synced, updated):
    allowed = [[s for s in block if s.synced <= synced and s.updated <= updated] for block in blocks]
    return sorted(min(block) for block in allowed if block)


def _least_within(pricing, layout, batch, min_replicas, wanted, blocks):
    question = pricing.question
    microbatches = question.global_batch // (layout.group.fsdp * batch.sequences)
    best = math.inf
    for count in range(1, len(blocks) + 1):
        replicas = count * layout.replicas_per_block
        if replicas > microbatches:
            break
        if replicas < min_replicas or wanted not in (None, replicas):
            continue
        used = blocks[:count]
        finish = _deal(
            microbatches, [block.slot_s for block in used for _ in range(layout.replicas_per_block)], layout
        )
        synced = estimate_collective_s(
            CollectiveKind.ALL_REDUCE,
            max(block.synced for block in used),
            layout.replica_spread(count),
            pricing.links,
        )
        update = max(block.updated * block.update_s for block in used) + question.calibration.step_overhead_s
        best = min(best, finish + synced + update)
    return best


def _deal(microbatches, slots, layout):
    """Each microbatch to whoever has it done first."""
    fill = layout.group.pipeline - 1
    queue = [((fill + 1) * slot, slot) for slot in slots]
    heapq.heapify(queue)
    done = 0.0
    for _ in range(microbatches):
        done, slot = queue[0]
        heapq.heapreplace(queue, (done + slot, slot))
    return done


def _blocks_that_fit(pricing, layout, batch):
    """The splits of each block: those of its slowest replica."""
    pool = pricing.question.pool
    domains = {}
    for host in pricing.question.topology.hosts:
        if host.accelerator.memory_bytes >= pool.memory_bytes:
            inside = layout.level not in (0, layout.outermost)
            domains.setdefault(host.domains[layout.level - 1] if inside else "", []).append(host)
    found = []
    for hosts in domains.values():
        hosts.sort(key=lambda host: -host.speed * host.accelerator.peak_flops_per_s("bf16"))
        cells = [host for host in hosts for _ in range(host.devices // layout.cell_devices)]
        size = layout.cells * layout.block
        for start in range(0, len(cells) - size + 1, size):
            slowest = cells[start + size - layout.cells : start + size]
            priced = _price_replica(pricing, layout, batch, slowest)
            if priced:
                found.append(priced)
    return found


def _price_replica(pricing, layout, batch, hosts):
    question, stages = pricing.question, layout.group.pipeline
    state = count_state_bytes(question.profile, layout.group)
    asked = count_microbatch_load(question.profile, state, layout, batch, pricing.links)
    sending = estimate_transfer_s(question.profile, layout, batch, pricing.links)
    groups = stages // layout.stages_inside
    per_group = len(hosts) // groups
    slowest = [max(hosts[i * per_group : (i + 1) * per_group], key=lambda h: -h.speed) for i in range(groups)]
    of_stage = [host for host in slowest for _ in range(layout.stages_inside)]
    parts = [
        estimate_part_times(
            asked, sending, host, host.accelerator.peak_flops_per_s("bf16"), question.calibration
        )
        for host in of_stage
    ]
    activations = count_activations(question.profile, layout.group, batch)
    microbatches = question.global_batch // (layout.group.fsdp * batch.sequences)

    def fits(layers):
        return all(
            estimate_stage_memory(
                state,
                activations,
                question.calibration,
                layers=number,
                stage=i,
                stages=stages,
                microbatches=min(stages - i, microbatches),
                is_gathered=layout.group.fsdp > 1,
            ).total
            <= pricing.usable_bytes
            for i, number in enumerate(layers)
        )

    worst = min(hosts, key=lambda host: host.speed)
    bandwidth = worst.accelerator.memory_bandwidth_bytes_per_s * question.calibration.memory_efficiency
    found = []
    for slot_s, layers in _splits(question.profile.layers, parts):
        if fits(layers):
            held = [
                state.count_stage(n, is_first=i == 0, is_last=i == stages - 1) for i, n in enumerate(layers)
            ]
            found.append(
                _Split(
                    slot_s=slot_s,
                    synced=max(part.gradients for part in held),
                    updated=max(2 * part.parameters + part.gradients + 2 * part.optimizer for part in held),
                    update_s=1 / (bandwidth * worst.speed),
                )
            )
    return found


class _Split(NamedTuple):
    """Of layers to stages: a microbatch on the slowest, bytes to sum up and to update, seconds a byte of the update."""

    slot_s: float
    synced: float
    updated: float
    update_s: float


def _splits(layers, parts):
    """Every way to give each stage a layer or more, with the time of its slowest stage."""
    stages = len(parts)
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = [0, *cuts, layers]
        split = tuple(ends[i + 1] - ends[i] for i in range(stages))
        yield max(part.stage(split[i], i, stages).total_s for i, part in enumerate(parts)), split
