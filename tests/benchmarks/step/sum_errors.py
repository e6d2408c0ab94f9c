"""Relative errors of sums of numbers like gradients: exact sums, and float32 sums in order, beside the true ones."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from resilient_jax.step.assignment import AccumulationSpec, Reduction
from resilient_jax.step.fixed_point_sum import choose_limits
from resilient_jax.step.running_total import (
    add_to_total,
    find_exponents,
    list_formats,
    read_total,
    start_total,
)

ELEMENTS = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumErrors:
    """Relative errors of the sums of elements.

    Attributes:
        exact: median of exact sums.
        wide: median of sums with `reduction="exact_wide"`.
        ordered: median of float32 sums in order.
        largest_wide: of any element.
        largest_ordered: of any element.
    """

    exact: float
    wide: float
    ordered: float
    largest_wide: float
    largest_ordered: float

    @property
    def ratio(self) -> float:
        """The median of exact sums over that of float32 sums."""
        return round(self.exact / self.ordered, 4)

    @property
    def wide_ratio(self) -> float:
        """The median of wide exact sums over that of float32 sums."""
        return round(self.wide / self.ordered, 4)


def measure_sum_errors(addends: int) -> SumErrors:
    """Sum `addends` arrays of normal numbers whose sizes differ by four orders of magnitude between elements."""
    generator = np.random.default_rng(16)
    sizes = 10 ** generator.uniform(-6, -2, ELEMENTS)
    parts = (generator.standard_normal((addends, ELEMENTS)) * sizes).astype(np.float32)
    true = np.array([math.fsum(column) for column in parts.T.tolist()])

    def errors_of(found: Any) -> np.ndarray:
        return np.abs(np.asarray(found) - true) / np.abs(true)

    ordered = np.zeros(ELEMENTS, np.float32)
    for part in parts:
        ordered = ordered + part
    wide = errors_of(_add_up(_make_spec(addends, "exact_wide"), parts))
    return SumErrors(
        exact=float(np.median(errors_of(_add_up(_make_spec(addends, "exact"), parts)))),
        wide=float(np.median(wide)),
        ordered=float(np.median(errors_of(ordered))),
        largest_wide=float(wide.max()),
        largest_ordered=float(errors_of(ordered).max()),
    )


def _make_spec(addends: int, reduction: Reduction) -> AccumulationSpec:
    return AccumulationSpec(name="", step=0, num_microbatches=addends, reduction=reduction)


def _add_up(spec: AccumulationSpec, parts: np.ndarray) -> Any:
    exponents = np.asarray(find_exponents(spec, jnp.asarray(parts[0])))
    limits = choose_limits(exponents, list_formats(spec, parts[0]), spec.num_microbatches)
    total = start_total(spec, jnp.asarray(parts[0]), limits)
    for part in parts[1:]:
        total, _ = add_to_total(total, jnp.asarray(part), limits, donate=True)
    return read_total(total, limits)
