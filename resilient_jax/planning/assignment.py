"""The assignment problem: a permutation with the least sum of costs.

By hand, because each worker would load SciPy's `optimize` at its start: 0.4 s of processor time, for some 30 lines.
"""

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Cost = TypeVar("Cost", np.int64, np.float64)
UNREACHED: Final = np.iinfo(np.int64).max
"""More than any way costs."""


def solve_assignment(costs: NDArray[Cost]) -> tuple[int, ...]:
    """Return the column of each row; each column is used once, and the sum of costs is least.

    The Hungarian method with potentials (Kuhn 1955, https://doi.org/10.1002/nav.3800020109): rows are added one by one,
    each by a shortest augmenting path over reduced costs `c_ij - u_i - v_j >= 0`. Takes time O(n^3) for n rows. Every
    host finds the same of equal sums, with any version of any library.

    Args:
        costs: [n, n]; whole numbers are summed exactly.

    >>> solve_assignment(np.array([[4, 1, 3], [2, 0, 5], [3, 2, 2]]))
    (1, 0, 2)
    """
    # Column `size` is where the path of the row that is added begins. On assigned pairs u[i] + v[j] = costs[i, j].
    size = len(costs)
    u, v = np.zeros(size + 1, costs.dtype), np.zeros(size + 1, costs.dtype)
    row_of = np.full(size + 1, -1)
    for row in range(size):
        row_of[size], column = row, size
        least = np.full(size, UNREACHED, costs.dtype)
        way, is_used = np.full(size, size), np.zeros(size + 1, np.bool_)
        # Dijkstra over columns: `least` holds distances in reduced costs. Raising u of reached rows and lowering v of
        # reached columns by each step keeps all reduced costs >= 0, and those on the path at 0.
        while row_of[column] >= 0:
            is_used[column] = True
            at, is_free = row_of[column], ~is_used[:size]
            reduced = costs[at] - u[at] - v[:size]
            is_nearer = is_free & (reduced < least)
            least[is_nearer], way[is_nearer] = reduced[is_nearer], column
            following = int(np.argmin(np.where(is_free, least, UNREACHED)))
            step = least[following]
            u[row_of[is_used]] += step
            v[is_used] -= step
            least[is_free] -= step
            column = following
        while column != size:
            row_of[column] = row_of[way[column]]
            column = way[column]
    columns = [0] * size
    for column, row in enumerate(row_of[:size].tolist()):
        columns[row] = column
    return tuple(columns)
