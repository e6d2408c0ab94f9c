"""`resilient-jax launch`: a job of several hosts on this machine."""

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from resilient_jax.cli.job_environment import make_job_environment
from resilient_jax.cli.options import (
    ConfigOption,
    DevicesOption,
    GraceOption,
    PlatformOption,
    ScriptArgument,
    StoreTlsOption,
    TopologyOption,
    VerboseOption,
    check_devices,
    check_platform,
    check_script,
    check_spares,
    check_store,
    list_options,
    load_job_config,
    note_misplaced_options,
    print_line,
    read_failure_domain,
    read_grace,
)
from resilient_jax.cli.outcome_text import describe_for_launch
from resilient_jax.cli.progress import ProgressLine
from resilient_jax.cluster.launcher import (
    EVENT_LOG_FILE,
    HostSite,
    Launcher,
    LaunchSettings,
    make_host_names,
)
from resilient_jax.cluster.notice_grace import DEFAULT_GRACE_S
from resilient_jax.cluster.run_directory import (
    HostLog,
    claim_directory,
    create_numbered_directory,
    create_run_directory,
    make_log_path,
)
from resilient_jax.config import JobConfig, load_toml
from resilient_jax.doctor.gpu_inventory import list_gpus, read_gpus
from resilient_jax.errors import CallerError, ConfigError, MessageError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName
from resilient_jax.jax_runtime.local_gpus import (
    VISIBLE_GPUS,
    has_shared_gpus,
    list_gpu_shares,
    make_gpu_share_environment,
)
from resilient_jax.jax_runtime.worker_environment import Platform, has_device_count
from resilient_jax.telemetry.event_log import read_events
from resilient_jax.telemetry.screen_output import unblocked_output


class Sites(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sites on this machine where the hosts of a job run; none: on its loopback device."""

    store_host: str = "127.0.0.1"
    sites: tuple[HostSite, ...] = ()


DEFAULT_DEVICES = 2
"""Devices of each host, if neither the option nor XLA_FLAGS sets their number."""
MAX_HOSTS = 250
"""Every host has a loopback address of its own in 127.0.0.0/24."""
NOTE_OF_USED_FOLDER = (
    "note: a job ran in this folder before: logs and compiled programs are kept. Training resumes where the script "
    "saved checkpoints; otherwise it begins with the initial state"
)


HostsOption = Annotated[int, typer.Option(help="Hosts to start on this machine.")]
SparesOption = Annotated[
    int,
    typer.Option(help="Hosts to start besides, which wait to take the place of a host that is missing."),
]
RunFolderOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Folder for logs and events. Default: `runs/DATE-TIME`."),
]
RestartDelayOption = Annotated[
    float, typer.Option(help="Seconds until a killed host is started again; negative: it is not.")
]
SitesOption = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with the places where the hosts run: `store_host`, and for each host a table in `sites` with "
        "`address` and `command_prefix`."
    ),
]
MaxHostRestartsOption = Annotated[
    int, typer.Option(help="How often a killed host is started again within ten minutes.")
]


EtcdOption = Annotated[
    str | None,
    typer.Option(
        help="An etcd cluster as the job's store: etcd://HOST:2379,HOST:2379,HOST:2379/NAMESPACE. Default: `launch` "
        "serves the store itself."
    ),
]


ZygotePlace = Literal["machine", "host", "off"]
ZygoteOption = Annotated[
    ZygotePlace,
    typer.Option(
        help="What workers are forked from, so that they start sooner: one process for this `machine` that has "
        "imported JAX (on CPU, without --sites), or one for each `host`, as on a pod. `off`: each worker imports JAX "
        "itself."
    ),
]


def launch(
    context: typer.Context,
    script: ScriptArgument,
    hosts: HostsOption = 4,
    spares: SparesOption = 0,
    devices_per_host: DevicesOption = None,
    platform: PlatformOption = "cpu",
    config: ConfigOption = None,
    topology: TopologyOption = None,
    run_dir: RunFolderOption = None,
    host_restart_delay: RestartDelayOption = 1.0,
    sites: SitesOption = None,
    max_host_restarts: MaxHostRestartsOption = 100,
    store: EtcdOption = None,
    store_tls: StoreTlsOption = None,
    zygote: ZygoteOption = "machine",
    grace_s: GraceOption = DEFAULT_GRACE_S,
    verbose: VerboseOption = False,
) -> None:
    """Train on several hosts on this machine, each with an agent as on a pod.

    Ctrl-C ends the job at once, pressed again without a record; SIGTERM ends it at a step boundary, with a checkpoint.
    Exit codes: see `agent --help`.

    Example: resilient-jax launch --hosts 4 --devices-per-host 2 examples/train_lm.py --steps 100
    """
    own_options = list_options(context)
    command = check_script(script, own_options)
    note_misplaced_options(command, own_options)
    check_devices(devices_per_host)
    checked_platform = check_platform(platform) or "cpu"
    _check_hosts(hosts, spares, config, topology, checked_platform)
    check_store(store, store_tls)
    num_hosts = hosts + spares
    host_sites = _load_sites(sites, num_hosts)
    devices_per_host, gpu_environments = _choose_devices(
        checked_platform, num_hosts, devices_per_host, is_on_loopback=not host_sites.sites
    )
    directory = _create_directory(run_dir)
    is_used = (directory / EVENT_LOG_FILE).exists()
    settings = LaunchSettings(
        job=_name_job(directory, store),
        num_hosts=hosts,
        num_spares=spares,
        command=command,
        agent_options=_list_agent_options(
            checked_platform, devices_per_host, config, topology, grace_s, zygote, verbose=verbose
        ),
        grace=read_grace(grace_s),
        run_directory=directory,
        environment=dict(os.environ),
        host_restart_delay_s=host_restart_delay if host_restart_delay >= 0 else None,
        max_host_restarts=max_host_restarts,
        sites=host_sites.sites,
        host_environments=gpu_environments,
        store_host=host_sites.store_host,
        store=store,
        store_tls=store_tls,
        zygote_environment=_make_zygote_environment(
            directory, checked_platform, devices_per_host, load_job_config(config, hosts)
        )
        # On GPUs the hosts have variables of their own.
        if zygote == "machine" and checked_platform == "cpu" and not host_sites.sites
        else None,
    )
    sys.exit(_run(settings, is_used=is_used))


def _list_agent_options(
    platform: Platform,
    devices: int | None,
    config: Path | None,
    topology: Path | None,
    grace_s: float,
    zygote: ZygotePlace,
    *,
    verbose: bool,
) -> tuple[str, ...]:
    """Return the options that every agent gets as they are."""
    options = {
        "--platform": platform,
        "--devices-per-host": devices,
        "--config": config,
        "--topology": topology,
        "--grace-s": grace_s,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return (*given, *(["--no-zygote"] if zygote == "off" else []), *(["--verbose"] if verbose else []))


def _create_directory(run_dir: Path | None) -> Path:
    if run_dir is not None:
        return create_run_directory(run_dir)
    return create_numbered_directory(Path("runs") / time.strftime("%Y%m%d-%H%M%S"))


def _choose_devices(
    platform: Platform, num_hosts: int, devices_per_host: int | None, *, is_on_loopback: bool
) -> tuple[int | None, tuple[dict[str, str], ...]]:
    """Return the devices of each host, and on GPU the variables of each host that name them.

    Raises:
        CallerError: there is no GPU, or fewer than a host needs.
    """
    if platform == "gpu":
        environments = _divide_gpus(num_hosts, devices_per_host, is_on_loopback=is_on_loopback)
        return len(environments[0][VISIBLE_GPUS].split(",")), environments
    if devices_per_host is None and not has_device_count(os.environ):
        return DEFAULT_DEVICES, ()
    return devices_per_host, ()


def _divide_gpus(
    num_hosts: int, gpus_per_host: int | None, *, is_on_loopback: bool
) -> tuple[dict[str, str], ...]:
    """Return the variables of each host that give it its GPUs of this machine; say so where hosts share them.

    Raises:
        CallerError: there is no GPU, or fewer than a host needs.
    """
    inventory = read_gpus()
    gpus = list_gpus(inventory, os.environ)
    if not gpus:
        raise CallerError(
            f"--platform gpu: found no GPU ({inventory.error or f'{VISIBLE_GPUS} names none'}), expected one or more. "
            "Install NVIDIA's driver, in a container start it with --gpus all, or train with --platform cpu"
        )
    try:
        shares = list_gpu_shares(gpus, num_hosts, gpus_per_host or max(1, len(gpus) // num_hosts))
    except ValueError as error:
        raise CallerError(f"--devices-per-host: {error}") from None
    if has_shared_gpus(shares):
        which = "one GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        print_line(f"note: {num_hosts} hosts share {which}: slow, to try recovery")
    hosts = make_host_names(num_hosts)
    return tuple(
        make_gpu_share_environment(host, shares, index, os.environ, is_on_loopback=is_on_loopback)
        for index, host in enumerate(hosts)
    )


def _make_zygote_environment(
    directory: Path, platform: Platform, devices_per_host: int | None, config: JobConfig
) -> dict[str, str]:
    """Return the environment that all agents will ask for."""
    return make_job_environment(
        os.environ, directory, platform, devices_per_host, config.collective_timeout_s
    )


def _run(settings: LaunchSettings, *, is_used: bool) -> int:
    """Run the job and show how it goes; return the exit code. `is_used`: a job ran in this folder before."""
    directory = settings.run_directory
    progress = ProgressLine()
    with unblocked_output():
        with claim_directory(directory) as claim, progress:
            launcher = Launcher(
                settings, on_line=progress.print_line, on_change=progress.update, restore_folder=claim.restore
            )
            print_line(f"run folder: {directory} (`resilient-jax status {directory}` shows the job)")
            if is_used:
                print_line(NOTE_OF_USED_FOLDER)
            started_s = time.time()
            outcome = asyncio.run(launcher.run())
        hosts = make_host_names(settings.num_hosts + settings.num_spares)
        errors = _read_script_errors(directory, hosts, started_s)
        print_line(describe_for_launch(outcome, directory, errors))
    return outcome.exit_code


def _name_job(directory: Path, store: str | None) -> JobName:
    """Return the job's name; in an etcd cluster there may still be records of a job of the same folder."""
    return JobName(directory.name if store is None else f"{directory.name}-{secrets.token_hex(4)}")


def _check_hosts(
    hosts: int, spares: int, config: Path | None, topology: Path | None, platform: Platform
) -> None:
    """Refuse a bad number of hosts, or bad files, here, once, instead of in the agent of every host.

    Raises:
        CallerError: so many hosts or spares cannot be started here, or the topology lacks one of them.
        ConfigError: the configuration does not fit the job.
    """
    if not 1 <= hosts <= MAX_HOSTS:
        raise CallerError(f"--hosts: found {hosts}, expected 1 to {MAX_HOSTS} on one machine")
    job_config = load_job_config(config, hosts)
    check_spares("--spares", spares, hosts, job_config, platform)
    if hosts + spares > MAX_HOSTS:
        raise CallerError(
            f"--spares: found {spares} beside {hosts} hosts, expected at most {MAX_HOSTS} in all on one machine"
        )
    if (required := job_config.min_hosts) > hosts:
        raise ConfigError(
            f"{config}: min_hosts: found {required} for a job of {hosts} hosts, expected no more than those. Lower it, "
            "or start more hosts"
        )
    if topology is not None:
        for host in make_host_names(hosts + spares):
            read_failure_domain(topology, host)


def _load_sites(path: Path | None, hosts: int) -> Sites:
    """Return the sites in a file; without a file no sites, which means the loopback device.

    Raises:
        ConfigError: the file does not have one site for each host.
    """
    found = load_toml(path, Sites) if path is not None else Sites()
    if found.sites and len(found.sites) != hosts:
        raise ConfigError(
            f"{path}: key 'sites': found {len(found.sites)} for a job of {hosts} hosts, expected one for each. Add the "
            "missing ones, or change --hosts"
        )
    return found


def _read_script_errors(directory: Path, hosts: Iterable[HostName], since_s: float) -> dict[HostName, str]:
    """Return the newest error of each host's script, with its complete traceback.

    Args:
        directory: the run folder.
        hosts: all hosts of the job.
        since_s: wall time of the job's start; an earlier job may have run in the directory.
    """
    errors: dict[HostName, str] = {}
    for host in hosts:
        with contextlib.suppress(OSError, MessageError):  # a full disk or a damaged log hides no outcome
            for event in read_events(make_log_path(directory, host, HostLog.EVENTS)):
                if event.kind is EventKind.SCRIPT_FAILED and event.wall_s >= since_s:
                    errors[host] = str(event.detail["error"])
    return errors
