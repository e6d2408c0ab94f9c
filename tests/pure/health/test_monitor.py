"""What the monitor finds, and what it does not: one host, all hosts, input, memory, links, noise, marked steps."""

import random
import re
from collections.abc import Callable, Iterable

import pytest

from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.health.monitor import FindingClosed, FindingOpened, HealthMonitor
from resilient_jax.protocol.step_timing import ReplicaWork, StepTiming

HOSTS = ("host-0", "host-1", "host-2", "host-3")
WORK_S, UPDATE_S, REDUCTION_S = 1.0, 0.2, 0.3
SLOW_FROM, NUM_STEPS = 60, 90
Change = Callable[[str, int, StepTiming], StepTiming]


def make_timing(chance: random.Random, step: int, noise: float) -> StepTiming:
    """Return a step of four microbatches with documents of widely varying lengths, and some noise."""
    lengths = [chance.choice((100, 500, 4000)) for _ in range(32)]
    tokens, squares = float(sum(lengths)), float(sum(length * length for length in lengths))
    seconds = WORK_S * (tokens / 60_000 + squares / 3e8)
    return StepTiming(
        step,
        (ReplicaWork(0, 4, tokens, squares, seconds * chance.gauss(1.0, noise), 0.001),),
        wait_s=REDUCTION_S * chance.gauss(1.0, noise),
        update_s=UPDATE_S * chance.gauss(1.0, noise),
    )


def watch(
    change: Change,
    *,
    hosts: Iterable[str] = HOSTS,
    noise: float = 0.02,
    steps: Iterable[int] = range(NUM_STEPS),
) -> tuple[list[FindingOpened | FindingClosed], HealthMonitor]:
    """Return what a monitor says of a job whose timings a test changes from SLOW_FROM on."""
    chance, monitor, found = random.Random(7), HealthMonitor(), []
    hosts = tuple(hosts)
    monitor.set_members(hosts, 0)
    for step in steps:
        for host in hosts:
            timing = make_timing(chance, step, noise)
            found += monitor.observe(host, change(host, step, timing))
    return found, monitor


def scale_work(timing: StepTiming, factor: float, input_s: float = 0.0) -> StepTiming:
    (work,) = timing.works
    works = (
        ReplicaWork(0, 4, work.tokens, work.squares, work.seconds * factor + input_s, work.input_s + input_s),
    )
    return StepTiming(timing.step, works, timing.wait_s, timing.update_s, timing.is_disturbed)


def scale(timing: StepTiming, *, update: float = 1.0, wait: float = 1.0) -> StepTiming:
    return StepTiming(timing.step, timing.works, timing.wait_s * wait, timing.update_s * update)


def the_finding(found: list) -> Finding:
    (opened,) = found
    assert isinstance(opened, FindingOpened)
    return opened.finding


def test_nothing_is_found_in_a_healthy_job():
    found, monitor = watch(lambda _host, _step, timing: timing, noise=0.05, steps=range(400))
    assert found == []
    assert monitor.findings == ()


def test_a_host_at_half_speed_is_named_with_factor_first_step_and_evidence():
    found, monitor = watch(
        lambda host, step, timing: scale_work(timing, 2.0 if host == "host-2" and step >= SLOW_FROM else 1.0)
    )
    finding = the_finding(found)
    assert (finding.host, finding.device, finding.kind) == ("host-2", None, FindingKind.COMPUTE)
    assert finding.factor == pytest.approx(2.0, rel=0.1)
    assert finding.since_step == SLOW_FROM
    assert "its peers take 1.0" in finding.evidence
    assert monitor.findings == (finding,)


def test_it_is_found_in_its_second_or_third_step():
    seen = 0
    for seen in range(1, 4):
        steps = range(SLOW_FROM + seen)
        found, _ = watch(
            lambda host, step, timing: scale_work(
                timing, 2.0 if host == "host-2" and step >= SLOW_FROM else 1.0
            ),
            steps=steps,
        )
        if found:
            break
    assert seen in (2, 3)


def test_what_slows_all_hosts_is_the_fault_of_none():
    found, _ = watch(lambda _host, step, timing: scale_work(timing, 2.0 if step >= SLOW_FROM else 1.0))
    assert found == []


def test_one_slow_step_and_marked_steps_are_no_finding():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        if host != "host-1" or step < SLOW_FROM:
            return timing
        slow = scale_work(timing, 5.0)
        if step == SLOW_FROM:
            return slow
        is_marked = step % 3 == 0
        return StepTiming(step, slow.works, 9.0, 9.0, is_disturbed=True) if is_marked else timing

    assert watch(change)[0] == []


def test_a_wait_for_data_is_the_inputs():
    found, _ = watch(
        lambda host, step, timing: scale_work(
            timing, 1.0, 1.5 if host == "host-0" and step >= SLOW_FROM else 0.0
        )
    )
    finding = the_finding(found)
    assert (finding.host, finding.kind) == ("host-0", FindingKind.INPUT)
    assert "waits for data" in finding.evidence


def test_a_slow_update_alone_is_the_memorys():
    found, _ = watch(
        lambda host, step, timing: scale(
            timing, update=4.0 if host == "host-3" and step >= SLOW_FROM else 1.0
        )
    )
    finding = the_finding(found)
    assert (finding.host, finding.kind) == ("host-3", FindingKind.MEMORY)


def test_a_processor_that_is_slow_in_all_it_does_is_one_finding():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        is_slow = host == "host-3" and step >= SLOW_FROM
        return scale(scale_work(timing, 3.0 if is_slow else 1.0), update=3.0 if is_slow else 1.0)

    assert the_finding(watch(change)[0]).kind is FindingKind.COMPUTE


def test_a_reduction_that_is_slow_for_all_hosts_is_the_links():
    found, _ = watch(lambda _host, step, timing: scale(timing, wait=3.0 if step >= SLOW_FROM else 1.0))
    finding = the_finding(found)
    assert (finding.host, finding.kind) == ("", FindingKind.LINK)


def test_hosts_that_wait_for_another_are_not_slow():
    found, _ = watch(
        lambda host, step, timing: scale(timing, wait=10.0 if host != "host-3" and step >= SLOW_FROM else 1.0)
    )
    assert found == []


def test_a_host_that_was_slow_from_its_first_step_is_compared_with_its_peers():
    found, _ = watch(lambda host, _step, timing: scale_work(timing, 1.8 if host == "host-1" else 1.0))
    finding = the_finding(found)
    assert (finding.host, finding.since_step) == ("host-1", 0)
    assert finding.factor == pytest.approx(1.8, rel=0.1)


@pytest.mark.parametrize("percent_per_step", [0.1, 0.3, 1.0])
def test_a_host_that_becomes_slow_little_by_little_is_found(percent_per_step):
    """So slowly that no step looks suspicious, and its own fits follow."""

    def drift(host: str, step: int, timing: StepTiming) -> StepTiming:
        is_slowing = host == "host-2" and step >= SLOW_FROM
        return scale_work(timing, 1 + is_slowing * percent_per_step / 100 * (step - SLOW_FROM))

    found, _ = watch(drift, steps=range(1000))
    finding = found[0].finding
    assert {one.finding.host for one in found} == {"host-2"}
    assert finding.kind is FindingKind.COMPUTE
    assert finding.factor > 1.2
    assert finding.since_step <= SLOW_FROM + 125 / percent_per_step


def test_hosts_that_all_become_slow_little_by_little_are_not_found():
    found, _ = watch(
        lambda _, step, timing: scale_work(timing, 1 + max(0, step - SLOW_FROM) / 300), steps=range(1000)
    )
    assert found == []


@pytest.mark.parametrize("since", [0, SLOW_FROM])
def test_a_finding_ends_when_the_host_is_healthy_again(since):
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        is_slow = host == "host-1" and since <= step < SLOW_FROM + 20
        return scale_work(timing, 2.0 if is_slow else 1.0)

    found, monitor = watch(change)
    opened, closed = found
    assert isinstance(opened, FindingOpened)
    assert isinstance(closed, FindingClosed)
    assert closed.finding == opened.finding
    assert SLOW_FROM + 20 < closed.step <= SLOW_FROM + 25
    assert monitor.findings == ()


def test_a_finding_ends_when_its_host_leaves():
    found, monitor = watch(
        lambda host, step, timing: scale_work(timing, 2.0 if host == "host-2" and step >= SLOW_FROM else 1.0)
    )
    (closed,) = monitor.set_members(HOSTS[:2], NUM_STEPS)
    assert (closed.finding, monitor.findings) == (the_finding(found), ())


def test_a_slow_device_of_several_is_named():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        (work,) = timing.works
        works = tuple(
            ReplicaWork(
                slot,
                work.microbatches,
                work.tokens,
                work.squares,
                work.seconds * (2.0 if (host, slot) == ("host-1", 1) and step >= SLOW_FROM else 1.0),
            )
            for slot in range(2)
        )
        return StepTiming(step, works, timing.wait_s, timing.update_s)

    finding = the_finding(watch(change)[0])
    assert (finding.host, finding.device) == ("host-1", 1)


def test_milliseconds_are_nothing_to_tell():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        return scale_work(timing, 0.002 * (2.0 if host == "host-2" and step >= SLOW_FROM else 1.0))

    assert watch(change)[0] == []


def test_one_long_reduction_among_small_noisy_ones_is_no_finding():
    """Where standbys start on the same machine: reductions of 4 ms take a little longer, and one of them a second."""

    def change(_host: str, step: int, timing: StepTiming) -> StepTiming:
        wait = 0.013 * (1.0 if step < SLOW_FROM else 250.0 if step == SLOW_FROM + 2 else 1.8)
        return scale(timing, wait=wait)

    assert watch(change)[0] == []


@pytest.mark.parametrize("seed", range(20))
def test_reductions_of_milliseconds_on_a_busy_machine_are_no_finding(seed: int):
    chance = random.Random(seed)
    bursts = {
        step: chance.uniform(1.5, 5) for start in range(40, 400, 60) for step in range(start, start + 12)
    }

    def change(_host: str, step: int, timing: StepTiming) -> StepTiming:
        return scale(timing, wait=0.013 * bursts.get(step, 1.0))

    assert watch(change, steps=range(400))[0] == []


def test_the_evidence_is_true_of_the_steps_that_it_names():
    def change(_host: str, step: int, timing: StepTiming) -> StepTiming:
        return scale(timing, wait=20.0 if step == SLOW_FROM else 3.0 if step > SLOW_FROM else 1.0)

    finding = the_finding(watch(change, steps=range(SLOW_FROM + 3))[0])
    numbers = re.search(
        r"took (\S+) s in a step instead of (\S+) s as predicted, (\S+) times as long", finding.evidence
    )
    assert numbers is not None
    took_s, predicted_s, factor = map(float, numbers.groups())
    assert factor == pytest.approx(took_s / predicted_s, rel=0.01)
    assert factor == pytest.approx(finding.factor, rel=0.01)


def test_in_a_noisy_job_more_steps_are_needed_and_the_host_is_found():
    noisy = random.Random(3)

    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        burst = noisy.uniform(1.3, 3.0) if noisy.random() < 0.1 else 1.0
        return scale_work(timing, burst * (2.5 if host == "host-2" and step >= 200 else 1.0))

    found, _ = watch(change, steps=range(240))
    finding = the_finding(found)
    assert (finding.host, finding.since_step) == ("host-2", pytest.approx(200, abs=2))


def test_hosts_that_differ_no_more_than_their_steps_vary_are_not_compared():
    found, _ = watch(
        lambda host, _step, timing: scale_work(timing, 1.4 if host == "host-1" else 1.0),
        noise=0.25,
        steps=range(50),
    )
    assert found == []


def test_an_update_that_is_long_for_once_does_not_make_a_slow_processor_a_slow_memory():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        is_slow = host == "host-3" and step >= SLOW_FROM
        return scale(scale_work(timing, 2.0 if is_slow else 1.0), update=0.02 * (9.0 if is_slow else 1.0))

    assert the_finding(watch(change, steps=range(SLOW_FROM + 3))[0]).kind is FindingKind.COMPUTE


def test_a_host_too_slow_to_get_microbatches_is_named_by_the_few_that_it_had():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        if host != "host-3":
            return timing
        # Slow from the first step on, so that after an exchange it has no share any more, and no fit of its own.
        return scale_work(timing, 10.0) if step < 14 else StepTiming(step, wait_s=timing.wait_s)

    finding = the_finding(watch(change)[0])
    assert (finding.host, finding.kind) == ("host-3", FindingKind.COMPUTE)
    assert finding.factor == pytest.approx(10.0, rel=0.1)
    assert finding.since_step == 0


def test_a_host_that_was_slower_by_milliseconds_is_not_named_when_it_gets_no_microbatches():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        timing = scale_work(timing, 0.004)
        if host != "host-3":
            return timing
        return scale_work(timing, 1.75) if step < 15 else StepTiming(step, wait_s=timing.wait_s)

    assert watch(change)[0] == []


def test_a_healthy_host_without_microbatches_is_not_named():
    def change(host: str, step: int, timing: StepTiming) -> StepTiming:
        return timing if host != "host-3" or step < 14 else StepTiming(step, wait_s=timing.wait_s)

    assert watch(change)[0] == []
