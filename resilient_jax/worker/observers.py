"""Observers of a session, outside of the training logic: the ledger, failpoints, compilation for likely next worlds.

A `Session` calls its observers in their order, at the start of a step, at each failpoint, after each reduction and
after each commit. Observers do not change the training, except that a failpoint may hold, break or corrupt a host.
"""

import itertools
from typing import Any, Final

from resilient_jax.compile.ahead_of_time import AheadOfTimeCompiler
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.protocol.failpoints import Corruption, FailPoint, FailPoints
from resilient_jax.state.flat_state import FlatState
from resilient_jax.step.accumulation_call import AccumulationCall
from resilient_jax.worker.generation_info import GenerationInfo
from resilient_jax.worker.ledger import Ledger

Sums = Any
"""A tree of arrays."""
PRECOMPILE_DELAY_S: Final = 2.0
"""Delay from the start of a world until programs for the next are compiled: until then hosts may be about to join."""


class Observer:
    """Does nothing at any moment; subclasses override the moments that they watch."""

    def on_step_begin(self, step: int) -> None:
        """Called before the user's code runs `step`."""

    def on_failpoint(self, failpoint: FailPoint, step: int, index: int) -> Corruption:
        """Called at each failpoint, from any thread; return what becomes of the values computed there."""
        return Corruption.NONE

    def on_reduce(self, call: AccumulationCall, owners: tuple[HostName, ...], total: Sums) -> None:
        """Called when an accumulation is reduced to `total`; `owners` gives the host that computed each microbatch."""

    def on_commit(self, state: FlatState) -> None:
        """Called when `state` has become the committed state."""

    def on_restore(self, state: FlatState) -> None:
        """Called when `state` is what this host resumes from."""


class FailPointObserver(Observer):
    """Executes the failpoint orders of a test or a chaos campaign."""

    def __init__(self, failpoints: FailPoints) -> None:
        self._failpoints = failpoints
        collective_thread.enter = None

    def on_step_begin(self, step: int) -> None:
        """Have the step's collectives hit their failpoint, on the thread that runs them."""
        collective_thread.enter = lambda: self._failpoints.hit(FailPoint.IN_COLLECTIVE, step)

    def on_failpoint(self, failpoint: FailPoint, step: int, index: int) -> Corruption:
        """Hold, break or corrupt this host as an order demands."""
        return self._failpoints.hit(failpoint, step, index)


class LedgerObserver(Observer):
    """Appends microbatches, commits and restores to the ledger."""

    def __init__(self, ledger: Ledger, info: GenerationInfo) -> None:
        self._ledger = ledger
        self._info = info
        self._owners: dict[str, tuple[HostName, ...]] = {}
        """Of each microbatch of this step, by the name of the accumulation."""

    def on_step_begin(self, step: int) -> None:
        """Forget the owners of the previous step's microbatches."""
        self._owners.clear()

    def on_failpoint(self, failpoint: FailPoint, step: int, index: int) -> Corruption:
        """Record each microbatch before it is computed."""
        if failpoint is FailPoint.BEFORE_MICROBATCH:
            self._ledger.record_microbatch(step, index, self._info.number)
        return Corruption.NONE

    def on_reduce(self, call: AccumulationCall, owners: tuple[HostName, ...], total: Sums) -> None:
        """Keep the owners for the entry of the step."""
        self._owners[call.spec.name] = owners

    def on_commit(self, state: FlatState) -> None:
        """Record the step with digests of the state."""
        self._ledger.record_commit(
            state,
            self._info.number,
            len(self._info.hosts),
            self._owners,
            is_first=self._info.process_index == 0,
        )

    def on_restore(self, state: FlatState) -> None:
        """Record what this host resumes from."""
        self._ledger.record_restore(
            state, self._info.number, len(self._info.hosts), is_first=self._info.process_index == 0
        )


class ReductionPrecompiler(Observer):
    """Compiles ahead of time the reductions of the worlds that are likely next: with fewer hosts, and with one more."""

    def __init__(self, compiler: AheadOfTimeCompiler) -> None:
        self._compiler = compiler
        self._names: set[str] = set()
        """Of accumulations whose first call was seen."""
        self._new_calls: list[AccumulationCall] = []

    def on_reduce(self, call: AccumulationCall, owners: tuple[HostName, ...], total: Sums) -> None:
        """Keep the first call of each name."""
        if call.spec.name not in self._names:
            self._names.add(call.spec.name)
            self._new_calls.append(call)

    def on_step_begin(self, step: int) -> None:
        """Enqueue what the accumulations that were called for the first time in the last step would need."""
        if not self._new_calls:
            return
        # The first job of each accumulation first, then the second ones: in the order of the likely worlds.
        rounds = itertools.zip_longest(*(call.list_jobs() for call in self._new_calls))
        self._compiler.enqueue(
            [job for jobs in rounds for job in jobs if job is not None], PRECOMPILE_DELAY_S
        )
        self._new_calls.clear()
