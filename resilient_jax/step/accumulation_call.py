"""An accumulation as it was called, for compiling ahead of time what it would need among other hosts."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from resilient_jax.compile.ahead_of_time import CancellationCheck, CompilationJob
from resilient_jax.errors import CallerError
from resilient_jax.host_exchange import SMALL_BYTES, compute_vector_size
from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.compile_cache import is_portable_cache_on
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.step.assignment import AccumulationSpec, ReplicaShape, locate_replicas
from resilient_jax.step.claims import count_claims_bytes
from resilient_jax.step.fixed_point_sum import FIT_WORDS
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.likely_worlds import list_likely_worlds
from resilient_jax.step.reduction import AllReduce, ExactReduce
from resilient_jax.step.running_total import compile_totals, list_formats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationCall:
    """One call of `World.accumulate_microbatches`.

    Attributes:
        devices: all devices of the live hosts.
        spare_devices: all devices of the seats that no host has; see `list_likely_worlds`.
        process_index: position of this host among the live ones.
        spec: what was accumulated.
        like: shapes and dtypes of the total.
        lone_microbatch: shapes, dtypes and shardings of a microbatch, where this host has added none to another; else
            None.
        has_shards: whether the total is in shards on the hosts of a replica. Then nothing is compiled ahead.
    """

    devices: Sequence[Device]
    spare_devices: Sequence[Device]
    process_index: ProcessIndex
    spec: AccumulationSpec
    replica_shape: ReplicaShape
    like: Any
    lone_microbatch: Any = None
    has_shards: bool = False

    def list_jobs(self) -> Iterator[CompilationJob]:
        """Yield the jobs for the worlds that are likely next, the likeliest first."""
        if self.has_shards:
            return
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
            locate_replicas(range(grid.num_hosts), replica_shape_after, grid.device_counts)
        except CallerError:  # such a world will be refused, with the reason
            return False
        all_reduce, num_limits = AllReduce(grid), len(list_formats(self.spec, self.like))
        # The exchanges of claims, of small messages of all hosts or of one, and of limits; the decision whether to
        # stop.
        claims = compute_vector_size(grid.num_hosts, count_claims_bytes(self.spec.num_microbatches))
        small, of_one = (compute_vector_size(num_rows, SMALL_BYTES) for num_rows in (grid.num_hosts, 1))
        for size in sorted({claims, small, of_one, num_limits, 1} - {0}):
            all_reduce.compile(np.zeros(size, np.int32), check)
        if self.spec.reduction == "fast":
            all_reduce.compile(self.like, check)
        else:
            fit = np.zeros(FIT_WORDS * num_limits, np.int32)
            ExactReduce(grid).compile(self.spec, (self.like, fit), check)
        return True

    def _compile_totals(self, check: CancellationCheck) -> bool:
        """Compile what adds a microbatch to another: among fewer hosts each computes more than one."""
        compile_totals(self.spec, self.lone_microbatch, check)
        return True
