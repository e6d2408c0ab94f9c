"""Whether processes have ended, as the kernel says."""

from pathlib import Path

from tests.support.patience import wait_until


def is_gone(pid: int) -> bool:
    """Return whether the process ended; a zombie that was not reaped counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pid: int) -> None:
    wait_until(f"the end of process {pid}", lambda: is_gone(pid))


def list_children(pid: int) -> list[int]:
    """Return the children of a process with one thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_name(pid: int) -> str:
    """Return the name that `ps` shows of a process."""
    return Path(f"/proc/{pid}/comm").read_text().strip()
