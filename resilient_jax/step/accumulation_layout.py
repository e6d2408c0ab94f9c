"""How the leaves of a sum are on the hosts: whole on each, or in shards on the hosts of a replica.

What a replica on several hosts computes of a microbatch may be sharded over them: gradients of weights that no host has
whole. Then each host adds up its own shards of all its microbatches, *stacked* along dim 0 and each on its device,
which needs no other host. The hosts with the same *rank* in their replicas have the same shards, and add up their
totals. What is whole, such as the loss, all hosts add up: of each replica the host with rank 0 counts.

The two collectives have an order: shards first. So a host that has the sum of what is whole knows that every host has
its sums of shards.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import CallerError, PeerUnreachable
from resilient_jax.state.flat_state import is_in_shards
from resilient_jax.step.assignment import AccumulationSpec, ReplicaLocation, list_holders
from resilient_jax.step.contributions import Contributions
from resilient_jax.step.fixed_point_sum import FIT_WORDS, FixedPointFormat, find_misfits
from resilient_jax.step.host_grid import LOCAL_AXIS, HostGrid, LiveHosts, stack_shards
from resilient_jax.step.quotas import accept_complete_claims, accept_disjoint_claims
from resilient_jax.step.reduction import AllReduce, ExactReduce
from resilient_jax.step.replica_partners import ReplicaPartners
from resilient_jax.step.running_total import (
    choose_format,
    list_fixed_point_paths,
    list_formats,
    merge_totals,
    reshard_total,
    start_total,
)

Tree = Any
"""A pytree of arrays."""
WHOLE_RANKS: Final = 1
"""Of sums without shards: as if each host were the only one of its replica."""


class AccumulationLayout:
    """The layout of one accumulation's sums in one generation.

    Attributes:
        like: the arrays that a total is added up in, on this host's devices: as `zeros`, or stacked shards.
        has_shards: whether any leaf is in shards; the same on all hosts.
        rank: number of this host among those of its replica; 0 without shards; None: the host is in no replica.
    """

    def __init__(
        self, spec: AccumulationSpec, zeros: Tree, locations: Sequence[ReplicaLocation], live: LiveHosts
    ) -> None:
        """Lay out sums.

        Args:
            zeros: arrays that say how the sums are to be: on this host's devices, or on a mesh of all replicas.
        """
        self._spec, self._live = spec, live
        self._zeros, self._treedef = jax.tree.flatten(zeros)
        self._in_shards = [position for position, leaf in enumerate(self._zeros) if is_in_shards(leaf)]
        self.has_shards = bool(self._in_shards)
        self._holders = list_holders(locations)
        ranks = [rank for rank, hosts in enumerate(self._holders) if live.host_index in hosts]
        self.rank = (ranks or [None])[0] if self.has_shards else 0
        self._width = locations[0].devices
        self._own = tuple(live.devices_by_host[live.host_index][: self._width])
        self._local_mesh = Mesh(np.array(self._own), (LOCAL_AXIS,))
        self.like = self._treedef.unflatten(map(self._make_like, self._zeros))
        self.formats = list_formats(spec, self.like)

    @functools.cached_property
    def _holder_grid(self) -> HostGrid:
        """The hosts that have the same shards."""
        assert self.rank is not None
        hosts = self._holders[self.rank]
        devices = [device for host in hosts for device in self._live.devices_by_host[host][: self._width]]
        return HostGrid(devices, self._live.process_indexes[self._live.host_index], in_shards=True)

    def _make_like(self, leaf: jax.Array) -> jax.Array:
        if leaf.is_fully_addressable:
            # One program takes all leaves, so they are on the same devices.
            are_all_here = all(one.is_fully_addressable for one in self._zeros)
            return leaf if are_all_here else jax.device_put(leaf, NamedSharding(self._local_mesh, P()))
        if leaf.addressable_shards:
            return self._to_local(leaf)
        # Of this host nothing comes into the sum, but it must know how the sum is made, and finds that from shapes.
        shape = describe_summand(leaf, self._local_mesh).shape
        return jax.device_put(np.zeros(shape, leaf.dtype), NamedSharding(self._local_mesh, P()))

    def _to_local(self, leaf: jax.Array) -> jax.Array:
        if not leaf.is_fully_replicated:
            return stack_shards(leaf, self._local_mesh)
        copies = [shard.data for shard in leaf.addressable_shards]
        where = NamedSharding(self._local_mesh, P())
        return jax.make_array_from_single_device_arrays(leaf.shape, where, copies)

    def describe(self) -> tuple[Tree, list[Any]]:
        """Return shapes and dtypes of what all hosts add up, and of shards as they are stacked on each host."""
        whole = [position for position in range(len(self._zeros)) if position not in set(self._in_shards)]
        shards = self._select(self.like, self._in_shards) if self.has_shards else []
        return jax.tree.map(_describe, self._select(self.like, whole)), list(map(_describe, shards))

    def to_local(self, result: Tree) -> Tree:
        """Return what a replica on several hosts has computed as this host adds it up.

        Raises:
            CallerError: the result is sharded otherwise than the zeros are.
        """
        leaves = self._treedef.flatten_up_to(result)
        return self._treedef.unflatten(map(self._check_and_localize, leaves, self._zeros))

    def _check_and_localize(self, leaf: jax.Array, zero: jax.Array) -> jax.Array:
        if leaf.is_fully_addressable and not is_in_shards(zero):
            return leaf
        # The mesh of a replica may be on this host alone.
        is_cut = not leaf.is_fully_replicated
        is_alike = is_cut == is_in_shards(zero)
        if is_alike and is_cut:
            # The boxes of this host's devices; a replica's mesh and that of all replicas are never equal.
            found, expected = (one.sharding.devices_indices_map(one.shape) for one in (leaf, zero))
            is_alike = all(found[device] == expected.get(device) for device in self._own)
        if not is_alike:
            raise CallerError(
                f"accumulate_microbatches: found a total of shape {leaf.shape} sharded as {leaf.sharding} by the "
                f"program, expected it as zeros: {zero.sharding}. Give the program out_shardings on replica.mesh with "
                "the same PartitionSpec (P() for what is whole), and zeros on world.mesh(replica_shape)"
            )
        return self._to_local(leaf)

    def accept(self, claims: np.ndarray) -> np.ndarray:
        """Return the claims that count, int[hosts, microbatches]; see `quotas`."""
        return (
            accept_complete_claims(claims, self._holders)
            if self.has_shards
            else accept_disjoint_claims(claims)
        )

    # What all hosts tell about a sum: a row for each rank, since each sees the elements of its own shards.

    @property
    def num_ranks(self) -> int:
        """Rows that are exchanged."""
        return len(self._holders) if self.has_shards else WHOLE_RANKS

    def make_row(self, numbers: np.ndarray) -> np.ndarray:
        """Return [ranks, n] with the numbers in this host's row; the sum of those of all hosts has all rows."""
        rows = np.zeros((self.num_ranks, numbers.size), numbers.dtype)
        if self.rank is not None:
            rows[self.rank] = numbers
        return rows

    def add_up(
        self, contributions: Contributions, partners: ReplicaPartners | None
    ) -> tuple[Tree, list[str]]:
        """Return the sum over all hosts, and the paths of leaves whose limit was wrong. For all hosts at once.

        Args:
            partners: has the hosts with the same shards begin together; None: without.
        """
        spec, limits = self._spec, contributions.limits
        assert limits is not None
        leaves: list[Any] = list(self._zeros)
        totals = [part.total for part in contributions.parts.values() if part.is_counted]
        if self.has_shards and self.rank is not None:
            arguments = self._merge(totals, self._in_shards, limits)
            run = partners.run if partners is not None else _run_alone
            found = run(self._holders[self.rank], self._add_up_shards, *arguments)
            for position, leaf in zip(self._in_shards, found, strict=True):
                leaves[position] = self._restore(leaf, self._zeros[position])
            # Before what is whole is added up: see the order above.
            contributions.shard_sums = jax.block_until_ready([leaves[p] for p in self._in_shards])
        whole = [position for position in range(len(leaves)) if position not in set(self._in_shards)]
        # The hosts of a replica have computed the same.
        total, like, own_limits = self._merge(totals if self.rank == 0 else [], whole, limits)
        misfits = np.zeros(0, bool)
        if self.has_shards and not whole:
            AllReduce(self._live.grid)(
                [np.zeros(1, np.int32)]
            )  # for the order: else nothing waits for all hosts
        if spec.reduction == "fast":
            found = AllReduce(self._live.grid)(total)
        else:
            # How all addends fit their limits is known only now, and costs no collective of its own.
            fit = self.make_row(self._measure_fit(contributions))
            found, fit = ExactReduce(self._live.grid)((total, fit), (like, fit), own_limits)
            misfits = np.any([find_misfits(row) for row in np.asarray(fit)], axis=0)
        for position, leaf in zip(whole, jax.tree.leaves(found), strict=True):
            leaves[position] = self._restore(leaf, self._zeros[position])
        paths = (
            list(itertools.compress(list_fixed_point_paths(spec, self.like), misfits))
            if misfits.any()
            else []
        )
        return self._treedef.unflatten(leaves), paths

    def assemble_sum(self, shard_sums: Sequence[jax.Array] | None, whole: Sequence[Any]) -> Tree:
        """Return a sum of its leaves in shards, as `add_up` keeps them, and of those that are whole.

        Raises:
            PeerUnreachable: the sum has shards, and they are not here.
        """
        leaves: list[Any] = list(self._zeros)
        if self.has_shards and self.rank is not None:
            if shard_sums is None:
                raise PeerUnreachable(
                    f"accumulation {self._spec.name!r} of step {self._spec.step}: this host has no sums of its shards"
                )
            for position, leaf in zip(self._in_shards, shard_sums, strict=True):
                leaves[position] = leaf
        others = [position for position in range(len(leaves)) if position not in set(self._in_shards)]
        like = jax.tree.leaves(self.like)
        for position, value in zip(others, whole, strict=True):
            leaf = jax.device_put(np.asarray(value), like[position].sharding)
            leaves[position] = self._restore(leaf, self._zeros[position])
        return self._treedef.unflatten(leaves)

    def _add_up_shards(self, total: list[Any], like: list[jax.Array], limits: np.ndarray) -> list[jax.Array]:
        if self._spec.reduction == "fast":
            return AllReduce(self._holder_grid)(total)
        return ExactReduce(self._holder_grid)(total, like, limits)

    def _merge(
        self, totals: Sequence[Tree], positions: Sequence[int], limits: np.ndarray
    ) -> tuple[Tree, Tree, np.ndarray]:
        """Return the total of some leaves, these leaves as they are to be, and their limits."""
        like = self._select(self.like, positions)
        own_limits = limits[np.isin(self._fixed_positions, positions)]
        parts = [reshard_total(self._select(total, positions), like) for total in totals]
        # A host that has computed nothing takes part in the collective, too.
        return (merge_totals(parts) if parts else start_total(self._spec, like, own_limits)), like, own_limits

    def _select(self, tree: Tree, positions: Sequence[int]) -> Tree:
        """Return some leaves as a list; without shards these are all, in their tree: as programs are compiled ahead."""
        if not self.has_shards:
            return tree
        leaves = self._treedef.flatten_up_to(tree)
        return [leaves[position] for position in positions]

    @functools.cached_property
    def _fixed_positions(self) -> list[int]:
        """The positions of leaves in fixed point, each with a limit."""
        spec = self._spec
        return [
            position
            for position, leaf in enumerate(jax.tree.leaves(self.like))
            if isinstance(choose_format(spec.reduction, spec.num_microbatches, leaf), FixedPointFormat)
        ]

    def _measure_fit(self, contributions: Contributions) -> np.ndarray:
        fit = contributions.measure_fit(self.formats).reshape(FIT_WORDS, -1)
        # What is whole is in the row of rank 0 alone, as in the sum.
        if self.rank:
            fit[:, ~np.isin(self._fixed_positions, self._in_shards)] = 0
        return fit.reshape(-1)

    def _restore(self, leaf: jax.Array, zero: jax.Array) -> jax.Array:
        """Return a sum as the zeros are. Nothing moves."""
        if zero.is_fully_addressable:
            return leaf if leaf.sharding == zero.sharding else jax.device_put(leaf, zero.sharding)
        by_device = {shard.device: shard.data for shard in leaf.addressable_shards}
        shards = [by_device[shard.device] for shard in zero.addressable_shards]
        return jax.make_array_from_single_device_arrays(zero.shape, zero.sharding, shards, dtype=zero.dtype)


def _run_alone(_: object, program: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - arrays
    return program(*arguments)  # its collectives run on their thread, or are loaded in a rehearsal


def describe_summand(leaf: Any, local_mesh: Mesh) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - an array or its shape
    """Return how a host of a replica adds up a leaf: whole, or the shards of its devices stacked.

    Args:
        leaf: has shape, dtype and sharding on the mesh of all replicas.
        local_mesh: the host's devices in its replica, with the axis `LOCAL_AXIS`.
    """
    if leaf.sharding.is_fully_replicated:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(local_mesh, P()))
    first, *others = leaf.sharding.shard_shape(leaf.shape)
    where = NamedSharding(local_mesh, P(LOCAL_AXIS))
    return jax.ShapeDtypeStruct((local_mesh.size * first, *others), leaf.dtype, sharding=where)


def _describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
