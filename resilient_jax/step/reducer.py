"""Sums over all microbatches of a step, finished despite failures.

The work of a sum is dealt out to replicas in units; every host knows who has what, so nothing is said while all goes
well. When a host dies, train is called again in the next generation and comes here again in the same step: the hosts
say what they have added up (one small sum), what is complete belongs to the first host that has it, and the rest is
dealt out again. A host that dies after the reduction takes nothing along: the others have the result.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.compile.ahead_of_time import CancellationCheck
from resilient_jax.errors import CallerError
from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.compile_cache import is_portable_cache_on
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.failpoints import ANY_INDEX, FailPoint
from resilient_jax.step.assignment import (
    Assignment,
    ReplicaLocation,
    ReplicaShape,
    assign_units,
    find_common_progress,
    locate_replicas,
    predict_widths_after_loss,
    replica_speeds,
)
from resilient_jax.step.contributions import AccumulationSpec, Contributions, PartialSum
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.quotas import accept_disjoint_claims, distribute_units
from resilient_jax.step.reduction import AllReduce, OrderedAllReduce
from resilient_jax.step.replicas import Replica, build_replicas

Tree = TypeVar("Tree")
PROGRESS_PADDING = 256
SPEED_EXCHANGE_INTERVAL_STEPS = 16
"""Steps between two exchanges of measured speeds: one small all-reduce each, a millisecond."""


class BatchSource(Protocol):
    """Where microbatches come from; `data.prefetch.Prefetcher` is one."""

    def expect(self, wanted: Sequence[tuple[int, int, tuple[int, int]]], /) -> None: ...
    def get(self, step: int, index: int, part: tuple[int, int], /) -> Any: ...  # noqa: ANN401 - a user's tree


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch, about to be added.

    Attributes:
        step: the step it belongs to.
        index: its number in the step; who computes it does not depend on it, what it is does.
        replica: that computes it.
        batch: this host's rows of it, as read from `data`; None without.
    """

    step: int
    index: int
    replica: Replica
    batch: Any = None


AccumulateFunction = Callable[[Tree, Microbatch], Tree]


class StepHooks(Protocol):
    """What a sum needs of the world around it."""

    def raise_if_ended(self) -> None:
        """Raises when this generation has ended."""

    def reach(self, place: FailPoint, index: int) -> bool:
        """Here a test can hold or break this host; gives whether the numbers computed here are to be spoiled."""
        ...


class Reducer:
    """The sums of one generation.

    Attributes:
        owners: of each microbatch of the sum that was last made, the place of a host that computed it.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        process_index: ProcessIndex,
        kept: dict[str, Contributions],
        surroundings: StepHooks,
    ) -> None:
        by_host: dict[int, list[Device]] = {}
        for device in devices:
            by_host.setdefault(device.process_index, []).append(device)
        self._process_indexes = sorted(by_host)
        self._by_place = [by_host[index] for index in self._process_indexes]
        self._me = self._process_indexes.index(process_index)
        self._grid = HostGrid(devices, process_index)
        self._kept = kept
        self._surroundings = surroundings
        self._agreed: set[str] = set()
        """Of which sums all know what the others had added up when this generation began."""
        self._replicas: dict[ReplicaShape, tuple[tuple[ReplicaLocation, ...], dict[int, Replica]]] = {}
        self._first_calls = _FirstCalls()
        self._seconds = np.ones(len(by_host), np.float32)
        """For a microbatch, of each host; only their ratio counts."""
        self._own_seconds = 0.0
        self._has_computed = False
        """Since speeds were compared."""
        self.owners: tuple[int, ...] = ()

    def locate_replicas(self, shape: ReplicaShape) -> tuple[ReplicaLocation, ...]:
        """Where the replicas of this generation are."""
        return self._arrange(shape)[0]

    @property
    def replicas_span_hosts(self) -> bool:
        """Whether any sum used a replica on several hosts."""
        return any(shape.hosts > 1 for shape in self._replicas)

    def _arrange(self, shape: ReplicaShape) -> tuple[tuple[ReplicaLocation, ...], dict[int, Replica]]:
        if shape not in self._replicas:
            seats = locate_replicas(self._process_indexes, shape, min(map(len, self._by_place)))
            self._replicas[shape] = seats, build_replicas(seats, self._by_place, self._me, shape)
        return self._replicas[shape]

    def all_reduce(self, tree: Tree) -> Tree:
        """The sum over hosts of each leaf."""
        total = AllReduce(self._grid)(tree)
        jax.block_until_ready(total)
        self._surroundings.raise_if_ended()
        return total

    def accumulate_microbatches(
        self,
        spec: AccumulationSpec,
        accumulate_fn: AccumulateFunction[Tree],
        zeros: Tree,
        *,
        data: BatchSource | None,
        replica_shape: ReplicaShape,
        balance_by_speed: bool,
    ) -> Tree:
        """See `World.accumulate_microbatches`."""
        mine = self._take_up(spec, zeros)
        seats, replicas = self._arrange(replica_shape)
        progress = self._agree(mine)
        if balance_by_speed and spec.step % SPEED_EXCHANGE_INTERVAL_STEPS == 0:
            self._compare_speeds()
        assignment = assign_units(spec, seats, progress, 1 / self._seconds)
        if data is not None:
            _announce(data, spec, seats, replicas, assignment.units_by_replica, 1 / self._seconds)
        self._compute(
            mine,
            replicas,
            assignment,
            progress,
            _Adder(accumulate_fn, spec, data, self._surroundings, self._first_calls),
            zeros,
        )
        self.owners = tuple(
            assignment.owners[index // spec.unit_size] for index in range(spec.num_microbatches)
        )
        self._surroundings.reach(FailPoint.BEFORE_REDUCE, ANY_INDEX)
        if spec.is_pooled:
            total = self._sum_pooled(mine, zeros)
        else:
            parts = {
                u: mine.partial_sums[u].total
                for u, owner in enumerate(assignment.owners)
                if owner == self._me
            }
            total = OrderedAllReduce(self._grid)(parts, assignment.owners, zeros)
        jax.block_until_ready(total)
        self._surroundings.raise_if_ended()
        self._surroundings.reach(FailPoint.AFTER_REDUCE, ANY_INDEX)
        return total

    def _take_up(self, job: AccumulationSpec, zeros: Any) -> Contributions:  # noqa: ANN401 - a tree
        """What this host has added up of this job already, on its devices."""
        kept = self._kept.get(job.name)
        if kept is None or kept.spec != job:
            kept = Contributions(job)
        kept.drop_unusable()
        kept.move_to_devices(zeros)
        self._kept[job.name] = kept
        return kept

    def _agree(self, mine: Contributions) -> np.ndarray:
        """int32[hosts, units]: how many microbatches of each unit every live host has added up.

        Asked only at a generation's first sum of this name: in all others everybody begins with nothing.
        """
        progress = np.zeros((len(self._by_place), mine.spec.num_units), np.int32)
        if mine.spec.name in self._agreed:
            mine.clear()  # of a first try at this very sum, which failed: everything is added up again
            return progress
        progress[self._me] = mine.count_progress()
        padded = np.zeros(_agreement_size(progress.size), np.int32)
        padded[: progress.size] = progress.reshape(-1)
        found = np.asarray(self.all_reduce(padded))[: progress.size].reshape(progress.shape)
        self._agreed.add(mine.spec.name)
        if mine.spec.is_pooled:
            accepted = accept_disjoint_claims([np.flatnonzero(row).tolist() for row in found])
            found = np.where(np.array(accepted)[:, None], found, 0)
            if not accepted[self._me]:
                mine.clear()
        return found

    def _compare_speeds(self) -> None:
        if not self._has_computed:
            self._own_seconds /= (
                2  # too slow to be given any work: it may have become faster, so it is tried again
            )
        self._has_computed = False
        seconds = np.zeros(len(self._by_place), np.float32)
        seconds[self._me] = self._own_seconds
        found = np.asarray(self.all_reduce(seconds))
        if found.all():  # else somebody has computed nothing yet
            self._seconds = found

    def _compute(
        self,
        mine: Contributions,
        replicas: dict[int, Replica],
        assignment: Assignment,
        progress: np.ndarray,
        adder: "_Adder",
        zeros: Any,  # noqa: ANN401 - a tree
    ) -> None:
        """Adds up the units of this host's replicas; each replica of a host has a thread."""
        started_s = time.monotonic()
        shares = []
        for number, replica in replicas.items():
            begun = {
                u: find_common_progress(progress, assignment.locations[number], u)
                for u in assignment.units_by_replica[number]
            }
            keeps = replica.data_shard[0] == 0 or not mine.spec.is_pooled
            pool = min([0, *mine.partial_sums]) - 1 - len(shares)
            shares.append(
                functools.partial(_compute_share, mine, replica, begun, adder, zeros, pool if keeps else None)
            )
        if len(shares) <= 1:
            for share in shares:
                share()
        else:
            with ThreadPoolExecutor(len(shares), "resilient-jax-replica") as threads:
                for done in [threads.submit(share) for share in shares]:
                    done.result()
        jax.block_until_ready([part.total for part in mine.partial_sums.values()])
        count = sum(
            len(mine.spec.microbatches_of(u))
            for number in replicas
            for u in assignment.units_by_replica[number]
        )
        if count:
            self._own_seconds = (time.monotonic() - started_s) / count
            self._has_computed = True

    def _sum_pooled(self, mine: Contributions, zeros: Tree) -> Tree:
        where = jax.tree.map(lambda leaf: leaf.sharding, zeros)
        totals = [
            jax.device_put(mine.partial_sums[number].total, where) for number in sorted(mine.partial_sums)
        ]
        return AllReduce(self._grid)(functools.reduce(_add_trees, totals, zeros))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationCall:
    """A sum over all microbatches as it is called now, to compile ahead what it will need among fewer hosts.

    Attributes:
        devices: of the live hosts.
        process_index: of this one.
        job: what is added up.
        shape: of the replicas.
        like: shapes and types of the total.
    """

    devices: Sequence[Device]
    process_index: ProcessIndex
    spec: AccumulationSpec
    replica_shape: ReplicaShape
    like: Any

    def compile_for_hosts(
        self, num_hosts: int, replica_shape_after: ReplicaShape, check: CancellationCheck
    ) -> bool:
        """Compiles, for the persistent cache, the exchanges between that many hosts. False: it would be of no use.

        What is compiled for some hosts serves any as many (on CPU: see `compile_cache`). More than live now cannot be
        compiled for: nobody has their devices.
        """
        hosts = sorted({device.process_index for device in self.devices})
        if num_hosts > len(hosts) or not is_portable_cache_on(self.devices[0]):
            return False
        hosts.remove(self.process_index)
        chosen = {self.process_index, *hosts[: num_hosts - 1]}
        grid = HostGrid([d for d in self.devices if d.process_index in chosen], self.process_index)
        per_host = grid.local_mesh.size
        try:
            before = locate_replicas(range(len(hosts) + 1), self.replica_shape, per_host)
            after = locate_replicas(range(num_hosts), replica_shape_after, per_host)
        except CallerError:  # such a world is refused, with the reason, when it comes
            return False
        summing = AllReduce(grid)
        # What all have added up, and whether to stop (the trainer): asked as a generation begins.
        for numbers in (_agreement_size(num_hosts * self.spec.num_units), 1):
            summing.compile(np.zeros(numbers, np.int32), check)
        if self.spec.is_pooled:
            summing.compile(self.like, check)
        else:
            for width in predict_widths_after_loss(self.spec, before, after):
                OrderedAllReduce(grid).compile(self.spec.num_units, width, self.like, check)
        return True


def _agreement_size(numbers: int) -> int:
    """Of a vector for so many: mostly the same for fewer hosts, so that its programs are there already."""
    return -(-numbers // PROGRESS_PADDING) * PROGRESS_PADDING


def _announce(
    data: BatchSource,
    job: AccumulationSpec,
    seats: Sequence[ReplicaLocation],
    replicas: dict[int, Replica],
    dealt: Sequence[Sequence[int]],
    speeds: np.ndarray,
) -> None:
    """Says what will be read: what this host computes now, and what it will in the next step if nobody dies."""
    everything = list(range(job.num_units))
    following = distribute_units(everything, replica_speeds(seats, speeds))

    def wanted(step: int, by_replica: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        for number, replica in replicas.items():
            for unit in by_replica[number]:
                for index in job.microbatches_of(unit):
                    yield step, index, replica.data_shard

    data.expect([*wanted(job.step, dealt), *wanted(job.step + 1, following)])


class _FirstCalls:
    """Lets the replicas of a host compile one after the other: the first fills the cache for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: set[tuple[str, Replica]] = set()
        """Sums, by name, and the replicas that have added to them. Guarded by the lock, except for looking."""

    @contextlib.contextmanager
    def in_turn(self, name: str, replica: Replica) -> Iterator[None]:
        if (name, replica) in self._done:
            yield
            return
        with self._lock:
            yield
            self._done.add((name, replica))


class _Adder:
    """Adds one microbatch of a job."""

    def __init__(
        self,
        add: AccumulateFunction[Any],
        job: AccumulationSpec,
        data: BatchSource | None,
        surroundings: StepHooks,
        first_calls: _FirstCalls,
    ) -> None:
        self._add = add
        self._job = job
        self._data = data
        self._surroundings = surroundings
        self._first_calls = first_calls

    def __call__(self, replica: Replica, total: Any, index: int) -> Any:  # noqa: ANN401 - a tree
        step = self._job.step
        self._surroundings.raise_if_ended()
        self._surroundings.reach(FailPoint.BEFORE_MICROBATCH, index)
        batch = self._data.get(step, index, replica.data_shard) if self._data is not None else None
        microbatch = Microbatch(step=step, index=index, replica=replica, batch=batch)
        with self._first_calls.in_turn(self._job.name, replica):
            total = self._add(total, microbatch)
        if self._surroundings.reach(FailPoint.AFTER_MICROBATCH, index):
            total = jax.tree.map(_spoil, total)
        if replica.data_shard != (0, 1):
            jax.block_until_ready(total)  # one program with collectives at a time: see jax_runtime's README
        return total


def _spoil(leaf: jax.Array) -> jax.Array:
    """NaN where there can be; as a processor that computes wrongly leaves it."""
    return leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf


def _compute_share(
    mine: Contributions,
    replica: Replica,
    begun: dict[int, int],
    adder: _Adder,
    zeros: Any,  # noqa: ANN401 - a tree
    pool: int | None,
) -> None:
    """Adds up units on one replica; what is added is kept at once.

    Args:
        mine: where it is kept.
        replica: that computes.
        begun: the units, with how many microbatches of each are added up already.
        adder: adds one.
        zeros: the total of nothing.
        pool: the number of the pooled part, if the job is pooled; None: another host of the replica keeps it.
    """
    nothing = replica.to_replica(zeros)
    if mine.spec.is_pooled:
        total = nothing
        for unit in begun:
            for index in mine.spec.microbatches_of(unit):
                total = adder(replica, total, index)
            if pool is not None:
                mine.partial_sums[pool] = PartialSum(0, replica.to_local(total))
                mine.pooled_units.add(unit)
        return
    for unit, count in begun.items():
        total = _lay_like(nothing, replica.to_replica(mine.partial_sums[unit].total)) if count else nothing
        for index in mine.spec.microbatches_of(unit)[count:]:
            total = adder(replica, total, index)
            count += 1
            mine.partial_sums[unit] = PartialSum(count, replica.to_local(total))


def _lay_like(like: Tree, total: Tree) -> Tree:
    """A total that was begun under another arrangement as totals lie now: the program is compiled for that."""

    def lay(origin: jax.Array, leaf: jax.Array) -> jax.Array:
        if leaf.sharding == origin.sharding or not leaf.is_fully_addressable:
            return leaf
        return jax.device_put(leaf, origin.sharding)

    return jax.tree.map(lay, like, total)


@jax.jit
def _add_trees(one: Any, other: Any) -> Any:  # noqa: ANN401 - a tree
    return jax.tree.map(jnp.add, one, other)
