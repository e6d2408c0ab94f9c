"""`resilient-jax demo`: train on four hosts, kill three things in turn, show how it went on."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from resilient_jax.cli.checkout import find_in_checkout
from resilient_jax.errors import InternalError
from resilient_jax.protocol.fault_points import Place
from resilient_jax.protocol.records import Generation, Phase
from resilient_jax.telemetry.stall import Stall, read_stall
from resilient_jax.world.inspection import JobReport, Part
from resilient_jax.world.local_job import LocalJob

HOSTS, DEVICES = 4, 2
TRAINED_STEPS = 3
"""Between two incidents everybody trains together for this long, so that each starts from health."""
PATIENCE_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What was done to the job, and what became of it."""

    what: str
    stall: Stall
    steps_lost: int


class Demo:
    """The job and the story told about it."""

    def __init__(self, job: LocalJob, console: Console, steps: int) -> None:
        self._job = job
        self._console = console
        self._steps = steps
        self._shown_s = 0.0
        self.incidents: list[Incident] = []

    def play(self) -> None:
        """Kills a worker inside a collective, the leader's whole host, and the coordination service."""
        self._wait_all_train("4 hosts import JAX, compile and begin to train")
        self._break("one worker, SIGKILL inside a collective", self._kill_worker_in_collective)
        self._wait_all_train("the worker comes back and asks to join")
        self._break("the leader's agent with everything on its host", lambda: self._kill(Part.HOST))
        self._wait_all_train("the host comes back")
        self._break("the coordination service", lambda: self._kill(Part.SERVICE))

    def watch_to_the_end(self) -> None:
        """Shows progress until the job has ended."""
        self._console.print("nothing more is broken; training to the end")
        while self._job.process.poll() is None:
            self._show_progress(self._job.report())
            time.sleep(0.1)
        if self._job.process.returncode:
            raise InternalError(f"the demo's job failed:\n{self._job.tail()}")

    def _kill_worker_in_collective(self) -> float:
        report = self._report()
        members = [m.host for m in _generation(report).members]
        victim = next(host for host in members if host != report.leader)
        late = next(host for host in members if host not in (victim, report.leader))
        # One host is late to the all-reduce, so that all others wait inside it when the victim dies.
        self._job.hold(Place.BEFORE_SUM, [late], max(h.step for h in report.hosts) + 2)
        self._job.wait_held([late])
        time.sleep(0.3)
        killed_s = self._job.kill(Part.WORKER, victim)
        self._job.release()
        return killed_s

    def _kill(self, part: Part) -> float:
        return self._job.kill(part, "leader", signal.SIGKILL)

    def _break(self, what: str, act: Callable[[], float]) -> None:
        self._console.print(f"[bold red]kill[/]: {what}")
        before = self._report()
        fault_s = act()
        stall = self._wait_stall(what, fault_s)
        committed = max((h.step for h in before.hosts), default=0)
        self.incidents.append(Incident(what=what, stall=stall, steps_lost=max(0, committed - stall.step)))
        self._console.print(
            f"  noticed by {stall.noticed_by} after {_ms(stall.notice_s)}; {stall.hosts} hosts train on "
            f"({stall.change}) from step {stall.step} after {stall.total_s:.2f} s"
        )

    def _wait_stall(self, what: str, fault_s: float) -> Stall:
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s and self._job.process.poll() is None:
            stall = read_stall(self._job.events(), fault_s)
            if stall is not None:
                return stall
            self._show_progress(self._job.report())
            time.sleep(0.05)
        raise InternalError(f"training did not go on after: {what}\n{self._job.tail()}")

    def _wait_all_train(self, why: str) -> None:
        self._console.print(f"[dim]{why}[/]")
        first = self._job.wait_report(why, self._all_train, PATIENCE_S)
        target = max(h.step for h in first.hosts) + TRAINED_STEPS

        def far_enough(report: JobReport) -> bool:
            self._show_progress(report)
            return max((h.step for h in report.hosts), default=0) >= target

        self._job.wait_report(f"step {target}", far_enough, PATIENCE_S)

    def _all_train(self, report: JobReport) -> bool:
        self._show_progress(report)
        generation = report.generation
        if generation is None or generation.phase is not Phase.ACTIVE or len(generation.members) < HOSTS:
            return False
        return all(h.worker is not None and h.worker.report.steady for h in report.hosts)

    def _show_progress(self, report: JobReport | None) -> None:
        interval_s = 0.5 if self._console.is_terminal else 10.0
        if report is None or report.generation is None or time.monotonic() - self._shown_s < interval_s:
            return
        self._shown_s = time.monotonic()
        newest = max(report.hosts, key=lambda h: h.step, default=None)
        if newest is None:
            return
        loss = f", loss {newest.metrics['loss']:.4f}" if "loss" in newest.metrics else ""
        self._console.print(
            f"  step {newest.step}/{self._steps}{loss}, generation {report.generation.number} "
            f"({report.generation.phase}), {len(report.generation.members)} hosts live",
            end="\r" if self._console.is_terminal else "\n",
            style="cyan",
        )

    def _report(self) -> JobReport:
        return self._job.wait_report("the job's report", lambda report: report.generation is not None)


def demo(
    steps: Annotated[int, typer.Option(help="Steps to train.")] = 50,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where logs and events go. Default: a new folder in /tmp."),
    ] = None,
) -> None:
    """Train a small language model on 4 hosts x 2 devices, kill three things, show how training went on.

    Takes about three minutes on two cores. Ends with a table: each incident, what noticed it, the phases of
    the stall, and the weights beside those of a run that nobody touched: the same, bit for bit.
    """
    script = find_in_checkout("examples/train_lm.py")
    console = Console(width=None if sys.stdout.isatty() else 132)
    directory = run_dir or Path(tempfile.mkdtemp(prefix="resilient-jax-demo-"))
    command = [str(script), "--steps", str(steps), "--digest"]
    with LocalJob(command, hosts=HOSTS, run_directory=directory, options=["--devices-per-host", "2"]) as job:
        story = Demo(job, console, steps)
        story.play()
        story.watch_to_the_end()
        found = _final_words(job.output())
    console.print("the same training again, undisturbed, on one host")
    expected = _train_undisturbed(command)
    console.print(_table(story.incidents))
    _print_comparison(console, found, expected)
    console.print(f"logs and events: {directory}")
    if found != expected:
        raise InternalError("the weights differ from those of the undisturbed run: please report it")


@dataclasses.dataclass(frozen=True, slots=True)
class _FinalWords:
    """What the script says of its end."""

    loss: str
    digest: str


def _print_comparison(console: Console, found: _FinalWords, expected: _FinalWords) -> None:
    console.print(f"with three kills:  loss {found.loss}, SHA-256 of all weights {found.digest}")
    console.print(f"undisturbed:       loss {expected.loss}, SHA-256 of all weights {expected.digest}")
    if found.digest == expected.digest:
        console.print("[bold green]all weights are equal, bit for bit[/]")


def _generation(report: JobReport) -> Generation:
    assert report.generation is not None, "waited for"
    return report.generation


def _final_words(output: str) -> _FinalWords:
    losses = re.findall(r"final loss ([0-9.]+)", output)
    digests = re.findall(r"sha256 of the parameters ([0-9a-f]{64})", output)
    if not losses or not digests:
        raise InternalError(f"the script printed no final loss or digest:\n{output[-2000:]}")
    return _FinalWords(losses[-1], digests[-1])


def _train_undisturbed(command: list[str]) -> _FinalWords:
    """One process, the same program, the same data: what must come out."""
    environment = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise InternalError(f"the undisturbed run failed:\n{done.stderr[-2000:]}")
    return _final_words(done.stdout)


def _table(incidents: list[Incident]) -> Table:
    table = Table(title="what was killed, and how training went on (times in ms)")
    table.add_column("incident", ratio=1)
    table.add_column("noticed by")
    for name in ("notice", "quiesce", "rebuild", "next step", "stall"):
        table.add_column(name, justify="right")
    table.add_column("how")
    table.add_column("steps lost", justify="right")
    table.add_column("live devices", justify="right")
    for incident in incidents:
        stall = incident.stall
        phases = (stall.notice_s, stall.quiesce_s, stall.rebuild_s, stall.step_s, stall.total_s)
        table.add_row(
            incident.what,
            str(stall.noticed_by),
            *(f"{1000 * seconds:.0f}" for seconds in phases),
            stall.change,
            str(incident.steps_lost),
            f"{stall.hosts * DEVICES} of {HOSTS * DEVICES}",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
