"""How well the lengths of documents predict what real microbatches take on this machine."""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.health.duration_model import WorkSample, fit_durations
from tests.benchmarks.paths import JOBS
from tests.benchmarks.runs import run_alone

STEPS: Final = 240
LEARNED: Final = 120
"""Microbatches that the fit is made of; the others are predicted."""


class RealWorkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of microbatches of the example's model, with attention that skips other documents.

    Attributes:
        error_microbatch_real: mean of |predicted / observed - 1|.
        error_microbatch_real_median: the median of the same: other programs on the machine disturb it less.
        error_without_lengths: the mean if each were predicted as the median of those that were learned.
        slowest_over_fastest: how widely the times themselves vary: 95th over 5th percentile.
        microbatch_s: seconds of one, median.
    """

    error_microbatch_real: float
    error_microbatch_real_median: float
    error_without_lengths: float
    slowest_over_fastest: float
    microbatch_s: float


def measure_real_work() -> RealWorkFigures:
    """Run the model on this machine."""
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        times = Path(folder) / "times.json"
        run_alone([str(JOBS / "packed_lm.py"), str(STEPS), str(times)], Path(folder) / "work")
        samples = msgspec.json.decode(times.read_bytes(), type=list[WorkSample])
    return make_real_work_figures(samples[:LEARNED], samples[LEARNED:])


def make_real_work_figures(learned: Sequence[WorkSample], others: Sequence[WorkSample]) -> RealWorkFigures:
    """Return the figures of predicting microbatches by a fit of others."""
    model = fit_durations(learned)
    usual_s = statistics.median(sample.seconds for sample in learned)
    errors = [abs(model.predict_s(s.tokens, s.squares) / s.seconds - 1) for s in others]
    ordered = sorted(sample.seconds for sample in others)
    return RealWorkFigures(
        error_microbatch_real=round(statistics.fmean(errors), 4),
        error_microbatch_real_median=round(statistics.median(errors), 4),
        error_without_lengths=round(statistics.fmean(abs(usual_s / s.seconds - 1) for s in others), 4),
        slowest_over_fastest=round(ordered[len(ordered) * 19 // 20] / ordered[len(ordered) // 20], 2),
        microbatch_s=round(statistics.median(ordered), 4),
    )
