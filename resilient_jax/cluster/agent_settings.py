"""What an agent is started with."""

import dataclasses
from pathlib import Path

from resilient_jax.config import JobConfig
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.records import Versions
from resilient_jax.transport.credentials import Credentials


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent is started with.

    Attributes:
        address: the address of this host under which the others reach it.
        command: the script and its arguments.
        environment: for the worker: what makes jax find its devices and survive.
        failure_domain: what fails together with this host, such as a rack; empty: nothing.
        run_directory: for logs and events; None writes none.
    """

    job: JobName
    host: HostName
    address: str
    command: tuple[str, ...]
    environment: dict[str, str]
    devices_per_host: int | None
    num_hosts: int
    versions: Versions
    credentials: Credentials
    config: JobConfig
    run_directory: Path | None
    failure_domain: str = ""
    show_all_output: bool = False
