"""Which hosts of a pipeline are slow: compared with those that have the same blocks, and kept when blocks move."""

import random

import pytest

from resilient_jax.events import EventKind
from resilient_jax.health.confirmation import DeviceRatios, is_confirmed_still
from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.health.monitor import FindingOpened, HealthMonitor
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.slow_hosts import Slowdown, SlowHost
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.device_speed import DeviceSeconds
from resilient_jax.step.watch_report import Measurement
from resilient_jax.worker.host_health import HealthRecord, HostHealth, continue_record
from tests.support.manual_clock import ManualClock
from tests.support.patience import patience

HOSTS = tuple(HostName(name) for name in "abcd")
STAGES = {"a": "0-3", "b": "4-7", "c": "0-3", "d": "4-7"}
OTHER_STAGES = {"a": "0-1", "b": "2-3", "c": "4-5", "d": "6-7"}
USUAL_S = dict(zip(HOSTS, (0.2, 0.5, 0.2, 0.5), strict=True))
"""Stages take unequally long, which is no host's fault."""
SOUND, HALF = DeviceSeconds(0.01, 0.02), DeviceSeconds(0.03, 0.06)


def make_timing(step: int, seconds: float, microbatches: int = 4) -> StepTiming:
    return StepTiming(step=step, works=(ReplicaWork(0, microbatches, float(microbatches), 0.0, seconds),))


def watch(monitor: HealthMonitor, steps: range, **factors: float) -> list[str]:
    """Return the hosts that are found while hosts take `factors` of their usual time."""
    chance, found = random.Random(steps.start), []
    for step in steps:
        for host in HOSTS:
            seconds = USUAL_S[host] * factors.get(host, 1.0) * chance.gauss(1, 0.01)
            found += monitor.observe(host, make_timing(step, seconds))
    return [change.finding.host for change in found if isinstance(change, FindingOpened)]


@pytest.mark.parametrize("groups", [STAGES, OTHER_STAGES])
def test_a_stage_that_becomes_slow_is_found_with_and_without_a_peer(groups: dict[str, str]) -> None:
    monitor = HealthMonitor(groups)
    monitor.set_members(HOSTS, 0)
    assert watch(monitor, range(60)) == []
    assert watch(monitor, range(60, 80), b=2.0) == ["b"]


@pytest.mark.parametrize("groups", [STAGES, OTHER_STAGES])
def test_what_slows_all_stages_is_no_hosts_fault(groups: dict[str, str]) -> None:
    monitor = HealthMonitor(groups)
    monitor.set_members(HOSTS, 0)
    assert watch(monitor, range(60)) == []
    assert watch(monitor, range(60, 120), **dict.fromkeys(HOSTS, 2.0)) == []


def test_beside_a_slow_stage_what_slows_all_is_no_hosts_fault_either() -> None:
    monitor = HealthMonitor(OTHER_STAGES)
    monitor.set_members(HOSTS[:2], 0)
    assert watch(monitor, range(60)) == []
    assert watch(monitor, range(60, 90), b=5.0) == ["b"]
    assert watch(monitor, range(90, 150), a=3.5, b=17.5) == []
    assert watch(monitor, range(150, 210)) == []
    assert watch(monitor, range(210, 240), a=3.5) == ["a"], "b is sound again"


def test_a_stage_that_was_slow_from_the_start_is_found_beside_its_peer_alone() -> None:
    for groups, expected in ((STAGES, ["b"]), (OTHER_STAGES, [])):
        monitor = HealthMonitor(groups)
        monitor.set_members(HOSTS, 0)
        assert watch(monitor, range(60), b=2.0) == expected


class Job:
    """The first host's judgement, in one generation after the other."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.record = HealthRecord(GenerationNumber(1))
        self.events: list[tuple[EventKind, str]] = []
        self.shown: tuple[SlowHost, ...] = ()
        self.step = 0
        self.exchange_s, self.measurement_s = 100.0, 0.0
        self.num_measurements = 0
        self.begin(HOSTS, STAGES)

    def begin(self, hosts: tuple[HostName, ...], groups: dict[str, str]) -> None:
        """Begin a generation."""
        self.hosts = hosts
        self.record = continue_record(self.record, GenerationNumber(self.record.generation + 1))
        self.health = HostHealth(hosts, self._record_event, self._show, self.record, self.clock)
        self.health.set_groups("pipeline", {str(host): groups[host] for host in hosts})

    def run(self, steps: int, device: DeviceSeconds = SOUND, **factors: float) -> None:
        """Run steps, told and judged sixteen at a time; the device of b takes `device`."""
        chance = random.Random(self.step)
        for _ in range(steps // 16):
            told = [
                [
                    make_timing(step, USUAL_S[host] * factors.get(host, 1.0) * chance.gauss(1, 0.01))
                    for step in range(self.step, self.step + 16)
                ]
                for host in self.hosts
            ]
            self.step += 16
            self.clock.advance(self.exchange_s)
            spec = AccumulationSpec(name="pipeline", step=self.step, num_microbatches=8, reduction="exact")
            due = self.health.choose_measurement(spec)
            if Measurement.DEVICES in due:
                self.health.begin_measurement(due)
                self.clock.advance(self.measurement_s)
                self.num_measurements += 1
                self.health.conclude(spec, [device if host == "b" else SOUND for host in self.hosts])
            self.health.observe(spec, told)
            self.record.thread.submit(lambda: None).result(timeout=patience(3))

    def _record_event(self, kind: EventKind, **detail: object) -> None:
        self.events.append((kind, str(detail["slow"])))

    def _show(self, found: tuple[tuple[SlowHost, ...], Slowdown | None]) -> None:
        self.shown, self.slowdown = found


SLOW, ENDED = (EventKind.HOST_SLOW, "b"), (EventKind.HOST_SLOW_ENDED, "b")


@pytest.fixture
def found() -> Job:
    """A job in which b has been found slow."""
    job = Job()
    job.run(64)
    assert job.events == []
    job.run(48, HALF, b=3.0)
    assert job.events == [SLOW]
    assert [one.host for one in job.shown] == ["b"]
    return job


def test_a_slow_host_stays_reported_in_a_generation_of_the_same_cut(found: Job) -> None:
    found.begin(HOSTS, STAGES)
    assert found.events == [SLOW]
    assert [one.host for one in found.shown] == ["b"]
    found.run(64)
    assert found.events == [SLOW, ENDED]
    assert found.shown == ()


def test_a_slow_host_with_other_blocks_stays_reported_while_its_devices_are_slow(found: Job) -> None:
    found.begin(HOSTS, OTHER_STAGES)
    found.run(96, HALF, b=3.0)
    assert found.events == [SLOW]
    assert [one.host for one in found.shown] == ["b"]
    found.run(96, SOUND)
    assert found.events == [SLOW, ENDED]
    assert found.shown == ()


def test_a_slow_host_with_other_blocks_that_becomes_slower_is_no_less_slow_than_before(found: Job) -> None:
    (before,) = found.shown
    found.begin(HOSTS, OTHER_STAGES)
    found.run(96, HALF, b=3.0)
    found.run(64, HALF, b=5.0)
    (after,) = found.shown
    assert after.since_step > before.since_step, "it was found anew"
    assert after.factor >= before.factor > 2.5


def test_who_else_may_be_slow_is_measured_soon_while_a_named_host_waits_for_that() -> None:
    job = Job()
    job.begin(HOSTS, OTHER_STAGES)
    job.run(64)
    job.exchange_s, job.measurement_s = 1.0, 2.0  # the next one would be due in minutes
    while not job.events:
        job.run(16, HALF, b=3.0)
    job.run(160, HALF, b=3.0, a=4.0)  # whose devices are sound: not found so before a second measurement
    assert job.events == [SLOW, (EventKind.HOST_SLOW, "a")]
    assert job.num_measurements == 3


def test_a_slow_host_that_leaves_is_no_longer_reported(found: Job) -> None:
    found.begin(HOSTS, OTHER_STAGES)
    rest = tuple(host for host in HOSTS if host != "b")
    found.begin(rest, {str(host): str(number) for number, host in enumerate(rest)})
    assert found.events == [SLOW, ENDED]
    assert found.shown == ()


def test_only_what_is_nearer_to_the_finding_than_to_its_peers_is_still_slow() -> None:
    finding = Finding(host="b", kind=FindingKind.COMPUTE, factor=4.0, since_step=1, evidence="")
    assert is_confirmed_still(finding, DeviceRatios(2.1, 1.0))
    assert is_confirmed_still(finding, DeviceRatios(1.0, 2.1))
    assert not is_confirmed_still(finding, DeviceRatios(1.9, 1.9))
