"""Options and checks that several commands share."""

import importlib.metadata
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from resilient_jax.cluster.notice_grace import NoticeGrace
from resilient_jax.config import JobConfig, load_toml
from resilient_jax.config.struct_schema import suggest_key
from resilient_jax.errors import CallerError, ConfigError
from resilient_jax.jax_runtime.worker_environment import Platform
from resilient_jax.protocol.versions import Versions
from resilient_jax.store.etcd_address import EtcdAddress
from resilient_jax.telemetry.screen_output import print_bytes
from resilient_jax.topology import load_topology
from resilient_jax.topology.errors import UnknownHost

ScriptArgument = Annotated[
    list[str], typer.Argument(help="The training script and its arguments.", metavar="SCRIPT [ARGS...]")
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices-per-host",
        help="Devices of each host: CPU devices to make, or GPUs to use. Default: for launch as many CPU devices as "
        "XLA_FLAGS makes, or 2, or an equal share of the GPUs; for agent all.",
    ),
]
PlatformOption = Annotated[
    str | None,
    typer.Option(
        help="What workers compute on: cpu or gpu. Default: cpu for launch; for agent what JAX finds."
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML file with deadlines and budgets of the job (see docs/operations.md)."
    ),
]
RunDirectoryOption = Annotated[
    Path, typer.Option("--run-dir", help="Folder for logs, events and the compilation cache.")
]
StoreTlsOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with cert.pem, key.pem and ca.pem, for an etcd cluster that is served over TLS."
    ),
]
TlsOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with cert.pem, key.pem and ca.pem, for mutual TLS between all processes of the job."
    ),
]
TopologyOption = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        help="TOML file that describes all hosts of the job (see meshes/README.md): parity avoids a host's own rack.",
    ),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show every line that workers print, also those of XLA and gloo."),
]


def _check_grace(grace_s: float) -> float:
    read_grace(grace_s)
    return grace_s


GraceOption = Annotated[
    float,
    typer.Option(
        "--grace-s",
        callback=_check_grace,
        help="Seconds from a notice (SIGTERM) until the scheduler kills the processes. Within these a host leaves, or "
        "the job saves its last checkpoint.",
    ),
]
END_TIME_VARIABLE = "SLURM_JOB_END_TIME"
"""When Slurm ends the job, as seconds since 1970."""
MAX_DEVICES = 256
"""The most devices of one host; a larger number is mistyped."""


def read_grace(grace_s: float) -> NoticeGrace:
    """Return the time that a notice leaves, from the option and Slurm's variable.

    Raises:
        CallerError: one of them is no time.
    """
    if not 0 < grace_s < math.inf:
        raise CallerError(
            f"--grace-s: found {grace_s:g}, expected the seconds from SIGTERM to SIGKILL, such as 25"
        )
    end = os.environ.get(END_TIME_VARIABLE, "")
    if not end:
        return NoticeGrace(seconds=grace_s)
    try:
        return NoticeGrace(seconds=grace_s, end_wall_s=float(int(end)))
    except ValueError:
        raise CallerError(
            f"{END_TIME_VARIABLE}: found {end!r}, expected seconds since 1970, as Slurm sets it. Unset it"
        ) from None


def load_job_config(path: Path | None, hosts: int) -> JobConfig:
    """Return the job's configuration from a file, or the defaults without one.

    Raises:
        ConfigError: the file is not valid, or its snapshots need more than `hosts` hosts.
    """
    if path is None:
        return JobConfig()
    config = load_toml(path, JobConfig)
    if config.snapshot_parity >= max(hosts, 2):
        raise ConfigError(
            f"{path}: snapshot_parity: found {config.snapshot_parity} for a job of {hosts} hosts, expected fewer than "
            "the hosts: parity for that many losses is kept on other hosts. Lower it, or start more hosts"
        )
    if config.snapshot_parity >= config.snapshot_group_size:
        raise ConfigError(
            f"{path}: snapshot_parity: found {config.snapshot_parity} with snapshot_group_size "
            f"{config.snapshot_group_size}, expected fewer than the hosts of a group. Lower one or raise the other"
        )
    return config


def check_store(store: str | None, store_tls: Path | None) -> None:
    """Check the options that name an etcd cluster.

    Raises:
        CallerError: the address has another form, or there are certificates without an address.
    """
    if store is not None:
        EtcdAddress.parse(store)
    elif store_tls is not None:
        raise CallerError("--store-tls: found it without --store, expected --store etcd://... beside it")


def check_spares(option: str, spares: int, hosts: int, config: JobConfig, platform: Platform | None) -> None:
    """Check that a job can have so many spares.

    Args:
        option: name of the option that asks for spares, for the error.
        spares: spares that this command knows of; an agent knows of itself alone.
        hosts: hosts of the job that are no spares.
        platform: what workers run on; None: not known.

    Raises:
        CallerError: the job has one host, or fewer seats than spares.
    """
    if spares < 0:
        raise CallerError(f"{option}: found {spares}, expected 0 or more")
    if spares and hosts < 2:
        raise CallerError(
            f"{option}: found a spare for a job of {hosts} host, expected at least 2 hosts beside the spares: a spare "
            f"has no part of the state, which is lost with the last host. Start more hosts, or leave out {option}"
        )
    # Without a seat a spare joins by a re-form, as every host does where workers are replaced or train on GPUs.
    has_seats = platform == "cpu" and config.abort != "replace"
    if has_seats and spares > config.spare_seats:
        raise CallerError(
            f"{option}: found {spares} spare{'s' if spares > 1 else ''} for {config.spare_seats} spare seats, expected "
            "a seat for each, in which it waits. Raise spare_seats in the configuration, or start fewer spares"
        )


def check_script(command: list[str], own_options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command, after a check that its script can be run.

    Args:
        command: script and arguments; what is in its first place when there is an unknown option before the script.
        own_options: the options that our command has.

    Raises:
        CallerError: the script does not exist, cannot be read, or is refused by Python's compiler; an unknown option.
    """
    if command[0].startswith("-"):
        name = command[0].split("=")[0]
        raise CallerError(
            f"option {name}: found no such option, expected one of this command before the script, and those of the "
            f"script after it. {suggest_key(name, own_options)} `--help` lists all"
        )
    script = Path(command[0])
    try:
        source = script.read_bytes() if script.is_file() else None
    except OSError as error:
        raise CallerError(
            f"script {script}: found a file that cannot be read ({error.strerror}), expected one that this user may "
            "read. Check the path and its permissions"
        ) from error
    if source is None:
        raise CallerError(
            f"script {script}: found no such file, expected a Python script. Check the path; it was looked for "
            f"from {Path.cwd()}"
        )
    try:
        compile(source, str(script), "exec")
    except (SyntaxError, ValueError) as error:
        raise CallerError(
            f"script {script}: found what Python cannot compile ({error}), expected a Python script. Correct it, then "
            "start again"
        ) from error
    return tuple(command)


def note_misplaced_options(command: Sequence[str], own_options: Sequence[str]) -> None:
    """Print which arguments of the script look like options of ours: the script may have one of that name, or not."""
    for name in dict.fromkeys(word.split("=")[0] for word in command[1:]):
        if name in own_options:
            print_line(
                f"note: {name} after the script goes to the script; options of `resilient-jax` precede it"
            )


def list_options(context: typer.Context) -> list[str]:
    """Return the options of the command that runs, as one writes them."""
    return [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")]


def read_failure_domain(topology: Path, host: str) -> str:
    """Return a host's innermost failure domain in the topology, as a path of all domains around the host.

    An example is "pod-1/rack-3": paths of neighbors sort together. Empty if the topology has no domains above hosts.

    Raises:
        CallerError: the file does not describe a topology, or the topology lacks this host.
    """
    try:
        domains = load_topology(topology).failure_domains(host)
    except UnknownHost as error:
        raise CallerError(f"--topology {topology}: {error}") from error
    return "/".join(domain.name for domain in reversed(domains[1:]))


def check_platform(name: str | None) -> Platform | None:
    """Return the platform of this name; None for None.

    Raises:
        CallerError: no platform has the name.
    """
    if name is None or name == "cpu" or name == "gpu":
        return name
    raise CallerError(f"--platform: found {name!r}, expected cpu or gpu")


def check_devices(count: int | None) -> None:
    """Check the number of devices of a host.

    Raises:
        CallerError: the number is not in 1 to `MAX_DEVICES`.
    """
    if count is not None and not 1 <= count <= MAX_DEVICES:
        raise CallerError(f"--devices-per-host: found {count}, expected 1 to {MAX_DEVICES}")


def read_versions() -> Versions:
    """Return the versions that must be equal on all hosts, read without importing the packages."""
    return Versions(
        python=platform.python_version(),
        resilient_jax=importlib.metadata.version("resilient_jax"),
        jax=importlib.metadata.version("jax"),
        jaxlib=importlib.metadata.version("jaxlib"),
    )


def print_line(text: str) -> None:
    """Print a line for people."""
    print_bytes(f"{text}\n".encode())
