"""Errors of exact sums of numbers like gradients, over those of float32 sums in order."""

import dataclasses
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from resilient_jax.step.assignment import AccumulationSpec, Reduction
from resilient_jax.step.fixed_point_sum import choose_limits, find_misfits, measure_fit
from resilient_jax.step.running_total import (
    add_to_total,
    compute_exponents,
    list_formats,
    read_total,
    start_total,
)

ADDENDS: Final = (4, 16, 64, 256, 1024, 4096)
SIZES: Final = 8
"""Of elements: from that of the largest down by six orders of magnitude."""
ELEMENTS_OF_SIZE: Final = 256
SPARSE: Final = "sparse"
"""The array that is zero in microbatch 0, and 1,000 times below the largest array."""
ARRAYS: Final = {"even": (0.0, 1.0), "spread": (6.0, 1.0), SPARSE: (6.0, 1e-3)}
"""Orders of magnitude within an array, and the size of its largest elements."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumErrors:
    """Ratios of errors, each the root of the mean square over elements of one size.

    Attributes:
        by_array: of exact sums over float32 sums in order: the largest over all sizes and numbers of addends.
        wide: the same of sums in bins, over all arrays.
        repeated: arrays and numbers of addends whose sum is made again in bins, which `by_array` then is of.
    """

    by_array: dict[str, float]
    wide: float
    repeated: tuple[str, ...]

    @property
    def largest(self) -> float:
        """Of any array."""
        return max(self.by_array.values())


def measure_sum_errors(all_addends: tuple[int, ...] = ADDENDS) -> SumErrors:
    """Sum arrays of each kind, of each number of addends."""
    found, wide, repeated = dict.fromkeys(ARRAYS, 0.0), 0.0, list[str]()
    for count in all_addends:
        parts = [_draw(index) for index in range(count)]
        true, ordered = _add_up_longs(parts), _add_up_floats(parts)
        exact, misfits = _add_up(_make_spec(count, "exact"), parts)
        binned, _ = _add_up(_make_spec(count, "exact_wide"), parts)
        for name, is_misfit in zip(sorted(ARRAYS), misfits, strict=True):
            least = _measure(ordered[name], true[name])
            of_bins = float(np.max(_measure(binned[name], true[name]) / least))
            wide = max(wide, of_bins)
            of_exact = of_bins if is_misfit else float(np.max(_measure(exact[name], true[name]) / least))
            found[name] = max(found[name], round(of_exact, 4))
            repeated += [f"{name} of {count}"] * bool(is_misfit)
    return SumErrors(by_array=found, wide=round(wide, 4), repeated=tuple(repeated))


def _draw(index: int) -> dict[str, np.ndarray]:
    random, found = np.random.default_rng((16, index)), {}
    for name, (orders, largest) in ARRAYS.items():
        sizes = largest * np.repeat(10.0 ** -np.linspace(0, orders, SIZES), ELEMENTS_OF_SIZE)
        values = random.standard_normal(sizes.size) * sizes
        found[name] = (values * (name != SPARSE or index > 0)).astype(np.float32)
    return found


def _add_up_longs(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.sum([part[name].astype(np.longdouble) for part in parts], axis=0) for name in ARRAYS}


def _add_up_floats(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    total = dict(parts[0])
    for part in parts[1:]:
        total = {name: total[name] + part[name] for name in ARRAYS}
    return total


def _measure(found: Any, true: np.ndarray) -> np.ndarray:
    """Return the error of elements of each size."""
    wrong = np.asarray(found, np.longdouble) - true
    return np.sqrt(np.mean(np.square(wrong).reshape(SIZES, -1), axis=1))


def _make_spec(addends: int, reduction: Reduction) -> AccumulationSpec:
    return AccumulationSpec(name="", step=0, num_microbatches=addends, reduction=reduction)


def _add_up(spec: AccumulationSpec, parts: list[dict[str, np.ndarray]]) -> tuple[Any, np.ndarray]:
    """Return the sums, and of each array in fixed point whether its sum would be made again."""
    formats = list_formats(spec, parts[0])
    exponents = [np.asarray(compute_exponents(spec, part)) for part in parts]
    limits = choose_limits(exponents[0], formats, spec.num_microbatches)
    total = start_total(spec, {name: jnp.asarray(leaf) for name, leaf in parts[0].items()}, limits)
    for part in parts[1:]:
        total, _ = add_to_total(total, part, limits, donate=True)
    misfits = find_misfits(measure_fit(np.array(exponents), limits, formats))
    return read_total(total, limits), misfits
