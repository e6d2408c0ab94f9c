"""Sums over hosts by mail, in a generation whose world can form no clique because its coordination service has ended.

Such a generation trains until its members pause between two steps, and a new world follows. A sum has the bits that a
collective would give it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from resilient_jax.host_exchange import HostExchange
from resilient_jax.host_exchange.array_packing import pack_arrays, unpack_arrays
from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.failures import ServiceEnded
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.reduction import ExactReduce
from resilient_jax.step.running_total import merge_totals, start_total_of_hosts
from resilient_jax.telemetry.worker_activity import worker_activity


class MailSums:
    """The sums of one generation.

    Attributes:
        exchange: exchange of the train function by mail, once the train function has said how hosts are reached; None:
            not yet.
    """

    def __init__(self, local_devices: Sequence[Device], process_index: ProcessIndex) -> None:
        """Add up on the devices of this host what is not whole numbers."""
        self.exchange: HostExchange | None = None
        self._local_devices, self._process_index = local_devices, process_index

    def add_up(self, tree: Any) -> Any:  # noqa: ANN401 - a tree
        """Return the sum over all hosts of each leaf; see `World.all_reduce`.

        Raises:
            ServiceEnded: there is no exchange, and the sum would need a collective.
            PeerUnreachable: a host is lost, or late.
        """
        if self.exchange is None:
            raise ServiceEnded(
                "all_reduce: found a world whose coordination service has ended, expected one that forms collectives. "
                "A new world follows"
            )
        leaves, structure = jax.tree.flatten(tree)
        # Of the dtypes that a collective would have.
        arrays = [np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)) for leaf in leaves]
        with worker_activity.task(WorkerTask.SUM):  # a wait for other hosts
            found = self.exchange.gather(bytes(pack_arrays(arrays)))
        trees = [
            structure.unflatten(unpack_arrays(memoryview(given), arrays, "a sum by mail")) for given in found
        ]
        if all(
            np.issubdtype(array.dtype, np.integer) and not isinstance(leaf, jax.Array)
            for array, leaf in zip(arrays, leaves, strict=True)
        ):  # as most are: nothing is compiled for them
            return jax.tree.map(lambda *values: np.sum(values, axis=0, dtype=values[0].dtype), *trees)
        total = merge_totals([start_total_of_hosts(one) for one in trees])
        return ExactReduce(HostGrid(self._local_devices, self._process_index))(total, tree)
