"""What a job leaves behind on its machine, and what its long-lived processes hold meanwhile."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from resilient_jax.chaos.resource_growth import ProcessSample
from resilient_jax.cluster.run_directory import CONTACT_FILE

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_WORDS = ("resilient", "gloo", "jax")
"""In the names of segments that a job might make. Its own have none; other programs run here, too."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def list_shared_segments() -> frozenset[str]:
    """What a job may have left in shared memory."""
    with contextlib.suppress(OSError):
        return frozenset(
            name for name in os.listdir(SHARED_MEMORY) if any(word in name for word in SEGMENT_WORDS)
        )
    return frozenset()


def list_leftover_files(run_directory: Path) -> list[str]:
    """Files in a run folder that only a running job has."""
    names = [CONTACT_FILE, *(path.name for path in run_directory.glob(".writable-*"))]
    return [name for name in names if (run_directory / name).exists()]


class ProcessIdentity(NamedTuple):
    """A process: numbers are used again, on a busy machine within minutes."""

    pid: int
    start_ticks: int


def identify_process(pid: int) -> ProcessIdentity | None:
    """The process that has this number now; None if it is gone, or only waits for its parent to note its end."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if stat[0] not in ("Z", "X"):
            return ProcessIdentity(pid, int(stat[19]))
    return None


def sample_process(pid: int, name: str) -> ProcessSample | None:
    """What a process holds now; None if it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        if (found := identify_process(pid)) is not None:
            return ProcessSample(
                name=name,
                pid=pid,
                start_ticks=found.start_ticks,
                rss_bytes=int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES,
                descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            )
    return None
