"""The memory that a host's snapshots need and the memory that is free, compared before training starts.

The required memory follows from the layout alone. The free memory is what the kernel reports as available, or less
where a control group (a container, a batch job) allows less: Linux `Documentation/admin-guide/cgroup-v2.rst`
(memory.max, memory.current, memory.stat) and `cgroup-v1/memory.rst`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from resilient_jax.errors import SnapshotRefused
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotLayout
from resilient_jax.snapshot.manifest import count_blocks
from resilient_jax.snapshot.stripes import cut_grid

NUM_SLOTS: Final = 2
"""The newest committed snapshot stays while the next one is taken."""
HEADER_BYTES: Final = 4096
"""One page, written by one call."""
MANIFEST_BYTES: Final = 2**20
"""Room for the leaves and slices in a manifest: about 10000 of them. Block checksums come on top."""
CHECKSUM_RECORD_BYTES: Final = 8
"""Room for a block's checksum, which takes at most 5 bytes in a manifest and 4 beside parity."""
UNLIMITED: Final = 2**60
"""From this limit on a group of version 1 has none: the kernel then reports the largest number of pages."""

_CGROUPS: Final = PurePosixPath("sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequiredMemory:
    """The memory that one host's snapshots need, in bytes.

    Attributes:
        part_bytes: bytes of one slot, for this host's part of the state.
        parity_bytes: bytes of one slot, for the parity chunks that this host keeps for other hosts.
        metadata_bytes: bytes of one slot, for the header, the manifests of the host's group and the checksums.
    """

    part_bytes: int
    parity_bytes: int
    metadata_bytes: int

    @property
    def total_bytes(self) -> int:
        """Required memory of all slots."""
        return NUM_SLOTS * (self.part_bytes + self.parity_bytes + self.metadata_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """The memory that this process can still allocate, in bytes, and the limits that it follows from.

    Attributes:
        available_bytes: free bytes on the machine, as the kernel estimates.
        limit_bytes: limit of the control group that has least left; None: no group has a limit.
        used_bytes: bytes in use in that control group, without page cache that the kernel can reclaim.
    """

    available_bytes: int
    limit_bytes: int | None = None
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """The memory that is left on the machine or in the control group, whichever is smaller."""
        return (
            self.available_bytes
            if self.limit_bytes is None
            else min(self.available_bytes, max(0, self.limit_bytes - self.used_bytes))
        )


def compute_required_memory(layout: SnapshotLayout, host: HostName) -> RequiredMemory:
    """Return the memory that the snapshots of a layout need on a host."""
    group = layout.find_group(host)
    parts = [layout.part_bytes[member] for member in group.hosts]
    block, chunk = cut_grid(parts, len(group.hosts) - group.parity)
    # Checksums of all members' blocks are in their manifests, those of the parity that this host keeps beside it.
    blocks = [count_blocks(part, block) for part in parts]
    kept_blocks = group.parity * count_blocks(chunk, block)
    return RequiredMemory(
        part_bytes=layout.part_bytes[host],
        parity_bytes=group.parity * chunk,
        metadata_bytes=HEADER_BYTES
        + len(parts) * MANIFEST_BYTES
        + CHECKSUM_RECORD_BYTES * (sum(blocks) + kept_blocks),
    )


def check_memory(
    required: RequiredMemory, free: FreeMemory, host: HostName, *, reclaimed_bytes: int = 0
) -> None:
    """Check that snapshots fit into the free memory.

    Args:
        reclaimed_bytes: bytes of earlier slots, which the new ones reuse or replace.

    Raises:
        SnapshotRefused: more is required than is free; the message has the amounts and what to do.
    """
    if required.total_bytes <= free.free_bytes + reclaimed_bytes:
        return
    group = "no control group limits it"
    if free.limit_bytes is not None:
        group = f"its control group allows {_size(free.limit_bytes)} and uses {_size(free.used_bytes)}"
    raise SnapshotRefused(
        f"host {host}: snapshots need {_size(required.total_bytes)} of memory ({NUM_SLOTS} slots with "
        f"{_size(required.part_bytes)} of state, {_size(required.parity_bytes)} of parity and "
        f"{_size(required.metadata_bytes)} of metadata each), expected at most "
        f"{_size(free.free_bytes + reclaimed_bytes)}: the machine has {_size(free.available_bytes)} available, "
        f"{group}, and {_size(reclaimed_bytes)} are used by earlier snapshots. Give the host or its container more "
        "memory, use more hosts (each then keeps less), lower the parity or make groups larger, or switch snapshots off"
    )


def read_free_memory(root: Path = Path("/")) -> FreeMemory:
    """Return the memory that is free now.

    Args:
        root: where `proc` and `sys` are mounted; another directory in tests.

    Raises:
        SnapshotRefused: the kernel does not report the available memory.
    """
    try:
        available = _kib(root / "proc/meminfo", "MemAvailable:")
    except (OSError, KeyError, ValueError) as error:
        raise SnapshotRefused(
            f"{root / 'proc/meminfo'} does not say how much memory is available ({error}); snapshots need Linux with "
            "proc mounted"
        ) from error
    left = min(_find_limits(root), key=lambda found: found[0] - found[1], default=(None, 0))
    return FreeMemory(available_bytes=available, limit_bytes=left[0], used_bytes=left[1])


def _find_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage of every control group that this process is in, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # a kernel without control groups
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _walk(root / _CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _walk(root / _CGROUPS / "memory", path, *names)


def _walk(
    mounted: Path, path: str, limit_name: str, used_name: str, cache_name: str
) -> Iterator[tuple[int, int]]:
    """Yield limit and usage from a group up to the root; in a container the lower groups may not be mounted."""
    inner = PurePosixPath(path.lstrip("/"))
    for folder in (mounted / inner, *(mounted / parent for parent in inner.parents)):
        try:
            limit, used = (folder / limit_name).read_text().strip(), int((folder / used_name).read_text())
            if limit == "max" or int(limit) >= UNLIMITED:
                continue
        except (OSError, ValueError):
            continue  # not mounted here, or the root group, which has no limit
        yield int(limit), max(0, used - _cache(folder / "memory.stat", cache_name))


def _cache(path: Path, name: str) -> int:
    """Return the page cache that the kernel can reclaim from the group; 0 where the file does not report it."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(words[1]) for words in lines if words and words[0] == name), 0)
    except (OSError, ValueError):
        return 0


def _kib(path: Path, name: str) -> int:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}[name] * 1024


def _size(nbytes: int) -> str:
    """Format a size in MiB, or in GiB from one GiB on.

    >>> _size(3 * 2**29)
    '1.50 GiB'
    """
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
