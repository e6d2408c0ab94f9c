"""Measures the links between hosts, by exchanges of pairs of them over the same network as a step's reductions."""

import functools
import time
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from resilient_jax.health.link_comparison import Pairs
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.step.host_grid import HOST_AXIS, LOCAL_AXIS, HostGrid

REPEATS: Final = 3
"""Exchanges of a pair, of which the fastest counts: on a busy machine any single one may wait for the processor."""
CPU_BYTES: Final = 64 * 1024
ACCELERATOR_BYTES: Final = 32 * 1024 * 1024
"""What a host sends in an exchange. 64 KiB takes half a second at 1 Mbit/s. Accelerators' networks send 32 MiB in a
millisecond, and less would measure how fast programs are started."""


def measure_links(grid: HostGrid, rounds: Sequence[Pairs]) -> list[float]:
    """Return by round what an exchange with this host's partner takes, in seconds; 0 where it has none.

    For all hosts at once: each round is a collective of all.
    """
    is_cpu = grid.local_mesh.devices.flat[0].platform == "cpu"
    size = (CPU_BYTES if is_cpu else ACCELERATOR_BYTES) // np.dtype(np.int32).itemsize
    rows = grid.pack([np.zeros(size, np.int32)])
    taken: list[float] = []
    for pairs in rounds:
        exchange = _make_exchange(grid, pairs)
        # The first one compiles the program, and has both ends of a pair begin the next one at the same time.
        rows = collective_thread.run(exchange, rows)
        fastest_s = 0.0
        for _ in range(REPEATS):
            began_s = time.monotonic()
            rows = collective_thread.run(exchange, rows)
            seconds = time.monotonic() - began_s
            fastest_s = min(fastest_s, seconds) if fastest_s else seconds
        taken.append(fastest_s if any(grid.host_index in pair for pair in pairs) else 0.0)
    return taken


def _make_exchange(grid: HostGrid, pairs: Pairs) -> Any:  # noqa: ANN401 - a jitted function
    """Return a program in which the hosts of each pair send each other their row of an array."""
    both_ways = [*pairs, *((b, a) for a, b in pairs)]

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=grid.mesh.abstract_mesh,
        in_specs=P(HOST_AXIS, LOCAL_AXIS),
        out_specs=P(HOST_AXIS, LOCAL_AXIS),
        check_vma=False,
    )
    def exchange(row: jax.Array) -> jax.Array:
        return jax.lax.ppermute(row, HOST_AXIS, both_ways)

    return exchange
