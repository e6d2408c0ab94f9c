"""Computes microbatches on this host's replicas and adds them up: what needs no other host."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.protocol.failpoints import Corruption, FailPoint
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.step.accumulation_layout import AccumulationLayout
from resilient_jax.step.assignment import AccumulationSpec
from resilient_jax.step.audit import Audit, Digest
from resilient_jax.step.audit_run import digest_result
from resilient_jax.step.batch_source import BatchSource, MicrobatchInput
from resilient_jax.step.contributions import Contribution, Contributions
from resilient_jax.step.data_sample import DataSample
from resilient_jax.step.limit_exchange import LimitExchange
from resilient_jax.step.replica_partners import ReplicaPartners
from resilient_jax.step.replicas import Replica
from resilient_jax.step.running_total import compute_exponents
from resilient_jax.telemetry.worker_activity import worker_activity

Tree = TypeVar("Tree")
FLIPPED_BIT: Final = 2**22
"""The highest bit of a float32's mantissa: the number changes by a third at most, and stays finite."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch, about to be accumulated.

    Attributes:
        step: number of the step that it belongs to.
        index: position in the step, from 0. With the step it names the same examples, whichever host computes them.
        replica: the devices that compute it.
        batch: this host's rows of it, as read from `data`; None: the compute function reads them itself.
    """

    step: int
    index: int
    replica: Replica
    batch: Any = None


ComputeFunction = Callable[[Microbatch], Tree]
"""Returns what is to be summed of one microbatch."""


class StepHooks(Protocol):
    """What an accumulation needs of the session around it."""

    def raise_if_ended(self) -> None:
        """Raise GenerationEnded if this generation has ended."""

    def digest_state(self) -> np.ndarray:
        """Return int32[words], the digests of what this host has of the state that this step begins with."""
        ...

    def compare_hosts(self, states: np.ndarray, sample: DataSample, reads: np.ndarray) -> None:
        """Compare the digests of all hosts' states, int32[hosts, words]; do not return if this host's state is wrong.

        Report if reads of the same microbatch, int32[reads, words], have returned different arrays.
        """
        ...

    def report_misfits(self, name: str, leaves: Sequence[str]) -> None:
        """Tell that limits of leaves were too low or too high for a sum, which is made again."""
        ...

    def leave_job(self, why: str) -> NoReturn:
        """End this host's part in the job, which goes on without it: its script is another than that of the others."""
        ...

    def hit_failpoint(self, failpoint: FailPoint, index: int = ...) -> Corruption:
        """Let a test hold or break this host; return what becomes of the values computed here."""
        ...


class CompilationTurns:
    """Lets the replicas of a host compile one after the other: the first fills the compilation cache for all.

    Their programs are the same but for the devices. Threads that compile at once would each compile all of it.
    """

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
    """Calls the user's function for one microbatch after the other.

    Attributes:
        partners: the other hosts of replicas on several hosts; None: their programs are run without agreement.
        digests: what identifies the results of audited microbatches, by index.
        inputs: what is known of each microbatch that was read here.
        lone_microbatch: shapes, dtypes and shardings of what a microbatch gives, if a replica on this host alone has
            computed a single one; else None.
    """

    def __init__(
        self,
        compute_fn: ComputeFunction[Any],
        spec: AccumulationSpec,
        layout: AccumulationLayout,
        data: BatchSource | None,
        hooks: StepHooks,
        turns: CompilationTurns,
        audits: Sequence[Audit] = (),
    ) -> None:
        self._compute_fn = compute_fn
        self._spec = spec
        self._layout = layout
        self._data = data
        self._hooks = hooks
        self._turns = turns
        self.partners: ReplicaPartners | None = None
        self._audited = {audit.microbatch for audit in audits}
        self.digests: dict[int, Digest] = {}
        self.inputs: list[MicrobatchInput] = []
        self.lone_microbatch: Any = None

    def accumulate(
        self,
        contributions: Contributions,
        replica: Replica,
        indexes: Sequence[int],
        number: int,
        exchange: LimitExchange,
    ) -> None:
        """Compute microbatches on one replica; each is kept in `contributions` at once.

        Args:
            contributions: this host's; other replicas' threads write to it at the same time, each its own part.
            replica: the one whose thread this is.
            indexes: the microbatches to compute, in order.
            number: the key of the replica's part in `contributions`. If it is there already it is continued, so that
                nothing is to be merged.
            exchange: where to wait for the limits, if they are not known.
        """
        for index in indexes:
            result = self._compute(replica, index)
            if len(indexes) == 1 and replica.is_on_one_host:
                self.lone_microbatch = jax.tree.map(_describe, result)
            if contributions.limits is None:
                self._wait_for_limits(contributions, replica, index, number, result, exchange)
            # It is there already if it was the part on its own that waited for the limits, and has become the total.
            if not contributions.has(index):
                # Of a replica on several hosts all is on this host's devices already: see `_call`.
                move = replica.to_replica if replica.is_on_one_host else lambda total: total
                # To start a total and to add to one are two programs, each compiled at its own first call.
                with self._turns.take(
                    f"{self._spec.name} total {number not in contributions.parts}", replica
                ):
                    contributions.add(number, index, result, move, is_counted=self._is_counted(replica))

    def _wait_for_limits(
        self,
        contributions: Contributions,
        replica: Replica,
        index: int,
        number: int,
        result: Any,  # noqa: ANN401 - a tree
        exchange: LimitExchange,
    ) -> None:
        """Return when the limits are known, and all that waits for them has become totals."""
        # It counts as computed meanwhile: if a host dies, it is not computed again. Where the replica continues a part
        # that an earlier generation has left unstarted, this microbatch waits under another number.
        waiting_number = number if number not in contributions.parts else contributions.draw_waiting_number()
        contributions.parts[waiting_number] = Contribution(
            result,
            frozenset({index}),
            (compute_exponents(self._spec, result),),
            is_started=False,
            is_counted=self._is_counted(replica),
        )
        jax.block_until_ready(result)  # what this takes is this host's own time; the wait is not
        exchange.wait()
        # Else it is the replica's part itself, and a total by now. `accumulate` adds this one to the earlier part.
        if waiting_number != number:
            del contributions.parts[waiting_number]

    def compute_digest(self, replica: Replica, index: int) -> Digest:
        """Return the digest of a microbatch that is computed on a replica for comparison, and not accumulated."""
        self._hooks.raise_if_ended()
        return digest_result(self._call(replica, index))

    def _compute(self, replica: Replica, index: int) -> Any:  # noqa: ANN401 - a tree
        # A replica on one host runs no collective that a peer's death would break: only this check ends its work.
        self._hooks.raise_if_ended()
        self._hooks.hit_failpoint(FailPoint.BEFORE_MICROBATCH, index)
        result = self._call(replica, index)
        if index in self._audited:
            self.digests[index] = digest_result(result)
        return result

    def _call(self, replica: Replica, index: int) -> Any:  # noqa: ANN401 - a tree
        """Return what the user's function gives of a microbatch, on this host's devices."""
        step = self._spec.step
        batch = None
        if self._data is not None:
            started_s = time.monotonic()
            with worker_activity.task(WorkerTask.INPUT):
                self._hooks.hit_failpoint(FailPoint.BEFORE_INPUT, index)
                batch = self._data.get(step, index, replica.data_shard)
            waited_s = time.monotonic() - started_s
            self.inputs.append(MicrobatchInput(waited_s, self._data.lengths(step, index)))
        microbatch = Microbatch(step=step, index=index, replica=replica, batch=batch)
        with self._turns.take(self._spec.name, replica), worker_activity.task(WorkerTask.COMPUTE):
            # Programs over hosts have collectives; what comes after them must need no other host.
            compute = self._compute_fn if replica.is_on_one_host else self._run_together
            result = compute(microbatch)
            if self._layout.has_shards or not replica.is_on_one_host:
                result = self._layout.to_local(result)
        return self._corrupt(result, index)

    def _is_counted(self, replica: Replica) -> bool:
        """Return whether this host, of those of the replica, brings the replica's total into the sum."""
        return replica.rank == 0 or self._layout.has_shards

    def _run_together(self, microbatch: Microbatch) -> Any:  # noqa: ANN401 - a tree
        if self.partners is None:
            # In a rehearsal a program that can be told from its arguments is loaded.
            bind = getattr(self._compute_fn, "bind", None)
            program, *arguments = (self._compute_fn, microbatch) if bind is None else bind(microbatch)
            return collective_thread.run(program, *arguments)
        return self.partners.run(microbatch.replica, self._compute_fn, microbatch)

    def _corrupt(self, result: Tree, index: int) -> Tree:
        """Return what was computed, or what a test makes of it."""
        match self._hooks.hit_failpoint(FailPoint.AFTER_MICROBATCH, index):
            case Corruption.NAN:
                return jax.tree.map(_replace_by_nan, result)
            case Corruption.BIT_FLIP:
                return flip_bit(result)
            case Corruption.NONE:
                return result


def _describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _replace_by_nan(leaf: jax.Array) -> jax.Array:
    """Return NaN wherever the dtype has it, as a faulty processor may."""
    return leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf


def flip_bit(tree: Tree) -> Tree:
    """Return the tree with one bit flipped, in the middle of the largest leaf of float32: finite, and unnoticed."""
    leaves, treedef = jax.tree.flatten(tree)
    floats = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32 and leaf.size]
    largest = max(floats, key=lambda i: leaves[i].size)
    leaf = leaves[largest]
    words = np.array(leaf).view(np.uint32)
    words.reshape(-1)[words.size // 2] ^= np.uint32(FLIPPED_BIT)
    leaves[largest] = jax.device_put(words.view(np.float32), leaf.sharding)
    return treedef.unflatten(leaves)
