"""Which devices of a host its workers see, when some of them are out. Pure."""

from collections.abc import Collection, Mapping
from typing import Final, Literal

from resilient_jax.cluster.nvml_reader import VISIBLE, parse_visible_devices
from resilient_jax.jax_runtime.worker_environment import count_cpu_devices, set_device_count

DevicesAfterLoss = Literal["even", "all", "host"]
"""See `JobConfig.devices_after_loss`."""
PART_OF_GPU: Final = "MIG-"
"""How the names of parts of GPUs begin."""


def select_devices(num_devices: int, lost: Collection[int], after_loss: DevicesAfterLoss) -> tuple[int, ...]:
    """Return the devices that a worker uses, by number from 0; () if the host can do without none that it lost.

    With "even" they are as many as divide the host's number, so that a mesh whose axes are powers of two still fits:
    of eight devices without one, four. The others stand by, and are used if one of these is lost.

    >>> select_devices(8, [2], "even"), select_devices(4, [0], "all"), select_devices(1, [0], "all")
    ((0, 1, 3, 4), (1, 2, 3), ())
    """
    left = [device for device in range(num_devices) if device not in lost]
    if len(left) == num_devices or after_loss == "all":
        return tuple(left)
    if after_loss == "host":
        return ()
    count = max((size for size in range(1, len(left) + 1) if num_devices % size == 0), default=0)
    return tuple(left[:count])


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
