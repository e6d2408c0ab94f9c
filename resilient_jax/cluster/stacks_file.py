"""The stacks of a host's workers in the run folder, taken while something hung; and a process seen from outside."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from resilient_jax.protocol.worker_report import WorkerReport

FOLDER: Final = "stacks"
_FACTS: Final = ("wchan", "stack", "syscall")
"""Files of a thread in /proc: where it waits in the kernel, which the kernel may refuse to tell."""


class StacksFile:
    """Appends stacks to `stacks/HOST.txt` of the run folder; without a run folder, or on a full disk, they are lost.

    Args:
        directory: the run folder of the agent; None: the agent has none.
    """

    def __init__(self, directory: Path | None, host: str) -> None:
        self._path = make_stacks_path(directory, host) if directory is not None else None
        self._waiting: list[Callable[[], None]] = []
        """What is called with the next stacks."""

    def call_when_next(self, call: Callable[[], None], timeout_s: float) -> None:
        """Call once when the next stacks are here, or after a time at the latest."""
        self._waiting.append(call)
        asyncio.get_running_loop().call_later(timeout_s, self._call, call)

    def _call(self, call: Callable[[], None]) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            call()

    def append(self, report: WorkerReport, why: str, stacks: str) -> None:
        """Append the stacks of a worker, under a line with the time, the worker's step and the reason."""
        if self._path is not None:
            self._write(self._path, report, why, stacks)
        for call in tuple(self._waiting):
            self._call(call)

    def _write(self, path: Path, report: WorkerReport, why: str, stacks: str) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        head = f"==== {when} UTC, generation {report.generation}: {why}"
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with path.open("a") as file:
                file.write(f"{head}\n{stacks}\n")


def make_stacks_path(directory: Path, host: str) -> Path:
    """Return where the stacks of a host are in a run folder."""
    return directory / FOLDER / f"{host}.txt"


def describe_process(pid: int) -> str:
    """Return what the kernel tells of each thread of a process that does not answer: its state, and where it waits."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            status = _read(thread / "status").splitlines()
            found = [line for line in status if line.startswith(("Name:", "State:", "TracerPid:"))]
            facts = [f"{name}: {text}" for name in _FACTS if (text := _read(thread / name).strip())]
            lines += [f"thread {thread.name}: " + ", ".join(" ".join(line.split()) for line in found), *facts]
    return "\n".join(lines) or "the process has ended"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
