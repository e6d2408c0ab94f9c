"""Limits a process to a share of a core: by the quota of a control group, else by periodic SIGSTOP and SIGCONT."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

PERIOD_US = 100_000
STOP_CYCLE_S = 0.04
"""Period of stopping and resuming: shorter than the interval at which an agent checks for a stopped worker."""
CGROUP_ROOT = Path("/sys/fs/cgroup")


def limit_cpu(pid: int, share: float) -> Callable[[], None]:
    """Limit a process to this share of one core, and return the function that lifts the limit."""
    for attempt in (_limit_by_cgroup_v2, _limit_by_cgroup_v1):
        with contextlib.suppress(OSError):
            return attempt(pid, share)
    return _limit_by_stopping(pid, share)


def _limit_by_cgroup_v2(pid: int, share: float) -> Callable[[], None]:
    if "cpu" not in (CGROUP_ROOT / "cgroup.subtree_control").read_text().split():
        raise OSError("no cpu controller")
    group = CGROUP_ROOT / f"resilient-jax-chaos-{pid}"
    group.mkdir()
    return _enter(group, pid, "cgroup.procs", "cpu.max", f"{int(share * PERIOD_US)} {PERIOD_US}")


def _limit_by_cgroup_v1(pid: int, share: float) -> Callable[[], None]:
    home = CGROUP_ROOT / "cpu"
    if not (home / "cpu.cfs_quota_us").exists() and not (home / "tasks").exists():
        raise OSError("no cpu controller")
    group = home / f"resilient-jax-chaos-{pid}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    except OSError:
        group.rmdir()
        raise
    return _enter(group, pid, "cgroup.procs", "cpu.cfs_quota_us", str(int(share * PERIOD_US)))


def _enter(group: Path, pid: int, members: str, key: str, value: str) -> Callable[[], None]:
    def leave() -> None:
        for member in (group / members).read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / members).write_text(member)
        # While a process of the group is dying, the group cannot be removed.
        with contextlib.suppress(OSError):
            group.rmdir()

    try:
        (group / key).write_text(value)
        (group / members).write_text(str(pid))
    except OSError:
        leave()
        raise
    return leave


def _limit_by_stopping(pid: int, share: float) -> Callable[[], None]:
    over = threading.Event()

    def cycle() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.wait(STOP_CYCLE_S * share):
                os.kill(pid, signal.SIGSTOP)
                over.wait(STOP_CYCLE_S * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=cycle, name="resilient-jax-slow", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(1.0)

    return end
