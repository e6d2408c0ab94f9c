"""All checks of a machine, in the order in which a person reads them."""

import importlib.metadata
import socket
from collections.abc import Generator, Mapping
from pathlib import Path

from resilient_jax.doctor.check_result import CheckResult
from resilient_jax.doctor.experiments import Experiments
from resilient_jax.doctor.gpu_health_check import check_gpu_health, read_gpu_health
from resilient_jax.doctor.gpu_inventory import GpuInventory, check_gpus, list_gpus
from resilient_jax.doctor.installed_versions import check_versions, find_installed_version
from resilient_jax.doctor.network_checks import check_network
from resilient_jax.doctor.system_limits import check_limits
from resilient_jax.doctor.xla_flags import check_environment, find_unknown_flags
from resilient_jax.jax_runtime.worker_environment import Platform

NUM_PROCESSES = 3
"""A death, and two survivors that go on together."""


def choose_platform(inventory: GpuInventory) -> Platform:
    """Return the platform that an agent's workers would most likely train on."""
    return "gpu" if inventory.gpus else "cpu"


def list_devices(
    platform: Platform, inventory: GpuInventory, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the ids of the devices of the experiments' processes: different ones, except where there is one GPU."""
    if platform == "cpu":  # each process makes its own
        return tuple(str(index) for index in range(NUM_PROCESSES))
    gpus = list_gpus(inventory, environment)
    return gpus * NUM_PROCESSES if len(gpus) == 1 else gpus


def examine(
    platform: Platform,
    inventory: GpuInventory,
    environment: Mapping[str, str],
    run_directory: Path,
    *,
    has_experiments: bool,
) -> Generator[CheckResult, None, None]:
    """Yield the result of each check, as soon as it is there. Close the iterator to end experiments early.

    Args:
        environment: environment that workers would inherit.
        run_directory: folder where logs and compiled programs would go.
        has_experiments: whether experiments are made, too, which takes from ten seconds to some minutes.
    """
    requirements = importlib.metadata.requires("resilient_jax") or []
    yield from check_versions(platform, find_installed_version, requirements)
    yield from check_gpus(platform, inventory)
    if inventory.gpus:
        yield check_gpu_health(read_gpu_health(environment))
    yield from check_environment(platform, environment, find_unknown_flags)
    yield from check_limits(platform, run_directory)
    yield from check_network(socket.gethostname())
    if has_experiments:
        yield from Experiments(platform, list_devices(platform, inventory, environment), environment).run()
