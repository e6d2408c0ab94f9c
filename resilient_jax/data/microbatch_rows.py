"""Which rows belong to a microbatch, and which of them to each of the hosts that share it."""

from numbers import Integral

from resilient_jax.errors import DataError

RowPart = tuple[int, int]
"""(k, n): the k-th of n equal parts of a microbatch's rows."""

ALL_ROWS: RowPart = (0, 1)


def slice_rows(rows: int, part: RowPart) -> slice:
    """Return the rows of `part`, of `rows` in all.

    Raises:
        DataError: `part` is invalid, or its number of parts does not divide the rows.
    """
    k, n = part
    if not 0 <= k < n:
        raise DataError(
            f"part: found {part}, expected (k, n) with 0 <= k < n: the k-th of n parts of the rows"
        )
    if rows % n:
        raise DataError(
            f"part {part}: found a microbatch of {rows} rows, expected a multiple of {n}, the hosts that share it. "
            "Choose another microbatch size"
        )
    return slice(k * rows // n, (k + 1) * rows // n)


def list_positions(
    step: int, index: int, part: RowPart, *, num_microbatches: int, microbatch_size: int
) -> range:
    """Return the positions, counted from the first row of step 0, of the rows of one part of a microbatch.

    Row k has position `(step * num_microbatches + index) * microbatch_size + k`. No two microbatches share a position.

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
    """Check that the values are integers: a float would be truncated, or fail far from its origin.

    Raises:
        DataError: names the first that is not.
    """
    for name, found in numbers.items():
        if not isinstance(found, Integral) or isinstance(found, bool):
            raise DataError(f"{name}: found {found!r} ({type(found).__name__}), expected an integer")


def check_positive_integers(**numbers: int) -> None:
    """Check that the values are integers of at least 1.

    Raises:
        DataError: names the first that is not.
    """
    check_integers(**numbers)
    for name, found in numbers.items():
        if found < 1:
            raise DataError(f"{name}: found {found}, expected at least 1")
