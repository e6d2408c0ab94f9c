"""Flips bits where a job keeps its state: in the memory of snapshot servers, and in checkpoints."""

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

from resilient_jax.errors import CallerError, ChecksumMismatch
from resilient_jax.snapshot.slot_memory import MEMFD_NAME, PAGE_BYTES, SlotHeader, SlotPhase, parse_header

MARK_BYTES = 64
"""The used part of a slot's first page."""


def flip_snapshot_bits(server_pid: int, region: str, count: int, rng: random.Random) -> int:
    """Flip a bit in each of `count` bytes of the newest complete snapshot of a server process.

    Args:
        server_pid: the snapshot server.
        region: "part" for the host's part, "parity", "manifest" or "mark".
        count: an upper bound; a short region has fewer bytes.
        rng: draws the bytes and their bits.

    Returns:
        The step of the snapshot.

    Raises:
        CallerError: there is no such snapshot, or it has no such region.
    """
    newest: tuple[SlotHeader, str] | None = None
    for path in _slots_of(server_pid):
        mark = _read_mark(path)
        if (
            mark is not None
            and mark.phase >= SlotPhase.COMPLETE
            and (newest is None or mark.id > newest[0].id)
        ):
            newest = mark, path
    if newest is None:
        raise CallerError(f"process {server_pid} holds no complete snapshot now")
    mark, path = newest
    start, length = _region(mark, region)
    if not length:
        raise CallerError(f"the snapshot of process {server_pid} has no {region}")
    with open(path, "r+b", buffering=0) as file:
        _flip(file.fileno(), start, length, count, rng)
    return mark.id.step


def flip_checkpoint_bits(folder: Path, count: int, rng: random.Random) -> Path:
    """Flip bits in the largest file of the newest checkpoint in a folder, and return the file.

    Raises:
        CallerError: the folder has no checkpoint.
    """
    steps = sorted((p for p in folder.glob("*") if p.is_dir()), key=lambda p: p.stat().st_mtime)
    for step in reversed(steps):
        files = [path for path in step.rglob("*") if path.is_file()]
        if files:
            largest = max(files, key=lambda path: path.stat().st_size)
            with largest.open("r+b", buffering=0) as file:
                _flip(file.fileno(), 0, largest.stat().st_size, count, rng)
            return largest
    raise CallerError(f"{folder}: found no checkpoint, expected folders with files, one for each")


def _slots_of(server: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{server}/fd"):
        path = f"/proc/{server}/fd/{name}"
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith(f"/memfd:{MEMFD_NAME}"):
            yield path


def _read_mark(path: str) -> SlotHeader | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return parse_header(file.read(PAGE_BYTES))
    except (OSError, ChecksumMismatch):
        return None


def _region(mark: SlotHeader, region: str) -> tuple[int, int]:
    """Return the offset of a region in the slot, and its length."""
    shape = mark.layout
    match region:
        case "part":
            return shape.part_offset, shape.part_bytes
        case "parity":
            return shape.parity_offset, shape.parity_rows * shape.chunk_bytes
        case "manifest":
            return shape.mapped_bytes, mark.manifest_bytes
        case "mark":
            return 0, MARK_BYTES
        case _:
            raise CallerError(f"found region {region!r}, expected part, parity, manifest or mark")


def _flip(descriptor: int, start: int, length: int, count: int, rng: random.Random) -> None:
    length = min(length, os.fstat(descriptor).st_size - start)
    # A mapping begins at a page.
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    with mmap.mmap(descriptor, start + length - first, offset=first) as memory:
        # Distinct bytes: a bit that is flipped twice would be no damage.
        for offset in rng.sample(range(length), min(count, length)):
            memory[start - first + offset] ^= 1 << rng.randrange(8)
