"""Which microbatches may have the memory: where the answer is no, none does, however the layers are split."""

import bisect
import dataclasses
import math
from typing import NamedTuple

from resilient_jax.planning.memory import Activations, in_flight, memory_of_stage
from resilient_jax.planning.pricing import Pricing
from resilient_jax.planning.shape import Group, Microbatch

ROUNDED = 1 + 1e-9
"""Of sums in other orders."""
ANY_NUMBER = 1 << 62
NOTHING_KEPT = Activations(embedding=0.0, layer=0.0, head=0.0, extra=0.0)


class Room(NamedTuple):
    """Bytes that a device has for layers and activations, by where its stage is; of one stage all three are the same.

    `layer` is what the state of a layer takes of it.
    """

    first: float
    between: float
    last: float
    layer: float


class QuickRoom(NamedTuple):
    """The same in short: the most bytes that any device has, what the state of a layer takes of it, what a sequence
    keeps in a layer, and what it needs beside."""

    most: float
    state: float
    kept: float
    extra: float

    def most_sequences(self, layers: int) -> float:
        """More than this have no room in a microbatch; not a whole number, and less sharp than `may_fit`.

        Args:
            layers: of the stage that has most: the average or more; it keeps one microbatch or more.
        """
        left, needed = self.most - layers * self.state, layers * self.kept + self.extra
        if needed > 0:
            return left / needed
        return math.inf if left >= 0 else 0.0


class Fitting:
    """Answers for one question, and remembers what it needs for them."""

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self._is_alike = len({kind.accelerator for kind in pricing.question.pool.kinds}) == 1
        # Copies of gradients lie where activations were: what more they need is known with the activations only.
        self._least = None if pricing.need is None else dataclasses.replace(pricing.need, gradient_copies=0)
        self._rooms: dict[tuple[int, int, int, bool], Room] = {}

    def room(self, group: Group) -> Room:
        """Under these axes."""
        key = (group.tensor, group.expert, group.fsdp, group.pipeline > 1)
        if key not in self._rooms:
            self._rooms[key] = self._find_room(group)
        return self._rooms[key]

    def _find_room(self, group: Group) -> Room:
        pricing = self._pricing
        stages = 3 if group.pipeline > 1 else 1  # those between the ends all need the same

        def count_left(stage: int, layers: int = 0) -> float:
            needed = memory_of_stage(
                pricing.state(group),
                NOTHING_KEPT,
                pricing.question.calibration,
                layers=layers,
                stage=stage,
                stages=stages,
                microbatches=0,
                is_gathered=group.fsdp > 1,
                need=self._least,
            )
            return pricing.usable_bytes - needed.total

        first, between, last = count_left(0), count_left(stages // 2), count_left(stages - 1)
        return Room(first, between, last, first - count_left(0, layers=1))

    def quick_room(self, group: Group, again: bool) -> QuickRoom:
        """Under these axes, for any number of stages that is not 1, or for 1."""
        room = self.room(group)
        one = self._pricing.activations(group, Microbatch(1, again))
        return QuickRoom(max(room[:3]) * ROUNDED, room.layer, one.layer, one.extra)

    def count_sizes(self, group: Group, again: bool, sizes: tuple[int, ...]) -> int:
        """How many of these sizes of a microbatch, in order, may fit."""
        return bisect.bisect_left(
            sizes, True, key=lambda size: not self.may_fit(group, Microbatch(size, again))
        )

    def may_fit(self, group: Group, batch: Microbatch) -> bool:
        """Whether the memory might do: False only if it is sure that it does not.

        Each stage has room for so many whole layers, fewer the more microbatches it keeps; each must have one, and
        together all. On equal accelerators the first stages are on the fastest hosts (see `stage_kinds`), and whoever
        deals layers by the time (see `deal_classes`) gives no stage between the ends two more than a faster one.
        """
        pricing, stages = self._pricing, group.pipeline
        room, layers = self.room(group), pricing.layers
        size, one = batch.sequences, pricing.activations(group, Microbatch(1, batch.rematerialise))
        microbatches, rounds = pricing.microbatches(group, batch), pricing.question.rounds
        extra, layer = size * one.extra, size * one.layer
        deepest = in_flight(0, stages, microbatches, rounds)
        if stages == 1:
            kept = deepest * (layers * layer + size * (one.embedding + one.head))
            return extra + layers * room.layer + kept <= room.first * ROUNDED
        flattest = in_flight(stages - 1, stages, microbatches, rounds)
        first = _hold(room.first - extra - deepest * size * one.embedding, room.layer + deepest * layer)
        last = _hold(room.last - extra - flattest * size * one.head, room.layer + flattest * layer)
        if first < 1 or last < 1:
            return False
        missing = layers - first - last
        if missing <= stages - 2:  # those between have one each
            return True
        between = room.between - extra
        if not self._is_alike:
            kept = [in_flight(stage, stages, microbatches, rounds) for stage in range(1, stages - 1)]
            return missing <= sum(_hold(between, room.layer + number * layer) for number in kept)
        deep, flat = (in_flight(stage, stages, microbatches, rounds) for stage in (1, stages - 2))
        least = _hold(between, room.layer + deep * layer)
        if least < 1 or layer <= 0:
            return least >= 1 and missing <= (stages - 2) * least
        # All hold so many, or one more: those that keep few enough microbatches, from the last on one more for each.
        few = (between / (least + 1) * ROUNDED - room.layer) / layer
        more = stages - 2 if deep <= few else min(max(int(few - flat + ROUNDED), 0), stages - 2)
        return missing <= (stages - 2) * least + more


def _hold(left: float, layer: float) -> int:
    """How many whole layers."""
    return int(left / layer * ROUNDED) if layer > 0 else int(left >= 0) * ANY_NUMBER
