"""The table of all candidates: a row for each choice of axes and microbatch, a column for each term of its cost.

All rows are priced at once, as if every host were as fast as the fastest of its kind and every replica had the best of
the layouts. A microbatch of b sequences, on P stages with l layers on the longest, N devices and a batch of B:

    c        = b flops / F + (b moved + parameters) / W + overhead          s, computing of one layer
    layer    = min over layouts of c + exchanges + max(0, gathers - overlap c)
    t        = max(l layer, (L layer + b ends) / P)         s, no stage is faster than their average
    R        = floor(N / devices of a replica)
    step     = ceil(B / (f b R)) p(t) + fill(t) + update + overhead of a step      p and fill as in `pipeline`

So a column `least_s` is at most the step time of any plan of its row: `candidates` prices rows in its order, until no
further row can be faster. On equal hosts it is nearly the step time itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import DeviceLink, estimate_collective_s
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_cost import is_partitioned, list_fsdp_collectives
from resilient_jax.planning.device_layout import MicrobatchConfig, ReplicaAxes, compute_level_factors
from resilient_jax.planning.memory import count_in_flight
from resilient_jax.planning.pipeline import REMAT_WEIGHT_SHARE, WEIGHT_SHARE, time_pipeline
from resilient_jax.planning.program_cost import AmountByAxis, CollectiveKind, ModelPart, PartCost
from resilient_jax.planning.search_space import SearchSpace
from resilient_jax.planning.stage_memory import ROUNDING_SLACK
from resilient_jax.planning.state_bytes import PartBytes

Column = NDArray[np.float64]
Index = NDArray[np.int64]
FIRST_ROWS = 64
"""Rows that are sorted at first; each further time four times as many."""
EXCHANGING = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT)
"""Axes along which activations are exchanged."""
IN_LAYER = (*EXCHANGING, Axis.FSDP)
"""Axes that shard a layer, innermost first."""
MANY = 1 << 40
"""More microbatches than any step has."""


class CandidateRow(NamedTuple):
    """A row: a bound of its plans' step times, axes and microbatch."""

    least_s: float
    axes: ReplicaAxes
    microbatch: MicrobatchConfig


class CandidateTable:
    """All rows of one request that may fit in memory."""

    def __init__(self, least_s: Column, columns: Index) -> None:
        """Create the table.

        Args:
            least_s: [rows], in s.
            columns: [rows, 7]: tensor, sequence, expert, fsdp, pipeline, sequences of a microbatch, remat or not.
        """
        self.least_s = least_s
        self.columns = columns

    def ascending(self) -> Iterator[CandidateRow]:
        """Yield the rows by `least_s`, the least first."""
        done, wanted, rows = 0, FIRST_ROWS, len(self.least_s)
        while done < rows:
            # The first `wanted` rows of the order, without sorting all.
            first = np.argpartition(self.least_s, wanted)[:wanted] if wanted < rows else np.arange(rows)
            for row in first[np.argsort(self.least_s[first], kind="stable")][done:]:
                *axes, size, is_remat = self.columns[row].tolist()
                yield CandidateRow(
                    float(self.least_s[row]), ReplicaAxes(*axes), MicrobatchConfig(size, bool(is_remat))
                )
            done, wanted = min(wanted, rows), wanted * 4


NO_CANDIDATES = CandidateTable(np.empty(0), np.empty((0, 7), np.int64))


def tabulate_candidates(space: SearchSpace, levels: Sequence[int]) -> CandidateTable:
    """Return the table of a search.

    Args:
        levels: levels of links that a replica may be placed at.
    """
    groups = _Groups(space)
    if not len(groups.devices):
        return NO_CANDIDATES
    rows = _Rows(groups, levels)
    tables = [NO_CANDIDATES, *map(rows.price, space.list_axis_sizes(Axis.PIPELINE))]
    return CandidateTable(
        np.concatenate([table.least_s for table in tables]),
        np.concatenate([table.columns for table in tables]),
    )


class _Groups:
    """Columns of the axes that shard a layer: one row for each choice of tensor, sequence, expert and FSDP."""

    def __init__(self, space: SearchSpace) -> None:
        self.cost_model, self.space = space.cost_model, space
        sizes = [space.list_axis_sizes(axis) for axis in IN_LAYER]
        least = max(space.constraints.min_replicas, space.constraints.axes.get(Axis.REPLICA, 1))
        grid = (
            np.stack(np.meshgrid(*sizes, indexing="ij"), axis=-1).reshape(-1, len(IN_LAYER)).astype(np.int64)
        )
        devices = grid.prod(axis=1)
        # By devices, so that the rows that have room for more stages come first.
        order = np.argsort(devices, kind="stable")
        order = order[devices[order] * least <= self.cost_model.devices]
        self.axes: Index = grid[order]
        self.devices: Index = devices[order]
        self.tensor, self.sequence, self.expert, self.fsdp = self.axes.T
        self.rates: dict[tuple[CollectiveKind, int, int, int], tuple[float, float]] = {}
        if len(order):
            self._fill()

    def _fill(self) -> None:
        """Compute the columns of state and of computing."""
        program_cost, memory = self.cost_model.request.program_cost, self.cost_model.memory
        parts = {cost.part: cost for cost in program_cost.parts}
        self.layer = parts.get(ModelPart.LAYER)
        self.ends = [cost for part, cost in parts.items() if part is not ModelPart.LAYER]
        # Bytes of a layer's state, and what a device has left for layers on a first, middle, last and single stage.
        self.state = self.tabulate(lambda axes: memory.count_state(axes).layer, Axis.SEQUENCE)
        self.headroom = self.tabulate(
            lambda axes: (
                *memory.find_headroom(axes._replace(pipeline=2)),
                memory.find_headroom(axes).first,
            ),
            Axis.SEQUENCE,
        )
        # Of one stage, and of several; each without and with remat.
        self.activations = [
            [
                self.tabulate(
                    lambda axes, stages=stages, remat=remat: _activations(
                        self.cost_model, axes._replace(pipeline=stages), is_remat=remat
                    ),
                    Axis.FSDP,
                )
                for remat in (False, True)
            ]
            for stages in (1, 2)
        ]
        self.has_vocabulary = self.find_partitioned(Axis.TENSOR, "vocab")

    def tabulate(self, function: Callable[[ReplicaAxes], Sequence[float]], without: Axis) -> Column:
        """Return [rows, values] of a function of the axes that does not depend on one of them."""
        axes = self.axes.copy()
        axes[:, IN_LAYER.index(without)] = 1
        distinct, index = _find_distinct(axes)
        return np.array([function(ReplicaAxes(*map(int, one))) for one in distinct])[index]

    def find_partitioned(self, axis: Axis, name: str) -> NDArray[np.bool_]:
        """Return whether the axis shards the dims of a logical name."""
        sizes = self.axes[:, IN_LAYER.index(axis)]
        distinct, index = np.unique(sizes, return_inverse=True)
        program_cost = self.cost_model.request.program_cost
        return np.array([is_partitioned(program_cost, axis, name, int(size)) for size in distinct])[index]

    def share(self, amounts: AmountByAxis) -> Column:
        """Return a device's share of an amount, as `device_cost.compute_device_share`."""
        vocabulary = np.where(self.has_vocabulary, self.tensor, 1)
        return (
            amounts.replicated
            + (amounts.tensor + amounts.attention) / self.tensor
            + amounts.vocabulary / vocabulary
            + amounts.expert / (self.expert * self.tensor)
        ) / self.sequence


def _find_distinct(rows: Index) -> tuple[Index, Index]:
    """Return the distinct rows of a table, and the index of each row among them."""
    codes = np.ravel_multi_index(tuple(rows.T), tuple(rows.max(axis=0) + 1))
    _, first, index = np.unique(codes, return_index=True, return_inverse=True)
    return rows[first], index


def _activations(
    cost_model: CostModel, axes: ReplicaAxes, *, is_remat: bool
) -> tuple[float, float, float, float]:
    one = cost_model.memory.count_activations(axes, MicrobatchConfig(1, is_remat))
    return one.embedding, one.layer, one.head, one.extra


class _LayoutTimes(NamedTuple):
    """Columns of one layout, without and with remat: a layer's exchanges, `fixed_s + b each_s`, and its gathers."""

    fixed_s: tuple[Column, Column]
    each_s: tuple[Column, Column]
    gathers_s: Column


def _list_layouts(groups: _Groups, levels: Sequence[int]) -> Iterator[_LayoutTimes]:
    """Yield the times of each layout: so many devices of a host used together, filled from the innermost axis out."""
    seen = set()
    for devices in range(groups.cost_model.request.pool.devices_per_host, 0, -1):
        inside, left = [], np.full(len(groups.devices), devices)
        for sizes in groups.axes.T:
            inside.append(np.gcd(sizes, left))
            left = left // inside[-1]
        if (key := np.stack(inside).tobytes()) not in seen:
            seen.add(key)
            for level in levels:
                yield _time_layout(groups, np.stack(inside, axis=1), level)


def _time_layout(groups: _Groups, inside: Index, level: int) -> _LayoutTimes:
    request = groups.cost_model.request
    shown = 1 - request.calibration.activation_overlap
    zero = np.zeros(len(groups.devices))
    fixed, each = [zero, zero], [zero, zero]
    assert groups.layer is not None
    for collective in groups.layer.collectives:
        place = IN_LAYER.index(collective.axis)
        is_needed = groups.axes[:, place] > 1
        if collective.logical_name:
            is_needed = is_needed & groups.find_partitioned(collective.axis, collective.logical_name)
        if not is_needed.any():
            continue
        per_byte, latency = _find_rates(groups, inside, level, collective.axis, collective.kind)
        if collective.axis is Axis.SEQUENCE:
            sharing = np.where(groups.find_partitioned(Axis.TENSOR, "kv_heads"), groups.tensor, 1)
        else:
            sharing = groups.sequence
        for remat in (False, True):
            times = shown * is_needed * (collective.forward_count * (1 + remat) + collective.backward_count)
            fixed[remat] = fixed[remat] + times * latency
            each[remat] = each[remat] + times * collective.message_bytes / sharing * per_byte
    # Devices along a sequence all-reduce their gradients.
    per_byte, latency = _find_rates(groups, inside, level, Axis.SEQUENCE, CollectiveKind.ALL_REDUCE)
    gradients = groups.state[:, PartBytes._fields.index("gradients")]
    reduced = shown * (groups.sequence > 1) * (gradients * per_byte + latency) * (gradients > 0)
    gathers = zero
    state = PartBytes(*groups.state.T)  # type: ignore[arg-type] - columns instead of numbers
    for kind, size, pieces in list_fsdp_collectives(request.program_cost, ModelPart.LAYER, state):
        per_byte, latency = _find_rates(groups, inside, level, Axis.FSDP, kind)
        gathers = gathers + (groups.fsdp > 1) * (size * per_byte + pieces * latency) * (state.gathered > 0)
    return _LayoutTimes((fixed[0] + reduced, fixed[1] + reduced), (each[0], each[1]), gathers)


def _find_rates(
    groups: _Groups, inside: Index, level: int, axis: Axis, kind: CollectiveKind
) -> tuple[Column, Column]:
    """Return seconds per byte, and latency, of a collective along an axis: its time is linear in the message."""
    links, place = groups.cost_model.links, IN_LAYER.index(axis)
    free = [DeviceLink(bytes_per_s=link.bytes_per_s, latency_s=0.0) for link in links]
    distinct, index = _find_distinct(np.stack([groups.axes[:, place], inside[:, place]], axis=1))
    for size, part in distinct.tolist():
        if (kind, size, part, level) not in groups.rates:
            factors = compute_level_factors(size, part, level, len(links) - 1)
            groups.rates[kind, size, part, level] = (
                estimate_collective_s(kind, 1.0, factors, free),
                estimate_collective_s(kind, 0.0, factors, links),
            )
    found = np.array([groups.rates[kind, size, part, level] for size, part in distinct.tolist()])[index]
    return found[:, 0], found[:, 1]


class _Rows:
    """Columns of axes and microbatch, but for the pipeline: a row for each group, microbatch size, and remat."""

    def __init__(self, groups: _Groups, levels: Sequence[int]) -> None:
        self._groups = groups
        batch = groups.cost_model.request.global_batch
        choices = {
            fsdp: np.array(groups.space.list_microbatches(fsdp), np.int64).reshape(-1, 2)
            for fsdp in set(groups.fsdp.tolist())
        }
        chosen = [choices[fsdp] for fsdp in groups.fsdp.tolist()]
        self.group = np.repeat(np.arange(len(chosen)), [len(one) for one in chosen])
        self.sequences, self.remat = np.concatenate(chosen).T
        self.devices = groups.devices[self.group]
        self.microbatches = batch // (groups.fsdp[self.group] * self.sequences)
        self._time_layers(levels)
        self._count_memory()

    def _pick(self, by_remat: Sequence[Column]) -> Column:
        """Return the values of each row from those of its group without and with remat."""
        return np.where(self.remat, by_remat[1][self.group], by_remat[0][self.group])

    def _time_layers(self, levels: Sequence[int]) -> None:
        groups, request = self._groups, self._groups.cost_model.request
        constants, kinds = request.calibration, request.pool.kinds
        # F [FLOP/s], W [bytes/s], and the overhead of a kernel [s], each of the best host kind.
        flops_per_s = constants.matrix_efficiency * max(
            kind.accelerator.peak_flops_per_s(request.number_format) * kind.speed for kind in kinds
        )
        self._bytes_per_s = constants.memory_efficiency * max(
            kind.accelerator.memory_bandwidth_bytes_per_s * kind.speed for kind in kinds
        )
        overhead_s = constants.kernel_overhead_s / max(kind.speed for kind in kinds)
        gathered, gradients = (
            groups.state[self.group, PartBytes._fields.index(name)] for name in ("gathered", "gradients")
        )

        def compute_s(cost: PartCost, *, is_remat: bool) -> Column:
            products, moved = cost.step_flops, groups.share(cost.step_bytes)
            if is_remat:
                products, moved = products + cost.remat_flops, moved + groups.share(cost.forward_bytes)
            attention = products.attention * (1 / constants.attention_efficiency - 1)
            flops = groups.share(products + AmountByAxis(attention=attention))
            return flops / flops_per_s + moved / self._bytes_per_s

        zero = np.zeros(len(groups.devices))
        ends = sum((compute_s(cost, is_remat=False) for cost in groups.ends), start=zero)
        self.ends_s = ends[self.group] * self.sequences
        self.transfer_s = self._find_transfer_s()
        layer = groups.layer
        if layer is None:
            self.layer_s = np.zeros(len(self.group))
            return
        each = self._pick([compute_s(layer, is_remat=remat) for remat in (False, True)])
        passes = 2 + self.remat
        computing = (
            self.sequences * each
            + (passes * gathered + 2 * gradients) / self._bytes_per_s
            + (passes + 1) * layer.kernels * overhead_s
        )
        least = np.full(len(self.group), np.inf)
        for layout in _list_layouts(groups, levels):
            exchanges = self._pick(layout.fixed_s) + self.sequences * self._pick(layout.each_s)
            exposed = np.maximum(0.0, layout.gathers_s[self.group] - constants.fsdp_overlap * computing)
            least = np.minimum(least, exchanges + exposed)
        self.layer_s = computing + least

    def _find_transfer_s(self) -> Column:
        groups = self._groups
        sent = groups.layer.input_bytes if groups.layer is not None else 0.0
        message = sent * self.sequences / groups.sequence[self.group]
        return np.min(
            [link.latency_s + message / link.bytes_per_s for link in groups.cost_model.links], axis=0
        )

    def _count_memory(self) -> None:
        # Bytes of a microbatch's activations, of one stage and of several: embedding, a layer, head, and the working
        # memory of one part.
        self.activations = [
            (
                np.where(self.remat[:, None], with_remat[self.group], without[self.group])
                * self.sequences[:, None]
            )
            for without, with_remat in self._groups.activations
        ]
        headroom = self._groups.headroom[self.group].T
        self.first, self.middle, self.last, self.state, self.single = headroom

    def price(self, stages: int) -> CandidateTable:
        """Return the rows with so many stages that may fit in memory, with the bound of their step times."""
        cost_model = self._groups.cost_model
        constants, repeats = cost_model.request.calibration, cost_model.request.pipeline_repeats
        layers = cost_model.layers
        # Rows are sorted by devices.
        has_room = slice(np.searchsorted(self.devices, cost_model.devices // stages, side="right"))
        longest = self._find_longest(stages, has_room)
        replicas = self._count_replicas(stages, self.devices[has_room])
        fits = np.flatnonzero((longest > 0) & (replicas >= self._groups.space.constraints.min_replicas))
        longest, replicas = longest[fits], replicas[fits]
        layer, transfer = self.layer_s[fits], self.transfer_s[fits]
        slowest = np.maximum(longest * layer, (layers * layer + self.ends_s[fits]) / stages)
        weights = np.where(self.remat[fits], REMAT_WEIGHT_SHARE, WEIGHT_SHARE)
        pipeline = time_pipeline(stages, slowest, transfer, weight_share=weights, repeats=repeats)
        quota = -(-self.microbatches[fits] // replicas)
        updated = PartBytes(*self._groups.state[self.group[fits]].T).updated  # type: ignore[arg-type]
        least = quota * pipeline.microbatch_s + pipeline.fill_s
        least = least + longest * updated / self._bytes_per_s + constants.step_overhead_s
        columns = np.column_stack(
            [
                self._groups.axes[self.group[fits]],
                np.full(len(fits), stages),
                self.sequences[fits],
                self.remat[fits],
            ]
        )
        return CandidateTable(least * (2 - ROUNDING_SLACK), columns)

    def _count_replicas(self, stages: int, widths: Index) -> Index:
        """Return the most replicas of each row, or as many as they must be."""
        space, most = self._groups.space, self._groups.cost_model.devices
        # Where stages may be anywhere, the number is the same for all widths.
        distinct, index = np.unique(0 if space.is_free else widths, return_inverse=True)
        counts = [space.count_replicas(width, stages) for width in distinct.tolist()]
        given = np.array([most if count is None else count for count in counts], np.int64)
        return np.minimum(most // (widths * stages), given[index])

    def _find_longest(self, stages: int, rows: slice) -> Column:
        """Return the least layers of the longest stage that memory allows, or fewer; 0 where the layers do not fit."""
        cost_model = self._groups.cost_model
        repeats, layers = cost_model.request.pipeline_repeats, cost_model.layers
        embedding, kept, head, extra = self.activations[stages > 1][rows].T
        state = self.state[rows]

        def in_flight(stage: int) -> Column:
            return np.minimum(count_in_flight(stage, stages, MANY, repeats), self.microbatches[rows])

        def count_layers(left: Column, stage: int) -> Column:
            # floor((C_i - x) / (S + F_i A)); where neither takes memory any number fits.
            each = state + in_flight(stage) * kept
            many = np.where(left - extra >= 0, MANY, 0.0)
            return np.floor(np.divide((left - extra) * ROUNDING_SLACK, each, out=many, where=each > 0))

        if stages == 1:
            needed = extra + layers * (state + in_flight(0) * kept)
            needed += in_flight(0) * (embedding + head)
            return np.where(needed <= self.single[rows] * ROUNDING_SLACK, layers, 0)
        first = count_layers(self.first[rows] - in_flight(0) * embedding, 0)
        last = count_layers(self.last[rows] - in_flight(stages - 1) * head, stages - 1)
        # Between the ends the last stage but one has the fewest microbatches in flight, so the most room.
        between = count_layers(self.middle[rows], stages - 2) if stages > 2 else np.zeros_like(first)
        ends = first + last
        # The longest stage has l layers, with min(l, first) + min(l, last) + (P - 2) min(l, between) >= L.
        longest = np.maximum(-(-layers // stages), np.ceil((layers - np.minimum(first, last)) / (stages - 1)))
        if stages > 2:
            longest = np.maximum(longest, np.ceil((layers - ends) / (stages - 2)))
            is_least = (between >= 1) & (ends + (stages - 2) * between >= layers)
        else:
            is_least = ends >= layers
        return np.where((first >= 1) & (last >= 1) & is_least, longest, 0)
