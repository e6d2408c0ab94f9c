"""What the stages of a pipeline need of a device's memory, and how many layers they have room for; memoized.

With S bytes of state and A bytes of activations per layer, F_i microbatches in flight on stage i, and C_i bytes left of
a device besides the layers, stage i holds at most `floor(C_i / (S + F_i A))` layers. The layers fit if these sum to
all layers or more. C_i differs only at the ends of the pipeline, where the embedding and the head are.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from resilient_jax.pipeline_schedule.makespan import UNLIMITED
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


def count_fitting_layers(left: float, layer: float) -> int:
    """Return how many layers of `layer` bytes fit in `left` bytes."""
    return int(left / layer * ROUNDING_SLACK) if layer > 0 else int(left >= 0) * UNLIMITED


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
            # C_i = usable - bytes of stage i with no layer and no activations; S = C_i - the same with one layer. All
            # stages between the ends have the same C_i, so three stages stand for any number.
            stages = 3 if axes.pipeline > 1 else 1

            def count_left(stage: int, layers: int = 0) -> float:
                return self.usable_bytes - self._estimate_state(axes, StagePosition(layers, stage, stages))

            first, middle, last = count_left(0), count_left(stages // 2), count_left(stages - 1)
            self._headrooms[key] = MemoryHeadroom(first, middle, last, first - count_left(0, layers=1))
        return self._headrooms[key]

    def _estimate_state(self, axes: ReplicaAxes, position: StagePosition) -> float:
        """Return the bytes that a device of a stage needs besides activations."""
        return estimate_stage_memory(
            self.count_state(axes),
            NO_ACTIVATIONS,
            self.request.calibration,
            position,
            in_flight=0,
            has_gathers=axes.fsdp > 1,
            measured=self._measured_least,
        ).total

    def count_max_layers(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> tuple[int, ...]:
        """Return the most layers that each stage has the memory for, on any host.

        A stage never needs more than leave every other stage one layer. Rounding, or what a compiler was measured to
        need beside, may lower the number by a few: see `remove_misfit_layers`.
        """
        key = (axes, microbatch)
        if key not in self._max_layers:
            # floor((C_i - F_i ends_i - x) / (S + F_i A)) layers, in bytes. C_0 and C_(P-1) lose the residuals of the
            # embedding and the head, in as many microbatches as are in flight there; every stage loses x, the working
            # memory of one part. More than L - P + 1 are of no use: each other stage has one.
            headroom, one = self.find_headroom(axes), self.count_activations(axes, microbatch)
            stages, repeats = axes.pipeline, self.request.pipeline_repeats
            microbatches = self.count_microbatches(axes, microbatch)
            in_flight = [count_in_flight(stage, stages, microbatches, repeats) for stage in range(stages)]
            left = [headroom.middle] * stages
            left[0] = headroom.first - in_flight[0] * one.embedding
            left[-1] = (left[0] if stages == 1 else headroom.last) - in_flight[-1] * one.head
            useful = self.layers - stages + 1
            self._max_layers[key] = tuple(
                max(0, min(count_fitting_layers(free - one.extra, headroom.layer + n * one.layer), useful))
                for free, n in zip(left, in_flight, strict=True)
            )
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
        """Return the least number of layers that the longest stage can have; 0 if the layers do not fit."""
        key = (axes, microbatch)
        if key not in self._longest:
            limits = self.count_max_layers(axes, microbatch)
            # The least l from ceil(L / P) on with sum_i min(l, limit_i) >= L.
            sizes = range(-(-self.layers // axes.pipeline), max(limits) + 1)
            enough = (size for size in sizes if sum(min(size, most) for most in limits) >= self.layers)
            self._longest[key] = next(enough, 0) if min(limits) else 0
        return self._longest[key]

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
