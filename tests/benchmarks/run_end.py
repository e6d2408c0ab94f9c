"""How a benchmark ends a job on all hosts at one step, and compares its weights with those of another run.

The script looks for the order after each step, and writes the SHA-256 of its weights at the end.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

NEVER: Final = 10**9


def order_stop(folder: Path, step: int) -> None:
    """Order the job whose script looks into this folder to stop after a step that no host has reached."""
    order = folder / "stop.tmp"
    order.write_text(str(step))
    order.replace(folder / "stop")


def read_stop(folder: Path) -> int:
    """Return the step after which to stop."""
    try:
        return int((folder / "stop").read_text())
    except OSError:
        return NEVER


def write_digest(folder: Path, digest: str) -> None:
    """Write the SHA-256 of this process's weights."""
    (folder / f"digest-{os.getpid()}.txt").write_text(digest)


def read_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights of the processes that finished; several, joined by spaces, if they differ."""
    found = sorted(path.read_text() for path in folder.glob("digest-*.txt"))
    return found[0] if are_equal(found) else " ".join(found)


def are_equal(words: Iterable[str]) -> bool:
    """Return whether there is at least one string, and all are equal."""
    return len(set(words)) == 1
