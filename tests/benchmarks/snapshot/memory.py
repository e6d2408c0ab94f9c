"""Memory that the cases of the snapshot benchmark need, and the sizes of state that fit. Pure.

Measured on 2 cores with states of 0.3 and 1.0 GB: the peak proportional memory (Pss) of all processes and files in
tmpfs, minus what stays for the entire run, is a multiple of the state and an offset for processes that import JAX.
"""

from collections.abc import Sequence
from typing import Final

from tests.benchmarks.snapshot.figures import MB, memory_formula

KEPT_STATES: Final = 1.0
"""The state itself, which stays for the entire run."""
ONE_HOST_STATES: Final = 4.1
"""Two slots, copies to compare with, and the restored state."""
GROUP_STATES: Final = 0.4
"""A group, beyond its slots."""
LOSS_STATES: Final = 7.0
"""Slots of a group with parity 1, a checkpoint in tmpfs, and the state restored by seven survivors and by Orbax."""
ORBAX_STATES: Final = 3.6
"""An Orbax save or restore, including a checkpoint in tmpfs."""
OFFSET_BYTES: Final = 1500 * MB
"""Added in every case; seven survivors need 1.2 GB before they restore anything."""


def group_states(hosts: int, parity: int) -> float:
    """Return the memory of a group of hosts, as a multiple of the state."""
    return memory_formula(hosts, parity) + GROUP_STATES


def required_bytes(states: float, state_bytes: int) -> int:
    """Return the memory of a case that needs `states` times the state beside the state itself."""
    return int(states * state_bytes) + OFFSET_BYTES


def choose_sizes(sizes_mb: Sequence[int], free_bytes: int) -> tuple[tuple[int, ...], dict[str, str]]:
    """Return the sizes whose largest case fits into free memory, and why others are left out.

    >>> choose_sizes((120, 4000), 20_000 * MB)
    ((120,), {'4000 MB, all': 'needs 33.5 GB of memory, 20.0 GB are free'})
    """
    required = {size: required_bytes(KEPT_STATES + LOSS_STATES, size * MB) for size in sizes_mb}
    left_out = {
        f"{size} MB, all": f"needs {needed / 1e9:.1f} GB of memory, {free_bytes / 1e9:.1f} GB are free"
        for size, needed in required.items()
        if needed > free_bytes
    }
    return tuple(size for size, needed in required.items() if needed <= free_bytes), left_out
