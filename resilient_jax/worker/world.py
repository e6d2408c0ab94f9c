"""What the user's train function gets: the live hosts, their devices, the steps, and the state."""

import contextlib
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from resilient_jax.compile.ahead_of_time import AheadOfTimeCompiler, CompilationJob
from resilient_jax.errors import CallerError, StateError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.failpoints import ANY_INDEX, FailPoint, FailPoints
from resilient_jax.protocol.records import StateLoss
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.state.flat_state import (
    FlatState,
    ShardingRule,
    flatten_state,
    make_abstract_state,
    place_initial_state,
    restore_state,
)
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.snapshotter import Snapshotter
from resilient_jax.step.assignment import AccumulationSpec, ReplicaShape
from resilient_jax.step.contributions import Contributions
from resilient_jax.step.quotas import count_units
from resilient_jax.step.reducer import AccumulationCall, BatchSource, Microbatch, Reducer
from resilient_jax.worker.ledger import Ledger

Tree = TypeVar("Tree")
PRECOMPILE_DELAY_S = 2.0
"""Seconds into a world before its losses are prepared for: until then other hosts may be about to join it."""
ONE_REPLICA_PER_HOST = ReplicaShape()
"""A replica on each host."""


class TrainingControl(Protocol):
    """What a world needs of the line to the agent."""

    def begin_step(self, step: int) -> None: ...
    def raise_if_ended(self) -> None: ...
    def report_commit(self, step: int, metrics: dict[str, float], *, holds_state: bool) -> None: ...
    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event: ...


class CommittedState:
    """The one place that holds what outlives a generation: the committed state, and the step in flight."""

    def __init__(self) -> None:
        self.state: FlatState | None = None
        self.snapshot_plan: SnapshotPlan | None = None
        """Where the committed state is, until `restore_or_init` has read it."""
        self.contributions: dict[str, Contributions] = {}
        """By the name of the sum."""
        self.first_step = 0
        """Of this job, if it goes on from what an earlier one left on storage."""

    @property
    def step(self) -> int:
        """How many steps are committed."""
        if self.snapshot_plan is not None:
            return self.snapshot_plan.id.step
        return self.state.step if self.state is not None else self.first_step

    @property
    def is_empty(self) -> bool:
        """Whether there is no committed state."""
        return self.state is None and self.snapshot_plan is None

    @property
    def holds_state(self) -> bool:
        """Whether the committed state is here, whole."""
        return self.state is not None and self.state.is_complete

    def set_snapshot_plan(self, plan: SnapshotPlan) -> None:
        """The committed state is that of a snapshot. What was added up in its step so far stays of use."""
        self.state = None
        self.snapshot_plan = plan

    def clear(self) -> None:
        """Drops everything: what counts is elsewhere, or nowhere."""
        self.state = None
        self.snapshot_plan = None
        self.contributions.clear()
        self.first_step = 0


class World:
    """One generation's members and devices, as the user's train function sees them.

    A world is valid until the train function is unwound; the next generation brings a new one.

    Attributes:
        generation: the agreed membership's number; it only grows.
        hosts: names of the live hosts, in order of their process index.
        host: this host's name.
        process_index: this worker's index in JAX's world; after a shrink the live ones have gaps.
        reason: why this generation was formed.
        change: how: "shrink" (in place) or "reform".
        lost: what was lost, and the step of the checkpoint that is on storage, if this generation must begin with that
            because no host's memory has the state any more; else None.
    """

    def __init__(
        self,
        *,
        generation: GenerationNumber,
        hosts: Mapping[ProcessIndex, HostName],
        process_index: ProcessIndex,
        holder: CommittedState,
        link: TrainingControl,
        change: str,
        reason: str,
        lost: StateLoss | None = None,
        events: Sequence[Event] = (),
        fault_points: FailPoints | None = None,
        ledger: Ledger | None = None,
        snapshots: Snapshotter | None = None,
        on_commit: Callable[[], None] = lambda: None,
        ahead: AheadOfTimeCompiler | None = None,
    ) -> None:
        self.generation = generation
        self.hosts = tuple(hosts[index] for index in sorted(hosts))
        self.host = hosts[process_index]
        self.process_index = process_index
        self.change = change
        self.reason = reason
        self.state_loss = lost
        self._events = tuple(events)
        self._fault_points = fault_points
        self._ledger = ledger
        self._snapshots = snapshots
        self._on_commit = on_commit
        self._ahead = ahead
        self._hosts_by_index = dict(hosts)
        self._indexes = sorted(hosts)
        self._holder = holder
        self._link = link
        self._step: int | None = None
        self._is_resumed = False
        self._sums: Reducer | None = None
        self._sums_made: dict[str, tuple[HostName, ...]] = {}
        """In this step: who computed each microbatch."""
        self._sum_calls: dict[str, AccumulationCall] = {}
        self._is_foreseen = True
        """Whether all sums that were called are expected to be called among fewer hosts."""

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is committed yet: `restore_or_init` will make the state, and not just ask for its shapes."""
        return self._holder.is_empty

    @property
    def events(self) -> tuple[Event, ...]:
        """What this worker saw on its way into this generation, oldest first."""
        return self._events

    @property
    def host_index(self) -> int:
        """This host's place among `hosts`, dense from 0: 0 is the one that prints and saves."""
        return self._indexes.index(self.process_index)

    @property
    def devices(self) -> list[Device]:
        """The devices of the live hosts. `jax.devices()` lists dead ones, too, for ever."""
        live = set(self._indexes)
        return [device for device in jax.devices() if device.process_index in live]

    @property
    def local_devices(self) -> list[Device]:
        """This host's devices."""
        return jax.local_devices()

    def mesh(self, axes: str | Sequence[str] | Mapping[str, int]) -> Mesh:
        """A mesh over the devices of all live hosts.

        Args:
            axes: one axis name; or names with sizes, of which one may be -1 (what is left).

        Raises:
            CallerError: the sizes do not multiply to the number of live devices.
        """
        return _mesh(self.devices, axes, f"the {len(self.hosts)} live hosts")

    def local_mesh(self, axes: str | Sequence[str] | Mapping[str, int] = "data") -> Mesh:
        """A mesh over this host's devices alone: programs on it outlive every change of membership."""
        return _mesh(self.local_devices, axes, f"host {self.host}")

    def steps(self, num_steps: int) -> Iterator[int]:
        """The steps that are left, from the first that is not committed up to `total`, exclusive.

        Between two steps is where hosts join and leave: a loop that does not use this is never grown.

        Raises:
            StateError: the job was to go on from a checkpoint, and nobody has said `resume_at`.
        """
        if self._holder.is_empty and not self._is_resumed:
            _refuse_to_begin_anew(self.state_loss)
        for step in range(self._holder.step, num_steps):
            self._link.begin_step(step)
            self._step = step
            self._sums_made.clear()
            self._foresee_losses()
            yield step
            self._link.raise_if_ended()

    def restore_or_init(self, init_fn: Callable[[], Tree], sharding: ShardingRule | None = None) -> Tree:
        """The state to go on from: what was committed last, else `init()`.

        Args:
            init: makes the initial state, a pytree of arrays and texts; must be deterministic, every host calls it.
                Also called abstractly, for the tree's shape: what it does must be traceable, as by `jax.eval_shape`.
            sharding: where leaves shall lie; None: where they lie, or this host's first device. Required
                for leaves on a mesh of several hosts, because that mesh has changed.

        Raises:
            StateError: the committed state does not fit `init`, or cannot be placed; or `init` cannot be traced.
        """
        self._link.raise_if_ended()
        abstract = make_abstract_state(
            init_fn
        )  # even where it is not needed: its errors must not wait for a failure
        if self._holder.snapshot_plan is not None:
            return self._restore_snapshot(self._holder.snapshot_plan, abstract, sharding)
        held = self._holder.state
        if held is None:
            return place_initial_state(init_fn(), sharding)
        self._enter_restored(held)
        return restore_state(abstract, held, sharding)

    def _restore_snapshot(self, plan: SnapshotPlan, abstract: Tree, sharding: ShardingRule | None) -> Tree:
        assert self._snapshots is not None, "only an agent's worker is told of a snapshot"
        started_s = time.monotonic()
        with contextlib.closing(self._snapshots.open_reader(plan)) as reader:
            _, state = restore_snapshot(abstract, reader, sharding, failpoint=self._reach_at)
            self._link.record_event(
                EventKind.SNAPSHOT_RESTORED,
                step=plan.id.step,
                seconds=time.monotonic() - started_s,
                local=reader.bytes_local,
                peer=reader.bytes_peer,
                decoded=reader.bytes_decoded,
            )
        self._holder.state = flatten_state(plan.id.step, state)
        self._holder.snapshot_plan = None
        self._enter_restored(self._holder.state)
        return state

    def snapshot(self, state: Any) -> None:  # noqa: ANN401 - any pytree
        """Begins to copy the committed state into the memory of the hosts, protected by parity; returns at once.

        From such a copy a state that no host holds whole is restored after a failure, and any state if all workers
        die at once. How often it is taken, and how many hosts may be lost, are in the job's configuration; a call when
        none is due does nothing. Without an agent there is nobody to keep it, and it does nothing either.

        Every host must call it after the same steps. Before the arrays are donated call `wait_until_finished`.

        Args:
            state: as given to `commit`.

        Raises:
            StateError: nothing is committed in this step.
            CallerError: the snapshots do not fit in this host's memory.
        """
        if self._step is None or self._holder.step != self._step + 1:
            raise StateError(
                "snapshot was called where no step had been committed just before; call it after world.commit(state)"
            )
        if self._snapshots is not None:
            self._snapshots.take(self, flatten_state(self._holder.step, state))

    def wait_until_finished(self) -> None:
        """Returns when the last snapshot is copied: from then on its arrays may be donated."""
        if self._snapshots is not None:
            self._snapshots.wait_until_copied()

    def host_of_device(self, device: Device) -> HostName:
        """The host that a device of this world belongs to."""
        return self._hosts_by_index[ProcessIndex(device.process_index)]

    def commit(self, state: Any, **metrics: float) -> None:  # noqa: ANN401 - any pytree
        """Hands over the state after the current step: what survives a failure from here on.

        Waits until the arrays are computed, for a step that fails later was not done. The arrays are
        held, not copied: do not donate them before the next commit, except to a program that cannot fail
        because of other hosts (one on `local_mesh`), whose result is committed.

        Args:
            state: a pytree of arrays. One that is not complete on every host survives the loss of a host only by
                `snapshot`.
            metrics: numbers for the progress line, the status and the log.

        Raises:
            StateError: called outside of `steps`, or a leaf is no array or was donated.
        """
        if self._step is None:
            raise StateError(
                "commit was called outside of `for step in world.steps(...)`; commit inside of it"
            )
        self._reach(FailPoint.BEFORE_COMMIT)
        jax.block_until_ready(state)
        self._holder.state = flatten_state(self._step + 1, state)
        self._holder.contributions.clear()
        self._link.report_commit(
            self._step + 1,
            {name: float(value) for name, value in metrics.items()},
            holds_state=self._holder.holds_state,
        )
        self._on_commit()
        if self._ledger is not None:
            self._ledger.record_commit(
                self._holder.state,
                self.generation,
                len(self.hosts),
                self._sums_made,
                is_first=self.host_index == 0,
            )
        self._reach(FailPoint.AFTER_COMMIT)

    def all_reduce(self, tree: Tree) -> Tree:
        """The sum over live hosts of each leaf, which lies where the leaf lay; one all-reduce.

        Every live host must call it, with the same shapes. The order of summation depends on the
        membership: equal within rounding, not bit for bit.

        Returns when the result is there, so that a step that goes on has been reduced on this host.
        """
        is_on_devices = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
        if is_on_devices:  # exchanges of host arrays are no reduction of the step
            self._reach(FailPoint.BEFORE_REDUCE)
        total = self._get_sums().all_reduce(tree)
        return jax.tree.map(
            lambda leaf, found: found if isinstance(leaf, jax.Array) else np.asarray(found), tree, total
        )

    def accumulate_microbatches(
        self,
        num_microbatches: int,
        accumulate_fn: Callable[[Tree, Microbatch], Tree],
        zeros: Tree,
        *,
        data: BatchSource | None = None,
        unit_size: int = 1,
        reproducible: bool = True,
        replica_shape: ReplicaShape = ONE_REPLICA_PER_HOST,
        balance_by_speed: bool = False,
        name: str = "train",
    ) -> Tree:
        """The sum over all microbatches of a step, each computed once by some live host.

        When a host dies in the middle, train is called again and comes here again in the same step: what the
        others have added up by then is kept, and only what is missing is computed, by all of them.

        Args:
            count: how many microbatches the step has, whoever lives.
            add: gives a running total with one microbatch in it. Must be the same function of the committed state
                and `microbatch.index` on every host, and must not donate its total, which lies replicated over
                `microbatch.replica.mesh`, as the one it gives back must. With several replicas on a host it is
                called on a thread for each.
            zeros: the total of nothing, on this host's devices; the result lies where its leaves lie.
            data: where `microbatch.batch` is read from, ahead of time.
            unit: how many consecutive microbatches are added up in one go by one host. Reproducible sums keep
                every unit's total until the end: a smaller unit loses less in a failure and evens out better, a
                larger one takes less memory and traffic. The bits depend on it.
            reproducible: sum in an order that depends on the indexes only: the same bits whoever lives. Else one
                all-reduce of each host's total: less memory and traffic, equal within rounding.
            replicas: how many hosts compute a microbatch together, or how many a host computes at a time.
            balance_by_speed: deal out work in proportion to measured speed; else evenly.
            name: of the sum; a step may have several, in the same order on every host.

        Raises:
            CallerError: outside of `steps`, twice in a step, a number below 1, too few hosts for one replica, or
                `zeros` are not this host's arrays.
        """
        if self._step is None or name in self._sums_made:
            found = "a call outside of `for step in world.steps(...)`"
            if self._step is not None:
                found = f"a second sum named {name!r} in step {self._step}"
            raise CallerError(
                f"accumulate_microbatches: found {found}, expected one of each name in a step. Put everything to be "
                "summed into one tree, or give the other sum another name"
            )
        _check_zeros(zeros)
        count_units(num_microbatches, unit_size)
        job = AccumulationSpec(
            name=name,
            step=self._step,
            num_microbatches=num_microbatches,
            unit_size=unit_size,
            is_pooled=not reproducible,
        )
        total = self._get_sums().accumulate_microbatches(
            job,
            accumulate_fn,
            zeros,
            data=data,
            replica_shape=replica_shape,
            balance_by_speed=balance_by_speed,
        )
        self._sums_made[name] = tuple(self.hosts[place] for place in self._get_sums().owners)
        if name not in self._sum_calls:
            self._sum_calls[name] = AccumulationCall(
                devices=self.devices,
                process_index=self.process_index,
                spec=job,
                replica_shape=replica_shape,
                like=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), zeros),
            )
            self._is_foreseen = False
        return total

    def count_replicas(self, replica_shape: ReplicaShape = ONE_REPLICA_PER_HOST) -> int:
        """How many replicas the live hosts have.

        Raises:
            CallerError: too few hosts for a single one.
        """
        return len(self._get_sums().locate_replicas(replica_shape))

    @property
    def replicas_span_hosts(self) -> bool:
        """Whether programs of this generation talk to other hosts while they compute microbatches."""
        return self._sums is not None and self._sums.replicas_span_hosts

    def host_of_microbatch(self, index: int) -> HostName:
        """The host that computed microbatch `index` of the last `accumulate_microbatches`."""
        return self.hosts[self._get_sums().owners[index]]

    def raise_if_ended(self) -> None:
        """Ends the train function here if its generation has ended; for whoever waits long, to call now and then."""
        self._link.raise_if_ended()

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> None:
        """Writes an event to this host's log."""
        self._link.record_event(kind, **detail)

    def resume_at(self, step: int) -> None:
        """Counts steps from here, as long as nothing is committed: for a state that comes from storage.

        Every host must say the same step.

        Raises:
            StateError: it is no whole number.
        """
        try:
            first_step = operator.index(step)
        except TypeError as error:
            raise StateError(f"resume_at: found {step!r}, expected a whole number of steps") from error
        self._is_resumed = True
        if self._holder.is_empty:
            self._holder.first_step = first_step

    def compile_ahead(self, jobs: Iterable[CompilationJob], delay_s: float = 0.0) -> None:
        """Compiles these in the background while training goes on; what waits is forgotten with this world."""
        if self._ahead is not None:
            self._ahead.enqueue(jobs, delay_s)

    def _foresee_losses(self) -> None:
        """What the sums of this world will call when one host is lost, and two, is compiled meanwhile."""
        if self._is_foreseen:
            return
        self._is_foreseen = True
        jobs = [
            CompilationJob(
                f"sums over {count} hosts",
                functools.partial(call.compile_for_hosts, count, call.replica_shape),
            )
            for count in (len(self.hosts) - 1, len(self.hosts) - 2)
            if count > 0
            for call in self._sum_calls.values()
        ]
        self.compile_ahead(jobs, PRECOMPILE_DELAY_S)

    def _get_sums(self) -> Reducer:
        if self._sums is None:
            self._sums = Reducer(
                self.devices, self.process_index, self._holder.contributions, _Surroundings(self)
            )
        return self._sums

    def _reach_at(self, place: FailPoint, step: int) -> None:
        if self._fault_points is not None:
            self._fault_points.hit(place, step)

    def _reach(self, place: FailPoint, index: int = ANY_INDEX) -> bool:
        if self._step is None:
            return False
        if self._ledger is not None and place is FailPoint.BEFORE_MICROBATCH:
            self._ledger.record_microbatch(self._step, index, self.generation)
        return self._fault_points is not None and self._fault_points.hit(place, self._step, index)

    def _enter_restored(self, held: FlatState) -> None:
        if self._ledger is not None:
            self._ledger.record_restore(held, self.generation, len(self.hosts), is_first=self.host_index == 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a sum sees of the world."""

    world: World

    def raise_if_ended(self) -> None:
        self.world._link.raise_if_ended()

    def reach(self, place: FailPoint, index: int) -> bool:
        return self.world._reach(place, index)


def _refuse_to_begin_anew(lost: StateLoss | None) -> None:
    if lost is not None and lost.checkpoint_step is not None:
        raise StateError(
            "steps: found a loop that begins at step 0, expected one that goes on from a checkpoint: the job's state "
            f"was lost after {lost.step} steps, and the checkpoint of step {lost.checkpoint_step} was seen on storage. "
            "Load it where world.is_fresh, and call world.resume_at(step)"
        )


def _check_zeros(zeros: object) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(zeros):
        if not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
            found = leaf.sharding if isinstance(leaf, jax.Array) else type(leaf).__name__
            raise CallerError(
                f"accumulate_microbatches: found {found} at zeros{jax.tree_util.keystr(path)}, expected an array on "
                'this host\'s devices: jax.device_put(zeros, NamedSharding(world.local_mesh("data"), PartitionSpec()))'
            )


def _mesh(devices: list[Device], axes: str | Sequence[str] | Mapping[str, int], whose: str) -> Mesh:
    sizes = dict(axes) if isinstance(axes, Mapping) else _names_to_sizes(axes)
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) == 1 and fixed > 0 and len(devices) % fixed == 0:
        sizes[open_axes[0]] = len(devices) // fixed
    if int(np.prod(list(sizes.values()))) != len(devices) or min(sizes.values(), default=0) < 1:
        raise CallerError(
            f"mesh axes {dict(sizes)} do not fit the {len(devices)} devices of {whose}: the sizes must multiply "
            "to that number; write -1 for one of them to have it follow the devices"
        )
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def _names_to_sizes(axes: str | Sequence[str]) -> dict[str, int]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return {name: -1 if position == 0 else 1 for position, name in enumerate(names)}
