"""The collective operations of one generation: all-reduces, and accumulations over microbatches that survive failures.

An accumulation's microbatches are grouped into units and the units assigned to replicas. Every host computes the same
assignment from the same progress, so no message is needed while no host fails. When a host dies, the train function is
called again in the next generation and accumulates again in the same step:

1. the hosts exchange how much of each unit they have accumulated (one small all-reduce),
2. a complete unit belongs to the first host that has it, and the missing ones are reassigned,
3. each host computes its units, and all reduce the totals.

A host that dies after the reduction takes nothing with it: the others have the result.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.step.assignment import (
    AccumulationSpec,
    Assignment,
    ReplicaLocation,
    ReplicaShape,
    assign_units,
    find_common_progress,
    locate_replicas,
    replica_speeds,
)
from resilient_jax.step.contributions import Contributions, pad_progress_size
from resilient_jax.step.host_grid import HostGrid
from resilient_jax.step.microbatch_accumulator import (
    AccumulateFunction,
    BatchSource,
    CompilationTurns,
    MicrobatchAccumulator,
    StepHooks,
)
from resilient_jax.step.quotas import accept_disjoint_claims, distribute_units
from resilient_jax.step.reduction import AllReduce, OrderedAllReduce
from resilient_jax.step.replicas import Replica, build_replicas

Tree = TypeVar("Tree")
SPEED_EXCHANGE_INTERVAL_STEPS: Final = 16
"""Steps between two exchanges of measured speeds: one small all-reduce each, a millisecond."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LiveHosts:
    """The live hosts with their devices, in order of their process index."""

    process_indexes: tuple[int, ...]
    devices_by_host: tuple[tuple[Device, ...], ...]
    host_index: int
    grid: HostGrid

    @classmethod
    def from_devices(cls, devices: Sequence[Device], process_index: int) -> "_LiveHosts":
        by_process: dict[int, list[Device]] = {}
        for device in devices:
            by_process.setdefault(device.process_index, []).append(device)
        indexes = sorted(by_process)
        return cls(
            process_indexes=tuple(indexes),
            devices_by_host=tuple(tuple(by_process[index]) for index in indexes),
            host_index=indexes.index(process_index),
            grid=HostGrid(devices, process_index),
        )


class Reducer:
    """All-reduces and accumulations of one generation.

    Args:
        list_devices: gives the devices of the live hosts; called once, when they are first needed.
        process_index: of this worker.
        kept: contributions by the name of their accumulation; they outlive the reducer.
        hooks: of the session.

    Attributes:
        owners: of each microbatch of the last accumulation, the index of the host that computed it.
    """

    def __init__(
        self,
        list_devices: Callable[[], Sequence[Device]],
        process_index: ProcessIndex,
        kept: dict[str, Contributions],
        hooks: StepHooks,
    ) -> None:
        self._list_devices = list_devices
        self._process_index = process_index
        self._kept = kept
        self._hooks = hooks
        self._exchanged: set[str] = set()
        """The accumulations whose progress the hosts have exchanged in this generation."""
        self._replicas: dict[ReplicaShape, tuple[tuple[ReplicaLocation, ...], dict[int, Replica]]] = {}
        self._turns = CompilationTurns()
        self._seconds: np.ndarray | None = None
        """float32[hosts], of a microbatch; only their ratio matters. None: not exchanged yet."""
        self._own_seconds = 0.0
        self._has_computed = False
        """Whether this host has computed since speeds were exchanged."""
        self.owners: tuple[int, ...] = ()

    @functools.cached_property
    def _live(self) -> _LiveHosts:
        return _LiveHosts.from_devices(self._list_devices(), self._process_index)

    def locate_replicas(self, shape: ReplicaShape) -> tuple[ReplicaLocation, ...]:
        """Return where the replicas of this generation are.

        Raises:
            CallerError: too few hosts for a single one.
        """
        return self._arrange(shape)[0]

    @property
    def replicas_span_hosts(self) -> bool:
        """Whether any accumulation used a replica on several hosts, whose programs wait for other hosts."""
        return any(shape.hosts > 1 for shape in self._replicas)

    def _arrange(self, shape: ReplicaShape) -> tuple[tuple[ReplicaLocation, ...], dict[int, Replica]]:
        if shape not in self._replicas:
            live = self._live
            # As in `HostGrid`, each host counts with as many devices as the host with the fewest has.
            locations = locate_replicas(live.process_indexes, shape, min(map(len, live.devices_by_host)))
            replicas = build_replicas(locations, live.devices_by_host, live.host_index, shape)
            self._replicas[shape] = locations, replicas
        return self._replicas[shape]

    def all_reduce(self, tree: Tree) -> Tree:
        """Return the sum over hosts of each leaf."""
        total = AllReduce(self._live.grid)(tree)
        jax.block_until_ready(total)
        # Also after a collective that returned: the generation may have ended meanwhile, and this host must stop.
        self._hooks.raise_if_ended()
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
        contributions = self._resume_contributions(spec, zeros)
        locations, replicas = self._arrange(replica_shape)
        progress = self._exchange_progress(contributions)
        # Decided by the step, which is the same on all hosts: in a collective all must take part.
        if balance_by_speed and spec.step % SPEED_EXCHANGE_INTERVAL_STEPS == 0:
            self._exchange_speeds()
        speeds = self._speeds()
        assignment = assign_units(spec, locations, progress, speeds)
        if data is not None:
            _announce_reads(data, spec, assignment, replicas, speeds)
        accumulator = MicrobatchAccumulator(accumulate_fn, spec, data, self._hooks, self._turns)
        self._compute(accumulator, contributions, replicas, assignment, progress, zeros)
        self.owners = tuple(
            assignment.owners[index // spec.unit_size] for index in range(spec.num_microbatches)
        )
        self._hooks.hit_failpoint(FailPoint.BEFORE_REDUCE)
        total = self._reduce(contributions, assignment, zeros)
        jax.block_until_ready(total)
        self._hooks.raise_if_ended()
        self._hooks.hit_failpoint(FailPoint.AFTER_REDUCE)
        return total

    def _resume_contributions(self, spec: AccumulationSpec, zeros: Any) -> Contributions:  # noqa: ANN401 - a tree
        """Return what this host has accumulated of this very accumulation, on its devices."""
        kept = self._kept.get(spec.name)
        if kept is None or kept.spec != spec:
            kept = Contributions(spec)
        # Before progress is exchanged: the other hosts will not compute what this one claims to have.
        kept.drop_unusable()
        kept.move_to_devices(zeros)
        self._kept[spec.name] = kept
        return kept

    def _exchange_progress(self, contributions: Contributions) -> np.ndarray:
        """Return int32[hosts, units]: how many microbatches of each unit every live host has accumulated.

        Exchanged only at a generation's first accumulation of this name: in later steps all hosts start at 0.
        """
        spec, live = contributions.spec, self._live
        progress = np.zeros((len(live.process_indexes), spec.num_units), np.int32)
        if spec.name in self._exchanged:
            contributions.clear()  # of a first try at this very step, which failed: everything is computed again
            return progress
        progress[live.host_index] = contributions.count_progress()
        # Each host fills in its own row only, so the sum over hosts is the table of all rows.
        padded = np.zeros(pad_progress_size(progress.size), np.int32)
        padded[: progress.size] = progress.reshape(-1)
        found = np.asarray(self.all_reduce(padded))[: progress.size].reshape(progress.shape)
        self._exchanged.add(spec.name)
        if spec.is_pooled:
            # All hosts decide this from the same table, so a host whose
            # claim is refused drops it without being told to.
            accepted = accept_disjoint_claims([np.flatnonzero(row).tolist() for row in found])
            found = np.where(np.array(accepted)[:, None], found, 0)
            if not accepted[live.host_index]:
                contributions.clear()
        return found

    def _speeds(self) -> np.ndarray:
        if self._seconds is None:
            return np.ones(len(self._live.process_indexes), np.float32)
        return 1 / self._seconds

    def _exchange_speeds(self) -> None:
        if not self._has_computed:
            # Too slow to be assigned any unit: the host may have become faster, so it is measured again.
            self._own_seconds /= 2
        self._has_computed = False
        seconds = np.zeros(len(self._live.process_indexes), np.float32)
        seconds[self._live.host_index] = self._own_seconds
        found = np.asarray(self.all_reduce(seconds))
        if found.all():  # a host that has computed nothing yet has no speed
            self._seconds = found

    def _compute(
        self,
        accumulator: MicrobatchAccumulator,
        contributions: Contributions,
        replicas: dict[int, Replica],
        assignment: Assignment,
        progress: np.ndarray,
        zeros: Any,  # noqa: ANN401 - a tree
    ) -> None:
        """Accumulate the units of this host's replicas, each replica on a thread of its own if there are several."""
        started_s = time.monotonic()
        calls = []
        for number, replica in replicas.items():
            begun = {
                unit: find_common_progress(progress, assignment.locations[number], unit)
                for unit in assignment.units_by_replica[number]
            }
            # All hosts of a replica have its total. Pooled totals are summed over hosts, so only the first keeps it; of
            # others the reduction takes each unit from its owner alone.
            keeps_total = replica.data_shard[0] == 0 or not contributions.spec.is_pooled
            # Below all keys there are, and another one for each replica of this call: nothing is overwritten.
            pool = min([0, *contributions.partial_sums]) - 1 - len(calls) if keeps_total else None
            calls.append(
                functools.partial(accumulator.accumulate_units, contributions, replica, begun, zeros, pool)
            )
        if len(calls) <= 1:
            for call in calls:
                call()
        else:
            # If one replica raises, leaving the block waits for the others: none writes to contributions afterwards.
            with ThreadPoolExecutor(len(calls), "resilient-jax-replica") as threads:
                for done in [threads.submit(call) for call in calls]:
                    done.result()
        # Without this the time measured below could be that of dispatching only.
        jax.block_until_ready([partial.total for partial in contributions.partial_sums.values()])
        count = sum(
            len(contributions.spec.microbatches_of(unit))
            for number in replicas
            for unit in assignment.units_by_replica[number]
        )
        if count:
            self._own_seconds = (time.monotonic() - started_s) / count
            self._has_computed = True

    def _reduce(self, contributions: Contributions, assignment: Assignment, zeros: Tree) -> Tree:
        partial_sums = contributions.partial_sums
        if contributions.spec.is_pooled:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, zeros)
            totals = [jax.device_put(partial_sums[key].total, shardings) for key in sorted(partial_sums)]
            # From zeros on: a host that has computed nothing takes part in the collective, too.
            return AllReduce(self._live.grid)(functools.reduce(_add_trees, totals, zeros))
        # Several hosts may have a complete unit, and all agree on its owner: it is added once.
        own = {
            unit: partial_sums[unit].total
            for unit, owner in enumerate(assignment.owners)
            if owner == self._live.host_index
        }
        return OrderedAllReduce(self._live.grid)(own, assignment.owners, zeros)


def _announce_reads(
    data: BatchSource,
    spec: AccumulationSpec,
    assignment: Assignment,
    replicas: dict[int, Replica],
    speeds: np.ndarray,
) -> None:
    """Announce what this host reads in this step, and in the next step if no host dies."""
    next_units = distribute_units(list(range(spec.num_units)), replica_speeds(assignment.locations, speeds))

    def list_reads(
        step: int, units_by_replica: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, tuple[int, int]]]:
        for number, replica in replicas.items():
            for unit in units_by_replica[number]:
                for index in spec.microbatches_of(unit):
                    yield step, index, replica.data_shard

    data.expect([*list_reads(spec.step, assignment.units_by_replica), *list_reads(spec.step + 1, next_units)])


@jax.jit
def _add_trees(one: Any, other: Any) -> Any:  # noqa: ANN401 - a tree
    return jax.tree.map(jnp.add, one, other)
