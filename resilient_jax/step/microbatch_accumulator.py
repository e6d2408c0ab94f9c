"""Adds microbatches to running totals on this host's replicas: the part of an accumulation that needs no other host."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.contributions import Contributions, PartialSum
from resilient_jax.step.replicas import Replica

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch, about to be accumulated.

    Attributes:
        step: the step it belongs to.
        index: its index in the step: the same examples, whichever host computes it.
        replica: the replica that computes it.
        batch: this host's rows of it, as read from `data`; None without.
    """

    step: int
    index: int
    replica: Replica
    batch: Any = None


AccumulateFunction = Callable[[Tree, Microbatch], Tree]
"""Returns a running total with one microbatch added."""


class BatchSource(Protocol):
    """The source of microbatches; `data.prefetcher.Prefetcher` is one."""

    def expect(self, wanted: Sequence[tuple[int, int, tuple[int, int]]], /) -> None:
        """Begin to read these (step, index, data shard), in this order."""
        ...

    def get(self, step: int, index: int, data_shard: tuple[int, int], /) -> Any:  # noqa: ANN401 - a user's tree
        """Return this host's rows of a microbatch."""
        ...


class StepHooks(Protocol):
    """What an accumulation needs of the session around it."""

    def raise_if_ended(self) -> None:
        """Raise GenerationEnded if this generation has ended."""

    def hit_failpoint(self, failpoint: FailPoint, index: int = ...) -> bool:
        """Let a test hold or break this host; return whether the values computed here are to be corrupted."""
        ...


class CompilationTurns:
    """Lets the replicas of a host compile one after the other: the first fills the compilation cache for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: set[tuple[str, Replica]] = set()
        """Accumulations, by name, with the replicas that have called theirs. Written under the lock only."""

    @contextlib.contextmanager
    def take(self, name: str, replica: Replica) -> Iterator[None]:
        """Hold the lock while a replica makes its first call of an accumulation."""
        # Read without the lock: an entry is added only by its replica's own thread.
        if (name, replica) in self._done:
            yield
            return
        with self._lock:
            yield
            self._done.add((name, replica))


class MicrobatchAccumulator:
    """Calls the user's function for one microbatch after the other."""

    def __init__(
        self,
        accumulate_fn: AccumulateFunction[Any],
        spec: AccumulationSpec,
        data: BatchSource | None,
        hooks: StepHooks,
        turns: CompilationTurns,
    ) -> None:
        self._accumulate_fn = accumulate_fn
        self._spec = spec
        self._data = data
        self._hooks = hooks
        self._turns = turns

    def accumulate_units(
        self,
        contributions: Contributions,
        replica: Replica,
        progress: Mapping[int, int],
        zeros: Any,  # noqa: ANN401 - a tree
        pool: int | None,
    ) -> None:
        """Accumulate units on one replica; each microbatch is kept in `contributions` at once.

        Args:
            contributions: of this host.
            replica: that computes.
            progress: the units, with the number of microbatches of each that are accumulated already.
            zeros: the total of no microbatches.
            pool: the key of the pooled partial sum, if the accumulation is pooled; None: another host of the replica
                keeps it.
        """
        start = replica.to_replica(zeros)
        if self._spec.is_pooled:
            total = start
            for unit in progress:
                for index in self._spec.microbatches_of(unit):
                    total = self._accumulate(replica, total, index)
                # Kept after complete units only: `pooled_units` cannot tell that half of a unit is in the sum. The
                # count is 0 because a pooled sum is no prefix of one unit.
                if pool is not None:
                    contributions.partial_sums[pool] = PartialSum(0, replica.to_local(total))
                    contributions.pooled_units.add(unit)
            return
        for unit, count in progress.items():
            total = start
            if count:
                total = _reshard_like(start, replica.to_replica(contributions.partial_sums[unit].total))
            for index in self._spec.microbatches_of(unit)[count:]:
                total = self._accumulate(replica, total, index)
                count += 1
                contributions.partial_sums[unit] = PartialSum(count, replica.to_local(total))

    def _accumulate(self, replica: Replica, total: Any, index: int) -> Any:  # noqa: ANN401 - a tree
        step = self._spec.step
        # A replica on one host runs no collective that a peer's death would break: only this check ends its work.
        self._hooks.raise_if_ended()
        self._hooks.hit_failpoint(FailPoint.BEFORE_MICROBATCH, index)
        batch = self._data.get(step, index, replica.data_shard) if self._data is not None else None
        microbatch = Microbatch(step=step, index=index, replica=replica, batch=batch)
        with self._turns.take(self._spec.name, replica):
            total = self._accumulate_fn(total, microbatch)
        if self._hooks.hit_failpoint(FailPoint.AFTER_MICROBATCH, index):
            total = jax.tree.map(_corrupt, total)
        if replica.data_shard != (0, 1):
            jax.block_until_ready(total)  # one program with collectives at a time: see jax_runtime's README
        return total


def _corrupt(leaf: jax.Array) -> jax.Array:
    """Return NaN wherever the dtype has it, as a faulty processor may."""
    return leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf


def _reshard_like(like: Tree, total: Tree) -> Tree:
    """Return a total that was begun under another arrangement with the sharding that the program is compiled for."""

    def reshard(origin: jax.Array, leaf: jax.Array) -> jax.Array:
        if leaf.sharding == origin.sharding or not leaf.is_fully_addressable:
            return leaf
        return jax.device_put(leaf, origin.sharding)

    return jax.tree.map(reshard, like, total)
