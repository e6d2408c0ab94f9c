"""The estimated cost of one plan, part by part; each part is computed once for a search.

A replica does N microbatches in `N p + fill`, by the slowest of its P pipeline stages and the transfers between them
(`pipeline`). A step's microbatches are assigned to the replicas with the least makespan. Then gradients are all-reduced
over replicas, and each device updates its part: `step = makespan + all-reduce + update`.
"""

import itertools
import math
from collections.abc import Sequence

import msgspec

from resilient_jax.pipeline_schedule.makespan import UNLIMITED, MachineClass, TaskAssignment, assign_tasks
from resilient_jax.planning.collectives import DeviceLink, estimate_collective_s, find_device_links
from resilient_jax.planning.columns import maximum
from resilient_jax.planning.device_layout import (
    NO_LAYER_LIMITS,
    DeviceLayout,
    MicrobatchConfig,
    ReplicaAxes,
    StageLayerLimits,
)
from resilient_jax.planning.host_pool import Composition, HostKind, find_stage_kinds
from resilient_jax.planning.layer_split import StageRun, split_layers_by_run
from resilient_jax.planning.memory import DeviceMemory
from resilient_jax.planning.pipeline import PipelineTime, find_weight_share, time_pipeline
from resilient_jax.planning.plan_request import PlanRequest
from resilient_jax.planning.program_cost import CollectiveKind
from resilient_jax.planning.stage_cost import (
    LeastTimes,
    PartTimes,
    StageTime,
    bound_part_times,
    count_microbatch_load,
    estimate_part_times,
    estimate_transfer_s,
)
from resilient_jax.planning.stage_memory import StageMemory, StageRuns


class ReplicaTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time and memory of the replicas on one composition of hosts.

    Attributes:
        layer_split: (consecutive stages, layers of each).
        slowest_stage: time of a microbatch on the slowest stage, by term.
        memory: memory of the fullest device.
        synced_bytes: gradients of one device, of the stage that has most.
        updated_bytes: bytes that the optimizer of one device reads and writes, the most of any device.
        host_kind: index of the slowest host's kind.
        transfer_s: time until a neighboring stage has a result.
    """

    layer_split: tuple[tuple[int, int], ...]
    pipeline: PipelineTime
    slowest_stage: StageTime
    memory: DeviceMemory
    synced_bytes: float
    updated_bytes: float
    host_kind: int
    transfer_s: float


class BlockClass(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of replicas on equal compositions of hosts: how many, and the time of their replicas."""

    composition: Composition
    blocks: int
    time: ReplicaTime


class PlanCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a plan's step; the step ends when the slowest replica is done and all devices have updated.

    Attributes:
        assignment: microbatches of the replicas of each block class.
        optimizer_s: the update, with the overhead of a step.
    """

    step_s: float
    assignment: TaskAssignment
    gradient_all_reduce_s: float
    optimizer_s: float


def _join_runs(runs: StageRuns, limits: Sequence[int]) -> StageRuns:
    """Return the runs of stages that share host kind and layer limit."""
    stages = [kind for kind, count, _ in runs for _ in range(count)]
    equal = itertools.groupby(zip(stages, limits, strict=True))
    return [(kind, sum(1 for _ in run), limit) for (kind, limit), run in equal]


def _total_s(time: StageTime) -> float:
    return time.total_s


class _LayoutCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a layout's microbatch by host kind, and the replica times of the compositions seen so far."""

    key: tuple[object, ...]
    parts: list[PartTimes]
    times: dict[tuple[Composition, StageLayerLimits], ReplicaTime | None]


class CostModel:
    """Memoized costs of all plans of one request; equal calls have equal answers."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.memory = StageMemory(request)
        constants = request.calibration
        self.links: tuple[DeviceLink, ...] = find_device_links(
            request.topology, constants.link_efficiency, constants.latency_factor
        )
        self.devices = request.pool.device_count
        self.layers = request.program_cost.layers
        self._peaks = [
            kind.accelerator.peak_flops_per_s(request.number_format) for kind in request.pool.kinds
        ]
        self._blocks: dict[tuple[int, int, int, int], tuple[tuple[Composition, int], ...]] = {}
        self._parts: dict[tuple[object, ...], list[PartTimes]] = {}
        self._newest: _LayoutCosts | None = None

    def find_blocks(self, layout: DeviceLayout) -> tuple[tuple[Composition, int], ...]:
        """Return the blocks of replicas that the hosts can form: (composition, number of blocks)."""
        key = (layout.devices_per_slot, layout.host_slots, layout.level, layout.block_size)
        if key not in self._blocks:
            self._blocks[key] = self.request.pool.count_blocks(layout)
        return self._blocks[key]

    def count_replicas(self, layout: DeviceLayout) -> int:
        """Return the number of replicas that the hosts can form."""
        # R = (blocks of all compositions) (replicas per block); slots that fill no block form no replica.
        return sum(blocks for _, blocks in self.find_blocks(layout)) * layout.replicas_per_block

    def find_block_classes(
        self, layout: DeviceLayout, microbatch: MicrobatchConfig, limit_s: float = math.inf
    ) -> tuple[BlockClass, ...]:
        """Return the blocks that fit in memory, fastest first; none if even all of them together exceed the limit."""
        count = self.count_replicas(layout)
        if not (count and self.memory.find_longest_stage(layout.axes, microbatch)):
            return ()
        costs = self._cost_layout(layout, microbatch)
        longest, least = (
            self.memory.find_longest_stage(layout.axes, microbatch),
            bound_part_times(costs.parts),
        )
        if self.bound_makespan_s(layout.axes, microbatch, least, longest, count) >= limit_s:
            return ()
        found = []
        for composition, number in self.find_blocks(layout):
            key = (composition, layout.layer_limits)
            if key not in costs.times:
                costs.times[key] = self._time_replica(costs.parts, layout, microbatch, composition)
            if (time := costs.times[key]) is not None:
                found.append(BlockClass(composition=composition, blocks=number, time=time))
        return tuple(
            sorted(
                found, key=lambda one: (one.time.pipeline.microbatch_s, one.time.host_kind, one.composition)
            )
        )

    def _cost_layout(self, layout: DeviceLayout, microbatch: MicrobatchConfig) -> _LayoutCosts:
        """Return what all block sizes of a layout share; only the newest is kept."""
        key = (layout.axes, layout.axes_in_host, layout.level, microbatch)
        if self._newest is None or self._newest.key != key:
            self._newest = _LayoutCosts(key=key, parts=self._time_parts(layout, microbatch), times={})
        return self._newest

    def _time_parts(self, layout: DeviceLayout, microbatch: MicrobatchConfig) -> list[PartTimes]:
        """Return the times of the model's parts by host kind; equal for all pipelines of two or more stages."""
        request = self.request
        # In s per microbatch: compute + exposed collectives. Of the pipeline only matters whether stages send, and how
        # long that takes, so the key lacks the number of stages.
        sending_s = estimate_transfer_s(request.program_cost, layout, microbatch, self.links)
        is_piped = layout.axes.pipeline > 1
        key = (layout.axes[:-1], layout.axes_in_host[:-1], layout.level, is_piped, microbatch, sending_s)
        if key not in self._parts:
            state = self.memory.count_state(layout.axes)
            load = count_microbatch_load(request.program_cost, state, layout, microbatch, self.links)
            self._parts[key] = [
                estimate_part_times(load, sending_s, kind, peak, request.calibration)
                for kind, peak in zip(request.pool.kinds, self._peaks, strict=True)
            ]
        return self._parts[key]

    def bound_makespan_s(
        self,
        axes: ReplicaAxes,
        microbatch: MicrobatchConfig,
        least: LeastTimes,
        longest: float,
        replicas: int,
    ) -> float:
        """Return a lower bound of the makespan of a step, where the longest stage has so many layers or more."""
        # t >= max(longest layer_s, (L layer_s + ends_s) / P) on the fastest host kind; a replica has ceil(N / R) of the
        # step's N microbatches or more; makespan >= ceil(N / R) p(t) + fill(t).
        stages = axes.pipeline
        average = (self.layers * least.layer_s + least.ends_s) / stages
        stage_s = maximum(longest * least.layer_s, average)
        quota = -(-self.memory.count_microbatches(axes, microbatch) // replicas)
        pipeline = self._time_pipeline(stages, stage_s, least.transfer_s, microbatch)
        return quota * pipeline.microbatch_s + pipeline.fill_s

    def _time_pipeline(
        self, stages: int, stage_s: float, transfer_s: float, microbatch: MicrobatchConfig
    ) -> PipelineTime:
        return time_pipeline(
            stages,
            stage_s,
            transfer_s,
            weight_share=find_weight_share(is_remat=microbatch.remat),
            repeats=self.request.pipeline_repeats,
        )

    def _time_replica(
        self,
        parts: Sequence[PartTimes],
        layout: DeviceLayout,
        microbatch: MicrobatchConfig,
        composition: Composition,
    ) -> ReplicaTime | None:
        """Return the time of a replica on these hosts; None if no split of the layers fits in memory."""
        found = self._find_split(parts, layout, microbatch, composition)
        if found is None:
            return None
        split, memory = found
        # All wait for the fullest or slowest stage s of P, with L_s layers:
        #     t = max_s (L_s layer_s + ends_s)                s per microbatch
        #     synced = max_s gradients_s                      bytes, all-reduced over replicas
        #     updated = max_s updated_s                       bytes, read and written by the optimizer
        stages, state = layout.axes.pipeline, self.memory.count_state(layout.axes)
        slowest = StageTime()
        synced = updated = 0.0
        stage = 0
        for kind, count, layers in split:
            slowest = max(slowest, parts[kind].estimate_stage(layers, stage, stages), key=_total_s)
            held = state.count_stage(layers, is_first=stage == 0, is_last=stage == stages - 1)
            synced = max(synced, held.gradients)
            updated = max(updated, held.updated)
            stage += count
        return ReplicaTime(
            layer_split=tuple((count, layers) for _, count, layers in split),
            pipeline=self._time_pipeline(stages, slowest.total_s, parts[0].transfer_s, microbatch),
            slowest_stage=slowest,
            memory=memory,
            synced_bytes=synced,
            updated_bytes=updated,
            host_kind=max(kind for kind, _, _ in split),
            transfer_s=parts[0].transfer_s,
        )

    def _find_split(
        self,
        parts: Sequence[PartTimes],
        layout: DeviceLayout,
        microbatch: MicrobatchConfig,
        composition: Composition,
    ) -> tuple[StageRuns, DeviceMemory] | None:
        """Return the fastest split of the layers that fits, and the memory of its fullest device."""
        # First the fastest split within the layout's limits; if it does not fit, within the limits of memory; each
        # further round lowers the limits of the stages that still do not fit, so it ends.
        axes, limited = layout.axes, layout.layer_limits.per_stage(layout.axes.pipeline)
        kinds = [(kind, count, UNLIMITED) for kind, count in find_stage_kinds(composition, layout)]
        runs = kinds if layout.layer_limits == NO_LAYER_LIMITS else _join_runs(kinds, limited)
        split = self._split_layers(parts, runs)
        memory = self.memory.find_fullest(axes, microbatch, split)
        limits: list[int] = []
        while memory.total > self.memory.usable_bytes:
            if limits:
                limits = self.memory.remove_misfit_layers(axes, microbatch, split, limits)
            else:
                limits = list(map(min, limited, self.memory.count_max_layers(axes, microbatch)))
            if min(limits) < 1 or sum(limits) < self.layers:
                return None
            split = self._split_layers(parts, _join_runs(kinds, limits))
            memory = self.memory.find_fullest(axes, microbatch, split)
        return split, memory

    def _split_layers(self, parts: Sequence[PartTimes], runs: StageRuns) -> StageRuns:
        """Return the fastest split of the layers over stages with these limits, whatever memory it needs."""
        if sum(count for _, count, _ in runs) == 1:
            return [(runs[0][0], 1, self.layers)]
        # Minimize max_s (L_s layer_s + extra_s) in s: extra_0 = embedding, extra_(P-1) = head.
        first, last = parts[runs[0][0]], parts[runs[-1][0]]
        split = split_layers_by_run(
            self.layers,
            [StageRun(count, parts[kind].layer.total_s, limit) for kind, count, limit in runs],
            first.embedding.total_s,
            last.head.total_s,
        )
        return [(runs[i][0], count, layers) for i, count, layers in split]

    def list_machines(
        self, layout: DeviceLayout, classes: Sequence[BlockClass], blocks: int
    ) -> list[MachineClass]:
        """Return the replicas of the fastest `blocks` blocks as machines, to assign microbatches to."""
        found = []
        for one in classes:
            taken = min(one.blocks, blocks)
            blocks -= taken
            if taken:
                found.append(one.time.pipeline.as_machines(taken * layout.replicas_per_block))
        return found

    def assign_microbatches(
        self,
        layout: DeviceLayout,
        microbatch: MicrobatchConfig,
        classes: Sequence[BlockClass],
        blocks: int,
    ) -> TaskAssignment:
        """Return the assignment of a step's microbatches to the replicas of the fastest `blocks` blocks."""
        microbatches = self.memory.count_microbatches(layout.axes, microbatch)
        return assign_tasks(microbatches, self.list_machines(layout, classes, blocks))

    def estimate_reduction_and_update_s(
        self, layout: DeviceLayout, classes: Sequence[BlockClass], blocks: int
    ) -> tuple[float, float]:
        """Return the seconds after the last microbatch: all-reduce over replicas; update with a step's overhead."""
        # update = max over classes of updated bytes / (bandwidth e_memory speed) + overhead, in s; the all-reduce waits
        # for the largest gradient. Only the classes that the first `blocks` blocks use count.
        synced = update = 0.0
        left = blocks
        for one in classes:
            if left <= 0:
                break
            left -= one.blocks
            kind = self.request.pool.kinds[one.time.host_kind]
            update = max(update, self.estimate_update_s(one.time.updated_bytes, kind))
            synced = max(synced, one.time.synced_bytes)
        factors = layout.replica_level_factors(blocks)
        reduction = estimate_collective_s(CollectiveKind.ALL_REDUCE, synced, factors, self.links)
        return reduction, update

    def estimate_update_s(self, updated_bytes: float, kind: HostKind) -> float:
        """Return the seconds of an update on hosts of a kind, with a step's overhead."""
        constants = self.request.calibration
        bandwidth = kind.accelerator.memory_bandwidth_bytes_per_s * constants.memory_efficiency
        return updated_bytes / (bandwidth * kind.speed) + constants.step_overhead_s

    def estimate_plan(
        self,
        layout: DeviceLayout,
        microbatch: MicrobatchConfig,
        classes: Sequence[BlockClass],
        blocks: int,
    ) -> PlanCost:
        """Return the cost of a step on the fastest `blocks` blocks."""
        # step = max_i (n_i p_i + fill_i) + all-reduce + update, in s; i over replicas, sum_i n_i = microbatches
        # of a step.
        assignment = self.assign_microbatches(layout, microbatch, classes, blocks)
        reduction, update = self.estimate_reduction_and_update_s(layout, classes, blocks)
        return PlanCost(
            step_s=assignment.makespan_s + reduction + update,
            assignment=assignment,
            gradient_all_reduce_s=reduction,
            optimizer_s=update,
        )
