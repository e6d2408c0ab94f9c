"""The environment of a job's workers, which `agent` gives them, and in which `launch` imports for all of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from resilient_jax.cluster.worker_process import WORKER_VARIABLES
from resilient_jax.jax_runtime.worker_environment import Platform, make_worker_environment
from resilient_jax.store.store_access import ETCD_PASSWORD_VARIABLE
from resilient_jax.transport.credentials import TOKEN_VARIABLE

PRIVATE_VARIABLES = frozenset({*WORKER_VARIABLES, TOKEN_VARIABLE, ETCD_PASSWORD_VARIABLE})
"""What belongs to an agent or to another worker, and secrets."""


def make_job_environment(
    base: Mapping[str, str],
    directory: Path,
    platform: Platform | None,
    devices_per_host: int | None,
    collective_timeout_s: float,
    own_addresses: Sequence[str] = (),
) -> dict[str, str]:
    """Return the environment of workers: `base` without secrets, with what a worker needs to survive its peers.

    The other arguments are those of `make_worker_environment`.

    Args:
        base: the environment of an agent, or of `launch`.
        directory: the run folder, which gets the compilation cache.
    """
    environment = {name: value for name, value in base.items() if name not in PRIVATE_VARIABLES}
    return environment | make_worker_environment(
        platform=platform,
        devices_per_host=devices_per_host,
        cache_dir=str((directory / "compile-cache").absolute()),
        collective_timeout_s=collective_timeout_s,
        base=environment,
        own_addresses=own_addresses,
    )
