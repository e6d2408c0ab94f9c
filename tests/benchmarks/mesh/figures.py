"""What the mesh benchmark reads from the files of its job's processes. Pure but for the reading."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from resilient_jax.errors import InternalError

PARTS_OF_A_HOST = "ocdbt.process_*"
"""Orbax's folder of what one process has written."""


class BoxRow(msgspec.Struct, frozen=True, kw_only=True):
    """The state after a step on one host.

    Attributes:
        step: its number.
        boxes: a digest of each box of the state that is there, by leaf and place in it.
        bytes: of these boxes, each once.
        whole_bytes: of the whole state.
    """

    step: int
    boxes: dict[str, str]
    bytes: int
    whole_bytes: int


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Repeated measurements; NaN where there are none."""

    median: float
    least: float
    most: float
    count: int


def describe(values: Sequence[float], less: float = 0.0, digits: int = 3) -> Spread:
    """Return the spread of values, each less the same number."""
    found = [value - less for value in values] or [float("nan")]
    return Spread(
        median=round(statistics.median(found), digits),
        least=round(min(found), digits),
        most=round(max(found), digits),
        count=len(values),
    )


def read_rows(folder: Path) -> list[BoxRow]:
    """Return the rows of all processes; a line that a killed process left half is left out."""
    lines = [line for path in folder.glob("boxes-*.jsonl") for line in path.read_bytes().splitlines()]
    return [msgspec.json.decode(line, type=BoxRow) for line in lines if line.endswith(b"}")]


def are_equal_boxes(found: Iterable[BoxRow], expected: Iterable[BoxRow]) -> bool:
    """Return whether each step is there, and each box after each step is that of the undisturbed job."""
    by_place = {(row.step, name): digest for row in expected for name, digest in row.boxes.items()}
    seen = {(row.step, name): set[str]() for row in expected for name in row.boxes}
    for row in found:
        for name, digest in row.boxes.items():
            seen.setdefault((row.step, name), set()).add(digest)
    return bool(seen) and all(digests == {by_place.get(place)} for place, digests in seen.items())


def find_largest_share(rows: Iterable[BoxRow], hosts_of_replica: int) -> float:
    """Return the most that a host had of the state, over the whole state split evenly over a replica's hosts."""
    return max((row.bytes * hosts_of_replica / row.whole_bytes for row in rows), default=float("nan"))


def find_written_share(checkpoint: Path, whole_bytes: int, hosts_of_replica: int) -> float:
    """Return the most that a host wrote of a checkpoint, over the whole state split evenly over a replica's hosts.

    Raises:
        InternalError: the checkpoint is not in parts of hosts.
    """
    parts = list(checkpoint.rglob(PARTS_OF_A_HOST))
    if not parts:
        raise InternalError(f"{checkpoint}: found no {PARTS_OF_A_HOST}, expected one of each host that wrote")
    written = [sum(file.stat().st_size for file in part.rglob("*") if file.is_file()) for part in parts]
    return max(written) * hosts_of_replica / whole_bytes
