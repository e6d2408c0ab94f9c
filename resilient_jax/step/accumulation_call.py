"""An accumulation as it was called, for compiling ahead of time what it would need among other hosts."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.compile.ahead_of_time import CancellationCheck, CompilationJob
from resilient_jax.errors import CallerError
from resilient_jax.host_exchange import SMALL_BYTES, compute_vector_size
from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.compile_cache import is_portable_cache_on
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.step.assignment import (
    AccumulationSpec,
    ReplicaLocation,
    ReplicaShape,
    list_holders,
    locate_replicas,
)
from resilient_jax.step.claims import count_claims_bytes
from resilient_jax.step.fixed_point_sum import FIT_WORDS
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.likely_worlds import list_likely_worlds
from resilient_jax.step.reduction import AllReduce, ExactReduce, compile_read
from resilient_jax.step.running_total import compile_host_total, compile_totals, list_formats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationCall:
    """One call of `World.accumulate_microbatches`.

    Attributes:
        devices: all devices of the live hosts.
        spare_devices: all devices of the seats that no host has; see `list_likely_worlds`.
        process_index: position of this host among the live ones.
        spec: what was accumulated.
        like: shapes and dtypes of the total, of leaves that are in shards apart.
        lone_microbatch: shapes, dtypes and shardings of a microbatch, where this host has added none to another; else
            None.
        shards: shapes and dtypes of the leaves that are in shards on the hosts of a replica, as each host stacks its
            own; see `accumulation_layout`.
    """

    devices: Sequence[Device]
    spare_devices: Sequence[Device]
    process_index: ProcessIndex
    spec: AccumulationSpec
    replica_shape: ReplicaShape
    like: Any
    lone_microbatch: Any = None
    shards: Sequence[Any] = ()

    def list_jobs(self) -> Iterator[CompilationJob]:
        """Yield the jobs for the worlds that are likely next, the likeliest first."""
        worlds = list_likely_worlds(self.devices, self.spare_devices, self.process_index)
        for number, devices in enumerate(worlds):
            # Here, and not on the thread that compiles: the members may change while it does, and with them what JAX
            # says of processes.
            grid = HostGrid(devices, self.process_index)
            if grid.num_hosts > 1:
                yield CompilationJob(
                    f"reductions of {self.spec.name!r} over {grid.num_hosts} hosts",
                    functools.partial(self.compile_for_grid, grid, self.replica_shape),
                )
            if number == 0 and self.lone_microbatch is not None:
                yield CompilationJob(f"totals of {self.spec.name!r}", self._compile_totals)

    def compile_for_grid(
        self, grid: HostGrid, replica_shape_after: ReplicaShape, check: CancellationCheck
    ) -> bool:
        """Compile, for the persistent cache, the reductions over the hosts of a grid; return whether they are usable.

        What is compiled for some hosts serves as many other hosts (on CPU: see `compile_cache`).
        """
        if not is_portable_cache_on(self.devices[0]):
            return False
        try:
            locations = locate_replicas(range(grid.num_hosts), replica_shape_after, grid.device_counts)
        except CallerError:  # such a world will be refused, with the reason
            return False
        all_reduce, num_limits = AllReduce(grid), len(list_formats(self.spec, (self.like, self.shards)))
        # A row for each rank, as `AccumulationLayout` makes them.
        num_rows = len(locations[0].host_indexes) if self.shards else 1
        # The exchanges of claims, of small messages of all hosts or of one, and of limits; the decision whether to
        # stop.
        claims = compute_vector_size(grid.num_hosts, count_claims_bytes(self.spec.num_microbatches))
        small, of_one = (compute_vector_size(num_rows, SMALL_BYTES) for num_rows in (grid.num_hosts, 1))
        shapes = [(size,) for size in sorted({claims, small, of_one, 1})]
        for shape in [*shapes, *([(num_rows, num_limits)] if num_limits else [])]:
            all_reduce.compile(np.zeros(shape, np.int32), check)
        if self.spec.reduction == "fast":
            all_reduce.compile(self.like, check)
        else:
            fit = np.zeros((num_rows, FIT_WORDS * num_limits), np.int32)
            ExactReduce(grid).compile(self.spec, (self.like, fit), check)
        if self.shards and locations[0].devices <= grid.local_mesh.size:
            self._compile_shards(grid, locations, check)
        return True

    def _compile_shards(
        self, grid: HostGrid, locations: Sequence[ReplicaLocation], check: CancellationCheck
    ) -> None:
        """Compile what adds up shards: over the hosts with the same rank in their replicas."""
        holders = list_holders(locations)
        # Left over among these hosts, this one is in a replica of others that are as many.
        others = *holders[0][1:], grid.host_index
        hosts = next((hosts for hosts in holders if grid.host_index in hosts), others)
        devices = [device for host in hosts for device in grid.mesh.devices[host][: locations[0].devices]]
        holder_grid = HostGrid(devices, self.process_index, in_shards=True)
        whole = NamedSharding(holder_grid.local_mesh, P())
        shards = [_place(leaf, holder_grid.leaf_sharding) for leaf in self.shards]
        # What this host had computed when the others were lost is merged with what it computes for them.
        for like in (shards, [_place(leaf, whole) for leaf in jax.tree.leaves(self.like)]):
            compile_host_total(self.spec, like, check, has_several=True)
        check()
        if self.spec.reduction == "fast":
            AllReduce(holder_grid).compile(list(self.shards), check)
        elif holder_grid.num_hosts > 1:
            ExactReduce(holder_grid).compile(self.spec, list(self.shards), check)
        else:
            compile_read(self.spec, shards)

    def _compile_totals(self, check: CancellationCheck) -> bool:
        """Compile what adds a microbatch to another: among fewer hosts each computes more than one."""
        compile_totals(self.spec, self.lone_microbatch, check)
        return True


def _place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - a shape
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
