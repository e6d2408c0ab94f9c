"""Records and kills of the resilience benchmark's jobs. The module imports the standard library alone.

In the job's folder:
- `job.json`: configuration; see `BenchmarkJob` in `benchmarks.resilience.runs`;
- `rows-<host>-<pid>.jsonl`: events of one process, with monotonic times, which all processes of a machine share;
- `fault-<number>.json`: marks a failure as done, so that a step that is done again does not fail again;
- `digest-<step>-<host>.txt`: SHA-256 of parameters and optimizer state after that many steps.
"""

import contextlib
import hashlib
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PACE_STEPS = 5
"""The newest steps, whose median gives half a step."""


class Recorder:
    """Writes each row as a complete line in a single write: a kill can tear only the last line."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        path = folder / f"rows-{host}-{os.getpid()}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._committed_s: float | None = None
        self.steps_s: list[float] = []

    def write(self, kind: str, attempt: int, **more: float) -> float:
        now_s = time.monotonic()
        row = {"kind": kind, "attempt": attempt, "host": self._host, "at_s": now_s, **more}
        os.write(self._descriptor, (json.dumps(row) + "\n").encode())
        return now_s

    def commit(self, attempt: int, step: int, hosts: int) -> None:
        now_s = self.write("committed", attempt, step=step, hosts=hosts)
        if self._committed_s is not None:
            self.steps_s.append(now_s - self._committed_s)
        self._committed_s = now_s

    def digest(self, step: int, leaves: Iterable[Any]) -> None:
        found = hashlib.sha256()
        for leaf in leaves:
            found.update(leaf.tobytes())
        (self._folder / f"digest-{step}-{self._host}.txt").write_text(found.hexdigest())


class Faults:
    """The failures that are still due. Every process has the schedule, and kills itself if it is the victim."""

    def __init__(self, folder: Path, faults: Sequence[dict], host: str, hosts: Sequence[str]) -> None:
        self._folder, self._faults, self._host, self._hosts = folder, faults, host, hosts
        self._armed = False

    def arm(self, attempt: int, step: int, living: Sequence[str], steps_s: Sequence[float]) -> None:
        """Schedule SIGKILL of this process half a step from now, if a failure of this host is due.

        Call it at the start of each step. If the scheduled host does not train, the next host that trains is the
        victim, so that every failure kills a worker.
        """
        due = next((n for n, f in enumerate(self._faults) if f["step"] <= step and not self._struck(n)), None)
        if due is None or self._armed:
            return
        first = self._hosts.index(self._faults[due]["host"])
        order = [*self._hosts[first:], *self._hosts[:first]]
        if next(host for host in order if host in living) != self._host:
            return
        self._armed = True
        half_s = statistics.median(steps_s[-PACE_STEPS:]) / 2 if steps_s else 0.0
        timer = threading.Timer(half_s, self._strike, (due, attempt, step))
        timer.daemon = True
        timer.start()

    def _struck(self, number: int) -> bool:
        return self._mark(number).exists()

    def _mark(self, number: int) -> Path:
        return self._folder / f"fault-{number}.json"

    def _strike(self, number: int, attempt: int, step: int) -> None:
        temporary = self._folder / f"fault-{number}-{os.getpid()}.tmp"
        struck = {"number": number, "attempt": attempt, "step": step, "host": self._host}
        temporary.write_text(json.dumps({**struck, "at_s": time.monotonic()}))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, self._mark(number))
        os.kill(os.getpid(), signal.SIGKILL)


def read_job(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "job.json").read_text())
