"""Real agents with stub workers, all on this machine: how long they take to form, and to shrink when one is killed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.errors import InternalError, ResilientJaxError
from resilient_jax.events import Event, EventKind
from resilient_jax.local_job.local_job import LocalJob
from resilient_jax.protocol.generation import GenerationPhase
from tests.benchmarks.control.figures import PartResult, Samples
from tests.benchmarks.paths import JOBS
from tests.benchmarks.runs import run_job

AGENTS_LIMIT_S: Final = 300.0
"""For each thing that is waited for."""
CONFIG: Final = "forming_timeout_s = 300\nquiesce_timeout_s = 60\n"
"""A machine with too few cores must lose no host by a timeout."""


def measure_agents(sizes: Sequence[int], work: Path) -> PartResult:
    """Return the figures of jobs of these sizes, each once; `real_agents` is the largest that formed and shrank."""
    samples: Samples = {}
    missing: dict[str, str] = {}
    for size in sizes:
        try:
            samples |= _measure(size, work / str(size))
        except ResilientJaxError as error:
            missing[f"{size} agents"] = str(error)
    done = [size for size in sizes if f"{size} agents" not in missing]
    if done:
        samples["real_agents"] = [float(max(done))]
    return PartResult(samples=samples, missing=missing)


def _measure(num_hosts: int, work: Path) -> Samples:
    script, lost = str(JOBS / "control_stub_worker.py"), make_host_names(num_hosts)[-1]
    with run_job(
        [script], work, num_hosts, config=CONFIG, options=["--host-restart-delay", "-1", "--zygote", "off"]
    ) as job:
        formed = _wait_active(job, num_hosts)
        _wait_first_step(job, num_hosts)
        killed_s = job.kill(JobComponent.HOST, lost)
        shrunk = _wait_active(job, num_hosts - 1)
        events = job.read_events()
    started = [event.monotonic_s for event in events if event.kind is EventKind.AGENT_STARTED]
    if len(started) != num_hosts:
        raise InternalError(f"found {len(started)} agents that have started, expected {num_hosts}")
    return {
        f"agents_form_s_{num_hosts}": [formed.monotonic_s - min(started)],
        f"agents_form_after_last_start_s_{num_hosts}": [formed.monotonic_s - max(started)],
        f"agents_shrink_s_{num_hosts}": [shrunk.monotonic_s - killed_s],
    }


def _wait_active(job: LocalJob, num_members: int) -> Event:
    """Return the event that a generation of so many members trains."""
    return job.wait_event(
        f"{num_members} hosts train",
        lambda event: (
            event.kind is EventKind.GENERATION_PHASE
            and event.detail["phase"] == GenerationPhase.ACTIVE
            and event.detail["hosts"] == num_members
        ),
        AGENTS_LIMIT_S,
    )


def _wait_first_step(job: LocalJob, num_hosts: int) -> None:
    job.wait_report(
        "the first step",
        lambda now: len(now.hosts) == num_hosts and all(host.progress.step > 0 for host in now.hosts),
        AGENTS_LIMIT_S,
    )
