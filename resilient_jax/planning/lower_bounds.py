"""What no plan of a group can beat: lower bounds of its step, quick ones and sharp ones."""

import functools
import math
from typing import NamedTuple

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import Link, time_of
from resilient_jax.planning.cost_model import Pricing
from resilient_jax.planning.device_cost import Message, exchange_s, fsdp_messages, share_of
from resilient_jax.planning.device_layout import Group, Layout, Microbatch, fill_host, layouts_of, spread_over
from resilient_jax.planning.memory_filter import Fitting, QuickRoom
from resilient_jax.planning.program_cost import ExchangeKind, Part, Work
from resilient_jax.planning.state_bytes import PartBytes

NO_STATE = PartBytes()
_EXCHANGING: tuple[Axis, ...] = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT)
"""Axes along which activations are exchanged."""


class Load(NamedTuple):
    """What one sequence takes at least on a device of a stage, by part: computing, and exchanges.

    Computing on the fastest kind of host, without overheads; exchanges without latency, wherever they are fastest.
    Both grow in proportion to the sequences of a microbatch.
    """

    layer_compute_s: float
    layer_exchange_s: float
    ends_s: float


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


class Slot(NamedTuple):
    """What a microbatch takes and needs at least: of b sequences a layer computes `fixed + b each`, and so on."""

    fixed_s: float
    each_s: float
    exchange_fixed_s: float
    exchange_each_s: float
    fsdp_s: float
    ends_s: float
    room: QuickRoom


class Bounds:
    """Lower bounds for one question; remembers what it computed."""

    def __init__(self, pricing: Pricing, levels: tuple[int, ...]) -> None:
        self.fitting = Fitting(pricing)
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
        self._batch, self._rounds = question.global_batch, question.rounds
        self._overlap = constants.fsdp_overlap
        self._again = (False, True) if question.profile.can_rematerialise else (False,)
        self._loads: dict[tuple[int, int, int, bool], Load] = {}
        self._bare_loads: dict[tuple[int, int, int, bool], Load] = {}
        self._times: dict[tuple[object, ...], float] = {}
        self._lefts: dict[tuple[int, ...], frozenset[int]] = {}
        self._slots: dict[tuple[int, int, int, int, bool], tuple[Slot, ...]] = {}

    def load(self, group: Group, again: bool) -> Load:
        """Of these axes, with or without rematerialisation."""
        key = (group.tensor, group.sequence, group.expert, again)
        if key not in self._loads:
            bare = self.bare_load(group, again)
            exchanged = sum(
                self._exchange_s(work, group, again)
                for work in self._pricing.question.profile.work
                if work.part is Part.LAYER
            )
            self._loads[key] = bare._replace(layer_exchange_s=exchanged)
        return self._loads[key]

    def bare_load(self, group: Group, again: bool) -> Load:
        """The same without what is exchanged, which takes longer to find."""
        key = (group.tensor, group.sequence, group.expert, again)
        if key not in self._bare_loads:
            self._bare_loads[key] = self._bare_load(group, again)
        return self._bare_loads[key]

    def _bare_load(self, group: Group, again: bool) -> Load:
        profile = self._pricing.question.profile
        layer = ends = 0.0
        for work in profile.work:
            flops, moved = work.step_flops, work.step_bytes
            if again and work.part is Part.LAYER:
                flops, moved = flops + work.recomputed_flops, moved + work.forward_bytes
            computing = share_of(profile, flops, group) / self._flops_per_s
            computing += share_of(profile, moved, group) / self._bytes_per_s
            if work.part is Part.LAYER:
                layer = computing
            else:
                ends += computing
        return Load(layer, 0.0, ends)

    def _exchange_s(self, work: Work, group: Group, again: bool) -> float:
        """The least of all layouts."""
        narrow = group._replace(fsdp=1, pipeline=1)
        profile, batch = self._pricing.question.profile, Microbatch(1, again)
        ways = {tuple(map(layout.spread_of, _EXCHANGING)) for layout in self._layouts(narrow)}
        times = []
        for way in ways:
            spreads = dict(zip(_EXCHANGING, way, strict=True))
            found = exchange_s(profile, work, NO_STATE, narrow, batch, spreads, self._free)
            times.append(sum(found.values()))
        return min(times) * (1 - self._pricing.question.calibration.activation_overlap)

    def _layouts(self, group: Group) -> tuple[Layout, ...]:
        return layouts_of(group, self._pricing.question.pool.devices_per_host, self._levels)

    def _weights(self, group: Group) -> Weights:
        """Of a layer under these axes."""
        layer = self._pricing.state(group).layer
        shown = 1 - self._pricing.question.calibration.activation_overlap
        return Weights(
            pass_s=layer.gathered / self._bytes_per_s,
            gradient_s=2 * layer.gradients / self._bytes_per_s,
            summed_s=shown
            * self._least_s(group, Axis.SEQUENCE, (Message(ExchangeKind.ALL_REDUCE, layer.gradients, 1),)),
            fsdp_s=self._least_s(
                group, Axis.FSDP, fsdp_messages(self._pricing.question.profile, Part.LAYER, layer)
            ),
        )

    def _least_s(self, group: Group, axis: Axis, messages: tuple[Message, ...]) -> float:
        """Of these collectives along an axis, wherever it is fastest; the same for many groups."""
        if (size := getattr(group, axis)) == 1:
            return 0.0
        inside = frozenset(math.gcd(size, left) for left in self._left_by(group[: group._fields.index(axis)]))
        if (key := (size, inside, messages)) not in self._times:
            outermost = self._levels[-1]
            ways = {spread_over(size, part, at, outermost) for part in inside for at in self._levels}
            self._times[key] = min(
                sum(time_of(kind, size, way, self._pricing.links, pieces) for kind, size, pieces in messages)
                for way in ways
            )
        return self._times[key]

    def _left_by(self, inner: tuple[int, ...]) -> frozenset[int]:
        """How many devices of a host are left for the next axis."""
        if inner not in self._lefts:
            rooms = range(self._pricing.question.pool.devices_per_host, 0, -1)
            self._lefts[inner] = frozenset(fill_host(inner, room)[1] for room in rooms)
        return self._lefts[inner]

    def slots(self, group: Group) -> tuple[Slot, ...]:
        """Of these axes: without rematerialisation, and with it where the program can."""
        tensor, sequence, expert, fsdp, stages = group
        key = (tensor, sequence, expert, fsdp, stages > 1)
        if key not in self._slots:
            weights = self._weights(group)
            self._slots[key] = tuple(self._slot(group, weights, again) for again in self._again)
        return self._slots[key]

    def _slot(self, group: Group, weights: Weights, again: bool) -> Slot:
        load = self.load(group, again)
        return Slot(
            fixed_s=(3 if again else 2) * (self._overhead_s + weights.pass_s) + weights.gradient_s,
            each_s=load.layer_compute_s,
            exchange_fixed_s=weights.summed_s,
            exchange_each_s=load.layer_exchange_s,
            fsdp_s=weights.fsdp_s,
            ends_s=load.ends_s,
            room=self.fitting.quick_room(group, again),
        )

    def _slot_s(self, slot: Slot, stages: int, size: float, longest: int) -> float:
        """Of a microbatch on the slowest stage: the average of the stages, or that with most layers."""
        fixed, each, exchange_fixed, exchange_each, fsdp, ends, _ = slot
        computing = fixed + size * each
        layer = computing + exchange_fixed + size * exchange_each
        if fsdp > self._overlap * computing:
            layer += fsdp - self._overlap * computing
        layers = self._layers
        return max(longest * layer, (layers * layer + size * ends) / stages)

    def narrow_step_s(self, group: Group) -> float:
        """A time that no plan of these axes can beat, whatever its FSDP, replicas and microbatches.

        N devices, groups of m p devices, a batch of B: all stages together take T for a sequence, so a slot of a
        microbatch of b is at least `b T / p`, and at least b times a layer times the layers of the longest stage;
        microbatches of all replicas make B, so one replica has at least `B m p / (N b)` of them, and the pipeline is
        filled once: `b = 1` is least.
        """
        return self._fill_s(group, self.load(group, False))

    def bare_step_s(self, group: Group) -> float:
        """The same without what is exchanged."""
        return self._fill_s(group, self.bare_load(group, False))

    def _fill_s(self, group: Group, load: Load) -> float:
        layers, stages = self._layers, group.pipeline
        layer = load.layer_compute_s + load.layer_exchange_s
        slot = max((layers * layer + load.ends_s) / stages, -(-layers // stages) * layer)
        return slot * (self._batch * group.devices / self._pricing.devices + (stages - 1) / self._rounds)

    def quick_step_s(self, group: Group, replicas: int) -> float:
        """A time that no plan of these axes on at most so many replicas can beat; infinite if none has the memory.

        A slot of b sequences takes `f + v b`, so less for each the larger b is, and b is at most what the memory has
        room for: `B / (F R) slot(b_max) / b_max`, and the pipeline is filled at least by slots of one.
        """
        stages, share = group.pipeline, self._batch // group.fsdp
        longest = -(-self._layers // stages)
        least = math.inf
        for slot in self.slots(group):
            most = slot.room.most_sequences(longest)
            if most >= 1:
                least = min(least, self._least_with(slot, stages, share, replicas, min(most, share)))
            if most >= share:
                break  # to compute again would only take longer
        return least

    def sharp_step_s(self, group: Group, replicas: int) -> float:
        """The same with the largest microbatch that may fit."""
        share = self._batch // group.fsdp
        sizes = divides_batch(share)
        least = math.inf
        for again, slot in zip(self._again, self.slots(group), strict=True):
            if fitting := self.fitting.count_sizes(group, again, sizes):
                most = sizes[fitting - 1]
                least = min(least, self._least_with(slot, group.pipeline, share, replicas, most))
        return least

    def _least_with(self, slot: Slot, stages: int, share: int, replicas: int, most: float) -> float:
        """With microbatches of at most so many sequences."""
        longest = -(-self._layers // stages)
        step = share / replicas * self._slot_s(slot, stages, most, longest) / most
        if stages > 1:
            step += (stages - 1) / self._rounds * self._slot_s(slot, stages, 1, longest)
        return step

    def step_s(self, group: Group, batch: Microbatch, replicas: int) -> float:
        """A time that no plan of these axes and this microbatch on at most so many replicas can beat."""
        if not replicas:
            return math.inf
        quota = -(-(self._batch // (group.fsdp * batch.sequences)) // replicas)
        fill = (group.pipeline - 1) / self._rounds
        slot = self.slots(group)[batch.rematerialise]
        longest = self._pricing.longest(group, batch)
        return (quota + fill) * self._slot_s(slot, group.pipeline, batch.sequences, longest)


@functools.lru_cache(maxsize=4096)
def divides_batch(global_batch: int) -> tuple[int, ...]:
    """Gives the divisors of the batch, in order: as many parts as it can be cut in."""
    small = [size for size in range(1, math.isqrt(global_batch) + 1) if global_batch % size == 0]
    return tuple(sorted({size for low in small for size in (low, global_batch // low)}))
