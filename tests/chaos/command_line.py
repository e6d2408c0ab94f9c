"""`python tests/chaos`: inject the faults of a manifest into a job, and check the job's invariants."""

import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import typer

from resilient_jax.cli.ending_signals import ended_by_signals
from resilient_jax.cli.options import StoreTlsOption, check_script, check_store, print_line
from resilient_jax.cluster.run_directory import create_run_directory
from resilient_jax.errors import CallerError, ExitCode, ResilientJaxError
from tests.chaos.campaign import CampaignResult
from tests.chaos.command_options import (
    CampaignOption,
    GapOption,
    HostsOption,
    IncidentsOption,
    JsonOption,
    ManifestAndScript,
    MaxHostsLostOption,
    NetworkOption,
    RandomOption,
    RepeatOption,
    RunFolderOption,
    SeedOption,
    ShrinkOption,
    StepsOption,
    StoreOption,
)
from tests.chaos.delta_debugging import is_same_failure, minimize_manifest
from tests.chaos.manifest import CampaignManifest, ChaosJob, load_manifest
from tests.chaos.manifest_toml import format_manifest
from tests.chaos.paths import CAMPAIGNS, REPOSITORY
from tests.chaos.random_campaigns import MAX_GAP_STEPS, MIN_GAP_STEPS, RandomCampaign, draw_campaign
from tests.chaos.runner import CampaignSetup, run_campaign

PROGRAM = "python tests/chaos"
CAMPAIGN_FOLDER = "campaign"
"""Folder of the campaign itself in the run folder, beside those of the reference run and the compilation cache."""


class CampaignFailed(ResilientJaxError):
    """The error of a campaign that found a violated invariant."""

    exit_code = ExitCode.INTERNAL_ERROR


def chaos(
    words: ManifestAndScript = None,
    campaign: CampaignOption = None,
    random: RandomOption = False,
    seed: SeedOption = 0,
    incidents: IncidentsOption = 20,
    gap: GapOption = 12.0,
    hosts: HostsOption = 4,
    steps: StepsOption = 0,
    max_hosts_lost: MaxHostsLostOption = None,
    network: NetworkOption = False,
    store: StoreOption = None,
    store_tls: StoreTlsOption = None,
    shrink: ShrinkOption = False,
    repeat: RepeatOption = 1,
    run_dir: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Inject faults into a job as a manifest lists them, and check the job's invariants.

    Faults kill, stop, slow down, partition or corrupt parts of the job. The job's steps are compared, bit for bit, with
    those of a reference run: the same script in one process without faults. After a violation the command prints the
    last events of all hosts and the manifest that replays them, and exits with 89.

    The script must stop at a given step: at the one in the file that the environment variable
    RESILIENT_JAX_CHAOS_STOP_STEP names (see tests/chaos/jobs/chaos_job.py), or always after `job.steps` (or --steps)
    steps.

    Ctrl-C, SIGTERM and SIGHUP end the job and remove the campaign's disks and networks; the exit code is 128 plus the
    signal's number.

    Example: python tests/chaos --random --seed 7 --incidents 20 -- tests/chaos/jobs/chaos_job.py
    """
    manifest, script = _read_words(words or [], campaign)
    if random:
        if manifest is not None:
            raise CallerError("--random: found a manifest besides, expected none: leave one of them out")
        # NaN passes the bounds of the option.
        if math.isnan(gap):
            raise CallerError(f"--gap: found {gap}, expected {MIN_GAP_STEPS:g} to {MAX_GAP_STEPS:g} steps")
        job = ChaosJob(hosts=hosts, steps=steps, network="namespaces" if network else "loopback")
        manifest = draw_campaign(
            job, RandomCampaign(seed=seed, incidents=incidents, gap_steps=gap, max_hosts_lost=max_hosts_lost)
        )
    if manifest is None:
        raise CallerError("chaos: found no manifest, expected one (a .toml file), or --campaign, or --random")
    command = _find_script(script, manifest)
    check_store(store, store_tls)
    if store is not None and manifest.job.store != "embedded":
        raise CallerError(
            f"--store: found it beside job.store = {manifest.job.store!r} in the manifest, expected one of the two"
        )
    log = _ProgressLog(to_stderr=as_json)
    runs = _Runs(_create_directory(run_dir), command, log, store=store, store_tls=store_tls)
    runs.log(
        f"{len(manifest.incidents)} incidents on {manifest.job.hosts} hosts; everything goes to {runs.directory}"
    )
    with ended_by_signals():
        result = runs.run(manifest, CAMPAIGN_FOLDER)
        written = runs.directory / CAMPAIGN_FOLDER / "manifest.toml"
        _print_result(result, written, as_json=as_json)
        if result.violations and shrink:
            runs.shrink(manifest, result, repeat)
    if result.violations:
        raise CampaignFailed(
            f"{len(result.violations)} invariants do not hold; replay: {PROGRAM} {written} -- "
            + " ".join(command)
        )


def _read_words(words: list[str], campaign: str | None) -> tuple[CampaignManifest | None, list[str]]:
    """Return the manifest that the command line names, if any, and the command of the script."""
    if campaign is not None:
        return load_manifest(CAMPAIGNS / f"{campaign}.toml"), words
    if words and words[0].endswith(".toml"):
        return load_manifest(Path(words[0])), words[1:]
    return None, words


def _find_script(script: list[str], manifest: CampaignManifest) -> tuple[str, ...]:
    if script:
        return check_script(script)
    if not manifest.script:
        raise CallerError(
            "chaos: found no script, expected one after `--`, or the key script in the manifest"
        )
    return check_script([str(REPOSITORY / manifest.script[0]), *manifest.script[1:]])


def _create_directory(run_dir: Path | None) -> Path:
    directory = create_run_directory(run_dir or Path(tempfile.mkdtemp(prefix="resilient-jax-chaos-")))
    if (directory / CAMPAIGN_FOLDER).exists():
        raise CallerError(
            f"--run-dir {directory}: found a campaign there, expected none: its events would be taken for those of "
            "this one. Name another folder, or remove it"
        )
    return directory


class _ProgressLog:
    """Prints lines with the seconds since the start; to standard error if standard output is for JSON."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._began_s = time.monotonic()
        self._to_stderr = to_stderr

    def __call__(self, text: str) -> None:
        line = f"{time.monotonic() - self._began_s:7.1f} s  {text}"
        if self._to_stderr:
            sys.stderr.write(line + "\n")
        else:
            print_line(line)


@dataclasses.dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of one script in one run folder; they share the reference run and the compilation cache."""

    directory: Path
    command: tuple[str, ...]
    log: _ProgressLog
    store: str | None = None
    store_tls: Path | None = None

    def run(self, manifest: CampaignManifest, folder: str) -> CampaignResult:
        """Run a campaign in a new folder of the run folder."""
        default_cache = self.directory / "compile-cache"
        setup = CampaignSetup(
            command=self.command,
            directory=self.directory / folder,
            compile_cache=Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", default_cache)),
            reference_directory=self.directory / "reference",
            store=self.store,
            store_tls=self.store_tls,
        )
        return run_campaign(manifest, setup, self.log)

    def shrink(self, manifest: CampaignManifest, result: CampaignResult, repeat: int) -> None:
        """Write the smallest manifest that violates the same invariants in at least one of `repeat` runs."""
        trials = 0

        def fails(candidate: CampaignManifest) -> bool:
            nonlocal trials
            for _ in range(repeat):
                trials += 1
                self.log(f"trial {trials}: {len(candidate.incidents)} incidents")
                trial = self.run(candidate, f"trial-{trials}")
                if is_same_failure(trial.violations, result.violations):
                    return True
            return False

        smallest = minimize_manifest(manifest, fails)
        path = self.directory / "minimal.toml"
        path.write_text(format_manifest(smallest))
        self.log(f"the smallest manifest that still fails has {len(smallest.incidents)} incidents: {path}")


def _print_result(result: CampaignResult, manifest: Path, *, as_json: bool) -> None:
    for line in result.timeline:
        sys.stderr.write(line + "\n")
    for violation in result.violations:
        sys.stderr.write(f"VIOLATED {violation}\n")
    growth = result.growth
    figures = {
        "incidents": len(result.incidents) - len(result.skipped),
        "violations": len(result.violations),
        "skipped": len(result.skipped),
        "rss_growth_mib": round(growth.rss_mib, 2),
        "rss_growth_process": growth.rss_process,
        "late_rss_growth_mib": round(growth.late_rss_mib, 2),
        "descriptor_growth": growth.descriptors,
        "descriptor_growth_process": growth.descriptors_process,
        "long_lived_processes": growth.processes,
        "steps": result.steps,
        "duration_s": round(result.duration_s, 1),
        "manifest": str(manifest),
    }
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    for record in result.skipped:
        print_line(f"skipped {record.describe()}: {record.skip_reason}")
    print_line(", ".join(f"{name} {value}" for name, value in figures.items()))


def main() -> None:
    """Run a campaign; report an error of this package in one line and by its exit code, without a traceback."""
    app = typer.Typer(
        name=PROGRAM,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.command()(chaos)
    try:
        app(prog_name=PROGRAM)
    except ResilientJaxError as error:
        sys.stderr.write(f"chaos: {error}\n")
        sys.exit(int(error.exit_code))
