"""Which microbatches may fit in memory; a microbatch that is excluded fits under no split of the layers.

Stage i of P has room for `floor((C_i - x b) / (S + F_i a b))` layers of a microbatch of b sequences, with the symbols
of `stage_memory`, a and x per sequence. F_i falls with i, so between the ends the second stage holds the fewest
layers and the last but one the most; these two decide all but a few microbatches.
"""

import bisect
import math
from typing import NamedTuple

from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes
from resilient_jax.planning.memory import count_in_flight
from resilient_jax.planning.stage_memory import ROUNDING_SLACK, count_fitting_layers


class HeadroomSummary(NamedTuple):
    """A `MemoryHeadroom` in short.

    The most bytes of any stage, and the bytes of a layer's state, of a sequence's residuals in a layer, and of a
    sequence's working memory.
    """

    most: float
    state: float
    kept: float
    extra: float

    def count_max_sequences(self, layers: int) -> float:
        """Return an upper bound of the sequences of a microbatch; not an integer, and less sharp than `may_fit`.

        Args:
            layers: of the longest stage: the average or more; it keeps one microbatch or more.
        """
        left, needed = self.most - layers * self.state, layers * self.kept + self.extra
        if needed > 0:
            return left / needed
        return math.inf if left >= 0 else 0.0


class MemoryFilter:
    """The filter of one request; memoizes what it needs."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def summarize_headroom(self, axes: ReplicaAxes, is_remat: bool) -> HeadroomSummary:
        """Return the headroom under these axes: the same for all pipelines of two or more stages."""
        headroom = self._cost_model.memory.find_headroom(axes)
        one = self._cost_model.memory.count_activations(axes, MicrobatchConfig(1, is_remat))
        return HeadroomSummary(max(headroom[:3]) * ROUNDING_SLACK, headroom.layer, one.layer, one.extra)

    def count_sizes(self, axes: ReplicaAxes, is_remat: bool, sizes: tuple[int, ...]) -> int:
        """Return how many of these sizes of a microbatch, in order, may fit."""
        return bisect.bisect_left(
            sizes, True, key=lambda size: not self.may_fit(axes, MicrobatchConfig(size, is_remat))
        )

    def may_fit(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> bool:
        """Return whether a microbatch may fit in memory; False only if it fits under no split of the layers.

        Each stage has room for a number of layers, fewer the more microbatches it keeps; each must have one, and all
        stages together all layers.
        """
        cost_model, stages = self._cost_model, axes.pipeline
        headroom, layers = cost_model.memory.find_headroom(axes), cost_model.layers
        size, one = (
            microbatch.sequences,
            cost_model.memory.count_activations(axes, MicrobatchConfig(1, microbatch.remat)),
        )
        microbatches, repeats = (
            cost_model.memory.count_microbatches(axes, microbatch),
            cost_model.request.pipeline_repeats,
        )
        # One stage: x b + S L + F (a L + embedding + head) b <= C.
        extra, layer = size * one.extra, size * one.layer
        most_in_flight = count_in_flight(0, stages, microbatches, repeats)
        if stages == 1:
            kept = most_in_flight * (layers * layer + size * (one.embedding + one.head))
            return extra + layers * headroom.layer + kept <= headroom.first * ROUNDING_SLACK
        fewest_in_flight = count_in_flight(stages - 1, stages, microbatches, repeats)
        first = count_fitting_layers(
            headroom.first - extra - most_in_flight * size * one.embedding,
            headroom.layer + most_in_flight * layer,
        )
        last = count_fitting_layers(
            headroom.last - extra - fewest_in_flight * size * one.head,
            headroom.layer + fewest_in_flight * layer,
        )
        if first < 1 or last < 1:
            return False
        # Two or more: the ends have their own number of layers. Between them the second stage has the most microbatches
        # in flight, so least room, and the last but one the fewest. The exact sum is needed only if `layers` lies
        # between (P - 2) times one and (P - 2) times the other.
        missing = layers - first - last
        if stages == 2:
            return missing <= 0
        between = headroom.middle - extra
        most_between, fewest_between = (
            count_in_flight(stage, stages, microbatches, repeats) for stage in (1, stages - 2)
        )
        least = count_fitting_layers(between, headroom.layer + most_between * layer)
        if least < 1 or missing > (stages - 2) * count_fitting_layers(
            between, headroom.layer + fewest_between * layer
        ):
            return False
        return (
            missing <= (stages - 2) * least
            or sum(cost_model.memory.count_max_layers(axes, microbatch)) >= layers
        )
