"""`resilient-jax chaos`: break a job by a plan, and check that it keeps its promise."""

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from resilient_jax.chaos.campaign import CampaignResult
from resilient_jax.chaos.delta_debugging import is_same_failure, minimize_manifest
from resilient_jax.chaos.manifest import MAX_NUMBER, CampaignManifest, ChaosJob, load_manifest
from resilient_jax.chaos.manifest_toml import format_manifest
from resilient_jax.chaos.random_campaigns import MAX_GAP_STEPS, MIN_GAP_STEPS, RandomCampaign, draw_campaign
from resilient_jax.chaos.runner import CampaignSetup, run_campaign
from resilient_jax.cli.checkout import find_in_checkout
from resilient_jax.cli.options import check_script, print_line
from resilient_jax.cluster.run_directory import create_run_directory
from resilient_jax.errors import CallerError, ExitCode, ResilientJaxError

CAMPAIGNS = "configs/chaos"
CAMPAIGN_FOLDER = "campaign"
"""Of the run folder: where the campaign itself goes, beside the undisturbed run and the cache."""


class CampaignFailed(ResilientJaxError):
    """An invariant was violated."""

    exit_code = ExitCode.INTERNAL_ERROR


def chaos(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="The manifest (a .toml file), then the script.", metavar="[MANIFEST] -- SCRIPT [ARGS...]"
        ),
    ] = None,
    campaign: Annotated[
        str | None, typer.Option(help=f"A manifest of {CAMPAIGNS} by its name, such as process or soak.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Draw the incidents from published failure rates.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=MAX_NUMBER, help="Of a random campaign.")] = 0,
    incidents: Annotated[int, typer.Option(min=1, help="Of a random campaign.")] = 20,
    gap: Annotated[
        float,
        typer.Option(
            min=MIN_GAP_STEPS,
            max=MAX_GAP_STEPS,
            help="Mean steps between two incidents anywhere in a random campaign.",
        ),
    ] = 12.0,
    hosts: Annotated[int, typer.Option(min=1, max=64, help="Of a random campaign's job.")] = 4,
    steps: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_NUMBER,
            help="That the script of a random campaign trains. 0: until the tool says so.",
        ),
    ] = 0,
    max_hosts_lost: Annotated[
        int | None,
        typer.Option(
            min=1, help="Hosts that may be lost at once in a random campaign. Default: all but one."
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Random campaign: hosts in network namespaces, links may fail.")
    ] = False,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink", help="If it fails: find the fewest incidents that still break the same promises."
        ),
    ] = False,
    repeat: Annotated[
        int, typer.Option(min=1, help="Runs of each trial when minimising: some failures are rare.")
    ] = 1,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="For logs, events, manifest. Default: a new folder in /tmp."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as one JSON object.")] = False,
) -> None:
    """Break a job by a plan: kill, stop, slow down, cut off, damage its parts; check that it keeps its promise.

    The job's steps are compared, bit for bit, with those of the same script on this machine alone. A violation prints
    the last events of all hosts and the manifest to replay it, and exits with 89.

    So the script has to stop at a given step: the one in the file that the environment variable
    RESILIENT_JAX_CHAOS_STOP_STEP names (see examples/chaos_job.py); or always after `job.steps` (or --steps) steps.

    Ctrl-C, SIGTERM and SIGHUP end the job and take away what the campaign has set up; exit code 128 and the signal's
    number.

    Example: resilient-jax chaos --random --seed 7 --incidents 20 -- examples/chaos_job.py
    """
    manifest, script = _read_words(words or [], campaign)
    if random:
        if manifest is not None:
            raise CallerError("--random: found a manifest besides, expected none: leave one of them out")
        shape = ChaosJob(hosts=hosts, steps=steps, network="namespaces" if network else "loopback")
        if math.isnan(gap):  # no bound of a number's range refuses it
            raise CallerError(f"--gap: found {gap}, expected {MIN_GAP_STEPS:g} to {MAX_GAP_STEPS:g} steps")
        wanted = RandomCampaign(seed=seed, incidents=incidents, gap_steps=gap, max_hosts_lost=max_hosts_lost)
        manifest = draw_campaign(shape, wanted)
    if manifest is None:
        raise CallerError("chaos: found no manifest, expected one (a .toml file), or --campaign, or --random")
    command = _find_script(script, manifest)
    directory = create_run_directory(run_dir or Path(tempfile.mkdtemp(prefix="resilient-jax-chaos-")))
    if (directory / CAMPAIGN_FOLDER).exists():
        raise CallerError(
            f"--run-dir {directory}: found a campaign there, expected none: its events would be taken for those of "
            "this one. Name another folder, or remove it"
        )
    tell = _Teller(quiet=as_json)
    tell(f"{len(manifest.incidents)} incidents on {manifest.job.hosts} hosts; everything goes to {directory}")
    with _unwound_by_signals():
        findings = _run(manifest, command, directory, directory / CAMPAIGN_FOLDER, tell)
        _report(findings, directory / CAMPAIGN_FOLDER / "manifest.toml", as_json=as_json)
        if findings.violations and shrink:
            smallest = _shrink(manifest, findings, command, directory, repeat, tell)
            tell(
                f"the smallest manifest that still fails has {len(smallest.incidents)} incidents: "
                f"{directory}/minimal.toml"
            )
    if findings.violations:
        raise CampaignFailed(
            f"{len(findings.violations)} invariants do not hold; replay: resilient-jax chaos "
            f"{directory / 'campaign' / 'manifest.toml'} -- {' '.join(command)}"
        )


def _read_words(words: list[str], campaign: str | None) -> tuple[CampaignManifest | None, list[str]]:
    if campaign is not None:
        return load_manifest(find_in_checkout(f"{CAMPAIGNS}/{campaign}.toml")), words
    if words and words[0].endswith(".toml"):
        return load_manifest(Path(words[0])), words[1:]
    return None, words


def _find_script(script: list[str], manifest: CampaignManifest) -> tuple[str, ...]:
    if not (script or manifest.script):
        raise CallerError(
            "chaos: found no script, expected one after `--`, or the key script in the manifest"
        )
    return check_script(script or [str(find_in_checkout(manifest.script[0])), *manifest.script[1:]])


def _run(
    manifest: CampaignManifest, command: tuple[str, ...], top: Path, directory: Path, tell: "_Teller"
) -> CampaignResult:
    setting = CampaignSetup(
        command=command,
        directory=directory,
        compile_cache=Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", top / "compile-cache")),
        reference_directory=top / "reference",
    )
    return run_campaign(manifest, setting, tell)


def _shrink(
    manifest: CampaignManifest,
    findings: CampaignResult,
    command: tuple[str, ...],
    directory: Path,
    repeat: int,
    tell: "_Teller",
) -> CampaignManifest:
    tries = 0

    def fails(candidate: CampaignManifest) -> bool:
        nonlocal tries
        for _ in range(repeat):
            tries += 1
            tell(f"trial {tries}: {len(candidate.incidents)} incidents")
            trial = _run(candidate, command, directory, directory / f"trial-{tries}", tell)
            if is_same_failure(trial.violations, findings.violations):
                return True
        return False

    smallest = minimize_manifest(manifest, fails)
    (directory / "minimal.toml").write_text(format_manifest(smallest))
    return smallest


@contextlib.contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does: disks, networks, the clock and processes are taken away.

    The exit code is 128 and the signal's number. A signal that was ignored before stays so (`nohup`).
    """

    def unwind(number: int, _: FrameType | None) -> None:
        for other in before:  # a second one must not break off what the first has begun to take away
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    ended_by = (signal.SIGTERM, signal.SIGHUP)
    before = {n: handler for n in ended_by if (handler := signal.getsignal(n)) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, unwind)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Teller:
    """Progress lines with the seconds since the beginning; to standard error if standard output is for figures."""

    def __init__(self, *, quiet: bool) -> None:
        self._began_s = time.monotonic()
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        line = f"{time.monotonic() - self._began_s:7.1f} s  {text}"
        if self._quiet:
            sys.stderr.write(line + "\n")
        else:
            print_line(line)


def _report(findings: CampaignResult, manifest: Path, *, as_json: bool) -> None:
    for line in findings.timeline:
        sys.stderr.write(line + "\n")
    for violation in findings.violations:
        sys.stderr.write(f"VIOLATED {violation}\n")
    growth = findings.growth
    figures = {
        "incidents": len(findings.incidents) - len(findings.skipped),
        "violations": len(findings.violations),
        "skipped": len(findings.skipped),
        "rss_growth_mib": round(growth.rss_mib, 2),
        "rss_growth_of": growth.rss_process,
        "rss_growth_late_mib": round(growth.late_rss_mib, 2),
        "fd_growth": growth.descriptors,
        "fd_growth_of": growth.descriptors_process,
        "grown_processes": growth.processes,
        "steps": findings.steps,
        "seconds": round(findings.duration_s, 1),
        "manifest": str(manifest),
    }
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for item in findings.skipped:
        print_line(f"skipped {item.describe()}: {item.skip_reason}")
    print_line(", ".join(f"{name} {value}" for name, value in figures.items()))
