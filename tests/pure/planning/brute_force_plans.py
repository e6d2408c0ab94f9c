"""The oracle of `search_plan`: every plan is estimated, without bounds, host classes or memoization."""

import heapq
import itertools
import math
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.candidates import BLOCK_SIZES
from resilient_jax.planning.collectives import estimate_collective_s
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes, make_layout
from resilient_jax.planning.host_pool import build_host_pool
from resilient_jax.planning.memory import StagePosition, count_activations, estimate_stage_memory
from resilient_jax.planning.plan_request import PlanRequest
from resilient_jax.planning.program_cost import CollectiveKind
from resilient_jax.planning.stage_cost import count_microbatch_load, estimate_part_times, estimate_transfer_s
from resilient_jax.planning.state_bytes import StateCounter
from resilient_jax.planning.tensor_partition import find_axis_sizes


def find_least_step_s(program_cost, topology, global_batch, number_format="bf16", min_replicas=1, axes=None):
    """Return the least step time of all plans with at least `min_replicas` and these axis sizes; inf if none fits."""
    given = dict(axes or {})
    replicas = given.pop(Axis.REPLICA, None)
    best = math.inf
    for memory in sorted({kind.memory_bytes for kind in topology.accelerators}):
        pool = build_host_pool(topology, number_format, memory)
        request = PlanRequest(
            program_cost=program_cost,
            topology=topology,
            pool=pool,
            global_batch=global_batch,
            calibration=Calibration(),
            number_format=number_format,
        )
        cost_model = CostModel(request)
        for layout, microbatch in _enumerate(cost_model):
            if all(getattr(layout.axes, axis) == size for axis, size in given.items()):
                best = min(best, _find_least(cost_model, layout, microbatch, min_replicas, replicas))
    return best


def _enumerate(cost_model):
    request = cost_model.request
    devices = request.topology.device_count
    outermost = len(request.topology.levels) - 1
    levels = range(1, outermost + 1) if outermost else [0]
    axes = [
        find_axis_sizes(request.program_cost, a, devices) for a in (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT)
    ]
    fsdps = range(1, devices + 1)
    for tensor, sequence, expert, fsdp, pipeline in itertools.product(
        *axes, fsdps, find_axis_sizes(request.program_cost, Axis.PIPELINE, devices)
    ):
        replica_axes = ReplicaAxes(tensor, sequence, expert, fsdp, pipeline)
        if replica_axes.devices > devices or request.global_batch % fsdp:
            continue
        rooms = range(1, request.pool.devices_per_host + 1)
        layouts = {
            make_layout(replica_axes, room, level, block, outermost)
            for room in rooms
            for level in levels
            for block in (BLOCK_SIZES if level < outermost else [1])
            if block <= devices
        }
        for layout, size, remat in itertools.product(
            sorted(layouts), range(1, request.global_batch // fsdp + 1), [False, True]
        ):
            if request.global_batch % (fsdp * size) == 0:
                yield layout, MicrobatchConfig(size, remat)


def _find_least(cost_model, layout, microbatch, min_replicas, replicas):
    """Return the least step time, over all limits on the bytes that the fullest stage reduces and updates.

    Under a limit each block takes its fastest split.
    """
    blocks = _blocks_that_fit(cost_model, layout, microbatch)
    splits = [split for block in blocks for split in block]
    synced = {split.synced for split in splits}
    updated = {split.updated for split in splits}
    return min(
        (
            _least_within(cost_model, layout, microbatch, min_replicas, replicas, _within(blocks, *most))
            for most in itertools.product(synced, updated)
        ),
        default=math.inf,
    )


def _within(blocks, synced, updated):
    allowed = [[s for s in block if s.synced <= synced and s.updated <= updated] for block in blocks]
    return sorted(min(block) for block in allowed if block)


def _least_within(cost_model, layout, microbatch, min_replicas, wanted, blocks):
    request = cost_model.request
    microbatches = request.global_batch // (layout.axes.fsdp * microbatch.sequences)
    best = math.inf
    for count in range(1, len(blocks) + 1):
        replicas = count * layout.replicas_per_block
        if replicas > microbatches:
            break
        if replicas < min_replicas or wanted not in (None, replicas):
            continue
        used = blocks[:count]
        finish = _assign(
            microbatches,
            [block.pipeline for block in used for _ in range(layout.replicas_per_block)],
        )
        synced = estimate_collective_s(
            CollectiveKind.ALL_REDUCE,
            max(block.synced for block in used),
            layout.replica_level_factors(count),
            cost_model.links,
        )
        update = max(block.updated * block.update_s for block in used) + request.calibration.step_overhead_s
        best = min(best, finish + synced + update)
    return best


def _assign(microbatches, pipelines):
    """Return the makespan when each microbatch goes to the replica that would finish it first."""
    queue = [(each + fill, each) for each, fill in pipelines]
    heapq.heapify(queue)
    done = 0.0
    for _ in range(microbatches):
        done, slot = queue[0]
        heapq.heapreplace(queue, (done + slot, slot))
    return done


def _blocks_that_fit(cost_model, layout, microbatch):
    """Return the splits of each block that fit: those of its slowest replica."""
    pool = cost_model.request.pool
    domains = {}
    for host in cost_model.request.topology.hosts:
        if host.accelerator.memory_bytes >= pool.memory_bytes:
            inside = layout.level not in (0, layout.outermost_level)
            domains.setdefault(host.domains[layout.level - 1] if inside else "", []).append(host)
    found = []
    for hosts in domains.values():
        hosts.sort(key=lambda host: -host.speed * host.accelerator.peak_flops_per_s("bf16"))
        slots = [host for host in hosts for _ in range(host.devices // layout.devices_per_slot)]
        size = layout.host_slots * layout.block_size
        for start in range(0, len(slots) - size + 1, size):
            slowest = slots[start + size - layout.host_slots : start + size]
            splits = _find_splits(cost_model, layout, microbatch, slowest)
            if splits:
                found.append(splits)
    return found


def _find_splits(cost_model, layout, microbatch, hosts):
    request, stages = cost_model.request, layout.axes.pipeline
    state = StateCounter(request.program_cost).count(layout.axes)
    load = count_microbatch_load(request.program_cost, state, layout, microbatch, cost_model.links)
    sending = estimate_transfer_s(request.program_cost, layout, microbatch, cost_model.links)
    hosts_in_line = stages // layout.stages_per_host
    per_host = len(hosts) // hosts_in_line
    slowest = [
        max(hosts[i * per_host : (i + 1) * per_host], key=lambda h: -h.speed) for i in range(hosts_in_line)
    ]
    of_stage = [host for host in slowest for _ in range(layout.stages_per_host)]
    parts = [
        estimate_part_times(
            load, sending, host, host.accelerator.peak_flops_per_s("bf16"), request.calibration
        )
        for host in of_stage
    ]
    activations = count_activations(request.program_cost, layout.axes, microbatch)
    microbatches = request.global_batch // (layout.axes.fsdp * microbatch.sequences)

    def fits(layers):
        return all(
            estimate_stage_memory(
                state,
                activations,
                request.calibration,
                StagePosition(number, i, stages),
                in_flight=min(stages, microbatches),
                has_gathers=layout.axes.fsdp > 1,
            ).total
            <= cost_model.memory.usable_bytes
            for i, number in enumerate(layers)
        )

    worst = min(hosts, key=lambda host: host.speed)
    bandwidth = worst.accelerator.memory_bandwidth_bytes_per_s * request.calibration.memory_efficiency
    found = []
    weights = 1 / 4 if microbatch.remat else 1 / 3
    for stage_s, layers in _splits(request.program_cost.layers, parts):
        if fits(layers):
            held = [
                state.count_stage(n, is_first=i == 0, is_last=i == stages - 1) for i, n in enumerate(layers)
            ]
            found.append(
                _Split(
                    pipeline=_time_pipeline(stage_s, weights * stage_s, sending, stages),
                    synced=max(part.gradients for part in held),
                    updated=max(2 * part.parameters + part.gradients + 2 * part.optimizer for part in held),
                    update_s=1 / (bandwidth * worst.speed),
                )
            )
    return found


def _time_pipeline(stage_s, weights_s, transfer_s, stages):
    """Return the time of each microbatch, and what filling and draining add."""
    way_s = stage_s - weights_s + (weights_s + 2 * (stages - 1) * transfer_s) / stages
    return max(stage_s, way_s), (stages - 1) * (stage_s - weights_s + 2 * transfer_s)


class _Split(NamedTuple):
    """A split of layers over stages: times of the pipeline, bytes to reduce and to update, seconds per updated byte."""

    pipeline: tuple[float, float]
    synced: float
    updated: float
    update_s: float


def _splits(layers, parts):
    """Yield every split with a layer or more for each stage, with the time of its slowest stage."""
    stages = len(parts)
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = [0, *cuts, layers]
        split = tuple(ends[i + 1] - ends[i] for i in range(stages))
        yield max(part.estimate_stage(split[i], i, stages).total_s for i, part in enumerate(parts)), split
