"""Measures the links between hosts, by exchanges of pairs of them over the same network as a step's reductions."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from resilient_jax.health.link_comparison import Pairs
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.step.host_grid import HOST_AXIS, LOCAL_AXIS, HostGrid
from resilient_jax.telemetry.worker_activity import worker_activity

REPEATS: Final = 3
"""Exchanges of a pair, of which the fastest counts: on a busy machine any single one may wait for the processor."""
CPU_BYTES: Final = 64 * 1024
ACCELERATOR_BYTES: Final = 32 * 1024 * 1024
"""What a host sends in an exchange. 64 KiB takes half a second at 1 Mbit/s. Accelerators' networks send 32 MiB in a
millisecond, and less would measure how fast programs are started."""


class LinkMeasurement:
    """A measurement that is prepared: its memory is allocated, its programs are compiled.

    Args:
        grid: rows of the live hosts' devices.
        rounds: who exchanges with whom.
        raise_if_ended: raises if the generation has ended.
    """

    def __init__(self, grid: HostGrid, rounds: Sequence[Pairs], raise_if_ended: Callable[[], None]) -> None:
        size = choose_exchange_bytes(grid.local_mesh.devices.flat[0].platform) // np.dtype(np.int32).itemsize
        self._has_partner = [any(grid.host_index in pair for pair in pairs) for pairs in rounds]
        self._raise_if_ended = raise_if_ended
        self._rows = grid.pack([np.zeros(size, np.int32)])
        self._exchanges = [_compile_exchange(grid, pairs, self._rows) for pairs in rounds]

    def run(self) -> list[float]:
        """Return by round what an exchange with this host's partner takes, in seconds; 0 where it has none.

        For all hosts at once: each round is a collective of all.
        """
        taken: list[float] = []
        for exchange, has_partner in zip(self._exchanges, self._has_partner, strict=True):
            self._exchange(exchange)  # has both ends of a pair begin the next one at the same time
            fastest_s = min(self._exchange(exchange) for _ in range(REPEATS))
            taken.append(fastest_s if has_partner else 0.0)
        return taken

    def _exchange(self, exchange: Any) -> float:  # noqa: ANN401 - a compiled function
        with worker_activity.task(WorkerTask.SUM):
            began_s = time.monotonic()
            self._rows = collective_thread.run(exchange, self._rows)
            seconds = time.monotonic() - began_s
        self._raise_if_ended()
        return seconds


def choose_exchange_bytes(platform: str) -> int:
    """Return what a host sends in an exchange, by the platform of its devices."""
    return CPU_BYTES if platform == "cpu" else ACCELERATOR_BYTES


def _compile_exchange(grid: HostGrid, pairs: Pairs, rows: jax.Array) -> Any:  # noqa: ANN401 - a compiled function
    """Return a program in which the hosts of each pair send each other their row of an array, which is donated."""
    both_ways = [*pairs, *((b, a) for a, b in pairs)]

    def exchange(row: jax.Array) -> jax.Array:
        return jax.lax.ppermute(row, HOST_AXIS, both_ways)

    spec = P(HOST_AXIS, LOCAL_AXIS)
    # An abstract mesh, else its trace would refer to the devices, and be dropped with all others.
    everywhere = jax.shard_map(
        exchange, mesh=grid.mesh.abstract_mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(everywhere, donate_argnums=0).lower(rows).compile()
