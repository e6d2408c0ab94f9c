"""Watches how long hosts take for their microbatches, in band, and has devices measured if one seems to be slow.

Every few steps, beside their claims, hosts tell each other what their last steps took. The first host judges that,
beside the training. If it suspects a host it says so in the next exchange, upon which all hosts measure their devices
at the same time, and it concludes what is slow. So hosts take part in a collective by what all of them were told.
"""

import collections
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.auditor import HostCollectives
from resilient_jax.step.batch_source import MicrobatchInput
from resilient_jax.step.device_speed import UNKNOWN_SECONDS, DeviceSeconds
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS
from resilient_jax.step.row_exchange import exchange_rows

logger = logging.getLogger(__name__)

WORDS_PER_STEP: Final = 6
WATCH_WORDS: Final = EXCHANGE_INTERVAL_STEPS * WORDS_PER_STEP + 1
"""Of what one host tells: the timings of all steps since the last exchange, and whether devices are to be measured."""
UNUSUAL_ACCUMULATIONS: Final = 2
"""The first ones of a generation: they compile programs, or load them."""


class SlownessJudge(Protocol):
    """Judges which hosts are slow. Hosts are given by their indexes, as positions in sequences."""

    def set_groups(self, name: str, groups: Mapping[str, str]) -> None:
        """Compare what accumulations of a name take only between hosts of a group, by host, from now on."""
        ...

    def observe(self, spec: AccumulationSpec, timings: Sequence[Sequence[StepTiming]]) -> None:
        """Take in what the last steps took, by host and in the order of steps; return before they are judged."""
        ...

    def is_measurement_due(self, spec: AccumulationSpec) -> bool:
        """Return whether the devices of all hosts are to be measured before this accumulation."""
        ...

    def conclude(self, spec: AccumulationSpec, measured: Sequence[DeviceSeconds]) -> None:
        """Say what is slow, by what all hosts' devices take; nothing if one host's are `UNKNOWN_SECONDS`."""
        ...


class SlowHostWatch:
    """Watches the hosts of one generation.

    Args:
        judge: of the first host; None on all others.
        measure: measures the devices of this host.
    """

    def __init__(self, judge: SlownessJudge | None, measure: Callable[[], DeviceSeconds]) -> None:
        self._judge = judge
        self._measure = measure
        self._timings: dict[str, collections.deque[StepTiming]] = {}
        self._num_seen: collections.Counter[str] = collections.Counter()
        self._last_step: dict[str, int] = {}

    def set_groups(self, name: str, groups: Mapping[str, str]) -> None:
        """Compare what accumulations of a name take only between hosts of a group, which do the same work.

        Args:
            name: of the accumulations.
            groups: by host, of all hosts of the generation.
        """
        if self._judge is not None:
            self._judge.set_groups(name, groups)

    def add(
        self, spec: AccumulationSpec, counts: Sequence[int], seconds: float, inputs: Sequence[MicrobatchInput]
    ) -> None:
        """Note what this host took for its microbatches of an accumulation, if it was an ordinary one.

        Args:
            spec: of the accumulation.
            counts: how many each replica of this host computed.
            seconds: from the first's begin to the last's end.
            inputs: of all of them; none: the accumulation reads no data.
        """
        self._num_seen[spec.name] += 1
        # A step that is done again has begun with what was done of it before.
        is_repeated = self._last_step.get(spec.name) == spec.step
        self._last_step[spec.name] = spec.step
        if is_repeated or self._num_seen[spec.name] <= UNUSUAL_ACCUMULATIONS or not any(counts):
            return
        timings = self._timings.setdefault(spec.name, collections.deque(maxlen=EXCHANGE_INTERVAL_STEPS))
        timings.append(StepTiming(step=spec.step, works=(describe_work(counts, seconds, inputs),)))

    def take_row(self, spec: AccumulationSpec) -> np.ndarray:
        """Return int32[WATCH_WORDS], what this host tells the others before an accumulation."""
        is_due = self._judge is not None and self._judge.is_measurement_due(spec)
        return np.append(encode_timings(self._timings.pop(spec.name, ())), np.int32(is_due))

    def look(self, spec: AccumulationSpec, rows: np.ndarray, hosts: HostCollectives) -> None:
        """Have judged what hosts have told each other, and measure their devices if that is due. For all hosts at once.

        Args:
            spec: of the accumulation that begins.
            rows: int32[hosts, WATCH_WORDS], as exchanged; zeros: nothing was told.
            hosts: exchange integers.
        """
        if hosts.num_hosts == 1 or not rows.any():
            return
        if rows[:, -1].any():
            own = np.array(self._try_measure(), np.float32).view(np.int32)
            found = np.ascontiguousarray(exchange_rows(own, *hosts)).view(np.float32)
            if self._judge is not None:
                self._judge.conclude(spec, [DeviceSeconds(*row) for row in found.tolist()])
        if self._judge is not None:
            self._judge.observe(spec, [decode_timings(row[:-1]) for row in rows])

    def _try_measure(self) -> DeviceSeconds:
        """Return what this host's devices take; what is measured to help must not end the job."""
        try:
            return self._measure()
        except Exception:  # a device without free memory, for example
            logger.exception("the devices of this host could not be measured; training goes on")
            return UNKNOWN_SECONDS


def make_empty_row() -> np.ndarray:
    """Return int32[WATCH_WORDS], that of a host that tells nothing."""
    return np.zeros(WATCH_WORDS, np.int32)


def describe_work(counts: Sequence[int], seconds: float, inputs: Sequence[MicrobatchInput]) -> ReplicaWork:
    """Return the work of a host's replicas, which compute at the same time, as that of one of them.

    Args:
        counts: how many microbatches each replica computed.
        seconds: from the first's begin to the last's end.
        inputs: of all of them.
    """
    num_working = sum(map(bool, counts))
    lengths = [one.lengths.astype(float) for one in inputs if one.lengths is not None]
    if len(lengths) == sum(counts):
        tokens = sum(float(known.sum()) for known in lengths) / num_working
        squares = sum(float((known**2).sum()) for known in lengths) / num_working
    else:
        tokens, squares = float(max(counts)), 0.0
    return ReplicaWork(
        slot=0,
        microbatches=sum(counts),
        tokens=tokens,
        squares=squares,
        seconds=seconds,
        input_s=sum(one.waited_s for one in inputs) / num_working,
    )


def encode_timings(timings: Iterable[StepTiming]) -> np.ndarray:
    """Return int32[words], of at most `EXCHANGE_INTERVAL_STEPS` steps; zeros behind them."""
    row = np.zeros((EXCHANGE_INTERVAL_STEPS, WORDS_PER_STEP), np.int32)
    for place, timing in enumerate(timings):
        (work,) = timing.works
        numbers = np.array([work.tokens, work.squares, work.seconds, work.input_s], np.float32)
        row[place] = [timing.step, work.microbatches, *numbers.view(np.int32)]
    return row.reshape(-1)


def decode_timings(row: np.ndarray) -> list[StepTiming]:
    """Return what `encode_timings` was given, to the precision of float32."""
    words = row.reshape(EXCHANGE_INTERVAL_STEPS, WORDS_PER_STEP)
    numbers = np.ascontiguousarray(words[:, 2:]).view(np.float32).tolist()
    return [
        StepTiming(step=int(step), works=(ReplicaWork(0, int(microbatches), *work),))
        for (step, microbatches), work in zip(words[:, :2], numbers, strict=True)
        if microbatches
    ]
