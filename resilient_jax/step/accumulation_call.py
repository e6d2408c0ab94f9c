"""An accumulation as it was called, for compiling ahead of time what it would need among fewer hosts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.errors import CallerError
from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.compile_cache import is_portable_cache_on
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.step.accumulation_comparison import COMPARED_WORDS
from resilient_jax.step.assignment import AccumulationSpec, ReplicaShape, locate_replicas
from resilient_jax.step.claims import pad_claims_size
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.reduction import AllReduce, ExactReduce
from resilient_jax.step.row_exchange import pad_rows_size
from resilient_jax.step.running_total import list_formats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationCall:
    """One call of `World.accumulate_microbatches`.

    Attributes:
        devices: of the live hosts.
        process_index: of this host.
        spec: what was accumulated.
        replica_shape: of the replicas.
        like: shapes and dtypes of the total.
    """

    devices: Sequence[Device]
    process_index: ProcessIndex
    spec: AccumulationSpec
    replica_shape: ReplicaShape
    like: Any

    def compile_for_hosts(
        self, num_hosts: int, replica_shape_after: ReplicaShape, check: CancellationCheck
    ) -> bool:
        """Compile, for the persistent cache, the reductions between `num_hosts` hosts; return whether they are usable.

        What is compiled for some hosts serves as many other hosts (on CPU: see `compile_cache`). Programs for more
        hosts than are alive cannot be compiled: their devices are unknown.
        """
        hosts = sorted({device.process_index for device in self.devices})
        if num_hosts > len(hosts) or not is_portable_cache_on(self.devices[0]):
            return False
        hosts.remove(self.process_index)
        chosen = {self.process_index, *hosts[: num_hosts - 1]}
        grid = HostGrid([d for d in self.devices if d.process_index in chosen], self.process_index)
        try:
            locate_replicas(range(num_hosts), replica_shape_after, grid.local_mesh.size)
        except CallerError:  # such a world will be refused, with the reason
            return False
        all_reduce, num_limits = AllReduce(grid), len(list_formats(self.spec, self.like))
        # The exchanges of claims, of digests and of limits, and the decision whether to stop.
        claims = pad_claims_size(self.spec.num_microbatches, num_hosts)
        digests = pad_rows_size(num_hosts, COMPARED_WORDS)
        for size in sorted({claims, digests, num_limits, 1} - {0}):
            all_reduce.compile(np.zeros(size, np.int32), check)
        if self.spec.reduction == "fast":
            all_reduce.compile(self.like, check)
        else:
            ExactReduce(grid).compile(self.spec, (self.like, np.zeros(num_limits, np.int32)), check)
        return True
