"""Watches how long hosts take for their microbatches, in band, and has devices measured if one seems to be slow.

Every few steps, beside their claims, hosts tell each other what their last steps took. The first host judges that, and
names suspects; then all hosts measure their devices at the same time, and it says what was found. No host decides
alone whether it takes part in a collective: that follows from what all of them were told.
"""

import collections
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from resilient_jax.health.work_series import SHIFT
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.auditor import HostCollectives
from resilient_jax.step.device_speed import DeviceSeconds
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS
from resilient_jax.step.row_exchange import exchange_rows, pad_rows_size

WORDS_PER_STEP: Final = 4
TIMING_WORDS: Final = EXCHANGE_INTERVAL_STEPS * WORDS_PER_STEP
"""Of the timings of one host: all steps since the last exchange."""
UNUSUAL_ACCUMULATIONS: Final = 2
"""The first ones of a generation: they compile programs, or load them."""


class SlownessJudge(Protocol):
    """Judges, on the first host, which hosts are slow. Hosts are given by their indexes."""

    def find_suspects(self, spec: AccumulationSpec, timings: Sequence[Sequence[StepTiming]]) -> Iterable[int]:
        """Take in what the last steps of each host took, and return those whose devices are to be measured now.

        Args:
            spec: of the accumulation.
            timings: by host, in the order of steps.
        """
        ...

    def conclude(self, spec: AccumulationSpec, measured: Sequence[DeviceSeconds]) -> None:
        """Say what is slow, after the devices of all hosts have been measured.

        Args:
            spec: of the accumulation.
            measured: by host.
        """
        ...


class SlowHostWatch:
    """Watches the hosts of one generation.

    Args:
        judge: is asked on the first host alone.
        measure: measures the devices of this host.
    """

    def __init__(self, judge: SlownessJudge, measure: Callable[[], DeviceSeconds]) -> None:
        self._judge = judge
        self._measure = measure
        self._timings: dict[str, collections.deque[StepTiming]] = {}
        self._num_seen: collections.Counter[str] = collections.Counter()
        self._last_step: dict[str, int] = {}

    def add(self, spec: AccumulationSpec, microbatches: int, seconds: float, input_s: float) -> None:
        """Note what this host took for its microbatches of an accumulation, if it was an ordinary one.

        Args:
            spec: of the accumulation.
            microbatches: of that of its replicas that computed most.
            seconds: from the first's begin to the last's end.
            input_s: of these, how long a replica waited for data.
        """
        self._num_seen[spec.name] += 1
        # A step that is done again has begun with what was done of it before.
        is_repeated = self._last_step.get(spec.name) == spec.step
        self._last_step[spec.name] = spec.step
        if is_repeated or self._num_seen[spec.name] <= UNUSUAL_ACCUMULATIONS or not microbatches:
            return
        timings = self._timings.setdefault(spec.name, collections.deque(maxlen=EXCHANGE_INTERVAL_STEPS))
        timings.append(make_timing(spec.step, microbatches, seconds, input_s))

    def take_row(self, name: str) -> np.ndarray:
        """Return int32[TIMING_WORDS], what this host has noted since the last call."""
        timings = self._timings.pop(name, ())
        return encode_timings(timings)

    def look(self, spec: AccumulationSpec, rows: np.ndarray, hosts: HostCollectives) -> None:
        """Judge what hosts have told each other; measure their devices if one is a suspect. All hosts must call this.

        Args:
            spec: of the accumulation that begins.
            rows: int32[hosts, TIMING_WORDS], of all hosts; zeros: nothing was told.
            hosts: exchange integers.
        """
        if hosts.num_hosts == 1 or not rows.any():
            return
        timings = [decode_timings(row) for row in rows]
        suspects = np.zeros(pad_rows_size(1, hosts.num_hosts), np.int32)
        if hosts.host_index == 0:
            suspects[list(self._judge.find_suspects(spec, timings))] = 1
        # Usually no host differs, which all see alike, and nobody waits for the first one's verdict.
        if not differ(timings) or not np.array(hosts.all_reduce(suspects)).any():
            return
        own = np.array(self._measure(), np.float32).view(np.int32)
        found = np.ascontiguousarray(exchange_rows(own, *hosts)).view(np.float32)
        if hosts.host_index == 0:
            self._judge.conclude(spec, [DeviceSeconds(*row) for row in found.tolist()])


def differ(timings: Sequence[Sequence[StepTiming]]) -> bool:
    """Return whether the microbatches of any host take longer than those of the others."""
    means = [
        sum(work.seconds for timing in of_host for work in timing.works)
        / sum(work.microbatches for timing in of_host for work in timing.works)
        for of_host in timings
        if of_host
    ]
    return len(means) > 1 and any(
        mean > SHIFT * statistics.median(means[:place] + means[place + 1 :])
        for place, mean in enumerate(means)
    )


def make_timing(step: int, microbatches: int, seconds: float, input_s: float) -> StepTiming:
    """Return the timing of a step whose documents' lengths are unknown."""
    work = ReplicaWork(
        slot=0, microbatches=microbatches, tokens=microbatches, squares=0, seconds=seconds, input_s=input_s
    )
    return StepTiming(step=step, works=(work,))


def encode_timings(timings: Iterable[StepTiming]) -> np.ndarray:
    """Return int32[TIMING_WORDS], of at most `EXCHANGE_INTERVAL_STEPS` steps; zeros behind them."""
    row = np.zeros((EXCHANGE_INTERVAL_STEPS, WORDS_PER_STEP), np.int32)
    for place, timing in enumerate(timings):
        (work,) = timing.works
        seconds = np.array([work.seconds, work.input_s], np.float32).view(np.int32)
        row[place] = [timing.step, work.microbatches, *seconds]
    return row.reshape(-1)


def decode_timings(row: np.ndarray) -> list[StepTiming]:
    """Return what `encode_timings` was given."""
    words = row.reshape(EXCHANGE_INTERVAL_STEPS, WORDS_PER_STEP)
    seconds = np.ascontiguousarray(words[:, 2:]).view(np.float32).astype(float)
    return [
        make_timing(int(step), int(microbatches), *taken)
        for (step, microbatches), taken in zip(words[:, :2], seconds.tolist(), strict=True)
        if microbatches
    ]
