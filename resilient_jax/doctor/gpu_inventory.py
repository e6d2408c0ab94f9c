"""The GPUs of this machine, as nvidia-smi lists them, and checks of their settings. No GPU is used for that."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.doctor.check_result import CheckResult, CheckVerdict, judge
from resilient_jax.doctor.installed_versions import parse_version
from resilient_jax.jax_runtime.local_gpus import VISIBLE_GPUS
from resilient_jax.jax_runtime.worker_environment import Platform

GROUP: Final = "GPUs"
SMI: Final = "nvidia-smi"
TIMEOUT_S: Final = 30.0
"""Of nvidia-smi, which takes seconds where the driver is not kept in memory, and hangs where a GPU has failed."""
FIELDS: Final = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "compute_mode",
    "mig.mode.current",
)
MIN_DRIVER: Final = (525,)
"""Of CUDA 12 (its release notes)."""
BUSY_MIB: Final = 512
"""A GPU that no process uses has some MiB of the driver's."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of this machine; memory in MiB."""

    index: int
    name: str
    total_mib: int
    used_mib: int
    driver: str
    compute_mode: str
    mig_mode: str


class GpuInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What nvidia-smi said.

    Attributes:
        gpus: GPUs that nvidia-smi listed.
        topology: links of the GPUs, as nvidia-smi prints it.
        error: why nothing could be read; empty if all could be read.
        is_installed: whether the program nvidia-smi is there.
    """

    gpus: tuple[Gpu, ...] = ()
    topology: str = ""
    error: str = ""
    is_installed: bool = True


def read_gpus() -> GpuInventory:
    """Return what nvidia-smi says."""
    if shutil.which(SMI) is None:
        return GpuInventory(is_installed=False, error=f"{SMI} is not installed")
    try:
        listed = _run(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
        gpus = tuple(parse_gpu(line) for line in listed.splitlines() if line.strip())
        topology = _run("topo", "-m") if len(gpus) > 1 else ""
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return GpuInventory(error=f"{SMI}: {error}")
    return GpuInventory(gpus=gpus, topology=topology)


def list_gpus(inventory: GpuInventory, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that processes with this environment may use, as `CUDA_VISIBLE_DEVICES` names them."""
    visible = environment.get(VISIBLE_GPUS)
    if visible is None:
        return tuple(str(gpu.index) for gpu in inventory.gpus)
    return tuple(word.strip() for word in visible.split(",") if word.strip() not in ("", "-1"))


def read_used_mib(gpu: str) -> int | None:
    """Return how much memory of a GPU, by its index or UUID, is in use; None if that cannot be read."""
    try:
        return int(_run(f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def parse_gpu(line: str) -> Gpu:
    """Return the GPU of a line of `nvidia-smi --query-gpu --format=csv,noheader,nounits`.

    Raises:
        ValueError: the line has other fields.
    """
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(FIELDS):
        raise ValueError(f"found {line!r}, expected the fields {', '.join(FIELDS)}")
    index, name, total, used, driver, compute_mode, mig_mode = words
    return Gpu(
        index=int(index),
        name=name,
        total_mib=int(total),
        used_mib=int(used),
        driver=driver,
        compute_mode=compute_mode,
        mig_mode=mig_mode,
    )


def check_gpus(platform: Platform, inventory: GpuInventory) -> list[CheckResult]:
    """Return a result for each thing that matters of the GPUs."""
    if not inventory.gpus:
        is_wanted = platform == "gpu"
        return [
            CheckResult(
                group=GROUP,
                name="devices",
                verdict=CheckVerdict.PROBLEM if is_wanted else CheckVerdict.NOT_RUN,
                found=inventory.error or "none is listed by nvidia-smi",
                remedy="install NVIDIA's driver; in a container: --gpus all" if is_wanted else "",
            )
        ]
    return [
        CheckResult(
            group=GROUP,
            name="devices",
            verdict=CheckVerdict.OK,
            found=", ".join(f"{gpu.index}: {gpu.name} {gpu.total_mib} MiB" for gpu in inventory.gpus),
        ),
        _check_driver(inventory.gpus),
        _check_modes(inventory.gpus),
        _check_use(inventory.gpus),
        _check_topology(inventory),
    ]


def _check_driver(gpus: Sequence[Gpu]) -> CheckResult:
    versions = sorted({gpu.driver for gpu in gpus})
    is_old = any(parse_version(version) < MIN_DRIVER for version in versions)
    return judge(
        GROUP,
        "driver",
        ", ".join(versions),
        is_bad=is_old,
        remedy="CUDA 12 needs driver 525 or later",
        verdict=CheckVerdict.PROBLEM,
    )


def _check_modes(gpus: Sequence[Gpu]) -> CheckResult:
    # A worker that returns starts while the kernel still frees its predecessor's memory and context.
    exclusive = [
        f"{gpu.index}: {gpu.compute_mode}" for gpu in gpus if gpu.compute_mode not in ("Default", "[N/A]")
    ]
    migs = [f"{gpu.index}: MIG" for gpu in gpus if gpu.mig_mode == "Enabled"]
    found = ", ".join(migs) or "default, no MIG"
    remedy = "NCCL does not join parts of one GPU; use whole GPUs for a job"
    if exclusive:
        found = f"compute mode {', '.join(exclusive)}"
        remedy = "nvidia-smi -c DEFAULT: else a worker cannot start while its predecessor is torn down"
    return judge(GROUP, "modes", found, is_bad=bool(exclusive or migs), remedy=remedy)


def _check_use(gpus: Sequence[Gpu]) -> CheckResult:
    busy = [f"{gpu.index}: {gpu.used_mib} MiB" for gpu in gpus if gpu.used_mib > BUSY_MIB]
    return judge(
        GROUP,
        "in use",
        ", ".join(busy) or "by no process",
        is_bad=bool(busy),
        remedy="end the processes that nvidia-smi lists: JAX takes 75 % of a GPU's memory",
    )


def _check_topology(inventory: GpuInventory) -> CheckResult:
    if not inventory.topology:
        return CheckResult(group=GROUP, name="links", verdict=CheckVerdict.NOT_RUN, found="one GPU")
    is_linked = "NV" in "".join(line for line in inventory.topology.splitlines() if line.startswith("GPU"))
    return CheckResult(
        group=GROUP,
        name="links",
        verdict=CheckVerdict.OK,
        found="NVLink" if is_linked else "PCIe only",
        details=inventory.topology,
    )


def _run(*arguments: str) -> str:
    return subprocess.run(
        [SMI, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout
