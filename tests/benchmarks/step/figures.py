"""Figures of the step benchmark from its measurements. Pure.

G is the size of one tree of gradients in bytes, H the number of hosts, M the largest number of units of a host. In a
reproducible sum a host sends (M + 1) G (H - 1) / H bytes and needs memory for 2 M G; see
`resilient_jax/step/reduction.py`.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

MicrobatchId = tuple[int, int]
"""Step, and index in the step."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON.

    Attributes:
        fast_overhead: of the trainer with fast sums, over a plain `jax.jit` data-parallel loop; 0.02 is 2 %.
        reproducible_overhead: over fast sums, by unit size.
        redone_microbatches: computed again, per kill.
        lost_microbatches: that the killed workers had computed, per kill; the least that must be redone.
        bitwise_equal: whether the weights after all kills are those of an undisturbed run on one host.
        step_s: median step times in seconds, by loop.
    """

    fast_overhead: float
    reproducible_overhead: dict[str, float]
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCost:
    """Bytes that a sum over hosts sends from, and needs on, each host."""

    sent_bytes: float
    held_bytes: float


def overhead(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    """Return by how much our median step exceeds theirs, as a fraction of theirs.

    >>> overhead([1.0, 1.1, 9.0], [1.0])
    0.1
    """
    return round(statistics.median(ours_s) / statistics.median(theirs_s) - 1, 4)


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


def max_units_per_host(microbatches: int, unit: int, hosts: int) -> int:
    """Return M, the largest number of units of a host when units are distributed evenly."""
    units = -(-microbatches // unit)
    return -(-units // hosts)


def reproducible_cost(tree_bytes: int, units_a_host: int, hosts: int) -> ReductionCost:
    """Return the cost of a reproducible sum: (M + 1) G (H - 1) / H bytes sent, 2 M G in memory."""
    sent_bytes = (units_a_host + 1) * tree_bytes * (hosts - 1) / hosts
    return ReductionCost(sent_bytes=sent_bytes, held_bytes=2.0 * units_a_host * tree_bytes)


def fast_cost(tree_bytes: int, hosts: int) -> ReductionCost:
    """Return the cost of one all-reduce: 2 G (H - 1) / H bytes sent, G in memory."""
    return ReductionCost(sent_bytes=2 * tree_bytes * (hosts - 1) / hosts, held_bytes=float(tree_bytes))


def are_equal(words: Iterable[str]) -> bool:
    """Return whether there is at least one string, and all are equal."""
    return len(set(words)) == 1
