"""What no plan of a group can beat: a lower bound of its step, and of the memory that it needs."""

import bisect
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import Link, Spread, time_of
from resilient_jax.planning.part_cost import exchange_s, share_of
from resilient_jax.planning.pricing import Pricing
from resilient_jax.planning.profile import ExchangeKind, Part, Work
from resilient_jax.planning.shape import Group, Layout, Microbatch, layouts_of
from resilient_jax.planning.state_bytes import PartBytes

ROUNDING = 1e-9
"""Of sums in other orders."""


NO_STATE = PartBytes()


class Load(NamedTuple):
    """What one sequence takes at least on a device of a stage, by part: computing, and exchanges.

    Computing on the fastest kind of host, without overheads; exchanges without latency, wherever they are fastest.
    Both grow in proportion to the sequences of a microbatch.
    """

    layer_compute_s: float
    layer_exchange_s: float
    ends_s: float

    def total_s(self, layers: int) -> float:
        """Through all the parts."""
        return layers * (self.layer_compute_s + self.layer_exchange_s) + self.ends_s


class Weights(NamedTuple):
    """What the parameters of a layer take at least for each microbatch, whatever its size."""

    pass_s: float
    """Read once."""
    gradient_s: float
    """Added to the sum."""
    summed_s: float
    """Its gradients over the devices of a sequence."""
    fsdp_s: float
    """Gathered and scattered."""


class Bounds:
    """Lower bounds for one question; remembers what it computed."""

    def __init__(self, pricing: Pricing, levels: tuple[int, ...]) -> None:
        self._pricing = pricing
        self._levels = levels
        question = pricing.question
        kinds, constants = question.pool.kinds, question.calibration
        self._flops_per_s = constants.matrix_efficiency * max(
            kind.accelerator.peak_flops_per_s(question.number_format) * kind.speed for kind in kinds
        )
        self._bytes_per_s = constants.memory_efficiency * max(
            kind.accelerator.memory_bandwidth_bytes_per_s * kind.speed for kind in kinds
        )
        self._overhead_s = constants.layer_overhead_s / max(kind.speed for kind in kinds)
        self._free = tuple(Link(bytes_per_s=link.bytes_per_s, latency_s=0.0) for link in pricing.links)
        self._layers = question.profile.layers
        self._overlap = constants.fsdp_overlap
        self._loads: dict[tuple[int, int, int, bool], Load] = {}
        self._weights: dict[tuple[int, ...], Weights] = {}

    def load(self, group: Group, again: bool) -> Load:
        """Of these axes, with or without rematerialisation."""
        key = (group.tensor, group.sequence, group.expert, again)
        if key not in self._loads:
            self._loads[key] = self._load(group, again)
        return self._loads[key]

    def _load(self, group: Group, again: bool) -> Load:
        profile = self._pricing.question.profile
        layer_compute = layer_exchange = ends = 0.0
        for work in profile.work:
            repeated = again and work.part is Part.LAYER
            flops = work.forward_flops + work.backward_flops
            moved = work.forward_bytes + work.backward_bytes
            if repeated:
                flops, moved = flops + work.recomputed_flops, moved + work.forward_bytes
            computing = share_of(profile, flops, group) / self._flops_per_s
            computing += share_of(profile, moved, group) / self._bytes_per_s
            if work.part is Part.LAYER:
                layer_compute, layer_exchange = computing, self._exchange_s(work, group, again)
            else:
                ends += computing
        return Load(layer_compute, layer_exchange, ends)

    def _exchange_s(self, work: Work, group: Group, again: bool) -> float:
        """The least of all layouts."""
        narrow = group._replace(fsdp=1, pipeline=1)
        profile, batch = self._pricing.question.profile, Microbatch(1, again)
        times = []
        for layout in self._layouts(narrow):
            spreads = {axis: layout.spread_of(axis) for axis in (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT)}
            found = exchange_s(profile, work, NO_STATE, narrow, batch, spreads, self._free)
            times.append(sum(found.values()))
        return min(times) * (1 - self._pricing.question.calibration.activation_overlap)

    def _layouts(self, group: Group) -> tuple[Layout, ...]:
        return layouts_of(group, self._pricing.question.pool.devices_per_host, self._levels)

    def weights(self, group: Group) -> Weights:
        """Of a layer under these axes."""
        key = group[:4]
        if key not in self._weights:
            layer = self._pricing.state(group).layer
            layouts = self._layouts(group._replace(pipeline=1))
            summed = fsdp = 0.0
            if group.sequence > 1:
                shown = 1 - self._pricing.question.calibration.activation_overlap
                spreads = {layout.spread_of(Axis.SEQUENCE) for layout in layouts}
                summed = shown * self._least_s(ExchangeKind.ALL_REDUCE, layer.gradients, spreads)
            if group.fsdp > 1:
                spreads = {layout.spread_of(Axis.FSDP) for layout in layouts}
                fsdp = 2 * self._least_s(ExchangeKind.ALL_GATHER, layer.gathered, spreads)
                fsdp += self._least_s(ExchangeKind.REDUCE_SCATTER, layer.gathered_gradients, spreads)
            self._weights[key] = Weights(
                layer.gathered / self._bytes_per_s, 2 * layer.gradients / self._bytes_per_s, summed, fsdp
            )
        return self._weights[key]

    def _least_s(self, kind: ExchangeKind, message: float, spreads: Iterable[Spread]) -> float:
        return min(time_of(kind, message, spread, self._pricing.links) for spread in spreads)

    def narrow_step_s(self, group: Group) -> float:
        """A time that no plan of these axes can beat, whatever its FSDP, replicas and microbatches.

        N devices, groups of m p devices, a batch of B: all stages together take T for a sequence, so a slot of a
        microbatch of b is at least `b T / p`, and at least b times a layer times the layers of the longest stage;
        microbatches of all replicas make B, so one replica has at least `B m p / (N b)` of them, and the pipeline is
        filled once: `b = 1` is least.
        """
        question = self._pricing.question
        layers = self._layers
        load = self.load(group, False)
        longest = -(-layers // group.pipeline)
        slot = max(
            load.total_s(layers) / group.pipeline,
            longest * (load.layer_compute_s + load.layer_exchange_s),
        )
        share = question.global_batch * group.devices / self._pricing.devices
        return slot * (share + (group.pipeline - 1) / question.rounds)

    def group_step_s(self, group: Group, replicas: int) -> float:
        """A time that no plan of these axes on at most so many replicas can beat; infinite if none has the memory.

        A slot of b sequences takes `f + v b`, so less for each the larger b is, and b is at most what the memory has
        room for: `B / (F R) slot(b_max) / b_max`, and the pipeline is filled at least by slots of one.
        """
        question = self._pricing.question
        share = question.global_batch // group.fsdp
        fill = (group.pipeline - 1) / question.rounds
        least = math.inf
        for again in (False, True) if question.profile.can_rematerialise else (False,):
            if fitting := self._count_fitting(group, again, share):
                most = divides_batch(share)[fitting - 1]
                each = self._slot_s(group, Microbatch(most, again)) / most
                first = self._slot_s(group, Microbatch(1, again)) if fill else 0.0
                least = min(least, share / replicas * each + fill * first)
        return least

    def _count_fitting(self, group: Group, again: bool, share: int) -> int:
        """How many sizes of microbatches there are for which the memory might do, from 1 up."""
        sizes = divides_batch(share)
        return bisect.bisect_left(
            sizes, True, key=lambda size: not self.may_fit(group, Microbatch(size, again))
        )

    def may_fit(self, group: Group, batch: Microbatch) -> bool:
        """Whether the memory might do: False only if it is sure that it does not.

        A stage that keeps k microbatches has room for at most `M / (w + k a)` layers of w bytes of state that keep a
        bytes each; over stages with k = 1 ... K, K the lesser of stages and microbatches, that is at most
        `M ln(1 + K a / w) / a`, an integral above the sum; all other stages keep K. Together they must have all layers.
        """
        pricing = self._pricing
        one = pricing.activations(group, Microbatch(1, batch.rematerialise))
        layer = one.layer * batch.sequences
        room = pricing.usable_bytes - one.extra * batch.sequences - pricing.question.calibration.staging_bytes
        state = pricing.state(group).layer
        weight = state.parameters + state.gradients + state.optimizer
        layers = self._layers
        if room < -(-layers // group.pipeline) * (weight + layer):
            return False
        if not layers or not weight or not layer:
            return True
        deep = min(group.pipeline, pricing.microbatches(group, batch))
        reach = math.log1p(deep * layer / weight) / layer
        reach += (group.pipeline - deep) / (weight + deep * layer)
        return room * reach >= layers * (1 - ROUNDING)

    def step_s(self, group: Group, batch: Microbatch, replicas: int) -> float:
        """A time that no plan of these axes and this microbatch on at most so many replicas can beat."""
        if not replicas:
            return math.inf
        quota = -(-self._pricing.microbatches(group, batch) // replicas)
        fill = (group.pipeline - 1) / self._pricing.question.rounds
        return (quota + fill) * self._slot_s(group, batch)

    def _slot_s(self, group: Group, batch: Microbatch) -> float:
        """Of one microbatch on the slowest stage: the average of the stages, or the most layers."""
        load, weights = self.load(group, batch.rematerialise), self.weights(group)
        layers, stages = self._layers, group.pipeline
        size, overlap = batch.sequences, self._overlap
        computing = (
            size * load.layer_compute_s
            + (3 if batch.rematerialise else 2) * (self._overhead_s + weights.pass_s)
            + weights.gradient_s
        )
        layer = computing + size * load.layer_exchange_s + weights.summed_s
        if weights.fsdp_s > overlap * computing:
            layer += weights.fsdp_s - overlap * computing
        return max(-(-layers // stages) * layer, (layers * layer + size * load.ends_s) / stages)


def state_bytes(pricing: Pricing, group: Group) -> float:
    """Gives the bytes of state that some device holds at least: one stage has as many layers as the average, or
    more."""
    layers = -(-pricing.layers // group.pipeline)
    state = pricing.state(group)
    layer = layers * (state.layer.parameters + state.layer.gradients + state.layer.optimizer)
    ends = [part.plus(state.tied) for part in (state.embedding, state.head)]
    if group.pipeline == 1:
        ends = [state.embedding.plus(state.head).plus(state.tied)]
        return layer + sum(ends[0][:3])
    return max(layer, *(sum(end[:3]) for end in ends))


@functools.lru_cache(maxsize=4096)
def divides_batch(global_batch: int) -> tuple[int, ...]:
    """Gives the divisors of the batch, in order: as many parts as it can be cut in."""
    small = [size for size in range(1, math.isqrt(global_batch) + 1) if global_batch % size == 0]
    return tuple(sorted({size for low in small for size in (low, global_batch // low)}))
