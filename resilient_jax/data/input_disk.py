"""Measures what a read of this process's input files takes, past the page cache. Linux only.

A data source does not say which files it reads. But large files that are read again and again are open or mapped: array
records, memory maps, packed tokens. What is read through a library's own protocol (an object store) is not found.
"""

import contextlib
import mmap
import os
import random
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

READ_BYTES: Final = 256 * 1024
NUM_READS: Final = 4
"""Of each file, at places of which none is likely to be in the storage's own cache; the fastest counts."""
MIN_FILE_BYTES: Final = 4 * READ_BYTES
MAX_FILES: Final = 2
MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
LIMIT_S: Final = 1.0
"""A read that takes longer counts as this long: a disk that hangs must not hold up the step in which it is measured."""


_LIBRARIES: Final = tuple(
    f"{folder}/" for folder in {sys.prefix, sys.base_prefix, "/usr/lib", "/usr/share"} - {"/", "/usr"}
)


class _Reading:
    """A measurement on a thread of its own, whose end need not be awaited."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        """None: it has not ended."""
        self.thread = threading.Thread(target=self._run, name="resilient-jax-input-disk", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.seconds = _measure()
        except Exception:  # a file that has shrunk meanwhile, for example; the measurement is only evidence
            self.seconds = 0.0


_last: _Reading | None = None


def measure_input_disk() -> float:
    """Return the seconds of a read of `READ_BYTES` of the slowest input file; 0: there is none on a disk."""
    global _last
    if _last is not None and _last.thread.is_alive():
        return LIMIT_S  # it hangs since an earlier measurement: another read would hang, too
    _last = _Reading()
    _last.thread.join(LIMIT_S)
    return _last.seconds if _last.seconds is not None else LIMIT_S


def list_input_files() -> list[str]:
    """Return the paths of files on disks that this process reads data from, the largest first."""
    sizes: dict[str, int] = {}
    disks = set(_list_disks())
    for path in {*_list_open_files(), *_list_mapped_files()}:
        if path.startswith(_LIBRARIES):
            continue  # libraries, and what comes with them
        with contextlib.suppress(OSError):
            status = os.stat(path)
            is_large = stat.S_ISREG(status.st_mode) and status.st_size >= MIN_FILE_BYTES
            if is_large and status.st_dev in disks:
                sizes[path] = status.st_size
    return sorted(sizes, key=lambda path: (-sizes[path], path))


def _measure() -> float:
    slowest = 0.0
    for path in list_input_files()[:MAX_FILES]:
        # Gone, not readable any more, or on a file system without direct reads.
        with contextlib.suppress(OSError):
            slowest = max(slowest, _time_reads(path))
    return slowest


def _time_reads(path: str) -> float:
    """Return the seconds of the fastest of some reads of a file.

    Raises:
        OSError: the file cannot be read past the page cache.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        num_places = os.fstat(descriptor).st_size // READ_BYTES
        taken: list[float] = []
        with mmap.mmap(-1, READ_BYTES) as buffer:  # a page's alignment, which direct reads need
            for _ in range(NUM_READS):
                place = random.randrange(num_places) * READ_BYTES
                began_s = time.monotonic()
                os.preadv(descriptor, [buffer], place)
                taken.append(time.monotonic() - began_s)
        return min(taken)
    finally:
        os.close(descriptor)


def _list_disks() -> Iterator[int]:
    """Yield the device number of each mounted file system that is not in memory, those of a network included."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            mount, _, kind = line.partition(" - ")
            if kind.split()[0] not in MEMORY_FILE_SYSTEMS:
                yield os.makedev(*map(int, mount.split()[2].split(":")))


def _list_open_files() -> Iterator[str]:
    """Yield the paths of what is open for reading alone."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            flags = _read_flags(name)
            if flags & os.O_ACCMODE == os.O_RDONLY:
                yield os.readlink(f"/proc/self/fd/{name}")


def _read_flags(descriptor: str) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
        return next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), os.O_WRONLY)


def _list_mapped_files() -> Iterator[str]:
    """Yield the paths of what is mapped, but for programs."""
    mapped: dict[str, bool] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            parts = line.rstrip("\n").split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith("/"):
                mapped[parts[5]] = mapped.get(parts[5], False) or "x" in parts[1]
    return (path for path, is_program in mapped.items() if not is_program)
