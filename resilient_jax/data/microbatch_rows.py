"""Which rows belong to a microbatch, and which of them to one of the hosts that share it."""

from numbers import Integral

from resilient_jax.errors import DataError

RowPart = tuple[int, int]
"""(k, n): the k-th of n equal runs of a microbatch's rows."""

ALL_ROWS: RowPart = (0, 1)


def slice_rows(rows: int, part: RowPart) -> slice:
    """The rows of `part`, among `rows` of them.

    Raises:
        DataError: `part` is none, or its number of runs does not divide the rows.
    """
    k, n = part
    if not 0 <= k < n:
        raise DataError(f"part: found {part}, expected (k, n) with 0 <= k < n: the k-th of n runs of rows")
    if rows % n:
        raise DataError(
            f"part {part}: found a microbatch of {rows} rows, expected a multiple of {n}, the hosts that share it. "
            "Choose another microbatch size"
        )
    return slice(k * rows // n, (k + 1) * rows // n)


def list_positions(
    step: int, index: int, part: RowPart, *, num_microbatches: int, microbatch_size: int
) -> range:
    """Positions, counted from the first row of step 0, of the rows of one part of a microbatch.

    Position `(step * microbatches + index) * size + k` is row k. No two microbatches share a position.

    Raises:
        DataError: there is no such step, microbatch or part.
    """
    if step < 0 or not 0 <= index < num_microbatches:
        raise DataError(
            f"step {step}, microbatch {index}: expected a step from 0 and a microbatch from 0 to {num_microbatches - 1}"
        )
    run = slice_rows(microbatch_size, part)
    first = (step * num_microbatches + index) * microbatch_size
    return range(first + run.start, first + run.stop)


def check_integers(**numbers: object) -> None:
    """Refuses what is no integer: a float would be cut, or fail where nobody can tell which it was.

    Raises:
        DataError: names the first of them.
    """
    for name, found in numbers.items():
        if not isinstance(found, Integral):
            raise DataError(f"{name}: found {found!r} ({type(found).__name__}), expected an integer")


def check_positive_integers(**numbers: int) -> None:
    """Refuses numbers below 1, and what is no integer.

    Raises:
        DataError: names the first of them.
    """
    check_integers(**numbers)
    for name, found in numbers.items():
        if found < 1:
            raise DataError(f"{name}: found {found}, expected at least 1")
