"""Microbatches from a function of the user's."""

from collections.abc import Callable

import numpy as np

from resilient_jax.data.example_layout import LayoutChecker, Tree
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart, slice_rows
from resilient_jax.errors import DataError


class FunctionData:
    """Microbatches from a function: `function(step, index)` returns all rows of one.

    The function must return the same for the same arguments on every host and after a restart; that is not checked.
    """

    def __init__(self, function: Callable[[int, int], Tree], *, microbatch_size: int | None = None) -> None:
        """Keep the function; do not call it yet.

        Args:
            function: returns a tree of arrays, whose first dimension counts the examples.
            microbatch_size: examples that the function returns; None: as many as in the first call.
        """
        self._function = function
        self._size = microbatch_size
        self._layout = LayoutChecker()

    def batch(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """Return the function's result, or the rows of a part of it.

        Raises:
            DataError: the result is no tree of arrays with one first dimension, has another layout than the first one,
                or cannot be divided.
        """
        name = f"step {step}, microbatch {index}"
        leaves = self._layout.check(self._function(step, index), name)
        run = slice_rows(self._count(leaves, name), part)
        return self._layout.rebuild([leaf[run] for leaf in leaves])

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """Return None: the document lengths are unknown."""
        return None

    def _count(self, leaves: list[np.ndarray], name: str) -> int:
        """Return how many examples the arrays contain."""
        counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
        count = counts.pop()
        if counts or count < 1 or self._size not in (None, count):
            size = "at least 1" if self._size is None else self._size
            raise DataError(
                f"{name}: found arrays of the shapes {[leaf.shape for leaf in leaves]}, expected as the first "
                f"dimension of all of them the number of examples, {size}. Stack the examples, or correct the "
                "microbatch size"
            )
        return count
