"""What audits cost a real job: steps with audits beside those without, which are drawn in turn."""

import math
import statistics
import tempfile
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.config.job_config import JobConfig
from resilient_jax.events import EventKind
from resilient_jax.telemetry.event_log import read_events
from tests.benchmarks.paths import JOBS, REPOSITORY
from tests.benchmarks.runs import COMPILING_STEPS, HOSTS, run_undisturbed
from tests.benchmarks.step_times import StepTime, read_step_times

AUDIT_SHARE: Final = 1 / 6
"""Of the 12 microbatches of a step each of 4 hosts audits one, in half of the steps."""
STEPS: Final = 120


class AuditCost(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit costs.

    Attributes:
        step_s: seconds of a step without audits, median.
        audited_step_s: the same of one in which each host audits one microbatch.
        audit_overhead: share of the time that audits take with the default `audit_share`.
        audited_steps: how many there were.
    """

    step_s: float
    audited_step_s: float
    audit_overhead: float
    audited_steps: int


def measure_audit_cost() -> AuditCost:
    """Run a job of `HOSTS` hosts on this machine."""
    settings = REPOSITORY / "configs/lm_tiny.toml"
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        work, times = Path(folder), Path(folder) / "times"
        command = [str(JOBS / "timed_lm.py"), str(settings), str(STEPS), str(times)]
        run_undisturbed(command, work, config=f"audit_share = {AUDIT_SHARE}\n")
        audited = read_audited_steps(work / "run")
        num_microbatches = tomllib.loads(settings.read_text())["microbatches"]
        return make_audit_cost(read_step_times(times), audited, num_microbatches)


def read_audited_steps(run_directory: Path) -> set[int]:
    """Return the steps in which the hosts of a job have audited each other."""
    events = [event for path in run_directory.rglob("*.events.jsonl") for event in read_events(path)]
    return {int(event.detail["step"]) for event in events if event.kind is EventKind.AUDIT_PASSED}


def make_audit_cost(
    steps: Sequence[StepTime], audited: Collection[int], num_microbatches: int, num_hosts: int = HOSTS
) -> AuditCost:
    """Return the cost, where each host audits one microbatch in each of the audited steps."""
    ends: dict[int, dict[int, float]] = {}
    for one in steps:
        ends.setdefault(one.process, {})[one.step] = one.at_s
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for found in ends.values():
        for step in found.keys() & {before + 1 for before in found}:
            if step > COMPILING_STEPS:
                seconds[step in audited].append(found[step] - found[step - 1])
    plain, with_audit = (statistics.median(seconds[has] or [math.nan]) for has in (False, True))
    frequency = JobConfig().audit_share * num_microbatches / num_hosts
    return AuditCost(
        step_s=round(plain, 4),
        audited_step_s=round(with_audit, 4),
        audit_overhead=float(f"{frequency * (with_audit - plain) / plain:.2g}"),
        audited_steps=len(audited),
    )
