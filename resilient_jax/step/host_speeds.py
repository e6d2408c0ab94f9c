"""How fast hosts compute microbatches, and when it is worth giving fast ones more. Pure: no clock, no collective.

Each host measures whole microbatches of its own: whatever makes it slow (another chip, a cap on its clock, its input),
all others would wait for it.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from resilient_jax.pipeline_schedule.makespan import estimate_finish_s, share_tasks
from resilient_jax.step.assignment import (
    AccumulationSpec,
    ReplicaLocation,
    count_by_host,
    count_working_devices,
    replica_speeds,
)
from resilient_jax.step.measured_seconds import MeasuredSeconds

EXCHANGE_INTERVAL_STEPS: Final = 16
"""Steps between two exchanges of what hosts have measured, beside claims: one small all-reduce, a millisecond."""
MIN_GAIN: Final = 1.1
"""The microbatches of a step must be done this many times sooner, or hosts keep those that they have. Noise alone does
not move work to and fro, which would waste what is read ahead."""


class HostSpeeds:
    """The speeds by which the microbatches of one generation are assigned, by the name of their accumulation.

    Args:
        measured: what this host has measured, by the name of the accumulation; it outlives the generation.

    Attributes:
        new_shares: by host, how many microbatches it gets from now on, and the seconds of one; () if shares have not
            changed since they were taken.
    """

    def __init__(self, measured: dict[str, MeasuredSeconds[str]]) -> None:
        self._measured = measured
        self._chosen: dict[str, np.ndarray] = {}
        self.new_shares: tuple[tuple[int, float], ...] = ()

    def add(self, name: str, seconds: float | None) -> None:
        """Note what a microbatch of an accumulation took on this host; None: it computed none."""
        means = {} if seconds is None else {name: seconds}
        self._measured.setdefault(name, MeasuredSeconds()).add(means)

    def estimate(self, spec: AccumulationSpec) -> float:
        """Return what this host tells the others, once for each exchange: see `MeasuredSeconds.estimate`."""
        # 0 where microbatches are to be assigned evenly: of unknown speeds none is chosen, see `choose_speeds`.
        measured = self._measured.get(spec.name)
        return measured.estimate().get(spec.name, 0.0) if measured and spec.balance_by_speed else 0.0

    def choose(
        self, spec: AccumulationSpec, seconds: np.ndarray, locations: Sequence[ReplicaLocation]
    ) -> np.ndarray:
        """Return float[hosts], the speeds by which to assign microbatches; the same on all hosts.

        Args:
            seconds: float[hosts], as exchanged; zeros: not in this step.
        """
        # A generation begins with devices of equal speed: a host that joins does not know by which the others were
        # assigned.
        present = self._chosen.setdefault(spec.name, count_working_devices(locations, len(seconds)))
        speeds = self._chosen[spec.name] = choose_speeds(present, seconds, locations, spec.num_microbatches)
        if speeds is not present:
            shares = share_tasks(spec.num_microbatches, replica_speeds(locations, speeds))
            counts = count_by_host(locations, shares, len(speeds))
            self.new_shares = tuple(zip(counts, (1 / speeds).tolist(), strict=True))
        return speeds


def choose_speeds(
    present: np.ndarray, seconds: np.ndarray, locations: Sequence[ReplicaLocation], num_microbatches: int
) -> np.ndarray:
    """Return float[hosts], the speeds by which microbatches are assigned: measured ones if that pays, else `present`.

    Args:
        present: float[hosts], those by which they are assigned now.
        seconds: float[hosts], time of a microbatch; 0: unknown, so the host counts as the median of the others.
        num_microbatches: the number in each step.
    """
    # All hosts have the same `seconds` and `present`, so all choose the same speeds.
    is_known = seconds > 0
    if not is_known.any():
        return present
    measured = 1 / np.where(is_known, seconds, np.median(seconds[is_known]))
    speeds = replica_speeds(locations, measured)
    present_s, best_s = (
        estimate_finish_s(num_microbatches, replica_speeds(locations, shared_by), speeds)
        for shared_by in (present, measured)
    )
    return measured if present_s > MIN_GAIN * best_s else present
