"""Figures of the step benchmark from its measurements. Pure."""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import msgspec

MicrobatchId = tuple[int, int]
"""Step, and index in the step."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON.

    Attributes:
        fast_overhead: of the trainer with fast sums, over a plain `jax.jit` data-parallel loop; 0.02 is 2 %.
        fast_spread: the least and the largest of its windows.
        exact_overhead: of exact sums over fast ones, each host adding up four microbatches of one sequence.
        exact_spread: the least and the largest of its windows.
        exact_overhead_one_microbatch: the same, of one microbatch of four sequences.
        exact_memory_ratio: peak memory of a worker, exact over fast.
        exact_traffic_ratio: bytes that a host sends in a step, exact over fast.
        error_ratio: error of an exact sum over that of a float32 sum in order: the largest of all arrays.
        error_ratio_by_array: the same of each array.
        error_ratio_sparse: the same of an array that is zero in microbatch 0.
        sums_repeated: arrays and numbers of microbatches whose sum is made again in bins.
        wide_error_ratio: the same of a sum with `reduction="exact_wide"`.
        redone_microbatches: computed again, per kill.
        lost_microbatches: that the killed workers had computed, per kill; the least that must be redone.
        bitwise_equal: whether the weights after all kills are those of an undisturbed run on one host.
        step_s: median step times in seconds, by loop.
    """

    fast_overhead: float
    fast_spread: tuple[float, float]
    exact_overhead: float
    exact_spread: tuple[float, float]
    exact_overhead_one_microbatch: float
    exact_memory_ratio: float
    exact_traffic_ratio: float
    error_ratio: float
    error_ratio_by_array: dict[str, float]
    error_ratio_sparse: float
    sums_repeated: tuple[str, ...]
    wide_error_ratio: float
    redone_microbatches: float
    lost_microbatches: float
    bitwise_equal: bool
    step_s: dict[str, float]
    machine: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKill:
    """One worker that was killed.

    Attributes:
        host: of the worker.
        pid: of the worker.
        step: in which the worker was killed, counted from 0.
    """

    host: str
    pid: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RedoneWork:
    """Cost of a kill, in microbatches of its step.

    Attributes:
        lost: that the killed worker had computed.
        redone: computations beyond the first of each microbatch.
        missing: computed by no process, though the step was committed.
    """

    lost: int
    redone: int
    missing: int


def overheads(ours_s: Sequence[Sequence[float]], theirs_s: Sequence[Sequence[float]]) -> list[float]:
    """Return by how much our median step exceeds theirs, as a fraction of theirs, for each pair of windows; ascending.

    >>> overheads([[1.0, 1.1, 9.0], [3.0]], [[1.0], [2.0]])
    [0.1, 0.5]
    """
    return sorted(
        round(statistics.median(ours) / statistics.median(theirs) - 1, 4)
        for ours, theirs in zip(ours_s, theirs_s, strict=True)
    )


def count_work(
    computed: Mapping[int, Sequence[MicrobatchId]], kill: WorkerKill, microbatches: int
) -> RedoneWork:
    """Return the cost of one kill.

    Args:
        computed: microbatches that each worker process computed, by pid, with repetitions.
        kill: of one of these workers.
        microbatches: number per step.
    """
    counts = collections.Counter(
        index for mine in computed.values() for step, index in mine if step == kill.step
    )
    own = {index for step, index in computed.get(kill.pid, ()) if step == kill.step}
    return RedoneWork(
        lost=len(own),
        redone=counts.total() - len(counts),
        missing=len(set(range(microbatches)) - set(counts)),
    )


def count_redone(computed: Mapping[int, Sequence[MicrobatchId]], steps: int) -> int:
    """Return how many microbatches of the first `steps` steps were computed again, for any reason."""
    counts = collections.Counter(m for mine in computed.values() for m in mine if m[0] < steps)
    return counts.total() - len(counts)


def find_missing(
    computed: Mapping[int, Sequence[MicrobatchId]], steps: int, microbatches: int
) -> list[MicrobatchId]:
    """Return the microbatches of committed steps that no process computed; there are none, unless there is a bug."""
    done = {m for mine in computed.values() for m in mine}
    return [(s, i) for s in range(steps) for i in range(microbatches) if (s, i) not in done]
