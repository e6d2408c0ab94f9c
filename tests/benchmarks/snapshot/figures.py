"""Figures of the snapshot benchmark, and the request and the timings that they come from. Pure.

A GB is 10^9 bytes of state, a MB 10^6. Each time is for one complete state, on any number of hosts.
"""

import enum
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

MB = 1_000_000
GB = 1_000 * MB
LOCAL, PEER, PARITY, ALONE = "local arena", "peer", "parity", "parity, all by one"
TMPFS, DISK = "tmpfs", "disk"
HOSTS_OF_MEMORY = 8
"""The group whose memory is compared with the formula."""


class SnapshotTask(enum.StrEnum):
    """An operation that is timed."""

    COPY = "copy"  # of the same bytes into touched memory
    BLOCKING = "blocking"  # the call of `SnapshotCapture.start`
    CAPTURE = "capture"  # from its start until all arrays are read
    COMMIT = "commit"  # from its start until every host has the commit of the complete snapshot
    RESTORE = "restore"
    ORBAX_BLOCKING = "orbax blocking"
    ORBAX_SAVE = "orbax save"
    ORBAX_RESTORE = "orbax restore"


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the script that measures one size of state.

    Attributes:
        state_bytes: approximate size of the state.
        rounds: number of times that each task is timed.
        limit_s: cases that have not begun by then are skipped.
        disk: folder on a disk.
        tmpfs: folder in memory.
    """

    state_bytes: int
    rounds: int
    limit_s: float
    disk: str
    tmpfs: str


class SnapshotTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one variant of a task.

    Attributes:
        variant: of the task: threads, hosts and parity, or where the bytes come from or go to.
        times_s: of each round.
    """

    task: SnapshotTask
    variant: str
    times_s: list[float]


class GroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the snapshot servers of a group.

    Attributes:
        part_bytes: of all hosts together.
        held_bytes: memory that the kernel gave to all slots of all hosts.
    """

    hosts: int
    parity: int
    part_bytes: int
    held_bytes: int


class SnapshotTimings(msgspec.Struct, frozen=True, kw_only=True):
    """All timings with a state of one size.

    Attributes:
        state_bytes: exact size of the state.
        skipped: cases that were not measured, with the reason.
        versions: of the software that was timed, by name.
    """

    state_bytes: int
    processor: str
    timed: list[SnapshotTiming]
    memory: list[GroupMemory]
    skipped: dict[str, str]
    versions: dict[str, str]


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Median, and 5 % and 95 % quantiles, of the rounds."""

    median: float
    low: float
    high: float


SecondsBySize = dict[str, dict[SnapshotTask, dict[str, Seconds]]]
"""By MB of state, task and variant."""


class MemoryFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of memory for a byte of state: measured, and (1 + m / k) x 2."""

    measured: float
    formula: float


class SnapshotFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON. Figures without a size in their name are for `state_mb`; None: skipped.

    Attributes:
        capture_gbps: one host, one thread: from `SnapshotCapture.start` until the arrays may be donated.
        copy_limit_gbps: `np.copyto` of the same bytes into memory that was touched before, one thread.
        capture_of_copy: speed of the capture over that of the copy in the same round, the median; by threads.
        blocking_ms_per_gb: of `SnapshotCapture.start`, on one host that has all of the state.
        commit_s: by hosts and parity.
        parity_restore_s: one of eight hosts is lost; until each of the seven others has its seventh of the state on its
            device: from its own memory, from peers, and decoded. All hosts share the machine.
        orbax_restore_s: by plain Orbax from tmpfs, the same state onto the same devices.
        parity_of_orbax: time of the first over that of the second in the same round, the median.
        memory_per_byte: by m, in a group of eight.
        spread: 5 % and 95 % quantiles of the rounds.
        n: number of rounds.
        seconds: of everything that was timed.
    """

    capture_gbps: float | None
    copy_limit_gbps: float | None
    capture_of_copy: dict[str, float]
    blocking_ms_per_gb: float | None
    commit_s: dict[str, float]
    parity_restore_s: float | None
    orbax_restore_s: float | None
    parity_of_orbax: float | None
    memory_per_byte: dict[str, MemoryFigure]
    spread: dict[str, tuple[float, float]]
    n: int
    state_mb: int
    seconds: SecondsBySize
    skipped: dict[str, str]
    versions: dict[str, str]
    machine: str


def threads_name(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def group_name(hosts: int, parity: int) -> str:
    return f"{hosts} hosts, m = {parity}"


def memory_formula(hosts: int, parity: int) -> float:
    """Return bytes of memory per byte of state: two slots, each for a part and m chunks of a k-th of the part.

    >>> memory_formula(8, 4)
    4.0
    """
    return (1 + parity / (hosts - parity)) * 2


def seconds_of(times_s: Sequence[float]) -> Seconds:
    """Return median and quantiles of one round or more.

    >>> seconds_of([2.0])
    Seconds(median=2.0, low=2.0, high=2.0)
    """
    doubled = [*times_s, *times_s]  # so that a single round has a span, too
    low, *_, high = statistics.quantiles(doubled, n=20, method="inclusive")
    return Seconds(median=rounded(statistics.median(times_s)), low=rounded(low), high=rounded(high))


def make_snapshot_figures(
    rounds: int,
    found: Sequence[SnapshotTimings],
    machine: str,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> SnapshotFigures:
    """Return the figures of the line of JSON from the timings of each size."""
    # The largest state with which the main comparison was made.
    main = max(found, key=lambda times: (_ratio(times, *_OVER_ORBAX) is not None, times.state_bytes))
    gb = main.state_bytes / GB
    one = threads_name(1)
    spread: dict[str, tuple[float, float]] = {}

    def figure(
        name: str, task: SnapshotTask, variant: str, scale: float = 1.0, *, inverse: bool = False
    ) -> float | None:
        times_s = _times(main, task, variant)
        if times_s is None:
            return None
        values = seconds_of([scale / t if inverse else scale * t for t in times_s])
        spread[name] = (values.low, values.high)
        return values.median

    return SnapshotFigures(
        capture_gbps=figure("capture_gbps", SnapshotTask.CAPTURE, one, gb, inverse=True),
        copy_limit_gbps=figure("copy_limit_gbps", SnapshotTask.COPY, one, gb, inverse=True),
        capture_of_copy={
            timed.variant: ratio
            for timed in main.timed
            if timed.task is SnapshotTask.CAPTURE
            and (
                ratio := _ratio(
                    main, (SnapshotTask.COPY, timed.variant), (SnapshotTask.CAPTURE, timed.variant)
                )
            )
        },
        blocking_ms_per_gb=figure("blocking_ms_per_gb", SnapshotTask.BLOCKING, one, 1000 / gb),
        commit_s={
            timed.variant: seconds_of(timed.times_s).median
            for timed in main.timed
            if timed.task is SnapshotTask.COMMIT
        },
        parity_restore_s=figure("parity_restore_s", SnapshotTask.RESTORE, PARITY),
        orbax_restore_s=figure("orbax_restore_s", SnapshotTask.ORBAX_RESTORE, TMPFS),
        parity_of_orbax=_ratio(main, *_OVER_ORBAX),
        memory_per_byte=_memory(main),
        spread=spread,
        n=rounds,
        state_mb=round(main.state_bytes / MB),
        seconds={str(round(times.state_bytes / MB)): _seconds(times) for times in found},
        skipped={
            **left_out,
            **{
                f"{round(times.state_bytes / MB)} MB, {what}": why
                for times in found
                for what, why in times.skipped.items()
            },
        },
        versions=main.versions,
        machine=f"{machine}, {main.processor}; all hosts share it",
    )


_OVER_ORBAX = ((SnapshotTask.RESTORE, PARITY), (SnapshotTask.ORBAX_RESTORE, TMPFS))


def _times(times: SnapshotTimings, task: SnapshotTask, variant: str) -> list[float] | None:
    return next((t.times_s for t in times.timed if (t.task, t.variant) == (task, variant)), None)


def _ratio(
    times: SnapshotTimings, over: tuple[SnapshotTask, str], under: tuple[SnapshotTask, str]
) -> float | None:
    """Return the time of one task over that of another in the same round, the median; None if either was skipped."""
    upper, lower = _times(times, *over), _times(times, *under)
    if upper is None or lower is None:
        return None
    return rounded(statistics.median(a / b for a, b in zip(upper, lower, strict=True)))


def _memory(times: SnapshotTimings) -> dict[str, MemoryFigure]:
    return {
        str(memory.parity): MemoryFigure(
            measured=rounded(memory.held_bytes / memory.part_bytes),
            formula=rounded(memory_formula(memory.hosts, memory.parity)),
        )
        for memory in times.memory
        if memory.hosts == HOSTS_OF_MEMORY
    }


def _seconds(times: SnapshotTimings) -> dict[SnapshotTask, dict[str, Seconds]]:
    found: dict[SnapshotTask, dict[str, Seconds]] = {}
    for timed in times.timed:
        found.setdefault(timed.task, {})[timed.variant] = seconds_of(timed.times_s)
    return found


def rounded(value: float) -> float:
    """Return the value with four significant digits."""
    return float(f"{value:.4g}")
