"""What tests need that run some parts of an agent in their own process."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.config import JobConfig
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.versions import Versions
from resilient_jax.transport.credentials import Credentials
from tests.support.patience import patience

HOST, JOB = HostName("host-0"), JobName("job")
WAIT_S = patience(2)


def make_agent_settings(
    script: Path,
    config: JobConfig,
    *,
    num_hosts: int = 1,
    run_directory: Path | None = None,
    forks_workers: bool = False,
) -> AgentSettings:
    """Return the settings of the agent of host-0 that runs this script."""
    return AgentSettings(
        job=JOB,
        host=HOST,
        address="127.0.0.1",
        command=(str(script),),
        environment=dict(os.environ),
        devices_per_host=None,
        num_hosts=num_hosts,
        versions=Versions(python="", resilient_jax="", jax="", jaxlib=""),
        credentials=Credentials("token"),
        config=config,
        run_directory=run_directory,
        forks_workers=forks_workers,
    )


async def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until this is true; fail after `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - no event announces what is waited for
            await asyncio.sleep(0.01)
