"""Sums of pytrees over the live hosts: of floats by an all-reduce, or of exact totals.

For G bytes of float32 on H hosts, a host sends

- `AllReduce`: 2 G (H - 1) / H, by one all-reduce.
- `ExactReduce` of sums in fixed point: 3 G (H - 1) / H, of which G are for each limb, of which there are two (three for
  more than 128 addends). A total is split into H slices; each host receives its slice of every host's total, adds them
  up, reads the sums as floats, and all hosts gather these.
- `ExactReduce` of sums in bins: (9 / 4 + 1) G (H - 1) / H, likewise: a total has 9 bytes for each element.

Where there are few numbers two collectives cost more than they save: limbs are added up by one all-reduce with all
other integers of the tree, and so are bins, in a table (`step.binned_table`).

The result of `ExactReduce` depends neither on H nor on which host has which microbatch.

The programs depend on which hosts are alive, and compile in milliseconds, whatever the model. Each has one collective
and is awaited, on a thread that can be given up (see jax_runtime's README).
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.step import binned_table, host_grid, resharding
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.binned_sum import BinnedFormat, BinnedSum, merge_binned, read_binned
from resilient_jax.step.binned_table import compile_table, fits_table, make_table, read_table
from resilient_jax.step.fixed_point_sum import FixedPointFormat, FixedPointSum, read_units, scale_units
from resilient_jax.step.host_grid import (
    HOST_AXIS,
    LOCAL_AXIS,
    MAX_GRIDS,
    HostGrid,
    group_by_dtype,
    make_reader,
)
from resilient_jax.step.running_total import (
    NO_LIMITS,
    describe_totals,
    is_exact,
    join_complex,
    read_sums,
    read_total,
)

Tree = TypeVar("Tree")
MIN_SLICED_SIZE = 2**16
"""Elements of a tree in fixed point that are added up in slices."""


class AllReduce:
    """Sums over the hosts of one generation, in any order."""

    def __init__(self, grid: HostGrid) -> None:
        self._grid = grid

    def __call__(self, tree: Tree) -> Tree:
        """Return the sum over hosts of each leaf, with the sharding of the leaf."""
        if self._grid.num_hosts == 1:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        totals: list[Any] = [None] * len(leaves)
        for positions in group_by_dtype(leaves):
            origins = [leaves[i] for i in positions]
            # One collective for each dtype, however many leaves there are.
            found = self._grid.unpack(self.add_packed(origins), origins)
            for position, leaf in zip(positions, found, strict=True):
                totals[position] = leaf
        return jax.tree.unflatten(treedef, totals)

    def add_packed(self, leaves: Sequence[Any]) -> jax.Array:
        """Return the sum over hosts of leaves of one dtype, as `HostGrid.unpack` takes it."""
        total = collective_thread.run(_reduce(self._grid.mesh), self._grid.pack(leaves))
        return self._grid.to_local(total)

    def compile(self, like: Any, check: CancellationCheck) -> None:  # noqa: ANN401 - a tree
        """Compile, for the persistent cache, the programs of a sum of such a tree."""
        leaves = jax.tree.leaves(like)
        for positions in group_by_dtype(leaves) if self._grid.num_hosts > 1 else ():
            group = [leaves[i] for i in positions]
            self.compile_packed(group, check)
            check()
            self._grid.compile_unpack(group)

    def compile_packed(self, leaves: Sequence[Any], check: CancellationCheck) -> None:
        """Compile what `add_packed` calls for leaves of these shapes and one dtype."""
        check()
        _make_reduce(self._grid.mesh).lower(self._grid.abstract_pack(leaves)).compile()
        check()
        self._grid.compile_pack(leaves)


class ExactReduce:
    """Adds up the exact totals of the hosts of one generation, and reads the sums."""

    def __init__(self, grid: HostGrid) -> None:
        self._grid = grid

    def __call__(self, total: Any, like: Tree, limits: np.ndarray = NO_LIMITS) -> Tree:  # noqa: ANN401 - a tree of totals
        """Return the sums of all hosts' totals, with the dtypes and shardings of the leaves of `like`.

        Args:
            total: this host's exact sums, see `step.running_total`.
            like: arrays, or numbers, with the tree of the sums.
            limits: int32[leaves in fixed point], the same on all hosts.
        """
        origins, treedef = jax.tree.flatten(like)
        parts = treedef.flatten_up_to(total)
        if self._grid.num_hosts > 1:
            self._add_up(parts, limits)
        else:
            exact = [position for position, part in enumerate(parts) if is_exact(part)]
            for position, found in zip(exact, read_sums([parts[i] for i in exact], limits), strict=True):
                parts[position] = found
        return jax.tree.unflatten(treedef, list(map(self._restore, origins, parts)))

    def _add_up(self, parts: list[Any], limits: np.ndarray) -> None:
        """Replace this host's totals by the sums of all hosts."""
        integers, small, large = _group_parts(parts, self._grid)
        with_limits = [position for position, part in enumerate(parts) if isinstance(part, FixedPointSum)]
        tables = [make_table([parts[i] for i in positions], self._grid) for positions in small]
        # Few numbers in fixed point are added up like all other integers; the tables go with them.
        sums_of_integers = self._add_integers(
            [*(parts[i] for i in integers), *tables], limits[np.isin(with_limits, integers)]
        )
        merged = [
            read_table(table, [parts[i] for i in positions], self._grid)
            for positions, table in zip(small, sums_of_integers[len(integers) :], strict=True)
        ]
        merged += [
            self._merge_slices([parts[i] for i in positions], limits[np.isin(with_limits, positions)])
            for positions in large
        ]
        # Not strict: the tables follow, and are read above.
        for position, total in zip(integers, sums_of_integers, strict=False):
            parts[position] = total
        for positions, sums in zip([*small, *large], merged, strict=True):
            for position, total in zip(positions, sums, strict=True):
                parts[position] = total

    def _add_integers(self, parts: Sequence[Any], limits: np.ndarray) -> list[jax.Array]:
        """Return the sums over hosts of integers, and of totals in fixed point, as floats."""
        sums: list[Any] = [None] * len(parts)
        with_limits = [position for position, part in enumerate(parts) if is_exact(part)]
        for positions in _group_integers(parts):
            group = [parts[i] for i in positions]
            packed = AllReduce(self._grid).add_packed(jax.tree.leaves(group))
            group_limits = limits[np.isin(with_limits, positions)]
            group_sums = _make_reader(self._grid, group)(packed, group_limits)
            for position, total in zip(positions, group_sums, strict=True):
                sums[position] = total
        return sums

    def _restore(self, origin: Any, leaf: jax.Array) -> jax.Array:  # noqa: ANN401 - any array
        dtype = jnp.result_type(origin)  # in 32 bits, of 64, unless JAX has these enabled
        joined = join_complex(leaf, dtype) if leaf.dtype != dtype else leaf
        return host_grid.reshard_like(origin, joined)

    def _merge_slices(
        self, totals: Sequence[BinnedSum | FixedPointSum], limits: np.ndarray
    ) -> list[jax.Array]:
        """Return the sums of totals of one format as floats; `limits` are theirs."""
        grid, format = self._grid, totals[0].format
        exchanged, size = [], 0
        # One after the other: what is one array must be made of them, and cut again, which takes as long.
        for leaves in _list_columns(totals):
            column = grid.pack(leaves)
            exchanged.append(collective_thread.run(_exchange(grid.mesh), column))
            size = column.shape[1]
        slices = _merge(grid.mesh, format)(exchanged)
        flat = grid.join_slices(grid.gather(slices), size)
        if isinstance(format, FixedPointFormat):
            return _make_scaler(grid, totals)(flat, limits)
        return grid.unpack(flat, [jax.tree.leaves(total)[-1] for total in totals])

    def compile(self, spec: AccumulationSpec, like: Any, check: CancellationCheck) -> None:  # noqa: ANN401 - a tree
        """Compile, for the persistent cache, what depends on the number of hosts in a sum of such a tree."""
        grid, totals = self._grid, describe_totals(spec, like)
        if grid.num_hosts == 1:
            return
        integers, small, large = _group_parts(totals, grid)
        tables = [compile_table([totals[i] for i in positions], grid) for positions in small]
        parts = [*(totals[i] for i in integers), *tables]
        for positions in _group_integers(parts):
            group = [parts[i] for i in positions]
            leaves = jax.tree.leaves(group)
            AllReduce(grid).compile_packed(leaves, check)
            check()
            limits = np.zeros(sum(map(is_exact, group)), np.int32)
            _make_reader(grid, group).lower(grid.abstract_local(leaves), limits).compile()
        sharded = NamedSharding(grid.mesh, P(HOST_AXIS, LOCAL_AXIS))
        for positions in large:
            mine = [totals[i] for i in positions]
            columns = [grid.abstract_pack(column) for column in _list_columns(mine)]
            exchanged = []
            for leaves, column in zip(_list_columns(mine), columns, strict=True):
                check()
                grid.compile_pack(leaves)
                check()
                exchange = _make_exchange(grid.mesh).lower(column)
                exchange.compile()
                found = exchange.out_info
                exchanged.append(jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=sharded))
            check()
            merge = _make_merge(grid.mesh, mine[0].format).lower(exchanged)
            merge.compile()
            slices = jax.ShapeDtypeStruct(merge.out_info.shape, merge.out_info.dtype, sharding=sharded)
            check()
            grid.compile_gather(slices)
            check()
            grid.compile_join_slices(slices, columns[0].shape[1])
            if isinstance(mine[0], FixedPointSum):
                check()
                shapes = [total.limbs[0] for total in mine]
                flat = grid.abstract_local(
                    [jax.ShapeDtypeStruct(like.shape, mine[0].format.float_dtype) for like in shapes]
                )
                _make_scaler(grid, mine).lower(flat, np.zeros(len(mine), np.int32)).compile()


def _group_parts(parts: Sequence[Any], grid: HostGrid) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Return the positions of what goes with integers, in order; of sums, by format, in tables; and in slices."""
    integers, by_format = [], {}
    for position, part in enumerate(parts):
        if is_exact(part):
            by_format.setdefault(part.format, []).append(position)
        else:
            integers.append(position)
    small, large = [], []
    for format, positions in by_format.items():
        totals = [parts[i] for i in positions]
        if isinstance(format, FixedPointFormat):
            is_large = sum(math.prod(total.limbs[0].shape) for total in totals) >= MIN_SLICED_SIZE
            if is_large:
                large.append(positions)
            else:
                integers += positions
        else:
            # A table is replicated over a host's row, and shards are not.
            fits = not grid.in_shards and fits_table(totals, grid.num_hosts)
            (small if fits else large).append(positions)
    return sorted(integers), small, large


def _list_columns(totals: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return, for each array that a total of this format consists of, those of all totals."""
    return list(zip(*map(jax.tree.leaves, totals), strict=True))


def _group_integers(parts: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the positions of integers and sums in fixed point whose integers are of one dtype."""
    return group_by_dtype([jax.tree.leaves(part)[0] for part in parts])


def _make_reader(grid: HostGrid, parts: Sequence[Any]) -> Any:  # noqa: ANN401 - a jitted function
    """Return what reads sums out of what was added up: in one pass, and no memory for integers of each leaf."""
    formats = tuple(part.format if isinstance(part, FixedPointSum) else None for part in parts)
    return make_reader(grid, tuple(map(jnp.shape, jax.tree.leaves(list(parts)))), _make_read(formats))


@functools.cache
def _make_read(formats: tuple[FixedPointFormat | None, ...]) -> Any:  # noqa: ANN401 - a function
    def read(leaves: list[jax.Array], limits: jax.Array) -> list[jax.Array]:
        arrays, totals = iter(leaves), []
        for format in formats:
            integers = tuple(itertools.islice(arrays, 1 if format is None else format.num_limbs))
            totals.append(integers[0] if format is None else FixedPointSum(integers, format))
        return read_total(totals, limits)

    return read


def _make_scaler(grid: HostGrid, totals: Sequence[Any]) -> Any:  # noqa: ANN401 - a jitted function
    """Return what reads sums out of a vector of their units, with their limits."""
    shapes = tuple(total.limbs[0].shape for total in totals)
    return make_reader(grid, shapes, _make_scale(totals[0].format))


@functools.cache
def _make_scale(format: FixedPointFormat) -> Any:  # noqa: ANN401 - a function
    def scale(leaves: list[jax.Array], limits: jax.Array) -> list[jax.Array]:
        return [scale_units(leaf, format, limits[number]) for number, leaf in enumerate(leaves)]

    return scale


def compile_read(spec: AccumulationSpec, like: Any) -> None:  # noqa: ANN401 - a tree
    """Compile, for the persistent cache, what a host alone reads: exact sums, sharded as such a tree."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(like)]
    leaves = list(zip(shardings, describe_totals(spec, like), strict=True))
    totals = [
        jax.tree.map(lambda part, to=to: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=to), total)
        for to, total in leaves
        if is_exact(total)
    ]
    num_limits = sum(isinstance(total, FixedPointSum) for _, total in leaves)
    read_sums.lower(totals, np.zeros(num_limits, np.int32)).compile()


def _make_reduce(mesh: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(LOCAL_AXIS)))
    def reduce(stacked: jax.Array) -> jax.Array:
        return stacked.sum(axis=0)

    return reduce


def _make_exchange(mesh: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    hosts = mesh.shape[HOST_AXIS]

    @jax.jit
    @_over_hosts(mesh)
    def exchange(column: jax.Array) -> jax.Array:
        """[1, n] of each host -> [hosts, n / hosts]: a slice of those of all hosts."""
        size = column.shape[1]
        width = -(-size // hosts)
        rows = jnp.pad(column[0], (0, hosts * width - size)).reshape(hosts, width)
        return jax.lax.all_to_all(rows, HOST_AXIS, 0, 0, tiled=True)

    return exchange


def _make_merge(mesh: Mesh, format: BinnedFormat | FixedPointFormat) -> Any:  # noqa: ANN401 - a jitted function
    @jax.jit
    @_over_hosts(mesh)
    def merge(columns: list[jax.Array]) -> jax.Array:
        """[hosts, n] of each array that totals consist of -> [1, n] of the sums; of limbs in units."""
        return _merge_hosts(columns, format)[None]

    return merge


def _over_hosts(mesh: Mesh) -> Any:  # noqa: ANN401 - a decorator
    """Return what runs a function on each device of all hosts, with its part of each argument."""
    return functools.partial(
        jax.shard_map,
        mesh=mesh.abstract_mesh,  # else its trace would refer to the devices, and be dropped with all others
        in_specs=P(HOST_AXIS, LOCAL_AXIS),
        out_specs=P(HOST_AXIS, LOCAL_AXIS),
        check_vma=False,
    )


def _merge_hosts(columns: Sequence[jax.Array], format: BinnedFormat | FixedPointFormat) -> jax.Array:
    """Return the sums, from [hosts, n] of each array that their totals consist of."""
    if isinstance(format, FixedPointFormat):
        return read_units(FixedPointSum(tuple(column.sum(axis=0) for column in columns), format))
    *slots, top = columns
    totals = [BinnedSum(tuple(slot[host] for slot in slots), top[host], format) for host in range(len(top))]
    return read_binned(functools.reduce(merge_binned, totals))


# Programs compiled ahead for other worlds are not cached here: they would refer to their meshes after `clear_caches`.
_reduce = functools.lru_cache(MAX_GRIDS)(_make_reduce)
_exchange = functools.lru_cache(MAX_GRIDS)(_make_exchange)
_merge = functools.lru_cache(MAX_GRIDS)(_make_merge)


def clear_caches() -> None:
    """Drop every cached program and mesh, before their devices are destroyed."""
    host_grid.clear_caches()
    resharding.clear_caches()
    binned_table.clear_caches()
    for cache in (_reduce, _exchange, _merge):
        cache.cache_clear()
