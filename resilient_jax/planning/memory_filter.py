"""Which microbatches may have the memory: where the answer is no, none does, however the layers are split."""

import bisect
import math
from typing import NamedTuple

from resilient_jax.planning.cost_model import ROUNDED, Pricing, hold
from resilient_jax.planning.device_layout import Group, Microbatch
from resilient_jax.planning.memory import in_flight


class QuickRoom(NamedTuple):
    """A `Room` in short: the most bytes that any device has, what the state of a layer takes of it, what a sequence
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

    def quick_room(self, group: Group, again: bool) -> QuickRoom:
        """Under these axes, for any number of stages that is not 1, or for 1."""
        room = self._pricing.room(group)
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
        together all.
        """
        pricing, stages = self._pricing, group.pipeline
        room, layers = pricing.room(group), pricing.layers
        size, one = batch.sequences, pricing.activations(group, Microbatch(1, batch.rematerialise))
        microbatches, rounds = pricing.microbatches(group, batch), pricing.question.rounds
        extra, layer = size * one.extra, size * one.layer
        deepest = in_flight(0, stages, microbatches, rounds)
        if stages == 1:
            kept = deepest * (layers * layer + size * (one.embedding + one.head))
            return extra + layers * room.layer + kept <= room.first * ROUNDED
        flattest = in_flight(stages - 1, stages, microbatches, rounds)
        first = hold(room.first - extra - deepest * size * one.embedding, room.layer + deepest * layer)
        last = hold(room.last - extra - flattest * size * one.head, room.layer + flattest * layer)
        if first < 1 or last < 1:
            return False
        missing = layers - first - last
        if stages == 2:
            return missing <= 0
        between = room.between - extra
        deep, flat = (in_flight(stage, stages, microbatches, rounds) for stage in (1, stages - 2))
        least = hold(between, room.layer + deep * layer)
        if least < 1 or missing > (stages - 2) * hold(between, room.layer + flat * layer):
            return False
        return missing <= (stages - 2) * least or sum(pricing.held_layers(group, batch)) >= layers
