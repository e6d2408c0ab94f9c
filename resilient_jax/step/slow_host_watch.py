"""Watches how long steps take, in band, and has devices or links measured if one of them seems to be slow.

Every few steps, beside their claims, hosts tell each other what their last steps took. The first host judges that,
beside the training. If it suspects a host, or the links between hosts, it says so in the next exchange, upon which all
hosts measure their devices, or exchange some bytes in pairs, at the same time. It concludes from that what is slow. So
hosts take part in a collective by what all of them were told.
"""

import collections
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np

from resilient_jax.health.finding import Finding
from resilient_jax.health.link_comparison import Pairs, pair_hosts
from resilient_jax.host_exchange import FLOAT_BYTES, MAX_INTEGER_BYTES, HostExchange
from resilient_jax.policy.devices_after_loss import DevicesAfterLoss
from resilient_jax.protocol.slow_hosts import Slowdown
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.batch_source import MicrobatchInput
from resilient_jax.step.device_speed import UNKNOWN_SECONDS, DeviceSeconds
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS
from resilient_jax.step.watch_report import Measurement, WatchReport

logger = logging.getLogger(__name__)

STEP_NUMBERS: Final = np.dtype(
    [(name, np.int32) for name in ("step", "microbatches")]
    + [
        (name, np.float32)
        for name in ("tokens", "squares", "seconds", "input_s", "wait_s", "received_bytes", "received_s")
    ]
)
"""What a host tells of a step: half as long as the same numbers in msgpack."""
WATCH_BYTES: Final = EXCHANGE_INTERVAL_STEPS * STEP_NUMBERS.itemsize + 3 * MAX_INTEGER_BYTES
"""Size of a `WatchReport` at most."""
UNUSUAL_ACCUMULATIONS: Final = 2
"""The first ones of a generation: they compile programs, or load them."""
SlowdownEstimate = Callable[[Sequence[Finding], DevicesAfterLoss], Slowdown | None]
"""Returns what hosts that are slow, one finding for each, cost a step; None: it is not known."""
_NO_WORK: Final = ReplicaWork(slot=0, microbatches=0, tokens=0.0, squares=0.0, seconds=0.0)


class PreparedLinks(Protocol):
    """A measurement of links that is prepared: nothing of it fails for want of memory any more."""

    def run(self) -> list[float]:
        """Return by round what an exchange with this host's partner takes, in seconds; 0 where it has none."""
        ...


LinkPreparation = Callable[[Sequence[Pairs]], PreparedLinks]


class SlownessJudge(Protocol):
    """Judges what is slow. Hosts are given by their indexes, as positions in sequences."""

    def set_groups(self, name: str, groups: Mapping[str, str]) -> None:
        """Compare what accumulations of a name take only between hosts of a group, by host, from now on."""
        ...

    def observe(self, spec: AccumulationSpec, timings: Sequence[Sequence[StepTiming]]) -> None:
        """Take in what the last steps took, by host and in the order of steps; return before they are judged."""
        ...

    def choose_measurement(self, spec: AccumulationSpec) -> Measurement:
        """Return what all hosts are to measure before this accumulation."""
        ...

    def begin_measurement(self, due: Measurement) -> None:
        """Note that all hosts begin to measure this now: measuring must take a small part of the time."""
        ...

    def conclude(self, spec: AccumulationSpec, measured: Sequence[DeviceSeconds]) -> None:
        """Say which host is slow, by what all hosts' devices take; nothing if one host's are `UNKNOWN_SECONDS`."""
        ...

    def conclude_links(
        self, spec: AccumulationSpec, rounds: Sequence[Pairs], seconds: Sequence[Sequence[float]]
    ) -> None:
        """Say which link is slow, by what exchanges took, by host and round; see `PreparedLinks.run`."""
        ...

    def estimate_by(self, estimate: SlowdownEstimate) -> None:
        """Report what slow hosts cost, if that lasts; return before it is estimated."""
        ...


class SlowHostWatch:
    """Watches the hosts of one generation.

    Args:
        measure: measures the devices of this host.

    Attributes:
        judge: judges what all hosts have told, on the first host; None on all others.
    """

    def __init__(self, judge: SlownessJudge | None, measure: Callable[[], DeviceSeconds]) -> None:
        self.judge = judge
        self._measure = measure
        self._timings: dict[str, collections.deque[StepTiming]] = {}
        self._num_seen: collections.Counter[str] = collections.Counter()
        self._last_step: dict[str, int] = {}

    def add(
        self, spec: AccumulationSpec, counts: Sequence[int], seconds: float, inputs: Sequence[MicrobatchInput]
    ) -> None:
        """Note what this host took for its microbatches of an accumulation, if it was an ordinary one.

        Args:
            counts: how many each replica of this host computed; all may be 0.
            seconds: time from the begin of the first to the end of the last.
            inputs: how each of them was read; none: the accumulation reads no data.
        """
        self._num_seen[spec.name] += 1
        # A step that is done again has begun with what was done of it before.
        is_repeated = self._last_step.get(spec.name) == spec.step
        self._last_step[spec.name] = spec.step
        if is_repeated or self._num_seen[spec.name] <= UNUSUAL_ACCUMULATIONS:
            return
        works = (describe_work(counts, seconds, inputs),) if any(counts) else ()
        timings = self._timings.setdefault(spec.name, collections.deque(maxlen=EXCHANGE_INTERVAL_STEPS))
        timings.append(StepTiming(step=spec.step, works=works))

    def amend(self, spec: AccumulationSpec, **measured: float) -> None:
        """Set more of the `StepTiming` of the microbatches that were noted last, if these are of this step."""
        timings = self._timings.get(spec.name)
        if timings and timings[-1].step == spec.step:
            timings[-1] = msgspec.structs.replace(timings[-1], **measured)

    def take_report(self, spec: AccumulationSpec) -> WatchReport:
        """Return what this host tells the others before an accumulation."""
        due = Measurement.NOTHING if self.judge is None else self.judge.choose_measurement(spec)
        return WatchReport(encode_timings(self._timings.pop(spec.name, ())), due)

    def look(
        self,
        spec: AccumulationSpec,
        reports: Sequence[WatchReport],
        hosts: HostExchange,
        prepare_links: LinkPreparation | None = None,
    ) -> None:
        """Have judged what hosts have told each other, and measure what is to be measured. For all hosts at once.

        Args:
            spec: the accumulation that begins.
            reports: what each host has told; (): nothing was told.
            hosts: the exchange in which they tell each other what they measure.
            prepare_links: prepares a measurement of the links of these hosts; None where links are not watched.
        """
        if hosts.num_hosts == 1 or not any(report.timings or report.due for report in reports):
            return
        # Only the first host's report says anything, but all have it: so all enter the collectives below.
        due = functools.reduce(operator.or_, (report.due for report in reports))
        if self.judge is not None and due:
            self.judge.begin_measurement(due)
        if Measurement.DEVICES in due:
            measured = hosts.gather(self._try_measure())
            if self.judge is not None:
                self.judge.conclude(spec, measured)
        if Measurement.LINKS in due:
            assert prepare_links is not None, "only watched links are suspected"
            rounds = pair_hosts(hosts.num_hosts)
            seconds = _measure_links(functools.partial(prepare_links, rounds), len(rounds), hosts)
            if self.judge is not None:
                self.judge.conclude_links(spec, rounds, seconds)
        if self.judge is not None:
            self.judge.observe(spec, [decode_timings(report.timings) for report in reports])

    def _try_measure(self) -> DeviceSeconds:
        """Return what this host's devices take; what is measured to help must not end the job."""
        try:
            return self._measure()
        except Exception:  # a device without free memory, for example
            logger.exception("the devices of this host could not be measured; training goes on")
            return UNKNOWN_SECONDS


def _measure_links(
    prepare: Callable[[], PreparedLinks], num_rounds: int, hosts: HostExchange
) -> list[list[float]]:
    """Return what exchanges took, by host and round; zeros if a host cannot take part in them."""
    try:
        prepared = prepare()
    except Exception:  # a device without free memory, for example
        logger.exception("the links of this host could not be measured; training goes on")
        prepared = None
    # A host that could not prepare would not enter the exchanges, in which the others would wait for it.
    is_ready = hosts.gather(prepared is not None)
    if prepared is None or not all(is_ready):
        return [[0.0] * num_rounds] * hosts.num_hosts
    return hosts.gather(prepared.run(), room_bytes=FLOAT_BYTES * num_rounds + MAX_INTEGER_BYTES)


def describe_work(counts: Sequence[int], seconds: float, inputs: Sequence[MicrobatchInput]) -> ReplicaWork:
    """Return the work of a host's replicas, which compute at the same time, as that of one of them.

    Args:
        counts: how many microbatches each replica computed.
        seconds: time from the begin of the first to the end of the last.
        inputs: how each of them was read.
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


def encode_timings(timings: Iterable[StepTiming]) -> bytes:
    """Return `STEP_NUMBERS` of each step."""
    rows = []
    for timing in timings:
        work = timing.works[0] if timing.works else _NO_WORK
        of_work = work.microbatches, work.tokens, work.squares, work.seconds, work.input_s
        rows.append((timing.step, *of_work, timing.wait_s, timing.received_bytes, timing.received_s))
    return np.array(rows, STEP_NUMBERS).tobytes()


def decode_timings(data: bytes) -> list[StepTiming]:
    """Return what `encode_timings` was given, to the precision of float32."""
    return [
        StepTiming(
            step=step,
            works=(ReplicaWork(0, microbatches, *work),) if microbatches else (),
            wait_s=wait_s,
            received_bytes=received_bytes,
            received_s=received_s,
        )
        for step, microbatches, *work, wait_s, received_bytes, received_s in np.frombuffer(
            data, STEP_NUMBERS
        ).tolist()
    ]
