"""Microbatches from a function of the user's."""

from collections.abc import Callable

import numpy as np

from resilient_jax.data.example_layout import LayoutChecker, Tree
from resilient_jax.data.microbatch_rows import ALL_ROWS, RowPart, slice_rows
from resilient_jax.errors import DataError


class FunctionData:
    """Microbatches that a function computes: `function(step, index)` gives all rows of one.

    It must give the same for the same arguments on every host and after a restart; nobody can check that.
    """

    def __init__(self, function: Callable[[int, int], Tree], *, microbatch_size: int | None = None) -> None:
        """Calls nothing yet.

        Args:
            function: its result is a tree of arrays, whose first dimension counts the examples.
            size: how many examples it gives; None: as many as it gives the first time.
        """
        self._function = function
        self._size = microbatch_size
        self._layout = LayoutChecker()

    def batch(self, step: int, index: int, part: RowPart = ALL_ROWS) -> Tree:
        """The function's result; of a part its rows, though the whole is computed.

        Raises:
            DataError: the result is no tree of arrays with one first dimension, is laid out differently from the
                first one, or cannot be divided.
        """
        name = f"step {step}, microbatch {index}"
        leaves = self._layout.check(self._function(step, index), name)
        run = slice_rows(self._count(leaves, name), part)
        return self._layout.rebuild([leaf[run] for leaf in leaves])

    def lengths(self, step: int, index: int) -> np.ndarray | None:
        """None: a function tells no lengths."""
        return None

    def _count(self, leaves: list[np.ndarray], name: str) -> int:
        """How many examples the arrays hold."""
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
