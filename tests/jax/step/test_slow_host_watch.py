"""Slow hosts are named by the first host, of what all tell each other, when their devices have been measured."""

import collections
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence

import jax
import msgspec
import numpy as np
import pytest

from resilient_jax.events import Event, EventKind
from resilient_jax.health.confirmation import name_slow_devices
from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.health.link_comparison import Pairs
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.batch_source import MicrobatchInput
from resilient_jax.step.device_speed import UNKNOWN_SECONDS, DeviceSeconds, DeviceSpeed
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS
from resilient_jax.step.link_speed import REPEATS, LinkMeasurement
from resilient_jax.step.slow_host_watch import SlowHostWatch, decode_timings, describe_work, encode_timings
from resilient_jax.worker.host_health import HealthRecord, HostHealth, continue_record
from resilient_jax.worker.standalone import StandaloneControl
from tests.support.manual_clock import ManualClock
from tests.support.summing_hosts import SummingHosts

HOSTS = 4
MICROBATCHES = 4
MICROBATCH_S = 0.05
REDUCTION_S = 0.05
EXCHANGE_S = 0.001
ROW_TOKENS = 256
SOUND = DeviceSeconds(compute_s=0.004, memory_s=0.008)
HALF_SPEED = DeviceSeconds(compute_s=0.008, memory_s=0.008)
BUSY_MEMORY = DeviceSeconds(compute_s=0.004, memory_s=0.012)


def test_timings_are_what_they_were() -> None:
    timings = [
        StepTiming(
            step=step, works=(ReplicaWork(0, step % 5 + 1, 96.0, 2048.0, 0.25 * step, 0.5),), wait_s=0.125
        )
        for step in range(7)
    ]
    timings += [StepTiming(step=step, wait_s=0.25 * step) for step in range(7, 15)]
    assert decode_timings(encode_timings(timings)) == timings
    assert decode_timings(encode_timings(())) == []


def test_the_work_of_replicas_is_that_of_one_at_a_time() -> None:
    lengths = [np.array(of_batch, np.int32) for of_batch in ([8, 8], [16], [4, 4, 8], [2])]
    inputs = [MicrobatchInput(0.5, of_batch) for of_batch in lengths]
    work = describe_work([2, 2, 0], 3.0, inputs)
    assert (work.microbatches, work.tokens, work.squares) == (4, 50 / 2, (128 + 256 + 96 + 4) / 2)
    assert (work.seconds, work.input_s) == (3.0, 1.0)
    unknown = describe_work([3, 2], 3.0, [MicrobatchInput(0.0, None)] * 5)
    assert (unknown.tokens, unknown.squares) == (3.0, 0.0), "as long as the replica that has most"
    assert describe_work([1], 3.0, []).tokens == 1.0


def test_devices_are_measured() -> None:
    speed = DeviceSpeed(jax.local_devices)
    found = speed.measure()
    assert min(found.compute_s, found.memory_s) > 0
    assert found.disk_s >= 0


def test_what_devices_take_is_told_to_all_hosts_as_it_is() -> None:
    for speeds in ((), (1.0, 0.5), (0.0, 1.0, 0.0, 0.25), (1.0,) * 64):
        told = DeviceSeconds(1 / 3, 0.25, 0.0, speeds, speeds[:2])
        said = told, UNKNOWN_SECONDS
        found = SummingHosts(2).run(lambda exchange, said=said: exchange.gather(said[exchange.host_index]))
        assert found == [list(said)] * 2


def test_the_devices_that_are_slower_than_the_others_of_their_host_are_named() -> None:
    found = Finding(host="b", kind=FindingKind.COMPUTE, factor=2.25, since_step=5, evidence="slow")
    named = name_slow_devices(found, (1.0, 0.0, 0.5, 0.7), (1.0, 0.0, 0.1, 0.1))
    assert named.slow_devices == (2,), "0.7 is nearer to the speed of the fastest one than 1 / 2.25"
    assert named.device_speeds == ((0, 1.0), (2, 0.5), (3, 0.7))
    assert named.evidence == "slow; of the speed of its fastest device its device 2 has 0.50"
    memory = msgspec.structs.replace(found, kind=FindingKind.MEMORY)
    assert name_slow_devices(memory, (1.0, 1.0), (0.2, 1.0)).slow_devices == (0,)
    for kind in (FindingKind.INPUT, FindingKind.OTHER, FindingKind.LINK):
        other = msgspec.structs.replace(found, kind=kind)
        assert name_slow_devices(other, (1.0, 0.2), (1.0, 0.2)) == other
    assert name_slow_devices(found, (1.0, 0.9), (1.0, 0.1)) == found
    assert name_slow_devices(found, (1.0,), (1.0,)) == found


class RecordingControl(StandaloneControl):
    def __init__(self) -> None:
        super().__init__("host-0")
        self.found: list[tuple[EventKind, dict[str, str | float | bool]]] = []
        self.links: list[tuple[EventKind, dict[str, str | float | bool]]] = []
        self.shown: tuple[SlowHost, ...] = ()
        self.slowdown: Slowdown | None = None

    def report_slow_hosts(self, found: tuple[tuple[SlowHost, ...], Slowdown | None]) -> None:
        self.shown, self.slowdown = found

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        (self.links if kind is EventKind.LINKS_MEASURED else self.found).append((kind, detail))
        return super().record_event(kind, **detail)


class MeasuredLinks(LinkMeasurement):
    """A measurement with these results."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def run(self) -> list[float]:
        return self._seconds


class Job:
    """Hosts that tell each other what their steps take; `measured` counts devices measured, `rounds` are of links."""

    def __init__(self, names: Sequence[str], control: RecordingControl, record: HealthRecord) -> None:
        self.names = [HostName(name) for name in names]
        self.clock = ManualClock()
        self.measured = 0
        self.devices = dict.fromkeys(names, SOUND)
        self.seconds = dict.fromkeys(names, MICROBATCH_S)
        self.input_s = dict.fromkeys(names, 0.0)
        self.reduction_s = REDUCTION_S
        self.links: dict[tuple[int, int], float] = collections.defaultdict(lambda: EXCHANGE_S)
        self.rounds: list[Sequence[Pairs]] = []
        self.without_memory: int | None = None
        self._chance = random.Random(0)
        self._record = record
        health = HostHealth(self.names, control.record_event, control.report_slow_hosts, record, self.clock)
        self._watches = [
            SlowHostWatch(health if name == names[0] else None, self._measure(name)) for name in names
        ]

    def run(self, steps: range) -> None:
        for step in steps:
            spec = AccumulationSpec(
                name="train", step=step, num_microbatches=HOSTS * MICROBATCHES, reduction="exact"
            )
            if step % EXCHANGE_INTERVAL_STEPS == 0:
                self._exchange(spec)
            for name, watch in zip(self.names, self._watches, strict=True):
                lengths = self.draw_lengths(name, step)
                share = 1.0 if lengths is None else float((lengths.astype(float) ** 2).sum()) / ROW_TOKENS**2
                seconds = MICROBATCHES * self.seconds[name] * share * self._chance.gauss(1, 0.02)
                one = MicrobatchInput(self.input_s[name] / MICROBATCHES, lengths)
                watch.add(spec, [MICROBATCHES], seconds, [one] * MICROBATCHES)
                watch.amend(spec, wait_s=self.reduction_s * self._chance.uniform(1, 1.1))
            self.clock.advance(MICROBATCHES * MICROBATCH_S)

    def draw_lengths(self, name: str, step: int) -> np.ndarray | None:
        """Return the lengths of the documents of each microbatch; None: they are unknown, and all alike."""
        return None

    def _measure(self, name: str) -> Callable[[], DeviceSeconds]:
        def measure() -> DeviceSeconds:
            self.measured += name == self.names[0]
            return self.devices[name]

        return measure

    def _prepare_links(self, host: int, rounds: Sequence[Pairs]) -> "MeasuredLinks":
        if host == self.without_memory:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        if host == 0:
            self.rounds.append(rounds)
        partners = ((pair for pair in pairs if host in pair) for pairs in rounds)
        return MeasuredLinks([sum(self.links[pair] for pair in found) for found in partners])

    def _exchange(self, spec: AccumulationSpec) -> None:
        """Have all hosts look at what all tell, each on a thread: in a collective all must take part."""
        reports = [watch.take_report(spec) for watch in self._watches]

        def look(exchange: CollectiveExchange) -> None:
            host = exchange.host_index
            self._watches[host].look(spec, reports, exchange, functools.partial(self._prepare_links, host))

        SummingHosts(len(self.names)).run(look)
        self._record.thread.submit(lambda: None).result()  # all is judged


@pytest.fixture
def control() -> RecordingControl:
    return RecordingControl()


@pytest.fixture
def record() -> HealthRecord:
    return HealthRecord(GenerationNumber(1))


@pytest.fixture
def job(control: RecordingControl, record: HealthRecord) -> Job:
    found = Job([f"host-{number}" for number in range(HOSTS)], control, record)
    found.run(range(64))
    return found


def test_nothing_is_found_where_all_are_alike(job: Job, control: RecordingControl) -> None:
    job.run(range(64, 400))
    assert not control.found
    assert not job.measured, "nobody waits for a measurement"


@pytest.mark.parametrize(("devices", "part"), [(HALF_SPEED, "compute"), (BUSY_MEMORY, "memory")])
def test_a_slow_device_is_reported_after_one_measurement(
    job: Job, control: RecordingControl, devices: DeviceSeconds, part: str
) -> None:
    job.seconds["host-2"] *= 2
    job.devices["host-2"] = devices
    job.run(range(64, 98))
    ((kind, detail),) = control.found
    assert kind == EventKind.HOST_SLOW
    assert (detail["slow"], detail["part"]) == ("host-2", part)
    assert detail["factor"] == pytest.approx(2.0, abs=0.1)
    assert detail["since_step"] == 64
    assert "median of its peers" in str(detail["why"])
    assert job.measured == 1


def test_what_is_over_when_devices_are_measured_is_not_reported(job: Job, control: RecordingControl) -> None:
    job.seconds["host-2"] *= 2
    job.run(range(64, 98))
    assert job.measured == 1
    job.seconds["host-2"] /= 2
    job.run(range(98, 400))
    assert not control.found


def test_a_host_whose_devices_are_sound_is_reported_when_it_stays_slow(
    job: Job, control: RecordingControl
) -> None:
    job.seconds["host-1"] *= 1.5
    job.run(range(64, 400))
    ((kind, detail),) = control.found
    assert kind == EventKind.HOST_SLOW
    assert (detail["slow"], detail["part"]) == ("host-1", "other")
    assert job.measured == 2


def test_a_wait_for_data_is_told_apart(job: Job, control: RecordingControl) -> None:
    job.seconds["host-3"] *= 2
    job.input_s["host-3"] = MICROBATCHES * MICROBATCH_S
    job.run(range(64, 98))
    ((_, detail),) = control.found
    assert (detail["slow"], detail["part"]) == ("host-3", "input")
    assert "input's files" not in str(detail["why"]), "no host has any on a disk"


def test_a_busy_moment_of_the_processor_does_not_hide_that_all_is_a_wait_for_data(
    job: Job, control: RecordingControl
) -> None:
    job.seconds["host-3"] *= 2
    job.input_s["host-3"] = MICROBATCHES * MICROBATCH_S
    job.devices["host-3"] = HALF_SPEED
    job.run(range(64, 98))
    assert control.found[0][1]["part"] == "input"


def test_a_slow_processor_is_the_cause_of_a_wait_for_some_of_the_time(
    job: Job, control: RecordingControl
) -> None:
    job.seconds["host-3"] *= 2
    job.input_s["host-3"] = 0.7 * MICROBATCHES * MICROBATCH_S
    job.devices["host-3"] = HALF_SPEED
    job.run(range(64, 98))
    assert control.found[0][1]["part"] == "compute"


def test_a_slow_disk_is_in_the_evidence_of_a_wait_for_data(job: Job, control: RecordingControl) -> None:
    job.seconds["host-3"] *= 2
    job.input_s["host-3"] = MICROBATCHES * MICROBATCH_S
    for name in job.names:
        job.devices[name] = SOUND._replace(disk_s=0.01 if name == "host-3" else 0.002)
    job.run(range(64, 98))
    ((_, detail),) = control.found
    assert "a read of its input's files, past the page cache, takes 5.00 times" in str(detail["why"])


def test_a_host_with_long_documents_is_not_slow_and_one_with_short_ones_may_be(
    control: RecordingControl, record: HealthRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)

    def draw_lengths(_: Job, name: str, step: int) -> np.ndarray:
        is_long = name == f"host-{step // 40 % HOSTS}"  # 40 steps with longer documents than on other hosts
        documents = chance.choice((1, 1, 1, 2) if is_long else (1, 2, 4, 4))
        return np.full(documents, ROW_TOKENS // documents, np.int32)

    monkeypatch.setattr(Job, "draw_lengths", draw_lengths)
    job = Job([f"host-{number}" for number in range(HOSTS)], control, record)
    job.run(range(400))
    assert not job.measured
    job.seconds["host-3"] *= 2
    job.devices["host-3"] = HALF_SPEED
    job.run(range(400, 440))
    assert [detail["slow"] for _, detail in control.found] == ["host-3"]


def test_the_end_of_slowness_is_reported(job: Job, control: RecordingControl) -> None:
    job.seconds["host-2"] *= 2
    job.devices["host-2"] = HALF_SPEED
    job.run(range(64, 100))
    assert [one.host for one in control.shown] == ["host-2"]
    job.seconds["host-2"] /= 2
    job.run(range(100, 200))
    assert not control.shown
    assert [kind for kind, _ in control.found] == [EventKind.HOST_SLOW, EventKind.HOST_SLOW_ENDED]
    assert control.found[-1][1]["slow"] == "host-2"


def test_a_slow_host_that_leaves_is_slow_no_more(
    job: Job, control: RecordingControl, record: HealthRecord
) -> None:
    job.seconds["host-2"] *= 2
    job.devices["host-2"] = HALF_SPEED
    job.run(range(64, 100))
    Job(["host-0", "host-1", "host-3"], control, record).run(range(100, 200))
    assert [kind for kind, _ in control.found] == [EventKind.HOST_SLOW, EventKind.HOST_SLOW_ENDED]
    assert "takes no part" in str(control.found[-1][1]["why"])
    assert not control.shown


def test_the_last_host_reports_that_the_other_is_gone(
    control: RecordingControl, record: HealthRecord
) -> None:
    job = Job(["host-0", "host-1"], control, record)
    job.run(range(64))
    job.seconds["host-1"] *= 2
    job.devices["host-1"] = HALF_SPEED
    job.run(range(64, 100))
    assert [one.host for one in control.shown] == ["host-1"]
    Job(["host-0"], control, record)
    assert [kind for kind, _ in control.found] == [EventKind.HOST_SLOW, EventKind.HOST_SLOW_ENDED]
    assert not control.shown


def test_a_host_that_was_not_the_first_for_a_while_begins_anew(record: HealthRecord) -> None:
    assert continue_record(record, GenerationNumber(2)) is record
    assert continue_record(record, GenerationNumber(4)) is not record


@pytest.mark.parametrize(
    ("slow", "peer"),
    [([(0, 2), (1, 2), (2, 3)], "each of its peers"), ([(1, 2)], "host-2")],
    ids=["of a host", "between two hosts"],
)
def test_a_slow_link_is_named_after_one_measurement(
    job: Job, control: RecordingControl, slow: list[tuple[int, int]], peer: str
) -> None:
    job.run(range(64, 144))
    job.reduction_s *= 3
    job.links.update(dict.fromkeys(slow, 4 * EXCHANGE_S))
    job.run(range(144, 210))
    ((kind, detail),) = control.found
    assert kind == EventKind.HOST_SLOW
    assert (detail["slow"], detail["part"]) == ("host-2" if len(slow) > 1 else "host-1", "link")
    assert detail["factor"] == pytest.approx(3.0, abs=0.3)
    assert f"with {peer} takes 4.0 times as long as before, other pairs 1.0 times" in str(detail["why"])
    assert len(job.rounds) == 3, "before, and twice now"
    assert not job.measured
    assert control.shown[0].describe().startswith("slow (link): 3.")
    job.reduction_s /= 3
    job.run(range(210, 280))
    assert [kind for kind, _ in control.found] == [EventKind.HOST_SLOW, EventKind.HOST_SLOW_ENDED]


def test_what_slows_all_links_names_no_host_and_is_not_measured_for_ever(
    job: Job, control: RecordingControl
) -> None:
    job.run(range(64, 144))
    job.reduction_s *= 3
    job.run(range(144, 1000))
    assert not control.found
    assert len(job.rounds) == 3


def slow_links_of(host: int) -> list[tuple[int, int]]:
    return [(min(host, peer), max(host, peer)) for peer in range(HOSTS) if peer != host]


def slow_down_all_links(job: Job, factor: float) -> None:
    every_pair = itertools.combinations(range(HOSTS), 2)
    job.links = collections.defaultdict(lambda: EXCHANGE_S, dict.fromkeys(every_pair, factor * EXCHANGE_S))


def test_links_that_were_first_measured_in_a_busy_moment_name_nobody_and_are_learned_anew(
    job: Job, control: RecordingControl
) -> None:
    slow_down_all_links(job, 5.0)
    job.run(range(64, 144))
    slow_down_all_links(job, 1.0)
    # Its exchanges were faster than before, those of the others more so.
    job.links.update(dict.fromkeys(slow_links_of(2), 4 * EXCHANGE_S))
    job.reduction_s *= 5
    job.run(range(144, 240))
    assert len(job.rounds) == 3
    assert not control.found
    job.reduction_s /= 5
    slow_down_all_links(job, 1.0)
    job.run(range(240, 400))
    job.reduction_s *= 3
    job.links.update(dict.fromkeys(slow_links_of(2), 4 * EXCHANGE_S))
    job.run(range(400, 480))
    assert [detail["slow"] for _, detail in control.found] == ["host-2"]


def test_links_are_measured_now_and_then_while_nothing_is_wrong(job: Job) -> None:
    job.run(range(64, 1100))
    assert len(job.rounds) == 4, "in steps 128, 256, 512 and 1024"


def test_a_link_that_only_one_measurement_shows_is_not_acted_on(job: Job, control: RecordingControl) -> None:
    job.run(range(64, 144))
    job.reduction_s *= 3
    job.links.update(dict.fromkeys(slow_links_of(2), 4 * EXCHANGE_S))
    acted: list[Slowdown] = []
    for first in range(144, 400, 16):
        job.run(range(first, first + 16))
        if control.found:
            slow_down_all_links(job, 1.0)
        if control.slowdown is not None:
            acted.append(control.slowdown)
    assert [kind for kind, _ in control.found] == [EventKind.HOST_SLOW, EventKind.HOST_SLOW_ENDED]
    assert control.found[1][1]["why"] == "a second measurement does not show it"
    assert not acted
    assert not control.shown


def test_what_a_slow_link_costs_is_told_after_the_second_measurement(
    job: Job, control: RecordingControl
) -> None:
    job.run(range(64, 144))
    job.reduction_s *= 3
    job.links.update(dict.fromkeys(slow_links_of(2), 4 * EXCHANGE_S))
    told: list[tuple[bool, int]] = []
    for first in range(144, 300, 16):
        job.run(range(first, first + 16))
        told.append((control.slowdown is not None, len(job.rounds)))
    assert (True, 3) in told
    assert all(num_measured >= 3 for is_told, num_measured in told if is_told)


@pytest.mark.parametrize("seed", range(12))
def test_a_busy_machine_has_no_link_that_something_is_done_about(
    job: Job, control: RecordingControl, seed: int
) -> None:
    """Now and then all reductions take long for a while, and what exchanges take varies by an order of magnitude."""
    chance = random.Random(seed)
    job.reduction_s = 0.004

    def measure() -> float:
        return EXCHANGE_S * math.exp(min(abs(chance.gauss(0, 1)) for _ in range(REPEATS)))

    job.run(range(64, 120))
    for first in range(128, 1664, 16):
        job.links = collections.defaultdict(measure)
        job.reduction_s = 0.004 * (chance.uniform(3, 20) if chance.random() < 0.3 else 1.0)
        job.run(range(first, first + 16))
        assert control.slowdown is None
    assert job.rounds


def test_reductions_of_fewer_hosts_are_learned_anew(
    job: Job, control: RecordingControl, record: HealthRecord
) -> None:
    smaller = Job(["host-0", "host-1", "host-3"], control, record)
    smaller.reduction_s *= 2
    smaller.run(range(100, 300))
    assert len(smaller.rounds) == 1, "to compare with"


def test_links_that_cannot_be_measured_end_nothing(job: Job, control: RecordingControl) -> None:
    job.run(range(64, 144))
    job.without_memory = 3
    job.reduction_s *= 3
    job.links.update(dict.fromkeys([(0, 2), (1, 2), (2, 3)], 4 * EXCHANGE_S))
    job.run(range(144, 210))
    assert not control.found


def test_what_links_usually_take_is_measured_again_if_it_could_not_be(
    job: Job, control: RecordingControl
) -> None:
    job.without_memory = 3
    job.run(range(64, 144))
    job.without_memory = None
    job.run(range(144, 272))
    job.reduction_s *= 3
    job.links.update(dict.fromkeys([(0, 2), (1, 2), (2, 3)], 4 * EXCHANGE_S))
    job.run(range(272, 340))
    assert [(detail["slow"], detail["part"]) for _, detail in control.found] == [("host-2", "link")]


def test_devices_that_cannot_be_measured_end_nothing(job: Job, control: RecordingControl) -> None:
    def fail() -> DeviceSeconds:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    job.seconds["host-2"] *= 2
    job.devices["host-2"] = HALF_SPEED
    job._watches[3]._measure = fail
    job.run(range(64, 200))
    assert not control.found


def test_measurements_take_a_hundredth_of_the_time(
    job: Job, control: RecordingControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> DeviceSeconds:
        job.clock.advance(1.0)
        return SOUND

    # Of the first host, which notes the begin: another one may measure before that on its own thread.
    monkeypatch.setattr(job._watches[0], "_measure", measure)
    job.seconds["host-1"] *= 1.5
    job.run(range(64, 400))
    # 336 steps of 0.2 s are 67 s: after a measurement of a second the next one is not due.
    assert not control.found


@pytest.mark.parametrize("second", range(80, 124, 4))
def test_two_hosts_that_slow_down_one_after_the_other_are_both_named_before_one_is_acted_on(
    job: Job, control: RecordingControl, second: int
) -> None:
    """A rack is throttled host by host. What is known when it is told what the first costs shows the common cause."""
    for first in range(64, 320, 2):
        for host, step in {"host-1": 66, "host-2": second}.items():
            if step == first:
                job.seconds[host] *= 2
                job.devices[host] = HALF_SPEED
        job.run(range(first, first + 2))
        if control.slowdown is not None:
            break
    assert control.slowdown is not None
    assert {one.host for one in control.shown} == {"host-1", "host-2"}
