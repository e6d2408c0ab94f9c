"""Sums of pytrees over the live hosts: of floats by an all-reduce, or of exact totals.

For G bytes of float32 on H hosts, a host sends

- `AllReduce`: 2 G (H - 1) / H, by one all-reduce.
- `ExactReduce`: (9 / 4 + 1) G (H - 1) / H. A total has 9 bytes for each element. It is split into H slices; each host
  receives its slice of every host's total, merges them, reads the sums as floats, and all hosts gather these. The
  result depends neither on H nor on which host has which microbatch: the same bits after any failure.

The programs depend on which hosts are alive, and compile in milliseconds, whatever the model. Each has one collective
and is awaited, on a thread that can be given up (see jax_runtime's README).
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.step import host_grid, resharding
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.exact_sum import ExactFormat, ExactSum, merge_exactly, read_exact_sum
from resilient_jax.step.host_grid import HOST_AXIS, LOCAL_AXIS, HostGrid, group_by_dtype
from resilient_jax.step.running_total import is_exact, join_complex, read_total

Tree = TypeVar("Tree")
WORD_BYTES = 4
"""What hosts exchange is cut into int32: `top` has a byte for each element."""


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
            total = collective_thread.run(_reduce(self._grid.mesh), self._grid.pack(origins))
            found = self._grid.unpack(self._grid.to_local(total), origins)
            for position, leaf in zip(positions, found, strict=True):
                totals[position] = leaf
        return jax.tree.unflatten(treedef, totals)

    def compile(self, like: Any, check: CancellationCheck) -> None:  # noqa: ANN401 - a tree
        """Compile, for the persistent cache, what depends on the number of hosts in a sum of such a tree."""
        leaves = jax.tree.leaves(like)
        for positions in group_by_dtype(leaves) if self._grid.num_hosts > 1 else ():
            check()
            packed = self._grid.abstract_pack([leaves[i] for i in positions])
            _make_reduce(self._grid.mesh).lower(packed).compile()


class ExactReduce:
    """Merges the exact totals of the hosts of one generation, and reads the sums."""

    def __init__(self, grid: HostGrid) -> None:
        self._grid = grid

    def __call__(self, total: Any, like: Tree) -> Tree:  # noqa: ANN401 - a tree of totals
        """Return the sums of all hosts' totals, with the dtypes and shardings of the leaves of `like`."""
        origins, treedef = jax.tree.flatten(like)
        parts = treedef.flatten_up_to(total)
        sums: list[Any] = [None] * len(origins)
        for positions in _group_by_format(parts):
            mine, like_these = [parts[i] for i in positions], [origins[i] for i in positions]
            found = self._reduce_exactly(mine) if is_exact(mine[0]) else AllReduce(self._grid)(mine)
            for position, origin, leaf in zip(positions, like_these, found, strict=True):
                dtype = jnp.result_type(origin)  # in 32 bits, of 64, unless JAX has these enabled
                joined = join_complex(leaf, dtype) if leaf.dtype != dtype else leaf
                sums[position] = host_grid.reshard_like(origin, joined)
        return jax.tree.unflatten(treedef, sums)

    def _reduce_exactly(self, totals: Sequence[ExactSum]) -> list[jax.Array]:
        grid = self._grid
        if grid.num_hosts == 1:
            return _read(list(totals))
        columns = [grid.pack([total.slots[k] for total in totals]) for k in range(totals[0].format.num_slots)]
        columns.append(grid.pack([total.top for total in totals]))
        slices = collective_thread.run(_merge_slices(grid.mesh, totals[0].format), columns)
        gathered = grid.gather(slices)
        return grid.unpack(grid.join_slices(gathered, columns[0].shape[1]), [total.top for total in totals])

    def compile(self, spec: AccumulationSpec, like: Any, check: CancellationCheck) -> None:  # noqa: ANN401 - a tree
        """Compile, for the persistent cache, what depends on the number of hosts in a sum of such a tree."""
        grid, totals = self._grid, [_abstract_total(spec, leaf) for leaf in jax.tree.leaves(like)]
        if grid.num_hosts == 1:
            return
        sharded = NamedSharding(grid.mesh, P(HOST_AXIS, LOCAL_AXIS))
        for positions in _group_by_format(totals):
            mine = [totals[i] for i in positions]
            if not is_exact(mine[0]):
                AllReduce(grid).compile(mine, check)
                continue
            columns = [grid.abstract_pack([total.slots[0] for total in mine])] * mine[0].format.num_slots
            columns.append(grid.abstract_pack([total.top for total in mine]))
            check()
            merge = _make_merge_slices(grid.mesh, mine[0].format).lower(columns)
            merge.compile()
            slices = jax.ShapeDtypeStruct(merge.out_info.shape, merge.out_info.dtype, sharding=sharded)
            check()
            grid.compile_gather(slices)
            check()
            grid.compile_join_slices(slices, columns[0].shape[1])


def _group_by_format(parts: Sequence[Any]) -> list[list[int]]:
    """Return the positions of parts that are reduced together: exact sums of one format, arrays of one dtype."""
    groups: dict[Any, list[int]] = {}
    for position, part in enumerate(parts):
        groups.setdefault(part.format if is_exact(part) else part.dtype, []).append(position)
    return list(groups.values())


def _abstract_total(spec: AccumulationSpec, leaf: Any) -> Any:  # noqa: ANN401 - an array or its shape
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    shape = (*leaf.shape, 2) if is_complex else leaf.shape
    real = jnp.finfo(leaf.dtype).dtype
    format = ExactFormat.for_addends(real, spec.num_microbatches)
    slots = tuple(jax.ShapeDtypeStruct(shape, format.integer_dtype) for _ in range(format.num_slots))
    return ExactSum(slots, jax.ShapeDtypeStruct(shape, jnp.int8), format)  # pyright: ignore[reportArgumentType]


@jax.jit
def _read(totals: list[ExactSum]) -> list[jax.Array]:
    return read_total(totals)


def _make_reduce(mesh: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(LOCAL_AXIS)))
    def reduce(stacked: jax.Array) -> jax.Array:
        return stacked.sum(axis=0)

    return reduce


def _make_merge_slices(mesh: Mesh, format: ExactFormat) -> Any:  # noqa: ANN401 - a jitted function
    hosts, num_slots = mesh.shape[HOST_AXIS], format.num_slots

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh.abstract_mesh,  # else its trace would refer to the devices, and be dropped with all others
        in_specs=P(HOST_AXIS, LOCAL_AXIS),
        out_specs=P(HOST_AXIS, LOCAL_AXIS),
        check_vma=False,
    )
    def merge_slices(columns: list[jax.Array]) -> jax.Array:
        """K times [1, n] of slots and [1, n] of tops -> [1, n / hosts]: a slice of the sums."""
        size = columns[0].shape[1]
        width = -(-size // (hosts * WORD_BYTES)) * WORD_BYTES  # of a slice: its tops fill whole words
        cut = [jnp.pad(column[0], (0, hosts * width - size)).reshape(hosts, width) for column in columns]
        words = [_to_words(column) for column in cut]
        # One collective for all: [hosts, words], a row for each host -> the rows that all hosts have for this one.
        rows = jax.lax.all_to_all(jnp.concatenate(words, axis=1), HOST_AXIS, 0, 0, tiled=True)
        ends = np.cumsum([part.shape[1] for part in words])
        found = [
            _from_words(part, column.dtype)
            for part, column in zip(jnp.split(rows, ends[:-1], axis=1), cut, strict=True)
        ]
        totals = [
            ExactSum(tuple(column[host] for column in found[:num_slots]), found[-1][host], format)
            for host in range(hosts)
        ]
        return read_exact_sum(functools.reduce(merge_exactly, totals))[None]

    return merge_slices


def _to_words(rows: jax.Array) -> jax.Array:
    """Return [hosts, n] integers of any size as int32, n a multiple of `WORD_BYTES`."""
    if rows.dtype.itemsize < WORD_BYTES:
        rows = rows.reshape(rows.shape[0], -1, WORD_BYTES // rows.dtype.itemsize)
    return jax.lax.bitcast_convert_type(rows, jnp.int32).reshape(rows.shape[0], -1)


def _from_words(words: jax.Array, dtype: Any) -> jax.Array:  # noqa: ANN401 - what jnp takes for a dtype
    if jnp.dtype(dtype).itemsize > WORD_BYTES:
        words = words.reshape(words.shape[0], -1, jnp.dtype(dtype).itemsize // WORD_BYTES)
    return jax.lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)


# Programs compiled ahead for other worlds are not cached here: they would refer to their meshes after `clear_caches`.
_reduce = functools.cache(_make_reduce)
_merge_slices = functools.cache(_make_merge_slices)


def clear_caches() -> None:
    """Drop every cached program and mesh, before their devices are destroyed."""
    host_grid.clear_caches()
    resharding.clear_caches()
    for cache in (_reduce, _merge_slices):
        cache.cache_clear()
