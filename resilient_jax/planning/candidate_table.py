"""The table of all candidates: a row for each choice of axes and microbatch, a column for each term of its cost.

All rows are priced at once by the formulas of one plan (see `columns`), as if every host were as fast as the fastest of
its kind and every replica had the best of the layouts. A row with P stages, l layers on the longest, and N devices:

    layer, ends = min over layouts of the times of a layer, and of both ends                s, `stage_cost`
    R           = floor(N / devices of a replica)
    step        = bound of the makespan of R replicas + update of l layers + overhead       s, `cost_model`

So a column `least_s` is at most the step time of any plan of its row: `candidates` prices rows in its order, until no
further row can be faster. On equal hosts it is nearly the step time itself.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from resilient_jax.planning.axes import Axis
from resilient_jax.planning.collectives import estimate_send_s
from resilient_jax.planning.columns import Column, choose, is_column, minimum
from resilient_jax.planning.cost_model import CostModel
from resilient_jax.planning.device_cost import DeviceWork
from resilient_jax.planning.device_layout import DeviceLayout, MicrobatchConfig, ReplicaAxes, fill_host
from resilient_jax.planning.host_pool import HostKind
from resilient_jax.planning.memory import ActivationBytes, count_activations
from resilient_jax.planning.program_cost import ModelPart
from resilient_jax.planning.search_space import SearchSpace
from resilient_jax.planning.stage_cost import (
    LeastTimes,
    PartLoad,
    bound_part_times,
    count_microbatch_load,
    count_sent_bytes,
    estimate_part_times,
)
from resilient_jax.planning.stage_memory import ROUNDING_SLACK, StageMemory
from resilient_jax.planning.state_bytes import PartBytes, StateBytes

Columns = TypeVar("Columns", bound=NamedTuple)
FIRST_ROWS = 64
"""Rows that are sorted at first; each further time four times as many."""
IN_LAYER = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT, Axis.FSDP)
"""Axes that shard a layer, innermost first."""


class CandidateRow(NamedTuple):
    """A row: a bound of its plans' step times, axes and microbatch."""

    least_s: float
    axes: ReplicaAxes
    microbatch: MicrobatchConfig


class CandidateTable:
    """All rows of one request that may fit in memory."""

    def __init__(self, least_s: Column, columns: Column) -> None:
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
    axes = _list_axes(space)
    if not len(axes):
        return NO_CANDIDATES
    rows = _Rows(space, levels, axes)
    tables = [NO_CANDIDATES, *map(rows.price, space.list_axis_sizes(Axis.PIPELINE))]
    return CandidateTable(
        np.concatenate([table.least_s for table in tables]),
        np.concatenate([table.columns for table in tables]),
    )


def _list_axes(space: SearchSpace) -> Column:
    """Return [choices, 4]: each choice of the axes that shard a layer, by the devices that it takes."""
    # So the rows that have room for more stages come first.
    sizes = np.meshgrid(*map(space.list_axis_sizes, IN_LAYER), indexing="ij")
    grid = np.stack(sizes, axis=-1).reshape(-1, len(IN_LAYER)).astype(np.int64)
    devices = grid.prod(axis=1)
    order = np.argsort(devices, kind="stable")
    least = max(space.constraints.min_replicas, space.constraints.axes.get(Axis.REPLICA, 1))
    return grid[order[devices[order] * least <= space.cost_model.devices]]


def _take(columns: Columns, rows: slice | Column) -> Columns:
    return columns._make(column[rows] if is_column(column) else column for column in columns)


def _tabulate_state(memory: StageMemory, axes: Column) -> StateBytes:
    """Return the bytes of state of each choice of axes, each [choices, 1, 1]."""
    # A sequence shards no state.
    distinct, index = np.unique(np.delete(axes, 1, axis=1), axis=0, return_inverse=True)
    bytes_of = np.array([memory.count_state(ReplicaAxes(t, 1, e, f)) for t, e, f in distinct.tolist()])
    return StateBytes(*itertools.starmap(PartBytes, np.moveaxis(bytes_of[index], 0, -1)[..., None, None]))


def _scale_load(part: ModelPart, without: PartLoad, with_one: PartLoad, sequences: int) -> PartLoad:
    """Return the load of a microbatch: work and collectives are linear in its sequences."""

    def scale(fixed: Column, one: Column) -> Column:
        each = one - fixed
        # Layouts matter little to the ends, so each of their collectives has the best of [layouts, choices, sizes, 2].
        if part is not ModelPart.LAYER and np.ndim(fixed) == 4:
            fixed, each = fixed.min(axis=0), each.min(axis=0)
        return fixed + sequences * each if np.any(each) else fixed

    return PartLoad(
        DeviceWork(*map(scale, without.device_work, with_one.device_work)),
        {axis: scale(without.collectives_s[axis], one) for axis, one in with_one.collectives_s.items()},
    )


class _Rows:
    """Columns of all but the pipeline: a row for each choice of axes and each size of a microbatch."""

    def __init__(self, space: SearchSpace, levels: Sequence[int], choices: Column) -> None:
        self._space, self._cost_model = space, space.cost_model
        self._kind, self._flops_per_s = _find_fastest_kind(self._cost_model)
        fsdp = choices.T[-1].tolist()
        allowed = {size: space.list_microbatches(size) for size in set(fsdp)}
        sizes = sorted({one.sequences for found in allowed.values() for one in found})
        # Formulas have columns of [choices, sizes, 2], the last without and with remat; `spread` takes what is allowed.
        sequences: Column = np.array(sizes, np.int64)[:, None]
        remat: Column = np.array([False, True])
        axes, microbatch = ReplicaAxes(*choices.T[..., None, None]), MicrobatchConfig(sequences, remat)
        memory = self._cost_model.memory
        state, shape = _tabulate_state(memory, choices), (len(choices), len(sizes), 2)
        # Of each fsdp, the places of its microbatches; of all, those in the flat columns.
        places = {size: place for place, size in enumerate(sizes)}
        inside = {
            size: np.array([2 * places[one.sequences] + one.remat for one in found], np.int64)
            for size, found in allowed.items()
        }
        rows = np.concatenate([2 * len(sizes) * row + inside[size] for row, size in enumerate(fsdp)])

        def spread(columns: Columns) -> Columns:
            return columns._make(np.broadcast_to(column, shape).take(rows) for column in columns)

        self._axes, self._microbatch = spread(axes), spread(microbatch)
        self._devices: Column = self._axes.devices
        self._columns = np.column_stack([*self._axes, *self._microbatch])
        self._layer = spread(state.layer)
        self._least = spread(self._bound_times(axes, microbatch, state, levels))
        several = [axes._replace(pipeline=stages) for stages in (1, 2)]
        self._headrooms = [spread(memory.bound_headroom(one, state)) for one in several]
        self._activations = [spread(self._count_activations(one, microbatch)) for one in several]

    def _count_activations(self, axes: ReplicaAxes, microbatch: MicrobatchConfig) -> ActivationBytes:
        program_cost = self._cost_model.request.program_cost
        pairs = zip(
            count_activations(program_cost, axes, microbatch._replace(remat=True)),
            count_activations(program_cost, axes, microbatch._replace(remat=False)),
            strict=True,
        )
        return ActivationBytes(*(choose(microbatch.remat, *pair) for pair in pairs))

    def _bound_times(
        self, axes: ReplicaAxes, microbatch: MicrobatchConfig, state: StateBytes, levels: Sequence[int]
    ) -> LeastTimes:
        """Return the least times of any layout: so many devices of a host used together, filled from inside out."""
        request, links = self._cost_model.request, self._cost_model.links
        sent = count_sent_bytes(request.program_cost, axes, microbatch)
        transfer_s = functools.reduce(minimum, (estimate_send_s(sent, (2,), [link]) for link in links))
        devices: Column = np.arange(1, request.pool.devices_per_host + 1)[:, None, None, None]
        # [layouts, axes, choices, 1, 1], each layout once.
        filled = np.stack(fill_host(axes, devices)[0], axis=1)
        inside = np.stack([*{layout.tobytes(): layout for layout in filled}.values()])
        in_host = ReplicaAxes(*np.moveaxis(inside, 1, 0))
        parts = []
        for level in levels:
            layout = DeviceLayout(axes, in_host, 1, level, 1, len(links) - 1)
            without, with_one = (
                count_microbatch_load(
                    request.program_cost, state, layout, microbatch._replace(sequences=sequences), links
                )
                for sequences in (0, 1)
            )
            load = {
                part: _scale_load(part, without[part], with_one[part], microbatch.sequences)
                for part in ModelPart
            }
            parts.append(
                estimate_part_times(load, transfer_s, self._kind, self._flops_per_s, request.calibration)
            )
        shape = np.broadcast_shapes(
            inside[:, 0].shape, np.shape(microbatch.sequences), np.shape(microbatch.remat)
        )
        return LeastTimes(*(np.broadcast_to(one, shape).min(axis=0) for one in bound_part_times(parts)))

    def price(self, stages: int) -> CandidateTable:
        """Return the rows with so many stages that may fit in memory, with the bound of their step times."""
        cost_model, memory = self._cost_model, self._cost_model.memory
        # Rows are sorted by devices.
        room = slice(np.searchsorted(self._devices, cost_model.devices // stages, side="right"))
        replicas = self._count_replicas(self._devices[room], stages)
        axes, microbatch = _take(self._axes, room)._replace(pipeline=stages), _take(self._microbatch, room)
        headroom, activations = self._headrooms[stages > 1], self._activations[stages > 1]
        longest: Column = memory.bound_longest_stage(
            axes, microbatch, _take(headroom, room), _take(activations, room)
        )
        fits = np.flatnonzero((longest > 0) & (replicas >= self._space.constraints.min_replicas))
        axes, microbatch, least = _take(axes, fits), _take(microbatch, fits), _take(self._least, fits)
        longest = longest[fits]
        makespan_s = cost_model.bound_makespan_s(axes, microbatch, least, longest, replicas[fits])
        updated = longest * _take(self._layer, fits).updated
        least_s = makespan_s + cost_model.estimate_update_s(updated, self._kind)
        columns = self._columns[fits]
        columns[:, axes._fields.index(Axis.PIPELINE)] = stages
        return CandidateTable(least_s * (2 - ROUNDING_SLACK), columns)

    def _count_replicas(self, widths: Column, stages: int) -> Column:
        """Return the most replicas of each row, or as many as they must be."""
        space, most = self._space, self._cost_model.devices
        # Where stages may be anywhere, the number is the same for all widths.
        distinct, index = np.unique(0 if space.is_free else widths, return_inverse=True)
        counts = [space.count_replicas(width, stages) for width in distinct.tolist()]
        given = np.array([most if count is None else count for count in counts], np.int64)
        return np.minimum(most // (widths * stages), given[index])


def _find_fastest_kind(cost_model: CostModel) -> tuple[HostKind, float]:
    """Return a host that is in each respect as fast as the fastest of all kinds, and its peak in FLOP/s."""
    kinds, speed = cost_model.request.pool.kinds, max(kind.speed for kind in cost_model.request.pool.kinds)
    flops_per_s = max(
        kind.accelerator.peak_flops_per_s(cost_model.request.number_format) * kind.speed for kind in kinds
    )
    bytes_per_s = max(kind.accelerator.memory_bandwidth_bytes_per_s * kind.speed for kind in kinds)
    accelerator = dataclasses.replace(kinds[0].accelerator, memory_bandwidth_bytes_per_s=bytes_per_s / speed)
    return dataclasses.replace(kinds[0], accelerator=accelerator, speed=speed), flops_per_s / speed
