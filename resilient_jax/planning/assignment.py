"""The assignment problem: a permutation with the least sum of costs."""

import math
from collections.abc import Sequence


def solve_assignment(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the column of each row; each column is used once, and the sum of costs is least.

    The Hungarian method with potentials (Kuhn 1955, https://doi.org/10.1002/nav.3800020109): rows are added one by one,
    each by a shortest augmenting path over reduced costs `c_ij - u_i - v_j >= 0`. Takes time O(n^3) for n rows.

    Args:
        costs: a square matrix.

    >>> solve_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
    (1, 0, 2)
    """
    size = len(costs)
    of_row, of_column = [0.0] * size, [0.0] * (size + 1)
    # The last column is where the row that is added starts.
    row_at = [-1] * (size + 1)
    for row in range(size):
        row_at[size] = row
        way, column = _find_path(costs, of_row, of_column, row_at)
        while column != size:
            row_at[column] = row_at[way[column]]
            column = way[column]
    columns = [0] * size
    for column in range(size):
        columns[row_at[column]] = column
    return tuple(columns)


def _find_path(
    costs: Sequence[Sequence[float]], of_row: list[float], of_column: list[float], row_at: list[int]
) -> tuple[list[int], int]:
    """Return the shortest augmenting path from the new row: the column before each, and the free column at its end."""
    # Dijkstra over columns: `least` holds distances in reduced costs. Raising u of reached rows and lowering v of
    # reached columns by each step keeps all reduced costs >= 0 and those on the path at 0 (complementary slackness).
    size = len(costs)
    least, way, seen = [math.inf] * size, [size] * size, [False] * (size + 1)
    column = size
    while row_at[column] != -1:
        seen[column] = True
        row = row_at[column]
        for other in range(size):
            if not seen[other]:
                reduced = costs[row][other] - of_row[row] - of_column[other]
                if reduced < least[other]:
                    least[other], way[other] = reduced, column
        nearest = min((c for c in range(size) if not seen[c]), key=least.__getitem__)
        step = least[nearest]
        for other in range(size + 1):
            if seen[other]:
                of_row[row_at[other]] += step
                of_column[other] -= step
            elif other < size:
                least[other] -= step
        column = nearest
    return way, column
