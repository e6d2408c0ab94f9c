"""Replicated copies of a tree that is sharded over hosts, and the way back.

`replicate_tree` concatenates the shards of each device, exchanges them between hosts in one all-gather for each dtype,
and joins the leaves from the result. `shard_tree` takes each device's shards out of copies that its host has, without
communication. The other programs are on one host's devices and depend on the number of the other hosts only; each has
one collective at most and is awaited (see jax_runtime's README).

Memory, for P bytes of tree: while replicating each device holds 2 P, afterwards P.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.sharding.placements import Placement
from resilient_jax.sharding.raveled_array import (
    RaveledArray,
    compute_padded_size,
    is_raveled,
    ravel_array,
)
from resilient_jax.step.host_grid import HOST_AXIS, LOCAL_AXIS, HostGrid, pack_shards, stack_shards

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, slots=True)
class ShardGrid:
    """How one leaf is sharded: a grid of shards of one shape.

    Attributes:
        shape: the leaf's; if it is raveled, that of its padded vector.
        shard_shape: the shards are equal, since axes divide the dims that they shard.
        shard_holders: number of a device that has the shard, for each shard in C order.
        raveled_shape: the shape that a raveled leaf represents; None: it is not raveled.
    """

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    shard_holders: tuple[int, ...]
    raveled_shape: tuple[int, ...] | None = None

    def join_shards(self, rows: jax.Array) -> jax.Array:
        """Return the leaf from [devices, elements of a shard]."""
        # In the common case device i has shard i, and no gather is compiled.
        if self.shard_holders != tuple(range(rows.shape[0])):
            rows = rows[np.array(self.shard_holders)]
        counts = [whole // part for whole, part in zip(self.shape, self.shard_shape, strict=True)]
        ndim = len(counts)
        # [c_0, .., c_n, s_0, .., s_n] -> [c_0, s_0, c_1, s_1, ..] -> [c_0 s_0, c_1 s_1, ..]: the position along a dim
        # is (index of the shard) x (its size) + (index in the shard).
        boxes = rows.reshape(*counts, *self.shard_shape)
        joined = boxes.transpose([axis for dim in range(ndim) for axis in (dim, ndim + dim)]).reshape(
            self.shape
        )
        if self.raveled_shape is None:
            return joined
        return joined[: math.prod(self.raveled_shape)].reshape(self.raveled_shape)


def compute_shard_grid(
    sharding: NamedSharding, shape: tuple[int, ...], devices: Sequence[Device]
) -> ShardGrid | None:
    """Return how a leaf is sharded over `devices`, numbered in their order; None: together they lack a shard of it."""
    starts = _list_starts(sharding, shape)
    holder_of: dict[tuple[int, ...], int] = {}
    for number, device in enumerate(devices):
        holder_of.setdefault(starts[device], number)
    if len(holder_of) < len(set(starts.values())):
        return None
    # Start indexes in ascending order are the C order of the grid.
    return ShardGrid(
        shape, sharding.shard_shape(shape), tuple(holder_of[start] for start in sorted(holder_of))
    )


def replicate_tree(tree: Tree, local_sharding: NamedSharding) -> Tree:
    """Return replicated copies of leaves that are sharded over hosts, or over this host's devices; none is raveled.

    Every host must call it. Leaves that are replicated already are not copied: they share their memory with the tree's.

    Args:
        tree: arrays on one mesh over all live hosts.
        local_sharding: how copies are placed: replicated over this host's devices.
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_raveled)
    copies: list[Any] = [node.vector if is_raveled(node) else node for node in nodes]
    for (_, is_here), members in _group_sharded(nodes, _locate).items():
        grid = _grid(copies[members[0][0]].sharding.mesh)
        row = pack_shards(grid.local_mesh)(
            [stack_shards(copies[position], grid.local_mesh) for position, _ in members]
        )
        rows = row if is_here else grid.gather(_as_row(row, grid))
        joined = _join(grid.local_mesh, tuple(shard_grid for _, shard_grid in members))(rows)
        for (position, _), leaf in zip(members, joined, strict=True):
            copies[position] = leaf
    copies = [replicate_over(leaf, local_sharding) for leaf in copies]
    jax.block_until_ready(copies)
    return jax.tree.unflatten(treedef, copies)


def compile_replicate(tree: Any, grid: HostGrid, check: CancellationCheck) -> None:  # noqa: ANN401 - a tree
    """Compile what `replicate_tree` calls for a tree with these shapes, dtypes and shardings.

    Args:
        tree: as `abstract_shards` returns it.
        grid: rows of the devices of the tree's mesh.
        check: raises if compiling is to end.
    """
    nodes, local = jax.tree.leaves(tree, is_leaf=is_raveled), grid.local_mesh
    # Not by `_locate`, which would keep what it finds for a mesh that may never be used.
    groups = _group_sharded(nodes, functools.partial(_locate_on, grid))
    for (dtype, is_here), members in groups.items():
        shard_grids = tuple(shard_grid for _, shard_grid in members)
        shapes = [shard_grid.shard_shape for shard_grid in shard_grids]
        stacked = NamedSharding(local, P(LOCAL_AXIS))
        check()
        pack_shards(local).lower(
            [
                jax.ShapeDtypeStruct((local.size * first, *others), dtype, sharding=stacked)
                for first, *others in shapes
            ]
        ).compile()
        width = local.size * sum(map(math.prod, shapes))
        if not is_here:
            check()
            across = NamedSharding(grid.mesh, P(HOST_AXIS, LOCAL_AXIS))
            grid.compile_gather(jax.ShapeDtypeStruct((grid.num_hosts, width), dtype, sharding=across))
        rows = jax.ShapeDtypeStruct(
            (1 if is_here else grid.num_hosts, width),
            dtype,
            sharding=NamedSharding(local, P(None, LOCAL_AXIS)),
        )
        check()
        _join(local, shard_grids).lower(rows).compile()


def _group_sharded(
    nodes: Sequence[Any],
    locate: Callable[[NamedSharding, tuple[int, ...]], tuple[ShardGrid, bool]],
) -> dict[tuple[Any, bool], list[tuple[int, ShardGrid]]]:
    """Return the positions and shards of the leaves that are to be joined.

    By dtype, because a dtype is one vector; and apart what this host has all shards of, which takes no collective.
    """
    groups: dict[tuple[Any, bool], list[tuple[int, ShardGrid]]] = {}
    for position, node in enumerate(nodes):
        leaf, shape = (node.vector, node.shape) if is_raveled(node) else (node, None)
        if leaf.sharding.is_fully_replicated and shape is None:
            continue
        shard_grid, is_here = locate(leaf.sharding, leaf.shape)
        shard_grid = dataclasses.replace(shard_grid, raveled_shape=shape)
        groups.setdefault((leaf.dtype, is_here), []).append((position, shard_grid))
    return groups


def shard_tree(tree: Tree, placement: Placement, raveled: Sequence[bool] | None = None) -> Tree:
    """Return the tree with the shardings of `placement`, from copies that every host has, without communication.

    Leaves that stay replicated are not copied: they share their memory with the tree's.

    Args:
        tree: arrays that are replicated over this host's devices, the same on every host.
        placement: on a mesh with devices, those of all live hosts.
        raveled: whether to return a leaf raveled, for each leaf in the tree's order; None: no leaf.
    """
    assert isinstance(placement.mesh, Mesh), "a placement without devices is for traced programs"
    grid = _grid(placement.mesh)
    leaves, treedef = jax.tree.flatten(tree)
    targets = _choose_targets(tree, placement, raveled)
    cuts = {position: target for position, target in enumerate(targets) if target.is_cut}
    here = tuple(grid.local_mesh.devices.flat)
    local = NamedSharding(grid.local_mesh, P())
    leaves = [
        _narrow(leaf, local) if target.is_cut else replicate_over(leaf, target.sharding)
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    # Of each device: where its shard starts. Each device of this host gets one row of these.
    starts = [np.array([cut.starts[device] for device in here], np.int32) for cut in cuts.values()]
    program = _cut(grid.local_mesh, tuple(cut.key for cut in cuts.values()))
    stacks = program([leaves[position] for position in cuts], starts) if cuts else []
    for (position, cut), stack in zip(cuts.items(), stacks, strict=True):
        shards = [shard.data for shard in stack.addressable_shards]
        array = jax.make_array_from_single_device_arrays(cut.shape, cut.sharding, shards)
        leaves[position] = RaveledArray(array, leaves[position].shape) if cut.is_vector else array
    return jax.tree.unflatten(treedef, leaves)


def compile_shard(
    tree: Any,  # noqa: ANN401 - a tree
    placement: Placement,
    raveled: Sequence[bool] | None,
    grid: HostGrid,
    check: CancellationCheck,
) -> None:
    """Compile what `shard_tree` calls for a tree with these shapes, dtypes and shardings.

    Args:
        tree: shapes, dtypes and shardings.
        placement: one on the mesh of the grid.
        raveled: see `shard_tree`.
        grid: rows of the devices of that mesh.
        check: raises if compiling is to end.
    """
    targets = _choose_targets(tree, placement, raveled)
    cuts = [(leaf, one) for leaf, one in zip(jax.tree.leaves(tree), targets, strict=True) if one.is_cut]
    if cuts:
        starts = [jax.ShapeDtypeStruct((grid.local_mesh.size, len(cut.shape)), np.int32) for _, cut in cuts]
        check()
        _cut(grid.local_mesh, tuple(cut.key for _, cut in cuts)).lower(
            [leaf for leaf, _ in cuts], starts
        ).compile()


def abstract_shards(tree: Any, placement: Placement, raveled: Sequence[bool] | None = None) -> Any:  # noqa: ANN401 - trees
    """Return the shapes, dtypes and shardings of what `shard_tree` returns for a tree of these shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    shapes: list[Any] = []
    for leaf, target in zip(leaves, _choose_targets(tree, placement, raveled), strict=True):
        array = jax.ShapeDtypeStruct(target.shape, leaf.dtype, sharding=target.sharding)
        shapes.append(RaveledArray(array, leaf.shape) if target.is_vector else array)
    return jax.tree.unflatten(treedef, shapes)


def _choose_targets(
    tree: Any,  # noqa: ANN401 - a tree
    placement: Placement,
    raveled: Sequence[bool] | None,
) -> list["_Target"]:
    targets = []
    for position, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        is_vector = raveled is not None and raveled[position]
        sharding = placement(jax.tree_util.keystr(path), _ravel_abstract(leaf) if is_vector else leaf)
        targets.append(_Target.of(leaf.shape, sharding, is_vector=is_vector))
    return targets


def _ravel_abstract(leaf: Any) -> RaveledArray:  # noqa: ANN401 - an array or its shape
    return ravel_array(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """How `shard_tree` returns a leaf.

    Attributes:
        sharding: the leaf's; if it is to be raveled, that of its vector.
        shape: the leaf's; if it is to be raveled, that of its padded vector.
        is_vector: whether the leaf is to be raveled.
    """

    sharding: NamedSharding
    shape: tuple[int, ...]
    is_vector: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], sharding: NamedSharding, *, is_vector: bool) -> "_Target":
        if is_vector:
            shape = (compute_padded_size(shape, sharding.mesh.size),)
        return cls(sharding, shape, is_vector)

    @property
    def is_cut(self) -> bool:
        """Whether the shards are cut out of the leaf; else it stays replicated."""
        return self.is_vector or not self.sharding.is_fully_replicated

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """What the program that cuts depends on: the shape, the shape of a shard, whether to ravel."""
        return self.shape, self.sharding.shard_shape(self.shape), self.is_vector

    @property
    def starts(self) -> dict[Device, tuple[int, ...]]:
        """The index at which each device's shard begins."""
        return _get_starts(self.sharding, self.shape)


def replicate_over(leaf: jax.Array, where: NamedSharding) -> jax.Array:
    """Return a replicated leaf, replicated over these devices of this host; copied to those alone that lack it."""
    if leaf.sharding == where:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = replicate_over(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
    # In a world of hosts with different numbers of devices this host may have more than its row of the grid.
    copies = [
        by_device[device] if device in by_device else jax.device_put(leaf.addressable_data(0), device)
        for device in where.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, where, copies)


def _narrow(leaf: Any, local: NamedSharding) -> Any:  # noqa: ANN401 - an array
    """Return a leaf on the devices of this host's row alone, of which others may have fewer; it has a copy on each."""
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set > local.device_set:
        return replicate_over(leaf, local)
    return leaf


def _as_row(row: jax.Array, grid: HostGrid) -> jax.Array:
    """Return [1, n] of this host as its row of [hosts, n]."""
    return jax.make_array_from_single_device_arrays(
        (grid.num_hosts, row.shape[1]),
        NamedSharding(grid.mesh, P(HOST_AXIS, LOCAL_AXIS)),
        [shard.data for shard in row.addressable_shards],
    )


@functools.cache
def _grid(mesh: Mesh) -> HostGrid:
    return HostGrid(list(mesh.devices.flat), jax.process_index())


def _list_starts(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Device, tuple[int, ...]]:
    """Return the index at which each device's shard of a leaf begins."""
    return {
        device: tuple(cut.indices(size)[0] for cut, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _locate_on(grid: HostGrid, sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[ShardGrid, bool]:
    """Return a leaf's shards, and whether this host has all: then they are numbered by its devices alone."""
    here = compute_shard_grid(sharding, shape, list(grid.local_mesh.devices.flat))
    if here is not None:
        return here, True
    everywhere = compute_shard_grid(sharding, shape, list(grid.mesh.devices.flat))
    assert everywhere is not None, "all devices of a mesh together have every shard"
    return everywhere, False


@functools.cache
def _locate(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[ShardGrid, bool]:
    """See `_locate_on`."""
    return _locate_on(_grid(sharding.mesh), sharding, shape)


_get_starts = functools.cache(_list_starts)


@functools.cache
def _join(local: Mesh, leaves: tuple[ShardGrid, ...]) -> Any:  # noqa: ANN401 - a jitted function
    everywhere = NamedSharding(local, P())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def join(rows: jax.Array) -> list[jax.Array]:
        """Join the leaves from [hosts, devices x elements], which is sharded over this host's devices."""
        rows = jax.lax.with_sharding_constraint(rows, everywhere)  # once, and not for each leaf
        by_device = rows.reshape(rows.shape[0] * local.size, -1)
        joined, start = [], 0
        for shard_grid in leaves:
            size = math.prod(shard_grid.shard_shape)
            joined.append(shard_grid.join_shards(by_device[:, start : start + size]))
            start += size
        return joined

    return join


@functools.cache
def _cut(local: Mesh, cuts: tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]) -> Any:  # noqa: ANN401 - a jitted function
    """Return this host's shards; their start indexes are arguments, so that all hosts compile the same program.

    Args:
        local: this host's devices.
        cuts: (shape, shape of a shard, whether to ravel) of each leaf; the shape of one to be raveled is its vector's.
    """

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=local.abstract_mesh,
        in_specs=(P(), P(LOCAL_AXIS)),
        out_specs=P(LOCAL_AXIS),
        check_vma=False,
    )
    def cut(leaves: list[jax.Array], starts: list[jax.Array]) -> list[jax.Array]:
        shards = []
        for leaf, start, (shape, shard_shape, is_vector) in zip(leaves, starts, cuts, strict=True):
            whole = jnp.pad(leaf.reshape(-1), (0, shape[0] - leaf.size)) if is_vector else leaf
            shards.append(jax.lax.dynamic_slice(whole, list(start[0]), shard_shape))
        return shards

    return cut


def clear_caches() -> None:
    """Drop every cached program, mesh and sharding, before their devices are destroyed."""
    for cache in (_grid, _get_starts, _locate, _join, _cut):
        cache.cache_clear()
