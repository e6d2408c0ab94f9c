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
    reduced_s: float
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
        self.memory_filter = MemoryFilter(cost_model)
        self._cost_model = cost_model
        self._levels = levels
        request = cost_model.request
        kinds, constants = request.pool.kinds, request.calibration
        # F = max e_matrix peak speed [FLOP/s], W = max e_memory bandwidth speed [bytes/s], each over all host kinds; no
        # pass has less overhead than overhead / max speed [s].
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
        self._remat_choices = (False, True) if request.program_cost.can_remat else (False,)
        self._sequence_bounds: dict[tuple[int, int, int, bool], SequenceBound] = {}
        self._compute_bounds: dict[tuple[int, int, int, bool], SequenceBound] = {}
        self._times: dict[tuple[object, ...], float] = {}
        self._left: dict[tuple[int, ...], frozenset[int]] = {}
        self._microbatch_bounds: dict[tuple[int, int, int, int, bool], tuple[MicrobatchBound, ...]] = {}

    def bound_sequence(self, axes: ReplicaAxes, is_remat: bool) -> SequenceBound:
        """Return the least time of a sequence under these axes, with or without remat."""
        key = (axes.tensor, axes.sequence, axes.expert, is_remat)
        if key not in self._sequence_bounds:
            bare = self.bound_sequence_compute(axes, is_remat)
            exchanged = sum(
                self._bound_exchange_s(cost, axes, is_remat)
                for cost in self._cost_model.request.program_cost.parts
                if cost.part is ModelPart.LAYER
            )
            self._sequence_bounds[key] = bare._replace(layer_exchange_s=exchanged)
        return self._sequence_bounds[key]

    def bound_sequence_compute(self, axes: ReplicaAxes, is_remat: bool) -> SequenceBound:
        """Return the same without collectives, which take longer to bound."""
        key = (axes.tensor, axes.sequence, axes.expert, is_remat)
        if key not in self._compute_bounds:
            self._compute_bounds[key] = self._bound_compute(axes, is_remat)
        return self._compute_bounds[key]

    def _bound_compute(self, axes: ReplicaAxes, is_remat: bool) -> SequenceBound:
        # Roofline without overlap, as in `device_cost`: T = flops share / F + bytes share / W, in s per sequence, for
        # one layer and for the ends together.
        program_cost = self._cost_model.request.program_cost
        layer = ends = 0.0
        for cost in program_cost.parts:
            flops, moved = cost.step_flops, cost.step_bytes
            if is_remat and cost.part is ModelPart.LAYER:
                flops, moved = flops + cost.remat_flops, moved + cost.forward_bytes
            computing = compute_device_share(program_cost, flops, axes) / self._flops_per_s
            computing += compute_device_share(program_cost, moved, axes) / self._bytes_per_s
            if cost.part is ModelPart.LAYER:
                layer = computing
            else:
                ends += computing
        return SequenceBound(layer, 0.0, ends)

    def _bound_exchange_s(self, cost: PartCost, axes: ReplicaAxes, is_remat: bool) -> float:
        """Return the least time of a part's collectives over all layouts."""
        # (1 - activation_overlap) min over placements of sum_axis collectives, in s per sequence. FSDP and the
        # pipeline lie outside of these axes and so never move them; without latency the time is proportional to the
        # bytes.
        narrow = axes._replace(fsdp=1, pipeline=1)
        program_cost, microbatch = self._cost_model.request.program_cost, MicrobatchConfig(1, is_remat)
        all_factors = {tuple(map(layout.axis_level_factors, _EXCHANGING)) for layout in self._layouts(narrow)}
        times = []
        for factors in all_factors:
            factors_by_axis = dict(zip(_EXCHANGING, factors, strict=True))
            times_by_axis = estimate_collectives(
                program_cost, cost, NO_STATE, narrow, microbatch, factors_by_axis, self._free
            )
            times.append(sum(times_by_axis.values()))
        return min(times) * (1 - self._cost_model.request.calibration.activation_overlap)

    def _layouts(self, axes: ReplicaAxes) -> tuple[DeviceLayout, ...]:
        return enumerate_layouts(axes, self._cost_model.request.pool.devices_per_host, self._levels)

    def _bound_parameters(self, axes: ReplicaAxes) -> ParameterBound:
        """Return the least time of a layer's parameters under these axes."""
        # In s per microbatch, whatever its size: a read of the parameters = parameters / W, gradients read and written
        # = 2 gradients / W, their all-reduce over sequence, and FSDP's gathers and scatters.
        layer = self._cost_model.memory.count_state(axes).layer
        exposed = 1 - self._cost_model.request.calibration.activation_overlap
        return ParameterBound(
            pass_s=layer.gathered / self._bytes_per_s,
            gradient_s=2 * layer.gradients / self._bytes_per_s,
            reduced_s=exposed
            * self._bound_collectives_s(
                axes, Axis.SEQUENCE, (FsdpCollective(CollectiveKind.ALL_REDUCE, layer.gradients, 1),)
            ),
            fsdp_s=self._bound_collectives_s(
                axes,
                Axis.FSDP,
                list_fsdp_collectives(self._cost_model.request.program_cost, ModelPart.LAYER, layer),
            ),
        )

    def _bound_collectives_s(
        self, axes: ReplicaAxes, axis: Axis, collectives: tuple[FsdpCollective, ...]
    ) -> float:
        """Return the least time of these collectives along an axis over all placements; equal for many axes."""
        if (size := getattr(axes, axis)) == 1:
            return 0.0
        # min over (q_0, level) of the sum of the collectives: q_0 = gcd(size, devices of a host that inner axes leave).
        inside = frozenset(math.gcd(size, left) for left in self._find_left(axes[: axes._fields.index(axis)]))
        if (key := (size, inside, collectives)) not in self._times:
            outermost = self._levels[-1]
            all_factors = {
                compute_level_factors(size, part, at, outermost) for part in inside for at in self._levels
            }
            self._times[key] = min(
                sum(
                    estimate_collective_s(kind, size, factors, self._cost_model.links, pieces)
                    for kind, size, pieces in collectives
                )
                for factors in all_factors
            )
        return self._times[key]

    def _find_left(self, inner: tuple[int, ...]) -> frozenset[int]:
        """Return how many devices of a host may be left for the next axis."""
        if inner not in self._left:
            sizes = range(self._cost_model.request.pool.devices_per_host, 0, -1)
            self._left[inner] = frozenset(fill_host(inner, room)[1] for room in sizes)
        return self._left[inner]

    def bound_microbatches(self, axes: ReplicaAxes) -> tuple[MicrobatchBound, ...]:
        """Return the bounds of a microbatch under these axes: without remat, and with it where the program can."""
        tensor, sequence, expert, fsdp, stages = axes
        key = (tensor, sequence, expert, fsdp, stages > 1)
        if key not in self._microbatch_bounds:
            parameters = self._bound_parameters(axes)
            self._microbatch_bounds[key] = tuple(
                self._bound_microbatch(axes, parameters, is_remat) for is_remat in self._remat_choices
            )
        return self._microbatch_bounds[key]

    def _bound_microbatch(
        self, axes: ReplicaAxes, parameters: ParameterBound, is_remat: bool
    ) -> MicrobatchBound:
        sequence = self.bound_sequence(axes, is_remat)
        return MicrobatchBound(
            # fixed = passes (overhead + parameters / W) + 2 gradients / W: two passes, and with remat a third.
            fixed_s=(3 if is_remat else 2) * (self._overhead_s + parameters.pass_s) + parameters.gradient_s,
            each_s=sequence.layer_compute_s,
            exchange_fixed_s=parameters.reduced_s,
            exchange_each_s=sequence.layer_exchange_s,
            fsdp_s=parameters.fsdp_s,
            ends_s=sequence.ends_s,
            room=self.memory_filter.summarize_headroom(axes, is_remat),
        )

    def _bound_microbatch_s(self, bound: MicrobatchBound, stages: int, size: float, longest: int) -> float:
        """Return the least time of a microbatch on the slowest stage: the stages' average, or the longest stage."""
        fixed, each, exchange_fixed, exchange_each, fsdp, ends, _ = bound
        # c = fixed + b each, layer = c + exchanges + max(0, fsdp - fsdp_overlap c);
        # t(b) = max(longest layer, (L layer + b ends) / P): no stage is faster than the longest, nor than the average.
        computing = fixed + size * each
        layer = computing + exchange_fixed + size * exchange_each
        if fsdp > self._overlap * computing:
            layer += fsdp - self._overlap * computing
        layers = self._layers
        return max(longest * layer, (layers * layer + size * ends) / stages)

    def bound_step_s(self, axes: ReplicaAxes) -> float:
        """Return a bound of the step for any FSDP, replicas and microbatches: the module's formula with b = 1."""
        return self._bound_step_s(axes, self.bound_sequence(axes, False))

    def bound_step_compute_s(self, axes: ReplicaAxes) -> float:
        """Return the same bound without collectives."""
        return self._bound_step_s(axes, self.bound_sequence_compute(axes, False))

    def _bound_step_s(self, axes: ReplicaAxes, sequence: SequenceBound) -> float:
        # b = 1: t = max((L layer + ends) / p, ceil(L / p) layer) and step = t (B m p / N + (p - 1) / r).
        layers, stages = self._layers, axes.pipeline
        layer = sequence.layer_compute_s + sequence.layer_exchange_s
        bound = max((layers * layer + sequence.ends_s) / stages, -(-layers // stages) * layer)
        return bound * (self._batch * axes.devices / self._cost_model.devices + (stages - 1) / self._repeats)

    def bound_fsdp_step_s(self, axes: ReplicaAxes, replicas: int) -> float:
        """Return a bound for these axes on at most so many replicas; infinite if none fits in memory.

        A microbatch of b sequences takes `f + v b`, so less per sequence the larger b is, and b is at most what fits in
        memory: `B / (F R) t(b_max) / b_max`, and the pipeline is filled at least by microbatches of one.
        """
        stages, share = axes.pipeline, self._batch // axes.fsdp
        longest = -(-self._layers // stages)
        least = math.inf
        for bound in self.bound_microbatches(axes):
            max_sequences = bound.room.count_max_sequences(longest)
            if max_sequences >= 1:
                least = min(
                    least, self._bound_with(bound, stages, share, replicas, min(max_sequences, share))
                )
            if max_sequences >= share:
                # Remat would only take longer.
                break
        return least

    def bound_feasible_step_s(self, axes: ReplicaAxes, replicas: int) -> float:
        """Return the same bound with the largest microbatch that may fit."""
        share = self._batch // axes.fsdp
        sizes = find_divisors(share)
        least = math.inf
        for is_remat, bound in zip(self._remat_choices, self.bound_microbatches(axes), strict=True):
            if fitting := self.memory_filter.count_sizes(axes, is_remat, sizes):
                max_sequences = sizes[fitting - 1]
                least = min(least, self._bound_with(bound, axes.pipeline, share, replicas, max_sequences))
        return least

    def _bound_with(
        self, bound: MicrobatchBound, stages: int, share: int, replicas: int, max_sequences: float
    ) -> float:
        """Return the bound for microbatches of at most so many sequences."""
        # B / (F R) t(b_max) / b_max + (p - 1) / r t(1), for p > 1.
        longest = -(-self._layers // stages)
        step = (
            share / replicas * self._bound_microbatch_s(bound, stages, max_sequences, longest) / max_sequences
        )
        if stages > 1:
            step += (stages - 1) / self._repeats * self._bound_microbatch_s(bound, stages, 1, longest)
        return step

    def bound_microbatch_step_s(
        self, axes: ReplicaAxes, microbatch: MicrobatchConfig, replicas: int
    ) -> float:
        """Return a bound for these axes and this microbatch on at most so many replicas."""
        if not replicas:
            return math.inf
        # (ceil(B / (F b R)) + (p - 1) / r) t(b), with the longest stage that memory requires.
        quota = -(-(self._batch // (axes.fsdp * microbatch.sequences)) // replicas)
        fill = (axes.pipeline - 1) / self._repeats
        bound = self.bound_microbatches(axes)[microbatch.remat]
        longest = self._cost_model.memory.find_longest_stage(axes, microbatch)
        return (quota + fill) * self._bound_microbatch_s(bound, axes.pipeline, microbatch.sequences, longest)


@functools.lru_cache(maxsize=4096)
def find_divisors(global_batch: int) -> tuple[int, ...]:
    """Return the divisors of the batch, in order."""
    # Divisors come in pairs (d, B / d) with d <= sqrt(B).
    small = [size for size in range(1, math.isqrt(global_batch) + 1) if global_batch % size == 0]
    return tuple(sorted({size for low in small for size in (low, global_batch // low)}))
