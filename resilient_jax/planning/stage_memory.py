"""What the stages of a pipeline need of a device's memory, and how many layers they have room for; memoized.

With S bytes of state and A bytes of activations per layer, F_i microbatches in flight on stage i, and C_i bytes left of
a device besides the layers, stage i holds at most `floor(C_i / (S + F_i A))` layers. The layers fit if these sum to
all layers or more. C_i differs only at the ends of the pipeline, where the embedding and the head are.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from resilient_jax.planning.columns import floor, maximum, minimum
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.memory import (
    ActivationBytes,
    DeviceMemory,
    StagePosition,
    count_activations,
    count_in_flight,
    estimate_stage_memory,
    read_measured_memory,
)
from resilient_jax.planning.plan_request import PlanRequest
from resilient_jax.planning.state_bytes import StateBytes, StateCounter

NO_ACTIVATIONS = ActivationBytes(embedding=0.0, layer=0.0, head=0.0, extra=0.0)
ROUNDING_SLACK = 1 + 1e-9
"""Tolerance for sums of the same terms in another order."""
LEAST_BYTES = 1e-6
"""Less than anything takes: a layer that takes nothing fits any number of times."""

StageRuns = Sequence[tuple[int, int, int]]
"""Consecutive pipeline stages: index of their host kind, number of stages, layers of each (or the limit of each)."""


class MemoryHeadroom(NamedTuple):
    """Bytes that a device has left for layers and activations, by the position of its stage; equal for a single stage.

    `layer` is the bytes of one layer's state.
    """

    first: float
    middle: float
    last: float
    layer: float


def _total_bytes(memory: DeviceMemory) -> float:
    return memory.total


class StageMemory:
    """Memory of the stages of all plans of one request; equal calls have equal answers."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.layers = request.program_cost.layers
        self.usable_bytes = request.pool.memory_bytes * request.calibration.usable_memory
        self._measured = read_measured_memory(request.program_cost)
        # Copies of gradients reuse the memory of activations, so what they need beyond that is unknown without these.
        self._measured_least = (
            None if self._measured is None else dataclasses.replace(self._measured, gradient_copies=0)
        )
        self._counter = StateCounter(request.program_cost)
        self._states: dict[tuple[int, int, int], StateBytes] = {}
        self._activations: dict[tuple[int, int, int, bool, MicrobatchConfig], ActivationBytes] = {}
        self._fullest: dict[tuple[object, ...], DeviceMemory] = {}
        self._headrooms: dict[tuple[int, int, int, bool], MemoryHeadroom] = {}
        self._max_layers: dict[tuple[ReplicaAxes, MicrobatchConfig], tuple[int, ...]] = {}
        self._longest: dict[tuple[ReplicaAxes, MicrobatchConfig], int] = {}

    def count_state(self, axes: ReplicaAxes) -> StateBytes:
        """Return the bytes of state that a device holds under these axes."""
        key = (axes.tensor, axes.expert, axes.fsdp)
        if key not in self._states:
            self._states[key] = self._counter.count(axes)
        return self._states[key]

    def count_activations(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> ActivationBytes:
        """Return the bytes of activations that a microbatch keeps on a device."""
        key = (axes.tensor, axes.sequence, axes.expert, axes.pipeline > 1, microbatch)
        if key not in self._activations:
            self._activations[key] = count_activations(self.request.program_cost, axes, microbatch)
        return self._activations[key]

    def count_microbatches(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> int:
        """Return the microbatches of a step, of all replicas together."""
        return self.request.global_batch // (axes.fsdp * microbatch.sequences)

    def estimate(
        self, axes: ReplicaAxes, microbatch: MicrobatchConfig, layers: int, stage: int
    ) -> DeviceMemory:
        """Return the memory of a device of one stage with so many layers."""
        microbatches = self.count_microbatches(axes, microbatch)
        repeats = self.request.pipeline_repeats
        return estimate_stage_memory(
            self.count_state(axes),
            self.count_activations(axes, microbatch),
            self.request.calibration,
            StagePosition(layers, stage, axes.pipeline),
            in_flight=count_in_flight(stage, axes.pipeline, microbatches, repeats),
            has_gathers=axes.fsdp > 1,
            measured=self._measured,
        )

    def find_fullest(self, axes: ReplicaAxes, microbatch: MicrobatchConfig, split: StageRuns) -> DeviceMemory:
        """Return the memory of the fullest device of a replica; independent of the hosts, so layouts share it."""
        key = (axes, microbatch, tuple((count, layers) for _, count, layers in split))
        if key not in self._fullest:
            # max_i memory(L_i, i). F_i falls with i, so of a run of equal stages the first needs the most.
            stage, needed = 0, []
            for _, count, layers in split:
                needed.append(self.estimate(axes, microbatch, layers, stage))
                stage += count
            self._fullest[key] = max(needed, key=_total_bytes)
        return self._fullest[key]

    def find_headroom(self, axes: ReplicaAxes) -> MemoryHeadroom:
        """Return an upper bound of the bytes that a device has left for layers and activations."""
        key = (axes.tensor, axes.expert, axes.fsdp, axes.pipeline > 1)
        if key not in self._headrooms:
            self._headrooms[key] = self.bound_headroom(axes, self.count_state(axes))
        return self._headrooms[key]

    def bound_headroom(self, axes: ReplicaAxes, state: StateBytes) -> MemoryHeadroom:
        """Return the result of `find_headroom`, also for columns."""
        # C_i = usable - bytes of stage i with no layer and no activations; S = C_i - the same with one layer. All
        # stages between the ends have the same C_i, so three stages stand for any number.
        stages = 3 if axes.pipeline > 1 else 1

        def count_left(stage: int, layers: int = 0) -> float:
            needed = estimate_stage_memory(
                state,
                NO_ACTIVATIONS,
                self.request.calibration,
                StagePosition(layers, stage, stages),
                in_flight=0,
                has_gathers=axes.fsdp > 1,
                measured=self._measured_least,
            )
            return self.usable_bytes - needed.total

        first, middle, last = count_left(0), count_left(stages // 2), count_left(stages - 1)
        return MemoryHeadroom(first, middle, last, first - count_left(0, layers=1))

    def count_max_layers(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> tuple[int, ...]:
        """Return the most layers that each stage has the memory for, on any host.

        A stage never needs more than leave every other stage one layer. Rounding, or what a compiler was measured to
        need beside, may lower the number by a few: see `remove_misfit_layers`.
        """
        key = (axes, microbatch)
        if key not in self._max_layers:
            headroom, one = self.find_headroom(axes), self.count_activations(axes, microbatch)
            # More than L - P + 1 are of no use: each other stage has one.
            useful, stages = self.layers - axes.pipeline + 1, axes.pipeline
            microbatches = self.count_microbatches(axes, microbatch)
            limits = (
                self._limit_layers(headroom, one, microbatches, stage, stages) for stage in range(stages)
            )
            self._max_layers[key] = tuple(int(max(0, min(limit, useful))) for limit in limits)
        return self._max_layers[key]

    def remove_misfit_layers(
        self, axes: ReplicaAxes, microbatch: MicrobatchConfig, split: StageRuns, max_layers: Sequence[int]
    ) -> list[int]:
        """Return `max_layers` with one layer less than `split` for each stage that does not fit with its layers."""
        given = [layers for _, count, layers in split for _ in range(count)]
        return [
            layers - 1 if self.estimate(axes, microbatch, layers, stage).total > self.usable_bytes else most
            for stage, (layers, most) in enumerate(zip(given, max_layers, strict=True))
        ]

    def find_longest_stage(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> int:
        """Return the least number of layers that the longest stage can have, or fewer; 0 if they do not fit."""
        key = (axes, microbatch)
        if key not in self._longest:
            headroom, one = self.find_headroom(axes), self.count_activations(axes, microbatch)
            self._longest[key] = int(self.bound_longest_stage(axes, microbatch, headroom, one))
        return self._longest[key]

    def bound_longest_stage(
        self,
        axes: ReplicaAxes,
        microbatch: MicrobatchConfig,
        headroom: MemoryHeadroom,
        activations: ActivationBytes,
    ) -> float:
        """Return the result of `find_longest_stage`, also for columns."""
        # The longest stage has l layers, with min(l, first) + min(l, last) + (P - 2) min(l, middle) >= L. Of the stages
        # between the ends the last has the fewest microbatches in flight, so room for the most layers.
        stages, layers = axes.pipeline, self.layers
        microbatches = self.count_microbatches(axes, microbatch)
        first, middle, last = (
            self._limit_layers(headroom, activations, microbatches, stage, stages)
            for stage in (0, max(stages - 2, 0), stages - 1)
        )
        ends = first + last
        longest: float = -(-layers // stages)
        for limited, most in ((1, minimum(first, last)), (2, ends)):
            if stages > limited:
                longest = maximum(longest, -floor((most - layers) / (stages - limited)))
        fits = (first >= 1) & (middle >= 1) & (last >= 1) & (ends + (stages - 2) * middle >= layers)
        return longest * fits

    def _limit_layers(
        self,
        headroom: MemoryHeadroom,
        activations: ActivationBytes,
        microbatches: int,
        stage: int,
        stages: int,
    ) -> float:
        """Return how many layers a stage has the memory for; it may be negative."""
        # floor((C_i - F_i ends_i - x) / (S + F_i A)), in bytes. C_0 and C_(P-1) lose the residuals of the embedding and
        # the head, in as many microbatches as are in flight there; every stage loses x, the working memory of one part.
        in_flight = count_in_flight(stage, stages, microbatches, self.request.pipeline_repeats)
        left = headroom.middle
        if stage == 0:
            left = headroom.first - in_flight * activations.embedding
        if stage == stages - 1:
            left = (left if stages == 1 else headroom.last) - in_flight * activations.head
        each = maximum(headroom.layer + in_flight * activations.layer, LEAST_BYTES)
        return floor((left - activations.extra) / each * ROUNDING_SLACK)

    def find_min_memory(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> float:
        """Return the bytes that the fullest device needs under the split of the layers that minimizes them."""
        stages = axes.pipeline

        def count_bytes(layers: int, stage: int) -> float:
            return self.estimate(axes, microbatch, layers, stage).total

        most = max(count_bytes(1, stage) for stage in range(stages))
        queue = [(count_bytes(2, stage), stage, 2) for stage in range(stages)]
        heapq.heapify(queue)
        # Minimize max_i memory(L_i, i) with sum_i L_i = L, L_i >= 1: memory grows with L_i, so giving each further
        # layer to the stage that needs the least with it is optimal.
        for _ in range(self.layers - stages):
            needed, stage, layers = queue[0]
            most = max(most, needed)
            heapq.heapreplace(queue, (count_bytes(layers + 1, stage), stage, layers + 1))
        return most
