"""Checks of what the kernel allows and has left: memory, shared memory, descriptors, processes, disk, system calls."""

import contextlib
import ctypes
import os
import resource
import shutil
from pathlib import Path
from typing import Final

import psutil

from resilient_jax.doctor.check_result import CheckResult, CheckVerdict, judge
from resilient_jax.jax_runtime.worker_environment import Platform

GROUP: Final = "limits"
MIB: Final = 2**20
WORKER_MIB: Final = 700
"""Resident memory of a small CPU worker, measured; a zygote adds 25 to it."""
MIN_DESCRIPTORS: Final = 256
GOOD_DESCRIPTORS: Final = 4096
"""A worker has some 60 with a few peers; gloo opens one for each pair of devices of a clique."""
MIN_PROCESSES: Final = 1024
"""RLIMIT_NPROC counts threads, of which a worker has some 50 to 200."""
MIN_NCCL_SHARED_MIB: Final = 1024
"""NCCL's transport between GPUs of a machine takes some 10 MiB for each pair; containers have 64 MiB by default."""
MIN_DISK_MIB: Final = 1024
CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
PR_GET_PDEATHSIG: Final = 2


def check_limits(platform: Platform, run_directory: Path) -> list[CheckResult]:
    """Return a result for each limit.

    Args:
        run_directory: folder where logs and compiled programs would go.
    """
    limits = resource.getrlimit
    return [
        judge_memory(psutil.virtual_memory().available, read_cgroup_limit()),
        judge_shared_memory(
            platform, shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
        ),
        judge_descriptors(limits(resource.RLIMIT_NOFILE)),
        judge_processes(limits(resource.RLIMIT_NPROC)[0]),
        judge_locked_memory(platform, limits(resource.RLIMIT_MEMLOCK)[0]),
        judge_disk(run_directory, shutil.disk_usage(run_directory).free),
        check_system_calls(),
    ]


def read_cgroup_limit() -> int | None:
    """Return the memory limit of this process's container in bytes; None without one."""
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            if (limit := int(Path(path).read_text())) < 2**60:
                return limit
    return None


def judge_memory(available: int, cgroup_limit: int | None) -> CheckResult:
    """Judge the memory that is free, in bytes, and the container's limit."""
    found = f"{available // MIB} MiB free" + (
        f", container limit {cgroup_limit // MIB} MiB" if cgroup_limit else ""
    )
    usable = min(available, cgroup_limit) if cgroup_limit else available
    return judge(
        GROUP,
        "memory",
        found,
        is_bad=usable < 2 * WORKER_MIB * MIB,
        remedy=f"a worker takes {WORKER_MIB} MiB, its zygote 25, and a snapshot twice the state's share",
        figures={"available_mib": float(available // MIB)},
    )


def judge_shared_memory(platform: Platform, size: int) -> CheckResult:
    """Judge the size of /dev/shm, in bytes."""
    is_low = platform == "gpu" and size < MIN_NCCL_SHARED_MIB * MIB
    good = "snapshots are in memory without a name, and need none of it"
    return judge(
        GROUP,
        "shared memory",
        f"/dev/shm has {size // MIB} MiB; {'NCCL uses it between the GPUs of a machine' if is_low else good}",
        is_bad=is_low,
        remedy="start the container with --shm-size=8g, or --ipc=host",
    )


def judge_descriptors(limits: tuple[int, int]) -> CheckResult:
    """Judge the soft and hard limit of open descriptors."""
    soft, hard = (2**31 if limit == resource.RLIM_INFINITY else limit for limit in limits)
    verdict = CheckVerdict.OK
    if soft < GOOD_DESCRIPTORS:
        verdict = CheckVerdict.PROBLEM if soft < MIN_DESCRIPTORS else CheckVerdict.WARNING
    target = min(hard, 65_536)
    remedy = "" if verdict is CheckVerdict.OK else f"ulimit -n {target}"
    if verdict is not CheckVerdict.OK and hard < GOOD_DESCRIPTORS:
        remedy = "raise `nofile` in /etc/security/limits.conf or the container's ulimits"
    return CheckResult(
        group=GROUP,
        name="open descriptors",
        verdict=verdict,
        found=f"soft limit {soft}, hard limit {hard}",
        remedy=remedy,
    )


def judge_processes(limit: int) -> CheckResult:
    """Judge the limit of processes and threads of this user."""
    is_low = limit != resource.RLIM_INFINITY and limit < MIN_PROCESSES
    return judge(
        GROUP,
        "processes and threads",
        "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit}",
        is_bad=is_low,
        remedy=f"ulimit -u {4 * MIN_PROCESSES}: a worker has up to 200 threads",
    )


def judge_locked_memory(platform: Platform, limit: int) -> CheckResult:
    """Judge the limit of locked memory, which InfiniBand needs."""
    is_low = platform == "gpu" and limit != resource.RLIM_INFINITY
    found = "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit // 1024} KiB"
    return judge(
        GROUP,
        "locked memory",
        found,
        is_bad=is_low,
        remedy="ulimit -l unlimited, if the hosts are joined by InfiniBand",
    )


def judge_disk(folder: Path, free: int) -> CheckResult:
    """Judge the space for logs and compiled programs, in bytes."""
    is_low = free < MIN_DISK_MIB * MIB
    return judge(
        GROUP,
        "disk",
        f"{free // MIB} MiB free in {folder}",
        is_bad=is_low,
        remedy="free space, or name another --run-dir: compiled programs take some 100 MiB",
    )


def check_system_calls() -> CheckResult:
    """Try what an agent cannot do without; a sandbox may forbid it."""
    missing: list[str] = []
    for name, call in (
        ("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid()))),
        ("memfd_create", lambda: os.close(os.memfd_create("resilient_jax_doctor", os.MFD_ALLOW_SEALING))),
        ("prctl", _read_death_signal),
        ("/proc", lambda: Path("/proc/self/stat").read_text()),
    ):
        try:
            call()
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
    return judge(
        GROUP,
        "system calls",
        f"not allowed: {', '.join(missing)}" if missing else "pidfd_open, memfd_create, prctl, /proc",
        is_bad=bool(missing),
        remedy="Linux 5.3 or later, and a sandbox (seccomp) that allows them",
        verdict=CheckVerdict.PROBLEM,
    )


def _read_death_signal() -> None:
    found = ctypes.c_int()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_GET_PDEATHSIG, ctypes.byref(found)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
