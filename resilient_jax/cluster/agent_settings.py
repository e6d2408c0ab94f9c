"""The settings that an agent is started with."""

import dataclasses
from pathlib import Path

from resilient_jax.cluster.notice_grace import DEFAULT_GRACE, NoticeGrace
from resilient_jax.config import JobConfig
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.versions import Versions
from resilient_jax.transport.credentials import Credentials


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Everything that the command line decides for an agent.

    Attributes:
        address: address at which the other hosts reach this host.
        command: path of the script, and its arguments.
        environment: variables of the worker that make JAX find its devices and survive a failure.
        devices: numbers of the host's devices that the worker sees; (): all.
        is_spare: whether the host takes part only in the place of another; `num_hosts` does not count spares.
        failure_domain: what fails together with this host, such as a rack; empty: the host alone.
        run_directory: folder of logs and events; None: nothing is written.
        zygote: descriptor of this agent's connection to the zygote of `launch`; None: there is none.
        forks_workers: whether the agent starts a zygote of its own where it has no other.
        is_launched: whether `resilient-jax launch` started the agent, and shows the error of a script that fails.
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
    is_spare: bool = False
    failure_domain: str = ""
    show_all_output: bool = False
    zygote: int | None = None
    forks_workers: bool = False
    grace: NoticeGrace = DEFAULT_GRACE
    is_launched: bool = False
    devices: tuple[int, ...] = ()

    @property
    def has_cpu_workers(self) -> bool:
        """Whether workers train on CPU for sure, where a world may have spare seats."""
        return self.environment.get("JAX_PLATFORMS") == "cpu"

    @property
    def replaces_workers(self) -> bool:
        """Whether the workers of a world in which one was lost are replaced, instead of interrupted."""
        abort = self.config.abort
        return abort == "replace" or (abort == "auto" and not self.has_cpu_workers)

    @property
    def uses_live_nodes(self) -> bool:
        """Whether JAX's coordination service is told of members and of deaths, as XLA's GPU client needs it."""
        return {"on": True, "off": False}.get(self.config.live_nodes, not self.has_cpu_workers)
