"""Runs the detectors over one simulated job. No clock but the processor's, for the overhead."""

import statistics
import time
from typing import Final

from resilient_jax.health.monitor import FindingOpened, HealthMonitor
from resilient_jax.health.step_parts import StepPart
from resilient_jax.ids import HostName
from tests.benchmarks.detect.figures import JobVerdict
from tests.benchmarks.detect.plain_detector import PlainDetector
from tests.benchmarks.detect.simulated_job import SimulatedJob, SimulatedStep, share_of

ALARM_STEPS: Final = 20
"""An alarm of the plain detector so soon after a device became slow is about it."""


class _Watch:
    """The verdict on one job, while it runs."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._monitor = HealthMonitor({str(host): stage for host, stage in job.groups.items()})
        self._monitor.set_members(job.groups, 0)
        self._plain = PlainDetector()
        self.delay_steps: int | None = None
        self.false_alarms = 0
        self.plain_delay_steps: int | None = None
        self.plain_false_alarms = 0
        self.microbatch_errors: list[float] = []
        self.least_errors: list[float] = []
        self.step_errors: list[float] = []
        self.detector_s: list[float] = []

    def watch(self, step: int, found: SimulatedStep) -> None:
        job = self._job
        since = step - job.slow_from + 1
        is_slow_now = job.slow_host is not None and since > 0
        if not found.is_disturbed and not is_slow_now:
            self._measure_errors(found)
        started_s = time.process_time()
        changes = [c for host, timing in found.timings.items() for c in self._monitor.observe(host, timing)]
        self.detector_s.append(time.process_time() - started_s)
        for change in changes:
            if not isinstance(change, FindingOpened):
                continue
            if is_slow_now and change.finding.host == job.slow_host and self.delay_steps is None:
                self.delay_steps = since
            else:
                self.false_alarms += 1
        if found.is_disturbed or not self._plain.observe(found.seconds):
            return
        if is_slow_now and since <= ALARM_STEPS and self.plain_delay_steps is None:
            self.plain_delay_steps = since
        else:
            self.plain_false_alarms += 1

    def _measure_errors(self, found: SimulatedStep) -> None:
        predicted_s: dict[tuple[HostName, int], float] = {}
        for hosts, sums in zip(self._job.hosts, found.lengths, strict=True):
            for host in hosts:
                for index, (tokens, squares) in enumerate(sums):
                    seconds = _predict_s(self._monitor, host, tokens, squares)
                    if seconds is None:
                        return
                    predicted_s[host, index] = seconds
        for host, timing in found.timings.items():
            for index, work in enumerate(timing.works):
                self.microbatch_errors.append(abs(predicted_s[host, index] / work.seconds - 1))
                cost_s = self._job.find_cost_s(host, work.tokens, work.squares)
                self.least_errors.append(abs(cost_s / work.seconds - 1))
        longest_s = max(path.predict_s(lambda task: share_of(task, predicted_s)) for path in self._job.paths)
        self.step_errors.append(abs((longest_s + self._job.reduction_s) / found.seconds - 1))


def _predict_s(monitor: HealthMonitor, host: HostName, tokens: float, squares: float) -> float | None:
    """Return what microbatches with these sums take on a host by the monitor's model; None: not known yet."""
    watched = monitor._watched.get(StepPart(host, "work", 0))
    model = watched.series.model if watched is not None else None
    return model.predict_s(tokens, squares) if model is not None else None


def judge_job(job: SimulatedJob) -> JobVerdict:
    """Return what the detectors make of a job."""
    watch, seconds = _Watch(job), []
    for step, found in enumerate(job.run()):
        watch.watch(step, found)
        seconds.append(found.seconds)
    return JobVerdict(
        is_slow=job.slow_host is not None,
        delay_steps=watch.delay_steps,
        false_alarms=watch.false_alarms,
        plain_delay_steps=watch.plain_delay_steps,
        plain_false_alarms=watch.plain_false_alarms,
        microbatch_errors=watch.microbatch_errors,
        step_errors=watch.step_errors,
        # The mean: fits are rare and long.
        detector_s=statistics.fmean(watch.detector_s),
        step_s=statistics.median(seconds),
        least_errors=watch.least_errors,
    )
