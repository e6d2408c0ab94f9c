"""`resilient-jax status`: show a running job, or how it ended."""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.cli.console import open_console
from resilient_jax.cli.job_contact import (
    JobOption,
    RemoteJob,
    RunDirectoryArgument,
    StoreOption,
    choose_job,
    read_live_contact,
)
from resilient_jax.cli.options import StoreTlsOption, TlsOption, print_line
from resilient_jax.cli.outcome_text import describe_outcome
from resilient_jax.cli.progress import StepRate, describe_members, describe_steps
from resilient_jax.cluster.job_report import JobReport, read_job_report
from resilient_jax.cluster.run_directory import CONTACT_FILE, EndedJob, read_ended_job, read_host_ends
from resilient_jax.errors import StoreUnreachable
from resilient_jax.membership.redundancy import Redundancy
from resilient_jax.protocol.generation import Generation, JobOutcome
from resilient_jax.protocol.host_status import HostStatus, StandbyStatus
from resilient_jax.protocol.recovery_records import RecoveryDecision
from resilient_jax.protocol.slow_hosts import SlowHost
from resilient_jax.protocol.snapshots import SnapshotStatus
from resilient_jax.protocol.worker_report import WorkerState
from resilient_jax.telemetry.metric_text import format_metrics

WATCH_INTERVAL_S = 1.0
MIN_WIDTH = 110
"""Columns of the table. In a narrower terminal its lines wrap, which is still readable; truncated columns are not."""


def status(
    run_dir: RunDirectoryArgument = None,
    store: StoreOption = None,
    job: JobOption = None,
    tls: TlsOption = None,
    store_tls: StoreTlsOption = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the job anew every second, until it is over or Ctrl-C.")
    ] = False,
) -> None:
    """Show generation, hosts, workers and services of a running job; of a job that is over, how it ended.

    In the run folder of agents that were started by hand it shows how they ended.

    A job of agents on other machines is found by --store and --job, with their token in RESILIENT_JAX_TOKEN.

    Example: resilient-jax status runs/first --watch

    Example: resilient-jax status --store etcd://a:2379,b:2379,c:2379 --job lm
    """
    chosen = choose_job(run_dir, store, job, tls, store_tls)
    with open_console() as console:
        screen = _Screen(console, is_json=json_output, is_redrawn=watch)
        while not _show(chosen, screen) and watch:
            time.sleep(WATCH_INTERVAL_S)


class _Screen:
    """Where reports are shown: one below the other, or on a terminal each in the place of the one before.

    Attributes:
        has_shown: whether there was a report.
    """

    def __init__(self, console: Console, *, is_json: bool, is_redrawn: bool) -> None:
        self._console = console
        self._is_json = is_json
        self._is_redrawn = is_redrawn and console.is_terminal and not is_json
        self._rate = StepRate()
        self.has_shown = False

    def show_end(self, ended: EndedJob) -> None:
        """Show how the job ended."""
        print_line(msgspec.json.encode(ended).decode() if self._is_json else describe_end(ended, time.time()))

    def show_host_ends(self, ends: Mapping[str, EndedJob | None]) -> None:
        """Show how hand-started agents ended; as JSON only what the last one knows."""
        if self._is_json:
            self.show_end(max(filter(None, ends.values()), key=lambda ended: ended.wall_s))
        else:
            print_line(describe_host_ends(ends, time.time()))

    def show_trouble(self, what: str) -> None:
        """Show why there is no report."""
        if not self._is_json:
            self._console.print(escape(what))

    def show(self, report: JobReport) -> None:
        """Show a report."""
        if self._is_json:
            sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        else:
            if self._is_redrawn:
                self._console.clear()
            newest = max(report.hosts, key=lambda host: host.progress.step, default=None)
            steps_per_s = (
                self._rate.measure(newest.progress.step, time.monotonic()) if newest is not None else None
            )
            print_report(self._console, report, steps_per_s)
        sys.stdout.flush()
        self.has_shown = True


def _show(chosen: Path | RemoteJob, screen: _Screen) -> bool:
    """Show a job as it is now; return whether it is over."""
    if isinstance(chosen, Path) and (ended := read_ended_job(chosen)) is not None:
        screen.show_end(ended)
        return True
    if isinstance(chosen, Path) and not (chosen / CONTACT_FILE).exists():
        ends = read_host_ends(chosen)
        if any(ends.values()):
            screen.show_host_ends(ends)
            return all(ends.values())
    contact = (
        read_live_contact(chosen) if isinstance(chosen, Path) else chosen.make_contact(calls_agents=False)
    )
    try:
        report = asyncio.run(read_job_report(contact))
    except StoreUnreachable as error:
        if not screen.has_shown:
            raise
        # The store of a job that ends goes before its end is written.
        screen.show_trouble(str(error))
        return False
    screen.show(report)
    return report.generation is not None and report.generation.outcome is not None


def describe_end(ended: EndedJob, now_s: float) -> str:
    """Return how a job ended, as `launch` printed it, with its last step."""
    words = [f"step {ended.step}", *format_metrics(ended.metrics)]
    return (
        f"job {ended.job}: ended {max(now_s - ended.wall_s, 0):.0f} s ago, exit code {ended.outcome.exit_code} | "
        f"{' | '.join(words)}\n{describe_outcome(ended.outcome)}"
    )


def describe_host_ends(ends: Mapping[str, EndedJob | None], now_s: float) -> str:
    """Return how the agents of a run folder ended, once for all that know the same, the newest end first."""
    found: dict[JobOutcome, dict[str, EndedJob]] = {}
    for host, ended in ends.items():
        if ended is not None:
            found.setdefault(ended.outcome, {})[host] = ended
    newest = {
        ", ".join(known): max(known.values(), key=lambda ended: ended.wall_s) for known in found.values()
    }
    lines = [
        f"{hosts}: {describe_end(ended, now_s)}"
        for hosts, ended in sorted(newest.items(), key=lambda item: -item[1].wall_s)
    ]
    if names := ", ".join(host for host, ended in ends.items() if ended is None):
        lines.append(f"{names}: no end is recorded here: still running, or killed")
    return "\n".join(lines)


def _describe(snapshot: SnapshotStatus, now_s: float) -> str:
    """Return a description such as "step 12 (committed, 3 s old, 1.5 MiB, survives the loss of 2 of 6 hosts)"."""
    group = snapshot.group
    return (
        f"step {snapshot.id.step} ({snapshot.phase}, {max(now_s - snapshot.wall_s, 0):.0f} s old, "
        f"{snapshot.nbytes / 2**20:.1f} MiB, survives the loss of {group.parity} of {len(group.hosts)} hosts)"
    )


def _describe_standby(standby: StandbyStatus) -> str:
    """Return a description such as "standby ready, 173 MiB"."""
    return f"standby {standby.state}" + (f", {standby.memory_mib} MiB" if standby.memory_mib else "")


def describe_spare(host: HostStatus, generation: Generation) -> str:
    """Return a description such as "spare, ready, 412 MiB: no part of the state"; empty for other hosts."""
    if not host.is_spare and host.host not in generation.membership.spares:
        return ""
    worker = host.worker
    if generation.membership.find_member(host.host) is not None:
        return "spare that takes part" if host.is_spare else ""
    if worker is None or not worker.is_alive:
        return "spare, without a worker"
    if worker.report.state is not WorkerState.IDLE:
        return "spare, getting ready"
    how = "" if worker.report.place.world == generation.membership.world else ", joins by a re-form"
    memory = f", {worker.memory_mib} MiB" if worker.memory_mib else ""
    return f"spare, ready{how}{memory}: no part of the state"


def describe_redundancy(redundancy: Redundancy | None) -> str:
    """Return a description such as "state of step 12: on 3 hosts; survives the loss of 2 more hosts"."""
    if redundancy is None:
        return "state: none committed, or none left"
    copies, snapshot = redundancy.copies, redundancy.snapshot
    places = [f"on {copies} host{'s' if copies > 1 else ''}"] if copies else []
    if redundancy.is_in_parts:
        places = [f"each part {places[0]}"]
    places += [f"in the snapshot of step {snapshot.step}"] if snapshot is not None else []
    losses = redundancy.losses
    survives = f"survives the loss of {losses} more host{'s' if losses > 1 else ''}"
    after = survives if losses > 0 else "the loss of one more host may lose it"
    return f"state of step {redundancy.step}: {' and '.join(places)}; {after}"


def describe_decision(decision: RecoveryDecision, about: str = "") -> str:
    """Return a description such as "last decision, in generation 7: shrink: the job goes on in place: ..."."""
    return f"last decision{about}, in generation {decision.number}: {decision.action}: {decision.reason}"


def list_options(decision: RecoveryDecision) -> list[str]:
    """Return the options of a decision, a line each; none if there was no other."""
    if len(decision.options) < 2:
        return []
    lines = [f"    {option.describe()}" for option in decision.options]
    return ["  scores are mean speeds until the next failure; all hosts at full speed have 1", *lines]


def print_report(console: Console, report: JobReport, steps_per_s: float | None = None) -> None:
    """Print generation and progress, the last decisions, and a table with a row for each host."""
    generation = report.generation
    if generation is None:
        console.print(f"job {escape(report.job)}: no generation yet, {len(report.hosts)} hosts registered")
    else:
        _print_generation(console, report, generation, steps_per_s)
        if generation.outcome is not None:
            console.print(describe_outcome(generation.outcome))
            return
    for line in _list_conditions(report, time.time()):
        console.print(escape(line))
    console.width = max(console.width, MIN_WIDTH)
    console.print(_make_table(report))


def _print_generation(
    console: Console, report: JobReport, generation: Generation, steps_per_s: float | None
) -> None:
    console.print(
        f"job {escape(report.job)}: generation {generation.number} ({generation.phase}, "
        f"{generation.membership.change}), world {generation.membership.world}, "
        f"{describe_members(generation)}, leader {report.leader}"
    )
    newest = max(report.hosts, key=lambda host: host.progress.step, default=None)
    if newest is not None and newest.progress.step:
        words = describe_steps(newest.progress.step, newest.progress.num_steps, steps_per_s)
        console.print(escape(" | ".join([*words, *format_metrics(newest.progress.metrics)])))
    decided = generation.record.decision
    if generation.reason and (decided is None or decided.number != generation.number):
        console.print(escape(f"why generation {generation.number}: {generation.reason}"))
    for decision, about in (
        (decided, ""),
        (generation.record.slowness.decision, " about slow hosts"),
    ):
        if decision is not None:
            console.print(escape("\n".join([describe_decision(decision, about), *list_options(decision)])))


def _list_conditions(report: JobReport, now_s: float) -> Iterator[str]:
    """Yield what else people should know of a job: how safe its state is, what has changed, who is in quarantine."""
    yield describe_redundancy(report.redundancy)
    for changed in dict.fromkeys(filter(None, (host.changed_program for host in report.hosts))):
        yield f"changed on disk since the job began, which goes on with its copies: {changed}"
    for record in report.quarantine:  # a host that gave up has no row in the table
        left_s = max(record.until_wall_s - now_s, 0.0)
        yield f"{record.host}: in quarantine for {left_s:.0f} s more: {record.reason}"
    for device in report.device_quarantine:
        left_s = max(device.until_wall_s - now_s, 0.0)
        yield f"{device.label}: device in quarantine for {left_s:.0f} s more: {device.reason}"


def _make_table(report: JobReport) -> Table:
    generation = report.generation
    table = Table()
    for name in ("host", "process", "worker", "incarnation", "pid", "step", "services", "snapshots", "notes"):
        table.add_column(name, overflow="fold")
    for host in report.hosts:
        member = generation.membership.find_member(host.host) if generation else None
        worker = host.worker
        table.add_row(
            host.host,
            str(generation.membership.members.index(member)) if generation and member else "-",
            str(worker.report.state) if worker else "-",
            str(worker.incarnation) if worker else "-",
            str(worker.pid) if worker else "-",
            str(host.progress.step),
            ", ".join(f"world {s.world}" for s in host.services) or "-",
            "\n".join(_describe(s, time.time()) for s in host.snapshots) or "-",
            "\n".join(_list_notes(host, report)),
        )
    return table


def _list_notes(host: HostStatus, report: JobReport) -> list[str]:
    worker, generation = host.worker, report.generation
    notes = ["draining"] if host.is_draining else []
    notes += ["stopped"] if worker and worker.is_unresponsive else []
    overdue = worker.report.overdue if worker else None
    notes += [f"overdue: {overdue.describe()}"] if overdue is not None else []
    notes += [slow.describe() for slow in _list_slow_hosts(report) if slow.host == host.host]
    used = host.devices.describe()
    notes += [f"trains on {used}"] if used else []
    notes += host.devices.gpus  # beside what is slow: a throttled GPU is often why
    spare = describe_spare(host, generation) if generation is not None else ""
    notes += [spare] if spare else []
    notes += [_describe_standby(host.standby)] if host.standby is not None else []
    return notes


def _list_slow_hosts(report: JobReport) -> tuple[SlowHost, ...]:
    """Return what the first host of the generation has found; what others did is of earlier generations."""
    if report.generation is None or not report.generation.membership.members:
        return ()
    first = report.generation.membership.members[0].host
    workers = [host.worker for host in report.hosts if host.host == first and host.worker is not None]
    return workers[0].report.findings.slow_hosts if workers else ()
