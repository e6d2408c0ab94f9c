"""A row of integers from every host, for all hosts: how they tell each other small things, in one all-reduce."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

ROWS_PADDING: Final = 256
"""Rows are exchanged in vectors of a multiple of this size: mostly the same size for fewer hosts, so that the
all-reduce is compiled already."""


def pad_rows_size(num_hosts: int, row_size: int) -> int:
    """Return the size of the vector in which hosts exchange rows of a size."""
    return -(-num_hosts * row_size // ROWS_PADDING) * ROWS_PADDING


def exchange_rows(
    row: np.ndarray, host_index: int, num_hosts: int, all_reduce: Callable[[np.ndarray], Any]
) -> np.ndarray:
    """Return int32[hosts, row size], the rows of all hosts. For all hosts at once.

    Args:
        row: int32[row size], of this host.
        host_index: of this host.
        num_hosts: of the generation.
        all_reduce: returns the sum over hosts of a vector.
    """
    table = np.zeros(pad_rows_size(num_hosts, row.size), np.int32)
    # Each host fills in its own row only, so the sum over hosts is the table of all rows.
    table[host_index * row.size : (host_index + 1) * row.size] = row
    # A copy: on CPU np.asarray would be a view, which keeps the backend after a re-form.
    return np.array(all_reduce(table))[: num_hosts * row.size].reshape(num_hosts, row.size)
