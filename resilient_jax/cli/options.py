"""Options and checks that several commands share."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Annotated

import typer

from resilient_jax.cluster.run_directory import JobContact, read_contact, remove_contact
from resilient_jax.cluster.worker_output import print_bytes
from resilient_jax.config import JobConfig, load_toml
from resilient_jax.errors import CallerError, ConfigError
from resilient_jax.jax_runtime.worker_environment import Platform
from resilient_jax.protocol.records import Versions
from resilient_jax.topology import load_topology
from resilient_jax.topology.errors import UnknownHost

ScriptArgument = Annotated[
    list[str], typer.Argument(help="The training script and its arguments.", metavar="SCRIPT [ARGS...]")
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices-per-host",
        help="CPU devices to make per host; on GPU how many to show. Default: for launch as many as XLA_FLAGS makes, "
        "or 2; for agent all.",
    ),
]
PlatformOption = Annotated[
    str | None, typer.Option(help="cpu or gpu. Default: cpu for launch, for agent what JAX finds.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="TOML with deadlines and budgets of the job (see the README)."),
]
RunDirectoryOption = Annotated[
    Path, typer.Option("--run-dir", help="Where logs, events and the compilation cache go.")
]
RunDirectoryArgument = Annotated[
    Path,
    typer.Argument(help="Run folder of a job that `launch` started, as it said first.", metavar="RUN_DIR"),
]
TopologyOption = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        help="File of the machines (see meshes/README.md), with all hosts of the job: parity avoids a host's own rack.",
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show every line of the workers, also of XLA and gloo.")
]
MAX_DEVICES = 256
"""Of one host; more is a mistyped number."""


def load_job_config(path: Path | None, hosts: int) -> JobConfig:
    """The job's knobs: from the file, or their defaults.

    Raises:
        ConfigError: the file does not fit, or the job that it describes cannot be run on so many hosts.
    """
    if path is None:
        return JobConfig()
    config = load_toml(path, JobConfig)
    if config.snapshot_parity >= max(hosts, 2):
        raise ConfigError(
            f"{path}: snapshot_parity: found {config.snapshot_parity} for a job of {hosts} hosts, expected fewer than "
            "the hosts: parity for as many losses lies on other hosts. Lower it, or start more hosts"
        )
    if config.snapshot_parity >= config.snapshot_group_size:
        raise ConfigError(
            f"{path}: snapshot_parity: found {config.snapshot_parity} with snapshot_group_size "
            f"{config.snapshot_group_size}, expected fewer than the hosts of a group. Lower one or raise the other"
        )
    return config


def check_script(command: list[str]) -> tuple[str, ...]:
    """The command, once it is sure that there is something to run.

    Raises:
        CallerError: there is no such file, it cannot be read, or Python cannot compile it.
    """
    script = Path(command[0])
    try:
        source = script.read_bytes() if script.is_file() else None
    except OSError as error:
        raise CallerError(
            f"script {script}: cannot be read: {error.strerror}; expected a Python script that this user may read. "
            "Check the path and its permissions"
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
            f"script {script}: Python cannot compile it: {error}. Correct it, then start again"
        ) from error
    return tuple(command)


def find_failure_domain(topology: Path, host: str) -> str:
    """What fails together with a host, as the topology has it: its innermost domain under the wider ones.

    Such as "pod-1/rack-3", so that neighbours sort together; empty where the topology has nothing but hosts.

    Raises:
        CallerError: the file does not describe a topology, or not this host.
    """
    try:
        domains = load_topology(topology).failure_domains(host)
    except UnknownHost as error:
        raise CallerError(f"--topology {topology}: {error}") from error
    return "/".join(domain.name for domain in reversed(domains[1:]))


def check_platform(name: str | None) -> Platform | None:
    """The platform, once it is sure that there is such a one.

    Raises:
        CallerError: there is none of that name.
    """
    if name is None or name == "cpu" or name == "gpu":
        return name
    raise CallerError(f"--platform: found {name!r}, expected cpu or gpu")


def check_devices(count: int | None) -> None:
    """Refuses a number of devices that no host has.

    Raises:
        CallerError: it is such a number.
    """
    if count is not None and not 1 <= count <= MAX_DEVICES:
        raise CallerError(f"--devices-per-host: found {count}, expected 1 to {MAX_DEVICES}")


def find_contact(run_directory: Path) -> JobContact:
    """How to reach the job of this machine that runs in a folder.

    Raises:
        CallerError: none runs there, or its launcher was killed and could not take its contact file along.
    """
    contact = read_contact(run_directory)
    if not Path(f"/proc/{contact.launcher_pid}").exists():
        remove_contact(run_directory, contact)
        raise CallerError(
            f"{run_directory}: the launcher of this job (process {contact.launcher_pid}) is gone, it was killed; "
            "expected the run folder of a job that runs on this machine"
        )
    return contact


def read_versions() -> Versions:
    """What must be equal on all hosts; read without importing any of it."""
    return Versions(
        python=platform.python_version(),
        resilient_jax=importlib.metadata.version("resilient_jax"),
        jax=importlib.metadata.version("jax"),
        jaxlib=importlib.metadata.version("jaxlib"),
    )


def print_line(text: str) -> None:
    """A line for people."""
    print_bytes(f"{text}\n".encode())
