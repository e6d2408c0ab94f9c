"""Relative errors of sums of numbers like gradients: exact sums, and float32 sums in order, beside the true ones."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.step.binned_sum import BinnedFormat, add_binned, make_binned_zero, read_binned

ELEMENTS = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumErrors:
    """Relative errors of the sums of elements.

    Attributes:
        exact: median of exact sums.
        ordered: median of float32 sums in order.
        largest_exact: of any element.
        largest_ordered: of any element.
    """

    exact: float
    ordered: float
    largest_exact: float
    largest_ordered: float

    @property
    def ratio(self) -> float:
        """The median of exact sums over that of float32 sums."""
        return round(self.exact / self.ordered, 4)


def measure_sum_errors(addends: int) -> SumErrors:
    """Sum `addends` arrays of normal numbers whose sizes differ by four orders of magnitude between elements."""
    generator = np.random.default_rng(16)
    sizes = 10 ** generator.uniform(-6, -2, ELEMENTS)
    parts = (generator.standard_normal((addends, ELEMENTS)) * sizes).astype(np.float32)
    total = jax.tree.map(
        jnp.asarray, make_binned_zero((ELEMENTS,), BinnedFormat.for_addends(jnp.float32, addends))
    )
    add, ordered = jax.jit(add_binned), np.zeros(ELEMENTS, np.float32)
    for part in parts:
        total, ordered = add(total, part), ordered + part
    true = np.array([math.fsum(column) for column in parts.T.tolist()])
    exact_errors = np.abs(np.asarray(read_binned(total)) - true) / np.abs(true)
    ordered_errors = np.abs(ordered - true) / np.abs(true)
    return SumErrors(
        exact=float(np.median(exact_errors)),
        ordered=float(np.median(ordered_errors)),
        largest_exact=float(exact_errors.max()),
        largest_ordered=float(ordered_errors.max()),
    )
