"""Sums of pytrees over the live hosts: in the fastest order, or in an order that never changes.

For G bytes of tree on H hosts:

- `AllReduce`: one all-reduce. Traffic about 2 G a host, memory G.
- `OrderedAllReduce`: a reduce-scatter in a fixed order and an all-gather. Each host has the totals of at most M units.
  They are split into H slices; each host receives its slice of every unit, adds the slices in unit order, and
  all hosts gather the sums. Each host sends (M + 1) G (H - 1) / H; memory 2 M G. The result depends on the units only,
  neither on H nor on which host has which unit: the same bits after any failure.

The programs depend on which hosts are alive, and compile in milliseconds, whatever the model. Each has one collective
and is awaited: gloo may otherwise end the process when a peer dies (see jax_runtime's README).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.step import host_grid, resharding
from resilient_jax.step.host_grid import HOST_AXIS, LOCAL_AXIS, HostGrid, group_by_dtype

Tree = TypeVar("Tree")


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
            total = self._grid.to_local(_reduce(self._grid.mesh)(self._grid.pack(origins)))
            for position, leaf in zip(positions, self._grid.unpack(total, origins), strict=True):
                totals[position] = leaf
        return jax.tree.unflatten(treedef, totals)

    def compile(self, like: Any, check: CancellationCheck) -> None:  # noqa: ANN401 - a tree
        """Compile, for the persistent cache, what depends on the number of hosts in a sum of such a tree."""
        leaves = jax.tree.leaves(like)
        for positions in group_by_dtype(leaves) if self._grid.num_hosts > 1 else ():
            check()
            packed = self._grid.abstract_pack([leaves[i] for i in positions])
            _make_reduce(self._grid.mesh).lower(packed).compile()


class OrderedAllReduce:
    """Adds the units of one step in the order of their numbers, whichever hosts own them."""

    def __init__(self, grid: HostGrid) -> None:
        self._grid = grid

    def __call__(self, parts: Mapping[int, Tree], owners: Sequence[int], like: Tree) -> Tree:
        """Return the sum over all units of each leaf, with the sharding of the leaf of `like`.

        Args:
            parts: the totals of the units that this host owns, by unit; leaves as in `like`. Floats of fewer than 32
                bits are added in float32 and rounded once.
            owners: of each unit, the index of its host among the live hosts; the same on every host.
            like: a tree with the shapes, dtypes and shardings of a total.
        """
        # No shortcut for a single host, as above: its units, too, must be added in their order for the same bits.
        grid = self._grid
        slots = [[u for u, owner in enumerate(owners) if owner == host] for host in range(grid.num_hosts)]
        # Host h sends `width` rows, its units in order, so unit u is row owner_u width + (its position on its owner).
        width = max(map(len, slots))
        where = np.array([owner * width + slots[owner].index(u) for u, owner in enumerate(owners)], np.int32)
        origins, treedef = jax.tree.flatten(like)
        columns = [jax.tree.leaves(parts[unit]) for unit in slots[grid.host_index]]
        totals: list[Any] = [None] * len(origins)
        for positions in group_by_dtype(origins):
            rows = [grid.pack([column[i] for i in positions]) for column in columns]
            if not rows:  # more hosts than units
                rows = [grid.pack([np.zeros(origins[i].shape, origins[i].dtype) for i in positions])]
            # A host with fewer units than others pads with slices that are never read.
            slices = _add_in_order(grid.mesh)(rows + rows[:1] * (width - len(rows)), where)
            jax.block_until_ready(slices)
            flat = grid.join_slices(grid.gather(slices), rows[0].shape[1])
            found = grid.unpack(flat, [origins[i] for i in positions])
            for position, leaf in zip(positions, found, strict=True):
                totals[position] = leaf
        return jax.tree.unflatten(treedef, totals)

    def compile(self, num_units: int, width: int, like: Any, check: CancellationCheck) -> None:  # noqa: ANN401 - a tree
        """Compile, for the persistent cache, what depends on the number of hosts in a sum of `num_units` units, if no
        host owns more than `width`.
        """
        grid, leaves = self._grid, jax.tree.leaves(like)
        sharded = NamedSharding(grid.mesh, P(HOST_AXIS, LOCAL_AXIS))
        for positions in group_by_dtype(leaves):
            row = grid.abstract_pack([leaves[i] for i in positions])
            check()
            add = _make_add_in_order(grid.mesh).lower([row] * width, np.zeros(num_units, np.int32))
            add.compile()
            slices = jax.ShapeDtypeStruct(add.out_info.shape, add.out_info.dtype, sharding=sharded)
            check()
            grid.compile_gather(slices)
            check()
            grid.compile_join_slices(slices, row.shape[1])


def _make_reduce(mesh: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(LOCAL_AXIS)))
    def reduce(stacked: jax.Array) -> jax.Array:
        return stacked.sum(axis=0)

    return reduce


def _make_add_in_order(mesh: Mesh) -> Any:  # noqa: ANN401 - a jitted function
    hosts = mesh.shape[HOST_AXIS]

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh.abstract_mesh,  # else its trace would refer to the devices, and be dropped with all others
        in_specs=(P(HOST_AXIS, LOCAL_AXIS), P()),
        out_specs=P(HOST_AXIS, LOCAL_AXIS),
        check_vma=False,
    )
    def add_in_order(units: list[jax.Array], where: jax.Array) -> jax.Array:
        """[1, n] of each own unit, and the position of each of all units -> [1, n / hosts]: a slice of the sum."""
        # [slots, n] -> all-to-all -> [hosts slots, n / hosts]: this host's slice of every row of every host. The sum
        # row where[0] + row where[1] + ... has the order of the units, whatever the number of hosts.
        mine = jnp.concatenate(units)
        slots, size = mine.shape
        sliced = jnp.pad(mine, ((0, 0), (0, -size % hosts))).reshape(slots, hosts, -1)
        rows = jax.lax.all_to_all(sliced, HOST_AXIS, split_axis=1, concat_axis=0, tiled=True)[:, 0]
        is_narrow = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize < 4
        wide = jnp.float32 if is_narrow else rows.dtype
        total = jax.lax.fori_loop(
            1,
            where.shape[0],
            lambda unit, total: total + rows[where[unit]].astype(wide),
            rows[where[0]].astype(wide),
        )
        return total.astype(rows.dtype)[None]

    return add_in_order


# Programs compiled ahead for other worlds are not cached here: they would refer to their meshes after `clear_caches`.
_reduce = functools.cache(_make_reduce)
_add_in_order = functools.cache(_make_add_in_order)


def clear_caches() -> None:
    """Drop every cached program and mesh, before their devices are destroyed."""
    host_grid.clear_caches()
    resharding.clear_caches()
    for cache in (_reduce, _add_in_order):
        cache.cache_clear()
