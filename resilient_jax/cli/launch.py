"""`resilient-jax launch`: a job of several hosts on this machine."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from resilient_jax.cli.options import (
    ConfigOption,
    DevicesOption,
    PlatformOption,
    ScriptArgument,
    TopologyOption,
    VerboseOption,
    check_devices,
    check_platform,
    check_script,
    find_failure_domain,
    load_job_config,
    print_line,
)
from resilient_jax.cli.progress import ProgressLine
from resilient_jax.cluster.launcher import HostSite, Launcher, LaunchSettings, make_host_names
from resilient_jax.cluster.run_directory import (
    claim_directory,
    create_numbered_directory,
    create_run_directory,
)
from resilient_jax.config import load_toml
from resilient_jax.errors import CallerError, ConfigError
from resilient_jax.ids import JobName
from resilient_jax.jax_runtime.worker_environment import has_device_count
from resilient_jax.protocol.records import JobOutcome, JobOutcomeKind


class Sites(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the hosts of a job on this machine run; none: on its loopback device."""

    store_host: str = "127.0.0.1"
    sites: tuple[HostSite, ...] = ()


DEFAULT_DEVICES = 2
"""Of each host, where neither the option nor XLA_FLAGS says how many."""
MAX_HOSTS = 250
"""Every host has a loopback address of its own in 127.0.0.0/24."""


def launch(
    script: ScriptArgument,
    hosts: Annotated[int, typer.Option(help="Hosts to start on this machine.")] = 4,
    devices_per_host: DevicesOption = None,
    platform: PlatformOption = "cpu",
    config: ConfigOption = None,
    topology: TopologyOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where logs and events go. Default: runs/<date and time>."),
    ] = None,
    host_restart_delay: Annotated[
        float, typer.Option(help="Seconds until a killed host comes back; negative: it stays away.")
    ] = 1.0,
    sites: Annotated[
        Path | None,
        typer.Option(
            help="TOML that says where each host runs: `store_host`, and for each host a table in `sites` with "
            "`address` and `command_prefix`."
        ),
    ] = None,
    host_restart_limit: Annotated[
        int, typer.Option(help="Times that a killed host comes back within ten minutes.")
    ] = 100,
    verbose: VerboseOption = False,
) -> None:
    """Train on several hosts of this machine, each with an agent as on a pod.

    Ctrl-C ends everything; SIGTERM ends at the next step boundary. Exit codes: see `agent --help`.

    Example: resilient-jax launch --hosts 4 --devices-per-host 2 examples/train_lm.py --steps 100
    """
    command = check_script(script)
    if not 1 <= hosts <= MAX_HOSTS:
        raise CallerError(f"--hosts: found {hosts}, expected 1 to {MAX_HOSTS} on one machine")
    check_devices(devices_per_host)
    if (least := load_job_config(config, hosts).min_hosts) > hosts:  # refused here once, not by every agent
        raise ConfigError(
            f"{config}: min_hosts: found {least} for a job of {hosts} hosts, expected no more than those. Lower it, or "
            "start more hosts"
        )
    options = [*("--platform", check_platform(platform) or "cpu")]
    if devices_per_host is None and not (platform == "cpu" and has_device_count(os.environ)):
        devices_per_host = DEFAULT_DEVICES
    if devices_per_host is not None:
        options += ["--devices-per-host", str(devices_per_host)]
    if config is not None:
        options += ["--config", str(config)]
    if topology is not None:
        for host in make_host_names(hosts):  # refused here once, not by every agent
            find_failure_domain(topology, host)
        options += ["--topology", str(topology)]
    if verbose:
        options += ["--verbose"]
    places = load_toml(sites, Sites) if sites is not None else Sites()
    if places.sites and len(places.sites) != hosts:
        raise ConfigError(
            f"{sites}: key 'sites': found {len(places.sites)} for a job of {hosts} hosts, expected one for each. Add "
            "the missing ones, or change --hosts"
        )
    default = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    directory = create_run_directory(run_dir) if run_dir is not None else create_numbered_directory(default)
    settings = LaunchSettings(
        job=JobName(directory.name),
        num_hosts=hosts,
        command=command,
        agent_options=tuple(options),
        run_directory=directory,
        environment=dict(os.environ),
        host_restart_delay_s=host_restart_delay if host_restart_delay >= 0 else None,
        max_host_restarts=host_restart_limit,
        sites=places.sites,
        store_host=places.store_host,
    )
    progress = ProgressLine()
    launcher = Launcher(settings, on_line=progress.print_line, on_change=progress.update)
    with claim_directory(directory), progress:
        print_line(
            f"run folder: {directory} (`resilient-jax status {directory}` shows the job while it runs)"
        )
        outcome = asyncio.run(launcher.run())
    print_line(_last_words(outcome, directory))
    sys.exit(outcome.exit_code)


def _last_words(outcome: JobOutcome, directory: Path) -> str:
    logs = f"logs and events: {directory}"
    if outcome.kind is JobOutcomeKind.DONE:
        return f"done; {logs}"
    where = f" on {outcome.host}" if outcome.host else ""
    return f"{logs}\nthe job ended: {outcome.kind}{where}\n{outcome.message}"
