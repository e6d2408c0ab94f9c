"""Matrices and vectors over GF(2^8), as immutable rows of bytes.

Small ones: at most 255 x 255, computed once for a code or a set of lost shards. A row is multiplied by
`bytes.translate` and added as one large integer, so Python's interpreter runs once per row, not once per
element.
"""

from collections.abc import Sequence

from resilient_jax.erasure.galois_field import multiplication_row, reciprocal

Vector = bytes
Matrix = tuple[Vector, ...]
"""Rows of equal length; hashable, so that what is made of one can be kept."""


def scale_vector(vector: Vector, factor: int) -> Vector:
    """vector * factor."""
    return vector.translate(multiplication_row(factor))


def add_vectors(a: Vector, b: Vector) -> Vector:
    """a + b, which is also a - b; both of one length."""
    return (int.from_bytes(a) ^ int.from_bytes(b)).to_bytes(len(a))


def identity(size: int) -> Matrix:
    """The size x size matrix with 1 on the diagonal."""
    return tuple(unit_vector(size, position) for position in range(size))


def unit_vector(size: int, position: int) -> Vector:
    """The vector with 1 at the position and 0 elsewhere."""
    return bytes(position) + b"\x01" + bytes(size - position - 1)


def linear_combination(coefficients: Sequence[int], rows: Sequence[Vector], start: Vector) -> Vector:
    """start + sum_i coefficients[i] * rows[i]."""
    for coefficient, row in zip(coefficients, rows, strict=True):
        if coefficient:
            start = add_vectors(start, scale_vector(row, coefficient))
    return start


def matmul(a: Matrix, b: Matrix) -> Matrix:
    """a b, for a of r x c and b of c x d, with c at least 1."""
    zero = bytes(len(b[0]))
    return tuple(linear_combination(row, b, zero) for row in a)


def transpose(a: Matrix) -> Matrix:
    """Columns as rows."""
    return tuple(bytes(column) for column in zip(*a, strict=True))


def invert(a: Matrix) -> Matrix:
    """The inverse of a square matrix, by Gauss and Jordan.

    Raises:
        ZeroDivisionError: the matrix is singular. The square parts of a parity matrix never are.
    """
    size = len(a)
    rows = [row + one for row, one in zip(a, identity(size), strict=True)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if rows[i][column]), None)
        if pivot is None:
            raise ZeroDivisionError(f"a singular matrix: no pivot in column {column} of {size}")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = scale_vector(rows[column], reciprocal(rows[column][column]))
        for i in range(size):
            if i != column and rows[i][column]:
                rows[i] = add_vectors(rows[i], scale_vector(rows[column], rows[i][column]))
    return tuple(row[size:] for row in rows)


class Span:
    """The vectors that can be combined from those that were put in; grows by `put`."""

    def __init__(self) -> None:
        self._by_pivot: dict[int, Vector] = {}  # each is 1 at its pivot, and 0 before it

    @property
    def dimension(self) -> int:
        return len(self._by_pivot)

    def put(self, vector: Vector) -> None:
        """Adds a vector, and with it all combinations."""
        rest = self._reduce(vector)
        if any(rest):
            pivot = _first_nonzero(rest)
            self._by_pivot[pivot] = scale_vector(rest, reciprocal(rest[pivot]))

    def contains(self, vector: Vector) -> bool:
        """Whether the vector is a combination of those put in."""
        return not any(self._reduce(vector))

    def _reduce(self, vector: Vector) -> Vector:
        for pivot in sorted(self._by_pivot):  # ascending: a later row cannot spoil an earlier pivot
            if vector[pivot]:
                vector = add_vectors(vector, scale_vector(self._by_pivot[pivot], vector[pivot]))
        return vector


def _first_nonzero(vector: Vector) -> int:
    return len(vector) - len(vector.lstrip(b"\x00"))
