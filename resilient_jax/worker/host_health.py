"""Which hosts are slow: judged by the first host of a generation from what all tell of their steps, and reported there.

A finding of the monitor is a suspicion only. It is reported when the devices of all hosts have been measured at the
same time: on a busy machine a host is behind its peers for a while without anything being wrong with it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from resilient_jax.clock import Clock
from resilient_jax.events import EventKind
from resilient_jax.health.confirmation import compare_devices, confirm_finding
from resilient_jax.health.finding import Finding
from resilient_jax.health.monitor import FindingChange, FindingClosed, HealthMonitor
from resilient_jax.ids import HostName
from resilient_jax.protocol.step_timing import StepTiming
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.device_speed import DeviceSeconds
from resilient_jax.worker.training_control import TrainingControl

MEASURING_SHARE: Final = 0.01
"""Of a job's time, at most, in which devices are measured."""


@dataclasses.dataclass(slots=True)
class HealthRecord:
    """What a host that is first knows of all hosts; it outlives the generation.

    Attributes:
        monitors: by the name of an accumulation, whose microbatches are compared with each other only.
        unconfirmed: of open findings, how many measurements in a row have shown nothing.
        reported: of open findings that are confirmed, what was reported.
        next_measurement_s: the monotonic time before which no device is measured.
    """

    monitors: dict[str, HealthMonitor] = dataclasses.field(default_factory=dict)
    unconfirmed: dict[Finding, int] = dataclasses.field(default_factory=dict)
    reported: dict[Finding, Finding] = dataclasses.field(default_factory=dict)
    next_measurement_s: float = 0.0


class HostHealth:
    """Judges the hosts of one generation; see `SlownessJudge`.

    Args:
        hosts: of the generation, in order of their indexes.
        control: writes the events.
        record: outlives the generation.
        clock: tells how long measuring takes.
    """

    def __init__(
        self, hosts: Sequence[HostName], control: TrainingControl, record: HealthRecord, clock: Clock
    ) -> None:
        self._hosts = tuple(hosts)
        self._control = control
        self._record = record
        self._clock = clock
        self._begun: set[str] = set()
        """The accumulations whose monitors know the hosts of this generation."""
        self._asked_s = 0.0

    def find_suspects(self, spec: AccumulationSpec, timings: Sequence[Sequence[StepTiming]]) -> Iterable[int]:
        """Take in what the last steps of each host took, and return those whose devices are to be measured now."""
        monitor = self._record.monitors.setdefault(spec.name, HealthMonitor())
        told = sorted(
            ((timing.step, host, timing) for host, of_host in enumerate(timings) for timing in of_host),
            key=lambda one: one[:2],
        )
        if spec.name not in self._begun and told:
            self._begun.add(spec.name)
            self._note(monitor.set_members(self._hosts, told[0][0]), spec)
        for _, host, timing in told:
            self._note(monitor.observe(self._hosts[host], timing), spec)
        self._asked_s = self._clock.monotonic_s()
        if self._asked_s < self._record.next_measurement_s:
            return ()
        return sorted({self._hosts.index(finding.host) for finding in self._list_suspicions(spec)})

    def conclude(self, spec: AccumulationSpec, measured: Sequence[DeviceSeconds]) -> None:
        """Report what is slow, after the devices of all hosts have been measured."""
        now_s = self._clock.monotonic_s()
        self._record.next_measurement_s = now_s + (now_s - self._asked_s) / MEASURING_SHARE
        compute_s, memory_s = zip(*measured, strict=True)
        for finding in self._list_suspicions(spec):
            ratios = compare_devices(self._hosts.index(finding.host), compute_s, memory_s)
            num_unconfirmed = self._record.unconfirmed.pop(finding, 0)
            confirmed = confirm_finding(finding, ratios, num_unconfirmed)
            if confirmed is None:
                self._record.unconfirmed[finding] = num_unconfirmed + 1
                continue
            self._record.reported[finding] = confirmed
            self._control.record_event(
                EventKind.HOST_SLOW,
                step=spec.step,
                slow=confirmed.host,
                part=confirmed.kind,
                factor=round(confirmed.factor, 2),
                since_step=confirmed.since_step,
                why=confirmed.evidence,
            )
            self._report()

    def _list_suspicions(self, spec: AccumulationSpec) -> list[Finding]:
        """Return the open findings about hosts that are not reported."""
        findings = self._record.monitors[spec.name].findings
        return [finding for finding in findings if finding.host and finding not in self._record.reported]

    def _note(self, changes: Iterable[FindingChange], spec: AccumulationSpec) -> None:
        """Forget findings that are over, and report that of those that were reported."""
        for change in changes:
            if not isinstance(change, FindingClosed):
                continue
            self._record.unconfirmed.pop(change.finding, None)
            if (reported := self._record.reported.pop(change.finding, None)) is not None:
                self._control.record_event(
                    EventKind.HOST_SLOW_ENDED,
                    step=spec.step,
                    slow=reported.host,
                    part=reported.kind,
                    why=change.reason,
                )
                self._report()

    def _report(self) -> None:
        """Tell the agent what is slow now, for `status`."""
        self._control.report_slow_hosts(
            tuple(
                (
                    finding.host,
                    f"slow ({finding.kind}): {finding.factor:.1f} times since step {finding.since_step}",
                )
                for finding in self._record.reported.values()
            )
        )
