"""The price of one plan: everything that a search asks of a layout and a microbatch, each part computed once."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.collectives import DeviceLink, estimate_collective_s, find_device_links
from resilient_jax.planning.device_layout import (
    NO_LAYER_LIMITS,
    DeviceLayout,
    MicrobatchConfig,
    ReplicaAxes,
    StageLayerLimits,
)
from resilient_jax.planning.host_pool import Composition, HostKind, HostPool, find_stage_kinds
from resilient_jax.planning.layer_split import StageRun, split_layers_by_run
from resilient_jax.planning.makespan import UNLIMITED, MachineClass, TaskAssignment, assign_tasks
from resilient_jax.planning.memory import (
    ActivationBytes,
    DeviceMemory,
    count_activations,
    count_in_flight,
    estimate_stage_memory,
    read_measured_memory,
)
from resilient_jax.planning.program_cost import CollectiveKind, ProgramCost
from resilient_jax.planning.stage_cost import (
    PartTimes,
    StageTime,
    count_microbatch_load,
    estimate_part_times,
    estimate_transfer_s,
)
from resilient_jax.planning.state_bytes import StateBytes, StateCounter
from resilient_jax.topology import Topology


class ReplicaTime(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the replicas on one composition of hosts are.

    Attributes:
        split: (stages in a row, layers of each).
        slot_s: one microbatch on the slowest stage.
        slowest: that stage's time by term.
        memory: of its fullest device.
        synced_bytes: gradients of one device, of the stage that has most.
        updated_bytes: what a device's optimizer reads and writes, the most.
        kind: of its slowest host.
    """

    layer_split: tuple[tuple[int, int], ...]
    microbatch_s: float
    slowest_stage: StageTime
    memory: DeviceMemory
    synced_bytes: float
    updated_bytes: float
    host_kind: int


class BlockClass(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of replicas that are alike."""

    composition: Composition
    blocks: int
    time: ReplicaTime


class PlanCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan takes; the step ends when its slowest replica is done and all have updated.

    Attributes:
        step_s: the step.
        dealt: microbatches of each team's replicas.
        replica_s: sum of gradients over replicas.
        optimizer_s: the update, with the overhead of a step.
    """

    step_s: float
    assignment: TaskAssignment
    replica_s: float
    optimizer_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is for.

    Attributes:
        profile: of the program.
        topology: of the hosts.
        pool: those of them that may be used.
        global_batch: sequences in a step.
        calibration: constants of the model.
        number_format: of matrix products.
        rounds: chunks of layers on each stage.
    """

    program_cost: ProgramCost
    topology: Topology
    pool: HostPool
    global_batch: int
    calibration: Calibration
    number_format: str
    pipeline_repeats: int = 1


NO_ACTIVATIONS = ActivationBytes(embedding=0.0, layer=0.0, head=0.0, extra=0.0)
ROUNDING_SLACK = 1 + 1e-9
"""Of sums in other orders."""

_Same = tuple[int, int, int]
"""Stages in a row: on which kind of host, how many, and of how many layers each (or room for how many)."""


class MemoryHeadroom(NamedTuple):
    """Bytes that a device has for layers and activations, by where its stage is; of one stage all three are the same.

    `layer` is what the state of a layer takes of it.
    """

    first: float
    middle: float
    last: float
    layer: float


def count_fitting_layers(left: float, layer: float) -> int:
    """Gives how many whole layers have room."""
    return int(left / layer * ROUNDING_SLACK) if layer > 0 else int(left >= 0) * UNLIMITED


def _join(kinds: Sequence[_Same], held: Sequence[int]) -> list[_Same]:
    """Stages on the same kind of host that have room for as many layers."""
    stages = [kind for kind, count, _ in kinds for _ in range(count)]
    same = itertools.groupby(zip(stages, held, strict=True))
    return [(kind, sum(1 for _ in run), most) for (kind, most), run in same]


def _total_s(time: StageTime) -> float:
    return time.total_s


def _total_bytes(memory: DeviceMemory) -> float:
    return memory.total


class _Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a layout's microbatch takes on each kind of host, and on compositions of them as far as asked."""

    key: tuple[object, ...]
    parts: list[PartTimes]
    times: dict[tuple[Composition, StageLayerLimits], ReplicaTime | None]


class CostModel:
    """Answers for one question, and remembers them. A value in all but its memory: equal calls have equal answers."""

    def __init__(self, question: PlanRequest) -> None:
        self.request = question
        constants = question.calibration
        self.links: tuple[DeviceLink, ...] = find_device_links(
            question.topology, constants.link_efficiency, constants.latency_factor
        )
        self.devices = question.pool.device_count
        self.layers = question.program_cost.layers
        self.usable_bytes = question.pool.memory_bytes * question.calibration.usable_memory
        self.measured = read_measured_memory(question.program_cost)
        # Copies of gradients lie where activations were: what more they need is known with the activations only.
        self._least_need = (
            None if self.measured is None else dataclasses.replace(self.measured, gradient_copies=0)
        )
        self._counter = StateCounter(question.program_cost)
        self._states: dict[tuple[int, int, int], StateBytes] = {}
        self._activations: dict[tuple[int, int, int, MicrobatchConfig], ActivationBytes] = {}
        self._replicas: dict[tuple[int, int, int, int], tuple[tuple[Composition, int], ...]] = {}
        self._newest: _Work | None = None
        self._parts: dict[tuple[object, ...], list[PartTimes]] = {}
        self._fullest: dict[tuple[object, ...], DeviceMemory] = {}
        self._rooms: dict[tuple[int, int, int, bool], MemoryHeadroom] = {}
        self._held: dict[tuple[ReplicaAxes, MicrobatchConfig], tuple[int, ...]] = {}
        self._longest: dict[tuple[ReplicaAxes, MicrobatchConfig], int] = {}
        self._peaks = [
            kind.accelerator.peak_flops_per_s(question.number_format) for kind in question.pool.kinds
        ]

    def count_state(self, group: ReplicaAxes) -> StateBytes:
        """What a device holds under these axes."""
        key = (group.tensor, group.expert, group.fsdp)
        if key not in self._states:
            self._states[key] = self._counter.count(group)
        return self._states[key]

    def count_activations(self, group: ReplicaAxes, batch: MicrobatchConfig) -> ActivationBytes:
        """What a microbatch keeps on a device."""
        key = (group.tensor, group.sequence, group.expert, batch)
        if key not in self._activations:
            self._activations[key] = count_activations(self.request.program_cost, group, batch)
        return self._activations[key]

    def find_blocks(self, layout: DeviceLayout) -> tuple[tuple[Composition, int], ...]:
        """The blocks of replicas that the hosts can make."""
        key = (layout.devices_per_slot, layout.host_slots, layout.level, layout.block_size)
        if key not in self._replicas:
            self._replicas[key] = self.request.pool.count_blocks(layout)
        return self._replicas[key]

    def count_replicas(self, layout: DeviceLayout) -> int:
        """How many the hosts can make."""
        return sum(blocks for _, blocks in self.find_blocks(layout)) * layout.replicas_per_block

    def find_block_classes(
        self, layout: DeviceLayout, batch: MicrobatchConfig, limit_s: float = math.inf
    ) -> tuple[BlockClass, ...]:
        """The replicas that have the memory, fastest first; none, if even all of them would not be done by the
        limit."""
        blocks = self.find_blocks(layout)
        work = self._work(layout, batch)
        count = self.count_replicas(layout)
        if not (count and self.find_longest_stage(layout.axes, batch)):
            return ()
        if self._least_s(layout, batch, work.parts, count) >= limit_s:
            return ()
        found = []
        for composition, number in blocks:
            key = (composition, layout.layer_limits)
            if key not in work.times:
                work.times[key] = self._time_replica(work.parts, layout, batch, composition)
            if (time := work.times[key]) is not None:
                found.append(BlockClass(composition=composition, blocks=number, time=time))
        return tuple(
            sorted(found, key=lambda team: (team.time.microbatch_s, team.time.host_kind, team.composition))
        )

    def _work(self, layout: DeviceLayout, batch: MicrobatchConfig) -> "_Work":
        """What is the same for all sizes of blocks; only the newest is remembered."""
        key = (layout.axes, layout.axes_in_host, layout.level, batch)
        if self._newest is None or self._newest.key != key:
            self._newest = _Work(key=key, parts=self._time_parts(layout, batch), times={})
        return self._newest

    def _time_parts(self, layout: DeviceLayout, batch: MicrobatchConfig) -> list[PartTimes]:
        """On each kind of host: the same for any two or more stages, and a search asks for each number of them."""
        question = self.request
        sending = estimate_transfer_s(question.program_cost, layout, batch, self.links)
        is_piped = layout.axes.pipeline > 1
        key = (layout.axes[:-1], layout.axes_in_host[:-1], layout.level, is_piped, batch, sending)
        if key not in self._parts:
            asked = count_microbatch_load(
                question.program_cost, self.count_state(layout.axes), layout, batch, self.links
            )
            self._parts[key] = [
                estimate_part_times(asked, sending, kind, peak, question.calibration)
                for kind, peak in zip(question.pool.kinds, self._peaks, strict=True)
            ]
        return self._parts[key]

    def _least_s(
        self, layout: DeviceLayout, batch: MicrobatchConfig, parts: Sequence[PartTimes], replicas: int
    ) -> float:
        """A time by which the last replica cannot be done: the slowest stage has the average, and some stage so many
        layers."""
        stages, layers = layout.axes.pipeline, self.layers
        layer = min(part.layer.total_s for part in parts)
        ends = min(part.embedding.total_s + part.head.total_s for part in parts)
        slot = max(self.find_longest_stage(layout.axes, batch) * layer, (layers * layer + ends) / stages)
        quota = -(-self.count_microbatches(layout.axes, batch) // replicas)
        return (quota + (stages - 1) / self.request.pipeline_repeats) * slot

    def _time_replica(
        self,
        parts: Sequence[PartTimes],
        layout: DeviceLayout,
        batch: MicrobatchConfig,
        composition: Composition,
    ) -> ReplicaTime | None:
        """On these hosts; None: they have not the memory, however the layers are split."""
        group = layout.axes
        kinds = [(kind, count, UNLIMITED) for kind, count in find_stage_kinds(composition, layout)]
        found = self._find_split(parts, layout, batch, kinds)
        if found is None:
            return None
        split, memory = found
        stages, state = group.pipeline, self.count_state(group)
        slowest = StageTime()
        synced = updated = 0.0
        stage = 0
        for kind, count, layers in split:
            time = parts[kind].estimate_stage(layers, stage, stages)
            slowest = max(slowest, time, key=_total_s)
            held = state.count_stage(layers, is_first=stage == 0, is_last=stage == stages - 1)
            synced = max(synced, held.gradients)
            updated = max(updated, held.updated)
            stage += count
        return ReplicaTime(
            layer_split=tuple((count, layers) for _, count, layers in split),
            microbatch_s=slowest.total_s,
            slowest_stage=slowest,
            memory=memory,
            synced_bytes=synced,
            updated_bytes=updated,
            host_kind=max(kind for kind, _, _ in split),
        )

    def _find_split(
        self,
        parts: Sequence[PartTimes],
        layout: DeviceLayout,
        batch: MicrobatchConfig,
        kinds: Sequence[_Same],
    ) -> tuple[list[_Same], DeviceMemory] | None:
        """The fastest that has the memory, and what its fullest device needs."""
        group = layout.axes
        asked = layout.layer_limits.per_stage(group.pipeline)
        split = self._split(parts, kinds if layout.layer_limits == NO_LAYER_LIMITS else _join(kinds, asked))
        memory = self._find_fullest(group, batch, split)
        held: list[int] = []
        while memory.total > self.usable_bytes:
            if held:
                held = self._take_back(group, batch, split, held)
            else:
                held = list(map(min, asked, self.count_layers_per_stage(group, batch)))
            if min(held) < 1 or sum(held) < self.layers:
                return None
            split = self._split(parts, _join(kinds, held))
            memory = self._find_fullest(group, batch, split)
        return split, memory

    def _find_fullest(
        self, group: ReplicaAxes, batch: MicrobatchConfig, split: Sequence[_Same]
    ) -> DeviceMemory:
        """Of the fullest device of a replica; the same wherever it stands, so layouts share it."""
        key = (group, batch, tuple((count, layers) for _, count, layers in split))
        if key not in self._fullest:
            stage, needs = 0, []
            for _, count, layers in split:  # of stages that are alike the first has most in flight
                needs.append(self._memory(group, batch, layers, stage))
                stage += count
            self._fullest[key] = max(needs, key=_total_bytes)
        return self._fullest[key]

    def find_headroom(self, group: ReplicaAxes) -> MemoryHeadroom:
        """What a device has left for layers and activations, at most."""
        key = (group.tensor, group.expert, group.fsdp, group.pipeline > 1)
        if key not in self._rooms:
            self._rooms[key] = self._find_room(group)
        return self._rooms[key]

    def _find_room(self, group: ReplicaAxes) -> MemoryHeadroom:
        stages = 3 if group.pipeline > 1 else 1  # those between the ends all need the same

        def count_left(stage: int, layers: int = 0) -> float:
            needed = estimate_stage_memory(
                self.count_state(group),
                NO_ACTIVATIONS,
                self.request.calibration,
                layers=layers,
                stage=stage,
                stages=stages,
                microbatches=0,
                is_gathered=group.fsdp > 1,
                measured=self._least_need,
            )
            return self.usable_bytes - needed.total

        first, between, last = count_left(0), count_left(stages // 2), count_left(stages - 1)
        return MemoryHeadroom(first, between, last, first - count_left(0, layers=1))

    def count_layers_per_stage(self, group: ReplicaAxes, batch: MicrobatchConfig) -> tuple[int, ...]:
        """How many layers each stage has the memory for at most, whichever its host.

        Of no use are more than leave each other stage one. A sum in another order, or what a compiler was seen to need
        beside, may make it fewer: see `_take_back`.
        """
        key = (group, batch)
        if key not in self._held:
            room, one, stages = (
                self.find_headroom(group),
                self.count_activations(group, batch),
                group.pipeline,
            )
            microbatches, rounds = self.count_microbatches(group, batch), self.request.pipeline_repeats
            flying = [count_in_flight(stage, stages, microbatches, rounds) for stage in range(stages)]
            left = [room.middle] * stages
            left[0] = room.first - flying[0] * one.embedding
            left[-1] = (left[0] if stages == 1 else room.last) - flying[-1] * one.head
            self._held[key] = tuple(
                max(
                    0,
                    min(
                        count_fitting_layers(free - one.extra, room.layer + number * one.layer),
                        self.layers - stages + 1,
                    ),
                )
                for free, number in zip(left, flying, strict=True)
            )
        return self._held[key]

    def _take_back(
        self, group: ReplicaAxes, batch: MicrobatchConfig, split: Sequence[_Same], held: Sequence[int]
    ) -> list[int]:
        """A layer less than it was given for each stage that has not the memory for it."""
        given = [layers for _, count, layers in split for _ in range(count)]
        return [
            layers - 1 if self._memory(group, batch, layers, stage).total > self.usable_bytes else most
            for stage, (layers, most) in enumerate(zip(given, held, strict=True))
        ]

    def find_longest_stage(self, group: ReplicaAxes, batch: MicrobatchConfig) -> int:
        """How many layers the stage with most has at least; 0: the stages have not the memory for all."""
        key = (group, batch)
        if key not in self._longest:
            held = self.count_layers_per_stage(group, batch)
            sizes = range(-(-self.layers // group.pipeline), max(held) + 1)
            enough = (size for size in sizes if sum(min(size, most) for most in held) >= self.layers)
            self._longest[key] = next(enough, 0) if min(held) else 0
        return self._longest[key]

    def find_min_memory(self, group: ReplicaAxes, batch: MicrobatchConfig) -> float:
        """What the fullest device needs if layers are split so that it needs least."""
        stages = group.pipeline
        most = max(self._memory(group, batch, 1, stage).total for stage in range(stages))
        queue = [(self._memory(group, batch, 2, stage).total, stage, 2) for stage in range(stages)]
        heapq.heapify(queue)
        for _ in range(self.layers - stages):  # to whoever needs least with one more, as `assign_tasks` does
            needed, stage, layers = queue[0]
            most = max(most, needed)
            more = self._memory(group, batch, layers + 1, stage).total
            heapq.heapreplace(queue, (more, stage, layers + 1))
        return most

    def _kind(self, index: int) -> HostKind:
        return self.request.pool.kinds[index]

    def _split(self, parts: Sequence[PartTimes], kinds: Sequence[_Same]) -> list[_Same]:
        """The fastest, of stages in a row on a kind of host that have room for so many layers each."""
        if sum(count for _, count, _ in kinds) == 1:
            return [(kinds[0][0], 1, self.layers)]
        first, last = parts[kinds[0][0]], parts[kinds[-1][0]]
        split = split_layers_by_run(
            self.layers,
            [StageRun(count, parts[kind].layer.total_s, most) for kind, count, most in kinds],
            first.embedding.total_s - first.transfer_s,
            last.head.total_s - last.transfer_s,
        )
        return [(kinds[i][0], count, layers) for i, count, layers in split]

    def _memory(self, group: ReplicaAxes, batch: MicrobatchConfig, layers: int, stage: int) -> DeviceMemory:
        question = self.request
        return estimate_stage_memory(
            self.count_state(group),
            self.count_activations(group, batch),
            question.calibration,
            layers=layers,
            stage=stage,
            stages=group.pipeline,
            microbatches=count_in_flight(
                stage, group.pipeline, self.count_microbatches(group, batch), question.pipeline_repeats
            ),
            is_gathered=group.fsdp > 1,
            measured=self.measured,
        )

    def count_microbatches(self, group: ReplicaAxes, batch: MicrobatchConfig) -> int:
        """In a step, of all replicas together."""
        return self.request.global_batch // (group.fsdp * batch.sequences)

    def list_machines(
        self, layout: DeviceLayout, teams: Sequence[BlockClass], blocks: int
    ) -> list[MachineClass]:
        """The replicas of the fastest so many blocks, for dealing out microbatches."""
        fill = (layout.axes.pipeline - 1) / self.request.pipeline_repeats
        found = []
        for team in teams:
            taken = min(team.blocks, blocks)
            blocks -= taken
            if taken:
                count = taken * layout.replicas_per_block
                slot = team.time.microbatch_s
                found.append(MachineClass(count=count, start_s=fill * slot, task_s=slot))
        return found

    def assign_microbatches(
        self, layout: DeviceLayout, batch: MicrobatchConfig, teams: Sequence[BlockClass], blocks: int
    ) -> TaskAssignment:
        """The step's microbatches to the replicas of the fastest so many blocks."""
        return assign_tasks(
            self.count_microbatches(layout.axes, batch), self.list_machines(layout, teams, blocks)
        )

    def estimate_reduction_and_update_s(
        self, layout: DeviceLayout, teams: Sequence[BlockClass], blocks: int
    ) -> tuple[float, float]:
        """After the last microbatch: the sum over replicas, and the update with the overhead of a step."""
        constants = self.request.calibration
        synced = update = 0.0
        left = blocks
        for team in teams:
            if left <= 0:
                break
            left -= team.blocks
            kind = self._kind(team.time.host_kind)
            bandwidth = kind.accelerator.memory_bandwidth_bytes_per_s * constants.memory_efficiency
            update = max(update, team.time.updated_bytes / (bandwidth * kind.speed))
            synced = max(synced, team.time.synced_bytes)
        spread = layout.replica_level_factors(blocks)
        replica = estimate_collective_s(CollectiveKind.ALL_REDUCE, synced, spread, self.links)
        return replica, update + constants.step_overhead_s

    def estimate_plan(
        self, layout: DeviceLayout, batch: MicrobatchConfig, teams: Sequence[BlockClass], blocks: int
    ) -> PlanCost:
        """The step of the fastest so many blocks."""
        dealt = self.assign_microbatches(layout, batch, teams, blocks)
        replica, optimizer = self.estimate_reduction_and_update_s(layout, teams, blocks)
        return PlanCost(
            step_s=dealt.makespan_s + replica + optimizer,
            assignment=dealt,
            replica_s=replica,
            optimizer_s=optimizer,
        )
