"""Figures of the step benchmark from its measurements. Pure.

G is the size of one tree of gradients in bytes, H the number of hosts, M the most units that a host has. A host sends
(M + 1) G (H - 1) / H bytes in a reproducible sum, and holds 2 M G; see `training/step/reduction.py`.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

MicrobatchId = tuple[int, int]
"""Step and index."""


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The machine-readable line.

    Attributes:
        fast_overhead: of the trainer with fast sums, over a plain `jax.jit` data-parallel loop; 0.02 is 2 %.
        reproducible_overhead: over fast sums, by unit size.
        redone_microbatches: computed again, a kill.
        lost_microbatches: that the killed workers had computed, a kill. Nobody can redo less.
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
        host: that it was on.
        pid: of the worker.
        step: that it died in, counted from 0.
    """

    host: str
    pid: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RedoneWork:
    """What a kill cost, in microbatches of its step.

    Attributes:
        lost: that the dead worker had computed.
        redone: computed more often than once.
        missing: computed by no process, though the step was committed.
    """

    lost: int
    redone: int
    missing: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCost:
    """What a sum over hosts takes on each of them, in bytes."""

    sent_bytes: float
    held_bytes: float


def overhead(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    """By how much our median step is longer than theirs, as a fraction of it.

    >>> overhead([1.0, 1.1, 9.0], [1.0])
    0.1
    """
    return round(statistics.median(ours_s) / statistics.median(theirs_s) - 1, 4)


def count_work(
    computed: Mapping[int, Sequence[MicrobatchId]], kill: WorkerKill, microbatches: int
) -> RedoneWork:
    """What one kill cost.

    Args:
        computed: what each worker process computed, by its pid, as often as it did.
        kill: of one of them.
        microbatches: of a step.
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
    """How many microbatches were computed again in the first `steps` steps, whatever the reason."""
    counts = collections.Counter(m for mine in computed.values() for m in mine if m[0] < steps)
    return counts.total() - len(counts)


def find_missing(
    computed: Mapping[int, Sequence[MicrobatchId]], steps: int, microbatches: int
) -> list[MicrobatchId]:
    """The microbatches of committed steps that no process computed; none, unless there is a bug."""
    done = {m for mine in computed.values() for m in mine}
    return [(s, i) for s in range(steps) for i in range(microbatches) if (s, i) not in done]


def max_units_per_host(microbatches: int, unit: int, hosts: int) -> int:
    """M: the most units that a host has when they are dealt out evenly."""
    units = -(-microbatches // unit)
    return -(-units // hosts)


def reproducible_cost(tree_bytes: int, units_a_host: int, hosts: int) -> ReductionCost:
    """Of a reproducible sum: (M + 1) G (H - 1) / H sent, 2 M G held."""
    sent_bytes = (units_a_host + 1) * tree_bytes * (hosts - 1) / hosts
    return ReductionCost(sent_bytes=sent_bytes, held_bytes=2.0 * units_a_host * tree_bytes)


def fast_cost(tree_bytes: int, hosts: int) -> ReductionCost:
    """Of one all-reduce: 2 G (H - 1) / H sent, G held."""
    return ReductionCost(sent_bytes=2 * tree_bytes * (hosts - 1) / hosts, held_bytes=float(tree_bytes))


def are_equal(words: Iterable[str]) -> bool:
    """Whether there is a word, and no other."""
    return len(set(words)) == 1
