"""Slow links of a pipeline: suspected by what mail takes to be received, and named by exchanges between all hosts."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilient_jax.events import EventKind
from resilient_jax.health.finding import FindingKind
from resilient_jax.health.link_comparison import pair_hosts
from resilient_jax.health.monitor import FindingClosed, FindingOpened, HealthMonitor
from resilient_jax.host_exchange.step_mail import STEP_MAIL, StepMail
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.pipeline.layer_speeds import compute_growth
from resilient_jax.pipeline.link_exchanges import LINKS_MAIL, MailExchanges
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.device_speed import DeviceSeconds
from resilient_jax.step.watch_report import Measurement
from resilient_jax.transport import Credentials
from resilient_jax.transport.mail_protocol import Mail, MailKey
from resilient_jax.transport.mail_service import MailService
from resilient_jax.transport.received_mail import ReceivedMail, ReceivedMailCounter
from resilient_jax.worker.host_health import HealthRecord, HostHealth
from tests.support.manual_clock import ManualClock

HOSTS = tuple(HostName(name) for name in "abcd")
SENT_BYTES = dict(zip(HOSTS, (4e6, 8e6, 8e6, 4e6), strict=True))
"""That each receives in a step; the ends of a pipeline have one neighbor."""
BYTES_PER_S = 2e8
SLOW_FROM, WAIT_S = 64, 60.0


def tell(
    step: int, host: HostName, chance: random.Random, slow: float = 1.0, share: float = 1.0, work: float = 1.0
) -> StepTiming:
    num_bytes = SENT_BYTES[host] * share
    return StepTiming(
        step=step,
        works=(ReplicaWork(0, 4, 4.0, 0.0, 0.3 * work * chance.gauss(1, 0.02)),),
        received_bytes=num_bytes,
        received_s=num_bytes / BYTES_PER_S * slow * chance.uniform(1, 1.1),
    )


def watch(
    monitor: HealthMonitor, steps: range, share: float = 1.0, **slow: float
) -> list[FindingOpened | FindingClosed]:
    chance = random.Random(steps.start)
    return [
        change
        for step in steps
        for host in HOSTS
        for change in monitor.observe(host, tell(step, host, chance, slow.get(host, 1.0), share))
    ]


@pytest.fixture
def monitor() -> HealthMonitor:
    found = HealthMonitor(dict(zip(HOSTS, ("0-3", "4-7", "8-11", "12-15"), strict=True)))
    found.set_members(HOSTS, 0)
    assert watch(found, range(SLOW_FROM)) == []
    return found


@pytest.mark.parametrize("slow", [{"b": 5.0}, {"d": 9.0}, {"a": 9.0, "b": 5.0, "c": 5.0}])
def test_mail_that_takes_long_is_a_suspicion_of_the_links(
    monitor: HealthMonitor, slow: dict[str, float]
) -> None:
    """The host with the slow link receives slowly, and so do the hosts that it sends to."""
    assert monitor.knows_links
    (change,) = watch(monitor, range(SLOW_FROM, SLOW_FROM + 20), **slow)
    assert isinstance(change, FindingOpened)
    assert (change.finding.host, change.finding.kind) == ("", FindingKind.LINK)
    assert "the mail of the host that received longest took" in change.finding.evidence
    assert not monitor.knows_links
    (over,) = watch(monitor, range(SLOW_FROM + 20, SLOW_FROM + 40))
    assert isinstance(over, FindingClosed)


def test_more_mail_is_no_slow_link(monitor: HealthMonitor) -> None:
    """Replicas that get more microbatches receive more."""
    assert watch(monitor, range(SLOW_FROM, SLOW_FROM + 60), share=3.0) == []


def test_milliseconds_of_mail_are_nothing_to_tell(monitor: HealthMonitor) -> None:
    assert watch(monitor, range(SLOW_FROM, SLOW_FROM + 60), share=0.01, b=20.0) == []


class Job:
    """The first host's judgement of a pipeline whose links are measured."""

    def __init__(self) -> None:
        self.clock, self.record = ManualClock(), HealthRecord(GenerationNumber(1))
        self.events: list[tuple[EventKind, str, str]] = []
        self.shown: tuple[SlowHost, ...] = ()
        self.slowdown: Slowdown | None = None
        self.measured: list[Measurement] = []
        self.step = 0
        self.health = HostHealth(HOSTS, self._record_event, self._show, self.record, self.clock)
        self.health.set_groups("pipeline", {host: host for host in HOSTS})

    def run(
        self,
        steps: int,
        exchanges: dict[str, float] | None = None,
        work: dict[str, float] | None = None,
        devices: dict[str, float] | None = None,
        **slow: float,
    ) -> None:
        """Run steps, told sixteen at a time; what a host does takes so many times as long as usual."""
        rounds, exchanges, work, devices = pair_hosts(len(HOSTS)), exchanges or {}, work or {}, devices or {}
        chance = random.Random(self.step)
        for _ in range(steps // 16):
            told = [
                [
                    tell(step, host, chance, slow.get(host, 1.0), work=work.get(host, 1.0))
                    for step in range(self.step, self.step + 16)
                ]
                for host in HOSTS
            ]
            self.step += 16
            self.clock.advance(100.0)
            spec = AccumulationSpec(name="pipeline", step=self.step, num_microbatches=8, reduction="exact")
            due = self.health.choose_measurement(spec)
            if due:
                self.measured.append(due)
                self.health.begin_measurement(due)
            if Measurement.DEVICES in due:
                self.health.conclude(
                    spec, [DeviceSeconds(devices.get(host, 1.0), devices.get(host, 1.0)) for host in HOSTS]
                )
            if Measurement.LINKS in due:
                pair_of = [{host: pair for pair in pairs for host in pair} for pairs in rounds]
                factors = [exchanges.get(host, 1.0) for host in HOSTS]
                measured = [
                    [0.001 * max(factors[other] for other in pairs[host]) for pairs in pair_of]
                    for host in range(len(HOSTS))
                ]
                self.health.conclude_links(spec, rounds, measured)
            self.health.observe(spec, told)
            self.record.thread.submit(lambda: None).result(timeout=WAIT_S)

    def _record_event(self, kind: EventKind, **detail: object) -> None:
        if kind is not EventKind.LINKS_MEASURED:
            self.events.append((kind, str(detail["slow"]), str(detail["part"])))

    def _show(self, found: tuple[tuple[SlowHost, ...], Slowdown | None]) -> None:
        self.shown, self.slowdown = found


def test_a_host_with_a_slow_link_is_named_and_shown() -> None:
    job = Job()
    job.run(160)
    assert job.events == []
    job.run(96, {"b": 6.0}, a=5.0, b=5.0, c=5.0)
    assert job.events == [(EventKind.HOST_SLOW, "b", "link")]
    assert [(one.host, one.kind) for one in job.shown] == [("b", "link")]
    job.run(64)
    assert job.events[1:] == [(EventKind.HOST_SLOW_ENDED, "b", "link")]


def test_links_are_measured_late_if_something_else_was_to_be_measured_in_step_128() -> None:
    """Else it would never be known what they took before."""
    job = Job()
    job.run(112)
    job.record.next_measurement_step = 140
    job.run(64)
    assert job.record.fastest_links is not None
    job.run(96, {"b": 6.0}, a=5.0, b=5.0, c=5.0)
    assert job.events == [(EventKind.HOST_SLOW, "b", "link")]


BOTH = Measurement.DEVICES | Measurement.LINKS


def test_a_link_is_measured_with_devices_that_seem_to_be_slow() -> None:
    """On a busy machine some host's devices often do; the next measurement would be minutes later."""
    job = Job()
    job.run(160)
    job.run(32, {"b": 6.0}, {"c": 1.5}, a=5.0, b=5.0, c=5.0)
    assert job.measured == [Measurement.LINKS, BOTH]
    assert job.events == [(EventKind.HOST_SLOW, "b", "link")]


def test_a_link_is_not_named_by_a_measurement_that_finds_slow_devices() -> None:
    """A slow processor makes its exchanges slow, too."""
    job = Job()
    job.run(160)
    job.run(32, {"b": 6.0}, {"b": 3.0}, {"b": 3.0}, a=5.0, b=5.0, c=5.0)
    assert job.measured == [Measurement.LINKS, BOTH]
    assert job.events == [(EventKind.HOST_SLOW, "b", "compute")]


def test_links_are_measured_to_compare_with_although_devices_are_suspected() -> None:
    job = Job()
    job.run(96)
    job.run(32, None, {"c": 1.5})
    assert job.measured == [BOTH]
    assert job.record.fastest_links is not None


def test_mail_that_is_slow_on_a_busy_machine_names_nobody() -> None:
    job = Job()
    job.run(160)
    job.run(320, dict.fromkeys(HOSTS, 3.0), a=5.0, b=5.0, c=5.0, d=5.0)
    assert job.events == []


def test_steps_are_compared_with_those_before() -> None:
    durations = [(step, 0.1 if step < 80 else 0.25) for step in range(100)]
    assert compute_growth(durations, 80) == pytest.approx(2.5)
    assert compute_growth(durations, 20) == pytest.approx(1.0 * 0.25 / 0.1)
    assert compute_growth(durations, 4) == compute_growth(durations, 96) == 1.0, "too few before, or after"


def test_only_what_steps_send_is_counted() -> None:
    counter = ReceivedMailCounter()
    for kind in (*STEP_MAIL, LINKS_MAIL):
        counter.add(Mail(key=MailKey(1, 0, kind, 0, 0), data=memoryview(bytes(10))), 0.5)
    assert counter.take(STEP_MAIL) == ReceivedMail(30, 1.5)
    assert counter.take(STEP_MAIL) == ReceivedMail()


def test_hosts_exchange_mail_in_pairs() -> None:
    """With real sockets. Five hosts: in each round one has no partner."""
    names = [HostName(f"h{number}") for number in range(5)]
    lost = threading.Event()
    services = [
        MailService(name, "127.0.0.1", Credentials("token"), lambda peer, error: lost.set()) for name in names
    ]
    try:
        addresses = {name: service.address for name, service in zip(names, services, strict=True)}
        for service in services:
            service.enter(1, addresses)
        rounds = pair_hosts(len(names))
        mails = [
            StepMail(service=service, generation=1, step=7, wait_timeout_s=WAIT_S, check=lambda: None)
            for service in services
        ]
        prepared = [MailExchanges(mail, names, own, rounds, 65536) for own, mail in enumerate(mails)]
        with ThreadPoolExecutor(len(names)) as threads:
            found = list(threads.map(lambda one: one.run(), prepared))
        for number, pairs in enumerate(rounds):
            partners = {host for pair in pairs for host in pair}
            assert {host for host in range(5) if found[host][number] > 0} == partners
        assert not any(service.box.try_take_kind(LINKS_MAIL) for service in services)
        assert not lost.is_set()
    finally:
        for service in services:
            service.close()
