"""Small sums in bins of all hosts as one table of integers, which an all-reduce of other integers takes along.

Sums in bins are not added up by adding their integers, so each host needs those of all others. A table has a row for
each host; a host fills in its own, and the sum of all tables is the table of all rows. While it is small it costs less
than collectives of its own. It has some rows to spare, of zeros, which are sums of nothing: so the programs are mostly
the same with fewer hosts.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.step.binned_sum import BinnedSum, merge_binned, read_binned
from resilient_jax.step.host_grid import HostGrid

MIN_ROWS: Final = 8
MAX_TABLE_SIZE: Final = 2**16
"""Numbers of a table; more are merged in slices, each by one host."""


def fits_table(totals: Sequence[Any], num_hosts: int) -> bool:
    """Return whether totals of one format, arrays or their shapes, are few enough for a table."""
    return _count_rows(num_hosts) * sum(map(_count_numbers, totals)) <= MAX_TABLE_SIZE


def make_table(totals: Sequence[BinnedSum], grid: HostGrid) -> jax.Array:
    """Return [rows, n] on this host's devices: totals of one format in this host's row, zeros elsewhere."""
    here = jax.device_put(list(totals), NamedSharding(grid.local_mesh, P()))
    return _make(grid.local_mesh, _count_rows(grid.num_hosts))(here, np.int32(grid.host_index))


def read_table(table: jax.Array, totals: Sequence[BinnedSum], grid: HostGrid) -> list[jax.Array]:
    """Return the sums of all rows as floats; `totals` are those of which this host's row was made."""
    return _read(grid.local_mesh, totals[0].format, tuple(total.top.shape for total in totals))(table)


def compile_table(totals: Sequence[Any], grid: HostGrid) -> jax.ShapeDtypeStruct:
    """Compile both programs for totals of these shapes; return the shape of the table."""
    here = NamedSharding(grid.local_mesh, P())
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), totals)
    made = _make(grid.local_mesh, _count_rows(grid.num_hosts)).lower(abstract, np.int32(0))
    made.compile()
    table = jax.ShapeDtypeStruct(made.out_info.shape, made.out_info.dtype, sharding=here)
    shapes = tuple(total.top.shape for total in totals)
    _read(grid.local_mesh, totals[0].format, shapes).lower(table).compile()
    return table


def _count_rows(num_hosts: int) -> int:
    """Return the rows of a table: a power of 2, so that the loss of a host seldom compiles programs again."""
    return max(MIN_ROWS, 1 << (num_hosts - 1).bit_length())


def _count_numbers(total: Any) -> int:  # noqa: ANN401 - a total or its shapes
    return (total.format.num_slots + 1) * int(np.prod(total.top.shape))


@functools.cache
def _make(local: Mesh, num_rows: int) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(local, P()))
    def make(totals: list[BinnedSum], host_index: jax.Array) -> jax.Array:
        format = totals[0].format
        # Counted from the lowest bin: then zeros are the total of nothing.
        tops = [total.top.astype(jnp.int32) - format.lowest_bin for total in totals]
        columns = [[total.slots[k] for total in totals] for k in range(format.num_slots)]
        row = jnp.concatenate(
            [part.reshape(-1).astype(format.integer_dtype) for column in (*columns, tops) for part in column]
        )
        return jnp.zeros((num_rows, row.size), row.dtype).at[host_index].set(row)

    return make


@functools.cache
def _read(local: Mesh, format: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(local, P()))
    def read(table: jax.Array) -> list[jax.Array]:
        *slots, top = jnp.split(table, format.num_slots + 1, axis=1)
        of_hosts = BinnedSum(tuple(slots), (top + format.lowest_bin).astype(jnp.int8), format)
        first, others = (
            jax.tree.map(lambda part, rows=rows: part[rows], of_hosts) for rows in (0, np.s_[1:])
        )
        # A loop, because with many hosts the program would be long.
        total, _ = jax.lax.scan(lambda one, other: (merge_binned(one, other), None), first, others)
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        parts = jnp.split(read_binned(total), ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    return read


def clear_caches() -> None:
    """Drop every cached program and mesh, before their devices are destroyed."""
    for cache in (_make, _read):
        cache.cache_clear()
