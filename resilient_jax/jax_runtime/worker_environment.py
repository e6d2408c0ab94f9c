"""The environment of a worker: what must be set before it imports jax. Imports no jax."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

Platform = Literal["cpu", "gpu"]

DEVICE_COUNT_FLAG: Final = "--xla_force_host_platform_device_count"
"""How many CPU devices a process makes."""
_DEVICE_COUNT = re.compile(rf"(?<!\S){DEVICE_COUNT_FLAG}=\S*\s*")

GPU_XLA_FLAGS: Final = {
    "--xla_gpu_nccl_terminate_on_error": "false",
    "--xla_gpu_nccl_async_execution": "true",
    "--xla_gpu_nccl_blocking_communicators": "false",
    # XLA would time several kernels for an operation and take the fastest: another one in another process, or another
    # time, and so other bits.
    "--xla_gpu_deterministic_ops": "true",
    # Without that choice cuBLAS's matrix products are faster than Triton's (H100: 8 % slower than by choice, not 26 %).
    "--xla_gpu_enable_triton_gemm": "false",
    # By XLA's documentation the processes of a world else divide the work of choosing when they compile a program, and
    # wait for each other's results; one that has the program from the cache gives none. With XLA's defaults a job of
    # three hosts stood still in its first sum (jax 0.11.2). For those who have kernels chosen all the same.
    "--xla_gpu_shard_autotuning": "false",
}
EXECUTION_TIMEOUT_FLAG: Final = "--xla_gpu_execution_terminate_timeout"
"""A duration with a unit. A program that takes longer ends its process: the last bound, for a collective whose abort
hangs itself. jaxlib 0.10.2 and 0.12.0 know it; a flag that XLA does not know would end each process at its start, so
`resilient-jax doctor` asks XLA."""
EXECUTION_TIMEOUT_FACTOR: Final = 2
"""Times `collective_timeout_s`, at which the agents act: they must come first."""

GPU_ENVIRONMENT: Final = {
    "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1",
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1",
}

MALLOC_TUNABLES: Final = "GLIBC_TUNABLES"
HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"
"""Large arrays in pages of 2 MiB where the kernel gives them on request: a CPU's arrays come from malloc, and most of
the time that it takes to make one are page faults. Measured with 4 hosts on two cores: an all-reduce of 40 MB with its
copies took 150 ms in place of 240."""

PROXY_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""Where gRPC, and with it JAX's coordination client, looks for a proxy: for each connection, one to this host, too."""
UNPROXIED_VARIABLES: Final = ("no_grpc_proxy", "no_proxy")
"""Where gRPC looks for names, addresses and networks that it connects to directly: in the first that is set."""
LOOPBACK_NETWORK: Final = "127.0.0.0/8"


def make_worker_environment(
    *,
    platform: Platform | None,
    devices_per_host: int | None,
    cache_dir: str | None,
    collective_timeout_s: float,
    base: Mapping[str, str],
    own_addresses: Sequence[str] = (),
) -> dict[str, str]:
    """Return the variables to add to `base` for a worker that has to survive its peers.

    What the user has set in `base` takes precedence, in `XLA_FLAGS` flag by flag, except for the number of CPU devices
    that was asked for, and for the three settings without which nothing survives: recoverability, gloo, and the
    preemption service (which swallows SIGTERM) switched off.

    Args:
        platform: what kind of devices the worker gets; None leaves the choice to JAX.
        devices_per_host: number of CPU devices to make, even if `XLA_FLAGS` has another; on GPU the number of visible
            devices; None for all.
        cache_dir: the persistent compilation cache; None for no cache.
        collective_timeout_s: time after which a collective between CPUs fails; on GPU a program that takes twice as
            long ends its process.
        base: the environment that the worker inherits; read, not changed.
        own_addresses: where the worker's host is reached, beside loopback: JAX's coordination client connects there,
            and never through a proxy.

    Returns:
        Only what differs from `base`.

    Example:
        >>> make_worker_environment(
        ...     platform="cpu", devices_per_host=2, cache_dir=None, collective_timeout_s=60.0, base={}
        ... )["JAX_PLATFORMS"]
        'cpu'
    """
    theirs = base.get("XLA_FLAGS", "")
    flags = {"--xla_cpu_collective_timeout_seconds": str(math.ceil(collective_timeout_s))}
    variables: dict[str, str] = {
        "JAX_ENABLE_RECOVERABILITY": "true",
        "JAX_ENABLE_PREEMPTION_SERVICE": "false",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in base:
        # Two programs in flight may enter a clique of several local devices in different orders, and then wait
        # for each other forever (seen: after some hundred steps of one host with two devices).
        variables["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
    if platform != "gpu" and MALLOC_TUNABLES not in base:
        variables[MALLOC_TUNABLES] = HUGE_PAGES
    if platform == "cpu":
        variables["JAX_PLATFORMS"] = "cpu"
        if devices_per_host is not None:
            theirs = set_device_count(theirs, devices_per_host)
    elif platform == "gpu":
        flags |= GPU_XLA_FLAGS
        flags[EXECUTION_TIMEOUT_FLAG] = f"{math.ceil(EXECUTION_TIMEOUT_FACTOR * collective_timeout_s)}s"
        variables |= {name: value for name, value in GPU_ENVIRONMENT.items() if name not in base}
        variables["JAX_PLATFORMS"] = base.get("JAX_PLATFORMS", "cuda,cpu")
        if devices_per_host is not None and "CUDA_VISIBLE_DEVICES" not in base:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(devices_per_host)))
    if cache_dir is not None:
        variables |= {
            "JAX_COMPILATION_CACHE_DIR": base.get("JAX_COMPILATION_CACHE_DIR", cache_dir),
            # Every program, however small: after a re-form each one that is missing is compiled within the stall.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    if any(base.get(name) for name in PROXY_VARIABLES):
        excepted = next((value for name in UNPROXIED_VARIABLES if (value := base.get(name))), "")
        words = [*filter(None, excepted.split(",")), LOOPBACK_NETWORK, *own_addresses]
        variables[UNPROXIED_VARIABLES[0]] = ",".join(dict.fromkeys(words))
    merged = merge_xla_flags(flags, theirs)
    if merged:
        variables["XLA_FLAGS"] = merged
    return {name: value for name, value in variables.items() if base.get(name) != value}


def has_device_count(environment: Mapping[str, str]) -> bool:
    """Return whether the user's `XLA_FLAGS` set the number of CPU devices of a process."""
    return _DEVICE_COUNT.search(environment.get("XLA_FLAGS", "")) is not None


def count_cpu_devices(environment: Mapping[str, str]) -> int:
    """Return how many CPU devices a process with this environment makes.

    >>> count_cpu_devices({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}), count_cpu_devices({})
    (4, 1)
    """
    flag = _DEVICE_COUNT.search(environment.get("XLA_FLAGS", ""))
    number = flag.group().strip().partition("=")[2] if flag is not None else ""
    return int(number) if number.isdecimal() else 1


def set_device_count(flags: str, count: int) -> str:
    """Return XLA's flags with `count` CPU devices in place of any other number."""
    return merge_xla_flags({DEVICE_COUNT_FLAG: str(count)}, _DEVICE_COUNT.sub("", flags))


def merge_xla_flags(ours: Mapping[str, str], theirs: str) -> str:
    """Return `theirs`, preceded by those of `ours` that `theirs` does not mention."""
    mentioned = {flag.split("=", 1)[0] for flag in theirs.split()}
    added = [f"{name}={value}" for name, value in ours.items() if name not in mentioned]
    return " ".join([*added, theirs.strip()]).strip()
