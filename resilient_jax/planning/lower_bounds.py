"""Lower bounds of the step time of all plans with given axes.

With T the least time of a sequence on all stages of a pipeline of p, m devices per stage, N devices and a batch of B:
a microbatch of b sequences takes `t(b) >= b T / p` on the slowest stage, and b times a layer's time times the layers of
the longest stage. The microbatches of all replicas sum to B, so one replica has at least `B m p / (N b)` of them, and
fills the pipeline once: `step >= t(b) (B m p / (N b) + (p - 1) / r)`. Each bound below refines T and t(b).
"""

import functools
import math
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import DeviceLink, estimate_collective_s
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_cost import (
    FsdpCollective,
    compute_device_share,
    estimate_collectives,
    list_fsdp_collectives,
)
from resilient_jax.planning.device_layout import (
    DeviceLayout,
    MicrobatchConfig,
    ReplicaAxes,
    compute_level_factors,
    enumerate_layouts,
    fill_host,
)
from resilient_jax.planning.memory_filter import HeadroomSummary, MemoryFilter
from resilient_jax.planning.program_cost import CollectiveKind, ModelPart, PartCost
from resilient_jax.planning.state_bytes import PartBytes

NO_STATE = PartBytes()
_EXCHANGING: tuple[Axis, ...] = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT)
"""Axes along which activations are exchanged."""


class SequenceBound(NamedTuple):
    """Least time of one sequence on a device of a stage, by part: computing, and collectives.

    Computing on the fastest host kind, without overheads; collectives without latency, on their fastest placement. Both
    grow in proportion to the sequences of a microbatch.
    """

    layer_compute_s: float
    layer_exchange_s: float
    ends_s: float


class ParameterBound(NamedTuple):
    """Least time that the parameters of a layer add to each microbatch, whatever its size."""

    pass_s: float
    """Parameters read once."""
    gradient_s: float
    """Gradients added to the sum."""
    summed_s: float
    """Gradients all-reduced over the devices of a sequence."""
    fsdp_s: float
    """Parameters gathered and gradients scattered."""


class MicrobatchBound(NamedTuple):
    """Least time and memory of a microbatch: for b sequences a layer computes `fixed_s + b each_s`, and so on."""

    fixed_s: float
    each_s: float
    exchange_fixed_s: float
    exchange_each_s: float
    fsdp_s: float
    ends_s: float
    room: HeadroomSummary


class LowerBounds:
    """Memoized lower bounds for one request."""

    def __init__(self, cost_model: CostModel, levels: tuple[int, ...]) -> None:
        self.fitting = MemoryFilter(cost_model)
        self._cost_model = cost_model
        self._levels = levels
        request = cost_model.request
        kinds, constants = request.pool.kinds, request.calibration
        self._flops_per_s = constants.matrix_efficiency * max(
            kind.accelerator.peak_flops_per_s(request.number_format) * kind.speed for kind in kinds
        )
        self._bytes_per_s = constants.memory_efficiency * max(
            kind.accelerator.memory_bandwidth_bytes_per_s * kind.speed for kind in kinds
        )
        self._overhead_s = constants.layer_overhead_s / max(kind.speed for kind in kinds)
        self._free = tuple(
            DeviceLink(bytes_per_s=link.bytes_per_s, latency_s=0.0) for link in cost_model.links
        )
        self._layers = request.program_cost.layers
        self._batch, self._repeats = request.global_batch, request.pipeline_repeats
        self._overlap = constants.fsdp_overlap
        self._again = (False, True) if request.program_cost.can_remat else (False,)
        self._loads: dict[tuple[int, int, int, bool], SequenceBound] = {}
        self._bare_loads: dict[tuple[int, int, int, bool], SequenceBound] = {}
        self._times: dict[tuple[object, ...], float] = {}
        self._lefts: dict[tuple[int, ...], frozenset[int]] = {}
        self._slots: dict[tuple[int, int, int, int, bool], tuple[MicrobatchBound, ...]] = {}

    def bound_sequence(self, axes: ReplicaAxes, again: bool) -> SequenceBound:
        """Return the least time of a sequence under these axes, with or without remat."""
        key = (axes.tensor, axes.sequence, axes.expert, again)
        if key not in self._loads:
            bare = self.bound_sequence_compute(axes, again)
            exchanged = sum(
                self._exchange_s(work, axes, again)
                for work in self._cost_model.request.program_cost.parts
                if work.part is ModelPart.LAYER
            )
            self._loads[key] = bare._replace(layer_exchange_s=exchanged)
        return self._loads[key]

    def bound_sequence_compute(self, axes: ReplicaAxes, again: bool) -> SequenceBound:
        """Return the same without collectives, which take longer to bound."""
        key = (axes.tensor, axes.sequence, axes.expert, again)
        if key not in self._bare_loads:
            self._bare_loads[key] = self._bare_load(axes, again)
        return self._bare_loads[key]

    def _bare_load(self, axes: ReplicaAxes, again: bool) -> SequenceBound:
        program_cost = self._cost_model.request.program_cost
        layer = ends = 0.0
        for work in program_cost.parts:
            flops, moved = work.step_flops, work.step_bytes
            if again and work.part is ModelPart.LAYER:
                flops, moved = flops + work.remat_flops, moved + work.forward_bytes
            computing = compute_device_share(program_cost, flops, axes) / self._flops_per_s
            computing += compute_device_share(program_cost, moved, axes) / self._bytes_per_s
            if work.part is ModelPart.LAYER:
                layer = computing
            else:
                ends += computing
        return SequenceBound(layer, 0.0, ends)

    def _exchange_s(self, work: PartCost, axes: ReplicaAxes, again: bool) -> float:
        """Return the least time of a part's collectives over all layouts."""
        narrow = axes._replace(fsdp=1, pipeline=1)
        program_cost, microbatch = self._cost_model.request.program_cost, MicrobatchConfig(1, again)
        ways = {tuple(map(layout.axis_level_factors, _EXCHANGING)) for layout in self._layouts(narrow)}
        times = []
        for way in ways:
            spreads = dict(zip(_EXCHANGING, way, strict=True))
            found = estimate_collectives(
                program_cost, work, NO_STATE, narrow, microbatch, spreads, self._free
            )
            times.append(sum(found.values()))
        return min(times) * (1 - self._cost_model.request.calibration.activation_overlap)

    def _layouts(self, axes: ReplicaAxes) -> tuple[DeviceLayout, ...]:
        return enumerate_layouts(axes, self._cost_model.request.pool.devices_per_host, self._levels)

    def _weights(self, axes: ReplicaAxes) -> ParameterBound:
        """Return the least time of a layer's parameters under these axes."""
        layer = self._cost_model.memory.count_state(axes).layer
        shown = 1 - self._cost_model.request.calibration.activation_overlap
        return ParameterBound(
            pass_s=layer.gathered / self._bytes_per_s,
            gradient_s=2 * layer.gradients / self._bytes_per_s,
            summed_s=shown
            * self._least_s(
                axes, Axis.SEQUENCE, (FsdpCollective(CollectiveKind.ALL_REDUCE, layer.gradients, 1),)
            ),
            fsdp_s=self._least_s(
                axes,
                Axis.FSDP,
                list_fsdp_collectives(self._cost_model.request.program_cost, ModelPart.LAYER, layer),
            ),
        )

    def _least_s(self, axes: ReplicaAxes, axis: Axis, messages: tuple[FsdpCollective, ...]) -> float:
        """Return the least time of these collectives along an axis over all placements; equal for many axes."""
        if (size := getattr(axes, axis)) == 1:
            return 0.0
        inside = frozenset(math.gcd(size, left) for left in self._left_by(axes[: axes._fields.index(axis)]))
        if (key := (size, inside, messages)) not in self._times:
            outermost = self._levels[-1]
            ways = {
                compute_level_factors(size, part, at, outermost) for part in inside for at in self._levels
            }
            self._times[key] = min(
                sum(
                    estimate_collective_s(kind, size, way, self._cost_model.links, pieces)
                    for kind, size, pieces in messages
                )
                for way in ways
            )
        return self._times[key]

    def _left_by(self, inner: tuple[int, ...]) -> frozenset[int]:
        """Return how many devices of a host may be left for the next axis."""
        if inner not in self._lefts:
            rooms = range(self._cost_model.request.pool.devices_per_host, 0, -1)
            self._lefts[inner] = frozenset(fill_host(inner, room)[1] for room in rooms)
        return self._lefts[inner]

    def bound_microbatches(self, axes: ReplicaAxes) -> tuple[MicrobatchBound, ...]:
        """Return the bounds of a microbatch under these axes: without remat, and with it where the program can."""
        tensor, sequence, expert, fsdp, stages = axes
        key = (tensor, sequence, expert, fsdp, stages > 1)
        if key not in self._slots:
            weights = self._weights(axes)
            self._slots[key] = tuple(self._slot(axes, weights, again) for again in self._again)
        return self._slots[key]

    def _slot(self, axes: ReplicaAxes, weights: ParameterBound, again: bool) -> MicrobatchBound:
        load = self.bound_sequence(axes, again)
        return MicrobatchBound(
            fixed_s=(3 if again else 2) * (self._overhead_s + weights.pass_s) + weights.gradient_s,
            each_s=load.layer_compute_s,
            exchange_fixed_s=weights.summed_s,
            exchange_each_s=load.layer_exchange_s,
            fsdp_s=weights.fsdp_s,
            ends_s=load.ends_s,
            room=self.fitting.summarize_headroom(axes, again),
        )

    def _slot_s(self, slot: MicrobatchBound, stages: int, size: float, longest: int) -> float:
        """Return the least time of a microbatch on the slowest stage: the stages' average, or the longest stage."""
        constraints, each, exchange_constraints, exchange_each, fsdp, ends, _ = slot
        computing = constraints + size * each
        layer = computing + exchange_constraints + size * exchange_each
        if fsdp > self._overlap * computing:
            layer += fsdp - self._overlap * computing
        layers = self._layers
        return max(longest * layer, (layers * layer + size * ends) / stages)

    def bound_step_s(self, axes: ReplicaAxes) -> float:
        """Return a bound of the step for any FSDP, replicas and microbatches: the module's formula with b = 1."""
        return self._fill_s(axes, self.bound_sequence(axes, False))

    def bound_step_compute_s(self, axes: ReplicaAxes) -> float:
        """Return the same bound without collectives."""
        return self._fill_s(axes, self.bound_sequence_compute(axes, False))

    def _fill_s(self, axes: ReplicaAxes, load: SequenceBound) -> float:
        layers, stages = self._layers, axes.pipeline
        layer = load.layer_compute_s + load.layer_exchange_s
        slot = max((layers * layer + load.ends_s) / stages, -(-layers // stages) * layer)
        return slot * (self._batch * axes.devices / self._cost_model.devices + (stages - 1) / self._repeats)

    def bound_fsdp_step_s(self, axes: ReplicaAxes, replicas: int) -> float:
        """Return a bound for these axes on at most so many replicas; infinite if none fits in memory.

        A microbatch of b sequences takes `f + v b`, so less per sequence the larger b is, and b is at most what fits in
        memory: `B / (F R) t(b_max) / b_max`, and the pipeline is filled at least by microbatches of one.
        """
        stages, share = axes.pipeline, self._batch // axes.fsdp
        longest = -(-self._layers // stages)
        least = math.inf
        for slot in self.bound_microbatches(axes):
            most = slot.room.count_max_sequences(longest)
            if most >= 1:
                least = min(least, self._least_with(slot, stages, share, replicas, min(most, share)))
            if most >= share:
                break  # remat would only take longer
        return least

    def bound_feasible_step_s(self, axes: ReplicaAxes, replicas: int) -> float:
        """Return the same bound with the largest microbatch that may fit."""
        share = self._batch // axes.fsdp
        sizes = find_divisors(share)
        least = math.inf
        for again, slot in zip(self._again, self.bound_microbatches(axes), strict=True):
            if fitting := self.fitting.count_sizes(axes, again, sizes):
                most = sizes[fitting - 1]
                least = min(least, self._least_with(slot, axes.pipeline, share, replicas, most))
        return least

    def _least_with(
        self, slot: MicrobatchBound, stages: int, share: int, replicas: int, most: float
    ) -> float:
        """Return the bound for microbatches of at most so many sequences."""
        longest = -(-self._layers // stages)
        step = share / replicas * self._slot_s(slot, stages, most, longest) / most
        if stages > 1:
            step += (stages - 1) / self._repeats * self._slot_s(slot, stages, 1, longest)
        return step

    def bound_microbatch_step_s(
        self, axes: ReplicaAxes, microbatch: MicrobatchConfig, replicas: int
    ) -> float:
        """Return a bound for these axes and this microbatch on at most so many replicas."""
        if not replicas:
            return math.inf
        quota = -(-(self._batch // (axes.fsdp * microbatch.sequences)) // replicas)
        fill = (axes.pipeline - 1) / self._repeats
        slot = self.bound_microbatches(axes)[microbatch.remat]
        longest = self._cost_model.memory.find_longest_stage(axes, microbatch)
        return (quota + fill) * self._slot_s(slot, axes.pipeline, microbatch.sequences, longest)


@functools.lru_cache(maxsize=4096)
def find_divisors(global_batch: int) -> tuple[int, ...]:
    """Return the divisors of the batch, in order."""
    small = [size for size in range(1, math.isqrt(global_batch) + 1) if global_batch % size == 0]
    return tuple(sorted({size for low in small for size in (low, global_batch // low)}))
