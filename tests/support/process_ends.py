"""Whether processes have ended, as the kernel says."""

import time
from pathlib import Path

from tests.support.patience import patience

WAIT_S = patience(2)


def is_gone(pid: int) -> bool:
    """Return whether the process ended; a zombie that was not reaped counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pid: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_gone(pid):
        assert time.monotonic() < deadline_s, f"process {pid} still runs"
        time.sleep(0.01)


def list_children(pid: int) -> list[int]:
    """Return the children of a process with one thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_name(pid: int) -> str:
    """Return the name that `ps` shows of a process."""
    return Path(f"/proc/{pid}/comm").read_text().strip()
