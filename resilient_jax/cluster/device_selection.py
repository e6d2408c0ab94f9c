"""The devices of a host that its workers see, in the environment of these workers. Pure."""

from collections.abc import Collection, Mapping
from typing import Final

from resilient_jax.cluster.nvml_reader import VISIBLE, parse_visible_devices
from resilient_jax.jax_runtime.worker_environment import count_cpu_devices, set_device_count

PART_OF_GPU: Final = "MIG-"
"""How the names of parts of GPUs begin."""


def list_named_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` names; () without it, or if it names parts of GPUs.

    >>> list_named_gpus({"CUDA_VISIBLE_DEVICES": "0, 2"})
    ('0', '2')
    """
    named = parse_visible_devices(environment.get(VISIBLE)) or ()
    # What fails is a GPU with all its parts.
    return () if any(name.startswith(PART_OF_GPU) for name in named) else named


def count_devices(
    environment: Mapping[str, str], devices_per_host: int | None, gpu_names: Collection[str]
) -> int | None:
    """Return how many devices a worker with this environment has; None: only JAX knows.

    Args:
        devices_per_host: number that the agent was told; None: the environment decides.
        gpu_names: names of the GPUs that workers see; empty: not known.
    """
    if environment.get("JAX_PLATFORMS") == "cpu":
        return devices_per_host or count_cpu_devices(environment)
    return len(gpu_names) or None


def restrict_environment(
    environment: Mapping[str, str], used: tuple[int, ...], gpu_names: tuple[str, ...]
) -> dict[str, str]:
    """Return the environment of a worker that sees only these devices.

    Args:
        environment: environment of a worker that sees all devices.
        used: numbers of the devices that the worker sees.
        gpu_names: names of all GPUs, as `CUDA_VISIBLE_DEVICES` names them; not needed on CPU.
    """
    if environment.get("JAX_PLATFORMS") == "cpu":
        flags = set_device_count(environment.get("XLA_FLAGS", ""), len(used))
        return {**environment, "XLA_FLAGS": flags}
    return {**environment, VISIBLE: ",".join(gpu_names[device] for device in used)}
