"""Which hosts are slow: judged by the first host of a generation from what all tell of their steps, and reported there.

A finding of the monitor is a suspicion only. It is reported if a measurement of all hosts' devices, or of the links
between them, at the same time, confirms it: on a busy machine a host is behind its peers for a while without anything
being wrong with it.
"""

import concurrent.futures
import dataclasses
import itertools
import logging
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.clock import Clock
from resilient_jax.events import EventKind
from resilient_jax.health.confirmation import (
    compare_devices,
    confirm_finding,
    confirm_link,
    is_confirmed_still,
    name_slow_devices,
)
from resilient_jax.health.confirmed_findings import ConfirmedFindings, ReportChange
from resilient_jax.health.finding import Finding, FindingKind
from resilient_jax.health.link_comparison import Pairs, keep_fastest, list_pair_seconds
from resilient_jax.health.monitor import FindingChange, FindingClosed, HealthMonitor
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.policy.devices_after_loss import DevicesAfterLoss
from resilient_jax.protocol.slow_hosts import HostSpeeds, Slowdown, SlowHost
from resilient_jax.protocol.step_timing import StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.device_speed import MEASURE_S, UNKNOWN_SECONDS, DeviceSeconds
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS
from resilient_jax.step.slow_host_watch import SlowdownEstimate
from resilient_jax.step.slowdown_estimate import estimate_slowdown
from resilient_jax.step.watch_report import Measurement
from resilient_jax.threads import start_thread_pool
from resilient_jax.worker.lasting_slowdown import LastingSlowdown

logger = logging.getLogger(__name__)

SlowHosts = tuple[tuple[SlowHost, ...], Slowdown | None]
"""Hosts that are slow, and what they cost once that has lasted."""
LINKS_INTERVAL_STEPS: Final = 128
"""From such a step on links are measured while nothing is wrong, after each time twice as late. A host that compiles
the programs for it is late to stop if another one dies just then, so not soon after each change."""
MEASURING_SHARE: Final = 0.01
"""Of a job's time, at most, in which devices or links are measured."""


@dataclasses.dataclass(slots=True)
class HealthRecord:
    """What a host that is the first knows of all hosts, from one generation to the next in which it is.

    Attributes:
        generation: newest generation in which this host was the first.
        lock: guards all attributes below, which the judging thread changes, too.
        monitors: monitors by accumulation, whose microbatches are compared with each other only.
        groups: groups of hosts that do the same work, by accumulation; none: all hosts do.
        findings: findings of the monitors, as measurements have confirmed them.
        fastest_links: least seconds that exchanges took, by host and round; None: not measured yet.
        next_links_step: step from which on links are measured while nothing is wrong; None: to be set.
        next_measurement_s: monotonic time before which nothing is measured.
        paid_s: monotonic time by which all measurements together have taken a small part of the time.
        next_measurement_step: step before which nothing is measured. What has been judged by then is newer than the
            last measurement.
        thread: thread that judges, beside the training.
    """

    generation: GenerationNumber
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    monitors: dict[str, HealthMonitor] = dataclasses.field(default_factory=dict)
    groups: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    findings: ConfirmedFindings = dataclasses.field(default_factory=ConfirmedFindings)
    hosts: tuple[HostName, ...] = ()
    fastest_links: Sequence[Sequence[float]] | None = None
    next_links_step: int | None = None
    judge: "HostHealth | None" = None
    next_measurement_s: float = 0.0
    next_measurement_step: int = 0
    paid_s: float = 0.0
    thread: concurrent.futures.ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: start_thread_pool(1, "resilient-jax-health")
    )


def continue_record(record: HealthRecord | None, generation: GenerationNumber) -> HealthRecord:
    """Return the record of the first host of a generation: a new one unless it was that in the one before, too."""
    if record is None or record.generation != generation - 1:
        return HealthRecord(generation)
    record.generation = generation
    return record


def _take_over(record: HealthRecord, known: HostSpeeds, hosts: Sequence[HostName]) -> None:
    """Go on with what another first host has found."""
    for host, speed in known:
        if host in hosts:
            evidence = "the host that was the first before has found it"
            found = Finding(
                host=host, kind=FindingKind.COMPUTE, factor=1 / speed, since_step=0, evidence=evidence
            )
            record.findings.carry(found)


class HostHealth:
    """Judges the hosts of one generation, on the first of them; see `SlownessJudge`.

    Args:
        hosts: hosts of the generation, in order of their indexes.
        report: called with all slow hosts when the slow hosts have changed; see `WorkerFindings.slow_hosts`.
        record: record that outlives the generation.
        clock: clock that tells how long measuring takes.
        known: hosts that get fewer layers of a pipeline because another first host has found them slow: these hosts are
            slow until a measurement of their devices says something else.
        after_loss: what hosts do with the devices that are left when others are taken out.
    """

    def __init__(
        self,
        hosts: Sequence[HostName],
        record_event: Callable[..., object],
        report: Callable[[SlowHosts], None],
        record: HealthRecord,
        clock: Clock,
        *,
        known: HostSpeeds = (),
        after_loss: DevicesAfterLoss = "even",
    ) -> None:
        self._after_loss: DevicesAfterLoss = after_loss
        self._hosts = tuple(hosts)
        self._record_event = record_event
        self._report_slow_hosts = report
        self._record = record
        self._clock = clock
        self._asked_s = 0.0
        self._due = Measurement.NOTHING
        """What is measured now, or was last."""
        self._is_device_slow = False
        """Whether this measurement has found a host with slow devices."""
        self._estimated_name: str | None = None
        """Of the accumulation by whose times it is estimated what slow hosts cost."""
        self._slowdown = LastingSlowdown()
        record.next_measurement_step = 0  # steps may have gone back
        with self._record.lock:
            if record.judge is None:
                _take_over(record, known, self._hosts)
            record.judge = self
            if record.hosts != self._hosts:
                record.hosts, record.fastest_links, record.next_links_step = self._hosts, None, None
            for monitor in record.monitors.values():
                self._note(monitor.set_members(self._hosts, step=0))
            for finding in [one for one in record.findings.carried if one.host not in self._hosts]:
                self._end(finding, "the host takes no part any more")
            self._report()

    def set_groups(self, name: str, groups: Mapping[str, str]) -> None:
        """Compare hosts with those of their group from now on; what was learned in other groups is dropped.

        A host that was slow stays reported: its new work says nothing about the old one, its devices do.
        """
        with self._record.lock:
            if self._record.groups.get(name) == groups:
                return
            self._record.groups[name] = dict(groups)
            monitor = self._record.monitors.pop(name, None)
            for finding in monitor.findings if monitor is not None else ():
                self._record.findings.forget(finding)
                reported = self._record.findings.reported.get(finding)
                if reported is None:
                    continue
                if reported.kind in (FindingKind.COMPUTE, FindingKind.MEMORY):
                    self._record.findings.carry(finding)
                else:
                    self._end(finding, "the host has other layers now")
            self._report()

    def observe(self, spec: AccumulationSpec, timings: Sequence[Sequence[StepTiming]]) -> None:
        """Take in what the last steps took; return before they are judged."""
        self._record.thread.submit(self._judge, spec, timings)

    def choose_measurement(self, spec: AccumulationSpec) -> Measurement:
        """Return what all hosts are to measure before this accumulation."""
        if not self._record.lock.acquire(blocking=False):
            return Measurement.NOTHING  # it is still judging
        try:
            now_s = self._clock.monotonic_s()
            is_late = now_s >= self._record.next_measurement_s
            is_news = spec.step >= self._record.next_measurement_step
            if not (is_late and is_news):
                return Measurement.NOTHING
            due = self._choose(spec.name, spec.step)
            if due:
                # Until it is known what it takes: the generation may end before that.
                self._record.next_measurement_s = now_s + 2 * MEASURE_S / MEASURING_SHARE
            return due
        finally:
            self._record.lock.release()

    def _choose(self, name: str, step: int) -> Measurement:
        unsettled = self._list_unsettled(name)
        due = Measurement.NOTHING
        if any(one.host for one in unsettled):
            due |= Measurement.DEVICES
        monitor = self._record.monitors.get(name)
        is_quiet = monitor is not None and monitor.knows_links and self._are_links_due(step)
        # While nothing is wrong with them they are measured to compare with.
        if is_quiet or not all(one.host for one in unsettled):
            due |= Measurement.LINKS
        return Measurement.DEVICES if not due and self._record.findings.carried else due

    def _are_links_due(self, step: int) -> bool:
        if self._record.next_links_step is None:
            self._record.next_links_step = -(-step // LINKS_INTERVAL_STEPS) * LINKS_INTERVAL_STEPS
        return step >= self._record.next_links_step

    def begin_measurement(self, due: Measurement) -> None:
        """Note that all hosts begin to measure this now."""
        self._asked_s = self._clock.monotonic_s()
        self._due = due
        self._is_device_slow = False

    def conclude(self, spec: AccumulationSpec, measured: Sequence[DeviceSeconds]) -> None:
        """Report which hosts are slow, by what the devices of all hosts take; none if one host's are unknown."""
        with self._record.lock:
            self._note_measurement(spec)
            if UNKNOWN_SECONDS in measured:
                return
            seconds = tuple(
                zip(*((one.compute_s, one.memory_s, one.disk_s) for one in measured), strict=True)
            )
            for finding in self._list_unsettled(spec.name):
                if finding.host not in self._hosts:
                    continue
                place = self._hosts.index(finding.host)
                ratios = compare_devices(place, *seconds)
                num_refuted = self._record.findings.count_refuted(finding)
                confirmed = confirm_finding(finding, ratios, num_refuted)
                if confirmed is not None:
                    speeds = measured[place].compute_speeds, measured[place].memory_speeds
                    confirmed = name_slow_devices(confirmed, *speeds)
                    self._is_device_slow |= confirmed.kind in (FindingKind.COMPUTE, FindingKind.MEMORY)
                self._settle(spec, finding, confirmed)
            for finding in tuple(self._record.findings.carried):
                ratios = compare_devices(self._hosts.index(finding.host), *seconds)
                if not is_confirmed_still(finding, ratios):
                    self._end(finding, "its devices are as fast as those of its peers")
            self._allow_another_measurement()
            self._report()

    def conclude_links(
        self, spec: AccumulationSpec, rounds: Sequence[Pairs], seconds: Sequence[Sequence[float]]
    ) -> None:
        """Report whose link is slow, by what exchanges between hosts took; none if all links are alike."""
        with self._record.lock:
            before = self._record.fastest_links
            found = [finding for finding in self._list_unsettled(spec.name) if not finding.host]
            self._note_measurement(spec)
            if not found and Measurement.DEVICES not in self._due:
                # It must not delay the first measurement of a suspicion.
                self._record.next_measurement_s = 0.0
            # A link may seem to be slow because the host at its end is: then it is measured again.
            for finding in found if not self._is_device_slow else ():
                # Suspected before there was anything to compare with: nobody can be named.
                confirmed = (
                    None if before is None else confirm_link(finding, self._hosts, rounds, seconds, before)
                )
                self._settle(spec, finding, confirmed)
            is_measured = any(map(any, seconds))  # else a host could not take part, and it is tried again
            if is_measured:
                self._record.fastest_links = keep_fastest(before, seconds)
                taken_s = list_pair_seconds(rounds, seconds)
                slowest = max(taken_s, key=taken_s.__getitem__)
                self._record_event(
                    EventKind.LINKS_MEASURED,
                    step=spec.step,
                    median_s=round(statistics.median(taken_s.values()), 6),
                    slowest_s=round(taken_s[slowest], 6),
                    slowest=" and ".join(self._hosts[index] for index in slowest),
                )
            if not found:
                # Again: this one may have met a busy moment, and no link would seem to be slow after it.
                self._record.next_links_step = spec.step + (
                    spec.step if is_measured else LINKS_INTERVAL_STEPS
                )
            self._allow_another_measurement()
            self._report()

    def _note_measurement(self, spec: AccumulationSpec) -> None:
        """Set when the next measurement may be."""
        now_s = self._clock.monotonic_s()
        seconds = now_s - self._asked_s
        self._record.paid_s = max(self._record.paid_s, now_s) + seconds / MEASURING_SHARE
        self._record.next_measurement_s = self._record.paid_s
        self._record.next_measurement_step = spec.step + 2 * EXCHANGE_INTERVAL_STEPS
        self._asked_s = now_s  # of links, if both are measured

    def _settle(self, spec: AccumulationSpec, finding: Finding, confirmed: Finding | None) -> None:
        """Report what a measurement has made of a finding; None: it has not confirmed it."""
        findings = self._record.findings
        match findings.note(finding, confirmed):
            case ReportChange.NOTHING_NEW:
                return
            case ReportChange.WITHDRAWN:
                self._end(finding, "a second measurement does not show it")
                return
            case ReportChange.NAMED:
                assert confirmed is not None, "else nothing would be named"
        # Compared with its own past, which was slow, it seems to be less slow than it is.
        factor = max(confirmed.factor, findings.replace_carried(finding.host))
        confirmed = findings.reported[finding] = msgspec.structs.replace(confirmed, factor=factor)
        self._record_event(
            EventKind.HOST_SLOW,
            step=spec.step,
            slow=confirmed.host,
            part=confirmed.kind,
            factor=round(confirmed.factor, 2),
            since_step=confirmed.since_step,
            why=confirmed.evidence,
        )

    def estimate_by(self, estimate: SlowdownEstimate) -> None:
        """Report what slow hosts cost, if that lasts; return before it is estimated."""
        self._record.thread.submit(self._estimate, estimate)

    def _estimate(self, estimate: SlowdownEstimate) -> None:
        with self._record.lock:
            findings = tuple(self._record.findings.reported.values())
        try:
            found = estimate(findings, self._after_loss)
        except Exception:  # which nobody waits for
            logger.exception("it could not be estimated what slow hosts cost; training goes on")
            return
        with self._record.lock:
            if self._record.judge is self:
                self._slowdown.add(found)
                self._report()

    def _judge(self, spec: AccumulationSpec, timings: Sequence[Sequence[StepTiming]]) -> None:
        """Give a monitor the timings in the order of steps, which is the order in which it judges."""
        name = spec.name
        told = sorted(
            ((timing.step, host, timing) for host, of_host in enumerate(timings) for timing in of_host),
            key=lambda one: one[:2],
        )
        with self._record.lock:
            if self._record.judge is not self:
                return  # of a generation that has ended
            if name not in self._record.monitors:
                self._record.monitors[name] = HealthMonitor(self._record.groups.get(name))
                self._record.monitors[name].set_members(self._hosts, step=0)
            try:
                for _, host, timing in told:
                    self._note(self._record.monitors[name].observe(self._hosts[host], timing))
                if name not in self._record.groups and self._estimated_name in (None, name):
                    self._estimated_name = name
                    found = estimate_slowdown(
                        self._record.generation,
                        self._hosts,
                        tuple(self._record.findings.reported.values()),
                        timings,
                        spec.num_microbatches,
                        is_balanced=spec.balance_by_speed,
                        after_loss=self._after_loss,
                    )
                    self._slowdown.add(found)
                self._report()
            except Exception:  # which nobody waits for
                logger.exception("the timings of steps could not be judged; training goes on")

    def _list_unsettled(self, name: str) -> list[Finding]:
        """Return the open findings that are to be measured."""
        monitor = self._record.monitors.get(name)
        findings = monitor.findings if monitor is not None else ()
        return [finding for finding in findings if not self._record.findings.is_settled(finding)]

    def _allow_another_measurement(self) -> None:
        """Measure again soon while nothing may be done about a host that is named: what waits for that costs more."""
        reported = self._record.findings.reported.values()
        if not all(self._may_act_on(HostName(one.host)) for one in reported):
            self._record.next_measurement_s = 0.0

    def _note(self, changes: Iterable[FindingChange]) -> None:
        """Forget findings that are over, and report that of those that were reported."""
        for change in changes:
            if not isinstance(change, FindingClosed):
                continue
            self._record.findings.forget(change.finding)
            if change.finding in self._record.findings.reported:
                self._end(change.finding, change.reason)

    def _end(self, finding: Finding, why: str) -> None:
        """Report that a host that was reported is no longer slow."""
        reported = self._record.findings.withdraw(finding)
        self._record_event(EventKind.HOST_SLOW_ENDED, slow=reported.host, part=reported.kind, why=why)

    def _report(self) -> None:
        """Tell the agent what is slow now, for `status` and the leader."""
        found = tuple(
            SlowHost(
                host=HostName(finding.host),
                kind=str(finding.kind),
                factor=round(finding.factor, 3),
                since_step=finding.since_step,
                devices=finding.slow_devices,
            )
            for finding in self._record.findings.reported.values()
        )
        slowdown = self._slowdown.reported
        if slowdown is not None and slowdown.host and all(one.host != slowdown.host for one in found):
            self._slowdown.clear()
            slowdown = None
        if slowdown is not None and not self._may_act_on(slowdown.host):
            slowdown = None
        self._report_slow_hosts((found, slowdown))

    def _may_act_on(self, host: HostName) -> bool:
        open_findings = itertools.chain.from_iterable(m.findings for m in self._record.monitors.values())
        return self._record.findings.may_act_on(host, open_findings)
