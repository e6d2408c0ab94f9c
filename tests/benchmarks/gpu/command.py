"""The GPU benchmark: how long a kill stops training on GPUs, and what equal bits cost. One GPU is enough."""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.launcher import make_host_names
from resilient_jax.doctor.gpu_inventory import read_gpus
from resilient_jax.errors import CallerError
from resilient_jax.jax_runtime.worker_environment import Platform
from resilient_jax.local_job.recovery import wait_stall
from tests.benchmarks.gpu.kernel_choices import OURS, measure_kernel_choices
from tests.benchmarks.paths import JOBS
from tests.benchmarks.report import describe_machine, open_console, print_json_line
from tests.benchmarks.runs import AS_ON_A_POD, HOSTS, MANY_STEPS, REPORT_TIMEOUT_S, run_job, wait_healthy
from tests.benchmarks.stall.trainer_stalls import find_recovery_s, time_steps

Abort = Literal["interrupt", "replace"]


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON: medians, in seconds unless the name has another unit.

    Attributes:
        interrupt_stall_s: from SIGKILL to a worker to the end of the next step, less a healthy step; XLA releases the
            survivors, who go on in place.
        replace_stall_s: the same where all workers are replaced.
        join_s: from the kill until the worker that was started again has made a step with the others.
        healthy_step_s: of the job with `interrupt`.
        deterministic_cost: step time with a worker's flags, which make bits equal, relative to kernels chosen by their
            speed, less one.
    """

    interrupt_stall_s: float
    replace_stall_s: float
    join_s: float
    healthy_step_s: float
    deterministic_cost: float
    kills: int
    device: str
    machine: str


class _JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    stalls_s: list[float]
    joins_s: list[float]
    healthy_s: float


def gpu(
    kills: Annotated[int, typer.Option(help="Kills of each of the two jobs.")] = 5,
    kernels: Annotated[bool, typer.Option(help="Compare the kernels that XLA may choose, too.")] = True,
    platform: Annotated[Platform, typer.Option(help="cpu, to try the benchmark itself.")] = "gpu",
    json_only: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Measure the stall of kills on GPUs, with survivors that go on and with all workers replaced.

    4 hosts x 1 GPU, which share what this machine has; a transformer of a million float32 parameters, 16 sequences of
    64 bytes per step: small, so that what is measured is the recovery. Beside it the step time of a larger transformer
    with the flags that make bits equal, and without. The benchmark takes about five minutes.
    """
    gpus = read_gpus()
    if platform == "gpu" and not gpus.gpus:
        raise CallerError(
            f"gpu: found no GPU ({gpus.error}), expected one or more; to try it without: --platform cpu"
        )
    console = open_console(json_only)
    with tempfile.TemporaryDirectory(prefix="resilient-jax-bench-") as folder:
        work = Path(folder)
        choices = measure_kernel_choices(work, console) if kernels and platform == "gpu" else {}
        found = {
            abort: _measure_kills(work / abort, abort, kills, platform, console)
            for abort in ("interrupt", "replace")
        }
    healthy_s = found["interrupt"].healthy_s
    console.print(_make_table(found))
    print_json_line(
        GpuFigures(
            interrupt_stall_s=_median(found["interrupt"].stalls_s) - healthy_s,
            replace_stall_s=_median(found["replace"].stalls_s) - found["replace"].healthy_s,
            join_s=_median(found["interrupt"].joins_s),
            healthy_step_s=healthy_s,
            deterministic_cost=choices[OURS] - 1 if choices else float("nan"),
            kills=kills,
            device=", ".join(sorted({one.name for one in gpus.gpus})),
            machine=describe_machine(),
        )
    )


def _measure_kills(work: Path, abort: Abort, kills: int, platform: Platform, console: Console) -> _JobFigures:
    """Kill workers one after the other, each once all hosts train again."""
    hosts, stalls_s, joins_s = make_host_names(HOSTS), [], []
    command = [str(JOBS / "trainer_job.py"), "replicated", str(MANY_STEPS)]
    config = f'abort = "{abort}"\nreplicated_snapshot_interval_steps = 1\n'
    with run_job(command, work, config=config, options=AS_ON_A_POD, platform=platform) as job:
        wait_healthy(job)
        healthy_s = time_steps(job)
        for number in range(kills):
            victim = hosts[number % HOSTS]
            wait_healthy(job)
            fault_s = job.kill(JobComponent.WORKER, victim)
            found = wait_stall(job, fault_s, REPORT_TIMEOUT_S)
            stalls_s.append(found.total_s)
            wait_healthy(job)
            joined_s = find_recovery_s(job.read_events(), fault_s, HOSTS)
            joins_s += [joined_s] if joined_s is not None else []
            console.print(
                f"  {number + 1}: {victim}, {abort}, {found.change}, {found.total_s:.2f} s with a step of "
                f"{healthy_s:.2f} s; all hosts again after {joined_s or 0:.2f} s"
            )
    return _JobFigures(stalls_s=stalls_s, joins_s=joins_s, healthy_s=healthy_s)


def _make_table(found: dict[str, _JobFigures]) -> Table:
    table = Table(title="From SIGKILL to the end of the next step, in seconds")
    for name in ("after a kill", "median", "lowest", "highest", "healthy step", "all hosts again"):
        table.add_column(name)
    for abort, figures in found.items():
        times = figures.stalls_s or [float("nan")]
        cells = (_median(times), min(times), max(times), figures.healthy_s, _median(figures.joins_s))
        table.add_row(abort, *(f"{cell:.3f}" for cell in cells))
    return table


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")
