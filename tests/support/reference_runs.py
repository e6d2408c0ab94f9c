"""Undisturbed runs, which all tests of a pytest session share, in whichever of its processes they are."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = "REFERENCE_RUNS_DIR"
"""The environment variable that names the folder of these runs; `conftest.py` sets it."""
SHARED_STEPS = 200
"""A run has a multiple of so many steps, so that later tests can share it."""
FEW_STEPS = 40
"""A run of no more is that of a test with a job of its own, which ends soon, and has no more."""


def share_run(kind: Sequence[object], total: int, run: Callable[[Path, int], None]) -> Path:
    """Return the folder of an undisturbed run of at least `total` steps.

    The result of a step does not depend on when the job ends. So the longest run of a kind serves all tests.

    Args:
        kind: all that the results depend on: the script, its arguments, the devices.
        total: steps that are needed.
        run: makes a run of so many steps in an empty folder; what it raises is raised here, and leaves no run.
    """
    name = hashlib.sha256(repr(list(map(str, kind))).encode()).hexdigest()[:16]
    folder = Path(os.environ[FOLDER]) / name
    folder.mkdir(parents=True, exist_ok=True)
    # Of two tests that need the same run at the same time, one makes it.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        longest = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
        if longest < total:
            longest = total if total <= FEW_STEPS else -(-total // SHARED_STEPS) * SHARED_STEPS
            unfinished = folder / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            run(unfinished, longest)
            unfinished.rename(folder / str(longest))
    return folder / str(longest)
