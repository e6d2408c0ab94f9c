"""Figures of the erasure benchmark, and the request and the timings that they come from. Pure.

GB/s are 10^9 bytes of data per second: k times the length of a shard, for encoding and for decoding alike.
"""

import enum
import statistics
from collections.abc import Sequence

import msgspec

MEMORY_COPY = "memory copy"
REFERENCE = "reedsolo"
ZFEC = "zfec"
BARE_ISAL = "bare ISA-L call"


class ErasureTask(enum.StrEnum):
    """An operation that is timed."""

    ENCODE = "encode"
    DECODE = "decode"  # as many data shards as there is parity, or all
    COPY = "copy"


class ErasureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the script that measures.

    Attributes:
        data_shards: k.
        parity_shards: each m.
        shard_bytes: length of a shard.
        skew_bytes: from the end of a shard to the start of the next.
        rounds: number of times that each call is timed.
    """

    data_shards: int
    parity_shards: tuple[int, ...]
    shard_bytes: int
    skew_bytes: int
    rounds: int


class ErasureTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one call.

    Attributes:
        who: name of a kernel of ours, or of an implementation to compare with.
        parity_shards: m.
        data_bytes: bytes of data that one call reads.
        times_s: of each round.
    """

    who: str
    task: ErasureTask
    parity_shards: int
    data_bytes: int
    times_s: list[float]


class ErasureTimings(msgspec.Struct, frozen=True, kw_only=True):
    """All timings of one process, on one core.

    Attributes:
        processor: model name of the processor.
        kernel: that a job would use on this machine.
        versions: of the implementations that were timed, by name.
        missing: implementations that could not be timed, with the reason.
    """

    processor: str
    kernel: str
    versions: dict[str, str]
    missing: dict[str, str]
    timed: list[ErasureTiming]


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """GB/s of data: median, and 5 % and 95 % quantiles, of the rounds."""

    gbps: float
    low: float
    high: float


Speeds = dict[str, dict[ErasureTask, Speed]]
"""By implementation and task."""


class ErasureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON. Figures that are not by m are for the first m.

    Attributes:
        encode_gbps: of `encode` with the kernel that a job would use.
        decode_gbps: of `decode` of m lost data shards with it.
        isal_gbps: of `ec_encode_data`, with all operands prepared before; None without ISA-L.
        copy_limit_gbps: of copying the data.
        encode_of_isal: speed of `encode` over that of the bare call with the same tables in the same round, the median
            of the rounds, by m; empty without ISA-L.
        decode_of_isal: the same for decoding.
        spread: 5 % and 95 % quantiles of the four figures in GB/s.
        n: number of rounds.
        speeds: of everything, by m.
    """

    encode_gbps: float
    decode_gbps: float
    isal_gbps: float | None
    copy_limit_gbps: float
    encode_of_isal: dict[str, float]
    decode_of_isal: dict[str, float]
    spread: dict[str, tuple[float, float]]
    n: int
    k: int
    m: int
    shard_bytes: int
    skew_bytes: int
    kernel: str
    versions: dict[str, str]
    missing: dict[str, str]
    speeds: dict[str, Speeds]
    machine: str


def speed_of(data_bytes: int, times_s: Sequence[float]) -> Speed:
    """Return GB/s of data from the times of two rounds or more.

    >>> speed_of(8_000_000, [0.001, 0.001, 0.001])
    Speed(gbps=8.0, low=8.0, high=8.0)
    """
    found = [data_bytes / time_s / 1e9 for time_s in times_s]
    low, *_, high = statistics.quantiles(found, n=20, method="inclusive")
    return Speed(gbps=_rounded(statistics.median(found)), low=_rounded(low), high=_rounded(high))


def make_erasure_figures(wanted: ErasureRequest, times: ErasureTimings, machine: str) -> ErasureFigures:
    """Return the figures of the line of JSON."""
    speeds: dict[str, Speeds] = {str(m): {} for m in wanted.parity_shards}
    for timed in times.timed:
        found = speeds[str(timed.parity_shards)].setdefault(timed.who, {})
        found[timed.task] = speed_of(timed.data_bytes, timed.times_s)
    first = speeds[str(wanted.parity_shards[0])]
    ours, bare = first[times.kernel], first.get(BARE_ISAL, {})
    named = {
        "encode_gbps": ours[ErasureTask.ENCODE],
        "decode_gbps": ours[ErasureTask.DECODE],
        "isal_gbps": bare.get(ErasureTask.ENCODE),
        "copy_limit_gbps": first[MEMORY_COPY][ErasureTask.COPY],
    }
    return ErasureFigures(
        encode_gbps=ours[ErasureTask.ENCODE].gbps,
        decode_gbps=ours[ErasureTask.DECODE].gbps,
        isal_gbps=bare[ErasureTask.ENCODE].gbps if bare else None,
        copy_limit_gbps=first[MEMORY_COPY][ErasureTask.COPY].gbps,
        encode_of_isal=_ratios(times, ErasureTask.ENCODE),
        decode_of_isal=_ratios(times, ErasureTask.DECODE),
        spread={name: (speed.low, speed.high) for name, speed in named.items() if speed is not None},
        n=wanted.rounds,
        k=wanted.data_shards,
        m=wanted.parity_shards[0],
        shard_bytes=wanted.shard_bytes,
        skew_bytes=wanted.skew_bytes,
        kernel=times.kernel,
        versions=times.versions,
        missing=times.missing,
        speeds=speeds,
        machine=f"{machine}, {times.processor}, one core used",
    )


def _ratios(times: ErasureTimings, task: ErasureTask) -> dict[str, float]:
    """Return, by m, the median over rounds of our speed over that of the bare call in the same round."""
    found = {(timed.parity_shards, timed.who): timed.times_s for timed in times.timed if timed.task is task}
    return {
        str(m): round(
            statistics.median(
                theirs / ours for theirs, ours in zip(bare, found[m, times.kernel], strict=True)
            ),
            3,
        )
        for (m, who), bare in found.items()
        if who == BARE_ISAL
    }


def _rounded(gbps: float) -> float:
    """Return the value with four significant digits: reedsolo is ten thousand times slower than ISA-L."""
    return float(f"{gbps:.4g}")
