"""Matrices and vectors over GF(2^8), as immutable rows of bytes.

The matrices are small: at most 255 x 255, computed once for a code or a set of lost shards. `bytes.translate`
multiplies a row and the XOR of two large integers adds two rows, so the interpreter runs once per row and not
once per element.
"""

from collections.abc import Sequence

from resilient_jax.erasure.galois_field import multiplication_row, reciprocal

Vector = bytes
Matrix = tuple[Vector, ...]
"""Rows of equal length. A matrix is hashable, so that results computed from it can be cached."""


def scale_vector(vector: Vector, factor: int) -> Vector:
    """Return vector * factor, each byte multiplied in the field."""
    return vector.translate(multiplication_row(factor))


def add_vectors(a: Vector, b: Vector) -> Vector:
    """Return a + b, which is also a - b; both have the same length."""
    return (int.from_bytes(a) ^ int.from_bytes(b)).to_bytes(len(a))


def identity(size: int) -> Matrix:
    """Return the size x size matrix with 1 on the diagonal."""
    return tuple(unit_vector(size, position) for position in range(size))


def unit_vector(size: int, position: int) -> Vector:
    """Return the vector with 1 at `position` and 0 elsewhere."""
    return bytes(position) + b"\x01" + bytes(size - position - 1)


def linear_combination(coefficients: Sequence[int], rows: Sequence[Vector], start: Vector) -> Vector:
    """Return start + sum_i coefficients[i] * rows[i]."""
    for coefficient, row in zip(coefficients, rows, strict=True):
        if coefficient:
            start = add_vectors(start, scale_vector(row, coefficient))
    return start


def matmul(a: Matrix, b: Matrix) -> Matrix:
    """Return the product of a (r x c) and b (c x d), with c at least 1."""
    zero = bytes(len(b[0]))
    return tuple(linear_combination(row, b, zero) for row in a)


def invert(a: Matrix) -> Matrix:
    """Return the inverse of a square matrix, by Gauss-Jordan elimination.

    Raises:
        ZeroDivisionError: the matrix is singular. The square parts of a parity matrix never are.
    """
    size = len(a)
    # Row operations that turn [A | I] into [I | B] multiply from the left by A^-1, so B = A^-1.
    rows = [row + unit for row, unit in zip(a, identity(size), strict=True)]
    for column in range(size):
        # Any pivot that is not 0 will do: arithmetic in a finite field has no rounding.
        pivot = next((i for i in range(column, size) if rows[i][column]), None)
        if pivot is None:
            raise ZeroDivisionError(f"a singular matrix: no pivot in column {column} of {size}")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = scale_vector(rows[column], reciprocal(rows[column][column]))
        for i in range(size):
            if i != column and rows[i][column]:
                rows[i] = add_vectors(rows[i], scale_vector(rows[column], rows[i][column]))
    return tuple(row[size:] for row in rows)
