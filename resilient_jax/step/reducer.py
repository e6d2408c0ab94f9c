"""The collective operations of one generation: all-reduces, and accumulations over microbatches that survive failures.

The microbatches of an accumulation are assigned to replicas. Every host computes the same assignment from the same
claims, so no message is needed while no host fails. When a host dies, the train function is called again in the next
generation and accumulates again in the same step:

1. the hosts exchange which microbatches are in their totals (one small all-reduce),
2. these stay where they are, and the missing ones are assigned anew,
3. each host computes its own, and the totals are reduced.

A host that dies after the reduction takes nothing with it: the others have the result.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh

from resilient_jax.compile.training_threads import mark_training_thread
from resilient_jax.errors import CallerError
from resilient_jax.health.link_comparison import Pairs
from resilient_jax.host_exchange import CollectiveExchange
from resilient_jax.ids import ProcessIndex
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.program_analysis.program_digest import ProgramDescription
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.worker_tasks import WorkerTask
from resilient_jax.state.state_digest import make_no_digest
from resilient_jax.step.accumulation_comparison import describe_accumulation, find_differing_hosts
from resilient_jax.step.accumulation_layout import AccumulationLayout
from resilient_jax.step.assignment import (
    AccumulationSpec,
    Assignment,
    HeldRanks,
    ReplicaLocation,
    ReplicaShape,
    assign_microbatches,
    locate_replicas,
)
from resilient_jax.step.audit import Audit
from resilient_jax.step.audit_run import OwnResults
from resilient_jax.step.auditor import Auditor
from resilient_jax.step.batch_source import BatchSource
from resilient_jax.step.claims import Claims, HostClaims
from resilient_jax.step.contributions import FIRST_MICROBATCH, Contributions
from resilient_jax.step.data_sample import (
    COMPARISON_INTERVAL_STEPS,
    DataSample,
    DigestFunction,
    announce_reads,
)
from resilient_jax.step.device_throttle import DeviceThrottle
from resilient_jax.step.fixed_point_sum import choose_limits
from resilient_jax.step.host_grid import LiveHosts
from resilient_jax.step.host_speeds import EXCHANGE_INTERVAL_STEPS, HostSpeeds
from resilient_jax.step.limit_exchange import LimitExchange
from resilient_jax.step.link_speed import LinkMeasurement
from resilient_jax.step.measured_seconds import MeasuredSeconds
from resilient_jax.step.microbatch_accumulator import (
    CompilationTurns,
    ComputeFunction,
    MicrobatchAccumulator,
    StepHooks,
)
from resilient_jax.step.microbatch_program import choose_digest_function, describe_programs
from resilient_jax.step.reduction import AllReduce, ExactReduce
from resilient_jax.step.replica_partners import ReplicaPartners
from resilient_jax.step.replicas import Replica, build_replicas, make_replica_mesh
from resilient_jax.step.running_total import (
    NO_LIMITS,
    start_total_of_hosts,
)
from resilient_jax.step.slow_host_watch import SlowHostWatch
from resilient_jax.step.watch_report import WatchReport
from resilient_jax.telemetry.worker_activity import worker_activity

Tree = TypeVar("Tree")


class Reducer:
    """All-reduces and accumulations of one generation.

    Args:
        list_devices: gives the devices of the live hosts; called once, when they are first needed.
        kept: this host's contributions by the name of their accumulation; the session's, so they outlive the reducer.
        measured_speeds: what this host has measured, by that name; the session's, too. None: measuring begins anew.
        max_microbatches: limit for each replica in an accumulation, for rehearsals; None: no limit.
        auditor: finds hosts that compute wrongly; None: nothing is audited.
        watch: finds hosts that are slow; None: nobody looks for them.

    Attributes:
        partners: the other hosts of this host's replicas; None: this host is alone, or rehearses.
        held_ranks: returns what `locate_replicas` is to know, for a shape.
        owners: index of the host whose total has it, for each microbatch of the last accumulation.
        lone_microbatch: the one of the last accumulation, see `MicrobatchAccumulator`.
        summands: what it added up, see `AccumulationLayout.describe`.
        watch: the argument; steps that are made elsewhere use it, too.
        throttle: slows devices down as a chaos campaign orders; None: no campaign can.
    """

    def __init__(
        self,
        list_devices: Callable[[], Sequence[Device]],
        process_index: ProcessIndex,
        kept: dict[str, Contributions],
        hooks: StepHooks,
        *,
        measured_speeds: dict[str, MeasuredSeconds[str]] | None = None,
        max_microbatches: int | None = None,
        auditor: Auditor | None = None,
        watch: SlowHostWatch | None = None,
    ) -> None:
        self.throttle: DeviceThrottle | None = None
        self.partners: ReplicaPartners | None = None
        self.held_ranks: Callable[[ReplicaShape], HeldRanks | None] = lambda _: None
        self._max_microbatches = max_microbatches
        self._auditor = auditor
        self.watch = watch
        self._list_devices = list_devices
        self._process_index = process_index
        self._kept = kept
        self._hooks = hooks
        self._exchanged: set[str] = set()
        """The accumulations of which the hosts have exchanged their claims in this generation."""
        self._compared_steps: dict[str, int] = {}
        """By accumulation, the last step in which the hosts have compared its data. The first accumulation of such a
        step compares their states, too."""
        self._replicas: dict[ReplicaShape, tuple[tuple[ReplicaLocation, ...], dict[int, Replica]]] = {}
        self._turns = CompilationTurns()
        self._speeds = HostSpeeds({} if measured_speeds is None else measured_speeds)
        self.owners: tuple[int, ...] = ()
        self.lone_microbatch: Any = None
        self.summands: tuple[Any, list[Any]] = (), []

    @functools.cached_property
    def _live(self) -> LiveHosts:
        return LiveHosts.from_devices(self._list_devices(), self._process_index)

    @property
    def exchange(self) -> CollectiveExchange:
        """How hosts tell each other small things."""
        return CollectiveExchange(self._live.host_index, len(self._live.process_indexes), self.all_reduce)

    def locate_replicas(self, shape: ReplicaShape) -> tuple[ReplicaLocation, ...]:
        """Return where the replicas of this generation are.

        Raises:
            CallerError: too few hosts for a single one.
        """
        return self._arrange(shape)[0]

    def make_replica_mesh(self, shape: ReplicaShape) -> Mesh:
        """Return the mesh of all replicas; see `make_replica_mesh`."""
        return make_replica_mesh(self.locate_replicas(shape), self._live.devices_by_host, shape)

    def take_new_shares(self) -> tuple[tuple[int, float], ...]:
        """Return `HostSpeeds.new_shares`, once: a sum that is made again knows no news."""
        new_shares, self._speeds.new_shares = self._speeds.new_shares, ()
        return new_shares

    def _arrange(self, shape: ReplicaShape) -> tuple[tuple[ReplicaLocation, ...], dict[int, Replica]]:
        if shape not in self._replicas:
            live = self._live
            device_counts = [len(devices) for devices in live.devices_by_host]
            locations = locate_replicas(self._live.seats, shape, device_counts, self.held_ranks(shape))
            replicas = build_replicas(locations, live.devices_by_host, live.host_index, shape)
            self._replicas[shape] = locations, replicas
        return self._replicas[shape]

    def _meet_partners(self, shape: ReplicaShape) -> tuple[tuple[ReplicaLocation, ...], dict[int, Replica]]:
        locations, replicas = self._arrange(shape)
        if self.partners is not None:
            self.partners.prepare(locations, replicas, self._live.seats, self.exchange)
        return locations, replicas

    def all_reduce(self, tree: Tree) -> Tree:
        """Return the sum over hosts of each leaf, exact where these are floats."""
        grid = self._live.grid
        is_rounded = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(tree)]
        with worker_activity.task(WorkerTask.SUM):
            if grid.num_hosts > 1 and any(is_rounded):
                total = ExactReduce(grid)(start_total_of_hosts(tree), tree)
            else:
                total = AllReduce(grid)(tree)
            jax.block_until_ready(total)
        # Also after a collective that returned: the generation may have ended meanwhile, and this host must stop.
        self._hooks.raise_if_ended()
        return total

    def accumulate_microbatches(
        self,
        spec: AccumulationSpec,
        compute_fn: ComputeFunction[Tree],
        zeros: Tree,
        *,
        data: BatchSource | None,
        replica_shape: ReplicaShape,
    ) -> Tree:
        """See `World.accumulate_microbatches`."""
        total, misfits = self._accumulate(spec, compute_fn, zeros, data=data, replica_shape=replica_shape)
        # All hosts find the same misfits, in numbers that were added up with the sum: all repeat it, or none does.
        if misfits:
            self._hooks.report_misfits(spec.name, misfits)
            wide = dataclasses.replace(spec, reduction="exact_wide")
            total, _ = self._accumulate(wide, compute_fn, zeros, data=data, replica_shape=replica_shape)
        return total

    def _accumulate(
        self,
        spec: AccumulationSpec,
        compute_fn: ComputeFunction[Tree],
        zeros: Tree,
        *,
        data: BatchSource | None,
        replica_shape: ReplicaShape,
    ) -> tuple[Tree, list[str]]:
        """Return the sum, and the paths of leaves whose sum is wrong, because its limit was too low or too high.

        Every collective in here waits for all hosts. So a condition that leads to one depends only on what is the same
        on all hosts: the specification, what this generation has done so far, and the claims once they are exchanged.
        """
        locations, replicas = self._meet_partners(replica_shape)
        layout = AccumulationLayout(spec, zeros, locations, self._live)
        contributions = self._resume_contributions(spec, layout, replica_shape)
        # On other numbers of devices, or other axes, a program has other shapes: then hosts have none to compare.
        are_alike = len({(location.devices, location.axes) for location in locations}) == 1
        typical_replica = next(iter(replicas.values()), None) if are_alike else None
        # Before the claims, whose size follows from what is compared here.
        if spec.name not in self._exchanged:
            self._compare_accumulations(
                describe_accumulation(spec, replica_shape, zeros),
                functools.partial(describe_programs, compute_fn, data, typical_replica),
                spec,
            )
        digest_read = choose_digest_function(compute_fn, data, typical_replica, spec.num_microbatches)
        claims = self._exchange_claims(contributions, layout, digest_read)
        if self.watch is not None:

            def prepare_links(rounds: Sequence[Pairs]) -> LinkMeasurement:
                return LinkMeasurement(self._live.grid, rounds, self._hooks.raise_if_ended)

            self.watch.look(spec, claims.watched, self.exchange, prepare_links)
        self._resume_limits(contributions, layout, claims)
        speeds = self._speeds.choose(spec, claims.seconds, locations)
        assignment = assign_microbatches(locations, claims.microbatches > 0, speeds)
        if data is not None:
            announce_reads(data, spec, assignment, replicas, speeds)
        audits = () if self._auditor is None else self._auditor.draw(spec, assignment, self.exchange)
        compute = compute_fn if self.throttle is None else self.throttle.wrap(compute_fn)
        accumulator = MicrobatchAccumulator(compute, spec, layout, data, self._hooks, self._turns, audits)
        accumulator.partners = self.partners
        agree = functools.partial(self._agree_on_limits, contributions, layout)
        self._compute(accumulator, contributions, replicas, assignment, agree)
        # Before the reduction: a wrong total must not come into the sum.
        if audits:
            self._audit(audits, accumulator, spec, assignment, replicas)
        self.owners, self.lone_microbatch = assignment.owners, accumulator.lone_microbatch
        self.summands = layout.describe()
        self._hooks.hit_failpoint(FailPoint.BEFORE_REDUCE)
        began_s = time.monotonic()
        with worker_activity.task(WorkerTask.SUM):
            total, misfits = layout.add_up(contributions, self.partners)
            jax.block_until_ready(total)
        if self.watch is not None:
            self.watch.amend(spec, wait_s=time.monotonic() - began_s)
        self._hooks.hit_failpoint(FailPoint.AFTER_REDUCE)
        self._hooks.raise_if_ended()
        return total, misfits

    def assemble_sum(
        self, spec: AccumulationSpec, zeros: Tree, replica_shape: ReplicaShape, found: Sequence[Any]
    ) -> Tree:
        """Return the sum of an accumulation that other hosts have finished, of this host's shards and what they found.

        Args:
            found: what `World` has kept of the accumulation: sums of what is whole, and the owners of microbatches.

        Raises:
            PeerUnreachable: sums of shards are not here.
        """
        *whole, owners = found
        self.owners, self.lone_microbatch = tuple(np.asarray(owners).tolist()), None
        layout = AccumulationLayout(spec, zeros, self.locate_replicas(replica_shape), self._live)
        kept = self._kept.get(spec.name)
        sums = kept.shard_sums if kept is not None and kept.spec.step == spec.step else None
        if sums is not None and any(leaf.is_deleted() for leaf in sums):
            sums = None  # the script has donated them before its last call
        return layout.assemble_sum(sums, whole)

    def _resume_limits(
        self, contributions: Contributions, layout: AccumulationLayout, claims: Claims
    ) -> None:
        """Give all hosts the limits before anything is computed, if hosts have brought limits or microbatch 0 along."""
        has_limits = claims.limits_digest != 0
        if not layout.formats:
            contributions.limits = NO_LIMITS
        elif has_limits.any():
            # Totals are made with these already, the same on all hosts that have any (`Claims.drop_other_limits`). So a
            # host without, which came later or lost its own, gets them too.
            if not has_limits.all():
                self._agree_on_limits(contributions, layout, source=int(np.argmax(has_limits)))
        elif claims.microbatches[:, FIRST_MICROBATCH].any():
            # The last generation ended between microbatch 0 and the agreement. Its host will not compute it again.
            self._agree_on_limits(contributions, layout)
        # Else microbatch 0 is computed in this generation, and the hosts agree after it: see `_compute`.

    def _agree_on_limits(
        self, contributions: Contributions, layout: AccumulationLayout, source: int | None = None
    ) -> None:
        """Give all hosts the limits that one host has, `source`, or those of microbatch 0 where it was computed."""
        # One host has them (of shards: one host for each rank) and all others have zeros. So the sum has them.
        rows = layout.make_row(np.zeros(len(layout.formats), np.int32))
        if source is None:
            exponents = contributions.find_first_exponents()
            if exponents is not None:
                num_microbatches = contributions.spec.num_microbatches
                rows = layout.make_row(choose_limits(exponents, layout.formats, num_microbatches))
        elif source == self._live.host_index:
            assert contributions.limits is not None
            rows[:] = contributions.limits
        # Each rank sees the elements of its shards alone. `np.max` makes a new array: what JAX gives is a view on CPU,
        # which keeps the backend after a re-form.
        limits = np.max(np.asarray(self.all_reduce(rows)), axis=0)
        self._hooks.hit_failpoint(FailPoint.BEFORE_LIMITS)
        self._hooks.raise_if_ended()
        contributions.start_totals(limits)

    def _resume_contributions(
        self,
        spec: AccumulationSpec,
        layout: AccumulationLayout,
        replica_shape: ReplicaShape,
    ) -> Contributions:
        """Return what this host has accumulated of this very accumulation, on its devices."""
        kept = self._kept.get(spec.name)
        if kept is None or kept.spec != spec:
            kept = self._kept[spec.name] = Contributions(
                spec, replica_shape=replica_shape, rank=layout.rank, in_shards=layout.has_shards
            )
        kept.shard_sums = None  # of an earlier try at this step
        # Before claims are exchanged: the other hosts will not compute what this one claims to have.
        kept.drop_unusable()
        kept.move_to_devices(layout.like, replica_shape, layout.rank, in_shards=layout.has_shards)
        return kept

    def _compare_accumulations(
        self,
        lines: list[str],
        describe: Callable[[], Mapping[str, ProgramDescription]],
        spec: AccumulationSpec,
    ) -> None:
        """Return if all hosts accumulate the same; else this host leaves the job, or the job ends."""
        exchange = self.exchange
        differing = None if exchange.num_hosts == 1 else find_differing_hosts(lines, describe(), exchange)
        if differing is None:
            return
        why = f"accumulate_microbatches {spec.name!r}: hosts accumulate different things: {differing.why}"
        if not differing.has_majority:
            raise CallerError(
                f"{why}, and no more hosts do the one than the other. Every host must run the same"
            )
        if exchange.host_index in differing.hosts:
            self._hooks.leave_job(f"{why} as on most hosts")

    def _exchange_claims(
        self, contributions: Contributions, layout: AccumulationLayout, digest_read: DigestFunction | None
    ) -> Claims:
        """Return the claims of all hosts, those to microbatches as far as they are accepted.

        No host has any microbatch after a generation's first accumulation of this name, so they are exchanged then, and
        every few steps for the sake of what is beside them: what steps took, and digests of the hosts' states and data.
        """
        spec, host, num_hosts = contributions.spec, self._live.host_index, len(self._live.process_indexes)
        is_first = spec.name not in self._exchanged
        # Decided by the step, which is the same on all hosts: in a collective all must take part.
        is_compared = (
            spec.step % COMPARISON_INTERVAL_STEPS == 0 and self._compared_steps.get(spec.name) != spec.step
        )
        if not is_first:
            contributions.clear()  # of a first try at this very step, which failed: everything is computed again
        if is_first or is_compared or spec.step % EXCHANGE_INTERVAL_STEPS == 0:
            own = HostClaims(
                microbatches=tuple(contributions.list_claims().tolist()),
                limits_digest=contributions.limits_digest,
                seconds=self._speeds.estimate(spec),
                watched=self.watch.take_report(spec) if self.watch is not None else WatchReport(),
            )
            claims = Claims.join(
                self._compare_hosts(own, spec, digest_read) if is_compared else own.gather(self.exchange)
            )
            self._exchanged.add(spec.name)
        else:
            claims = Claims.make_empty(num_hosts, spec.num_microbatches)
        # All hosts decide this from the same table: a host whose claim is refused drops it without being told to.
        # Limits first: a total that cannot be added must not keep another host's from being accepted.
        claims = claims.drop_other_limits()
        if not claims.limits_digest[host]:
            contributions.drop_totals()
        accepted = layout.accept(claims.microbatches)
        contributions.keep_accepted(accepted[host])
        return dataclasses.replace(claims, microbatches=accepted)

    def _compare_hosts(
        self, own: HostClaims, spec: AccumulationSpec, digest_read: DigestFunction | None
    ) -> list[HostClaims]:
        """Return the claims of all hosts, which are exchanged with digests of their states and data."""
        num_hosts = len(self._live.process_indexes)
        sample = DataSample.choose(spec.step, spec.num_microbatches, num_hosts)
        reads = sample.read(digest_read) if digest_read is not None else make_no_digest()[None]
        own = msgspec.structs.replace(own, data_digest=tuple(reads[0].tolist()))
        if num_hosts > 1 and spec.step not in self._compared_steps.values():
            own = msgspec.structs.replace(own, state_digest=tuple(self._hooks.digest_state().tolist()))
        told = own.gather(self.exchange)
        self._compared_steps[spec.name] = spec.step
        states = np.array([claims.state_digest for claims in told], np.int32)
        if num_hosts > 1:
            reads = np.array([claims.data_digest for claims in told], np.int32)
        self._hooks.compare_hosts(states, sample, reads)
        return told

    def _compute(
        self,
        accumulator: MicrobatchAccumulator,
        contributions: Contributions,
        replicas: dict[int, Replica],
        assignment: Assignment,
        agree: Callable[[], None],
    ) -> None:
        """Compute the microbatches of this host's replicas, each replica on a thread of its own if there are several.

        While the limits are not known every host calls `agree` once, after the first microbatch of each of its
        replicas. One of these is microbatch 0, as a replica computes a run of microbatches in order.
        """
        started_s = time.monotonic()
        num_working = sum(bool(assignment.by_replica[number]) for number in replicas)
        # This host has nothing to compute, but the others cannot agree without it.
        if contributions.limits is None and not num_working:
            agree()
        exchange = LimitExchange(max(num_working, 1), agree)
        calls = []
        for number, replica in replicas.items():
            # A replica on one host continues the total of the replica that was in its place. All hosts of a replica on
            # several must have the same total, and some of them may have dropped the earlier one: a new part.
            part = len(calls) if replica.is_on_one_host else 1 + max(contributions.parts, default=-1)
            indexes = assignment.by_replica[number][: self._max_microbatches]
            calls.append(
                functools.partial(accumulator.accumulate, contributions, replica, indexes, part, exchange)
            )
        if len(calls) <= 1:
            for call in calls:
                call()
        else:
            # If one replica raises, leaving the block waits for the others: none writes to contributions afterwards.
            with ThreadPoolExecutor(len(calls), "resilient-jax-replica", mark_training_thread) as threads:
                for future in [threads.submit(exchange.call, call) for call in calls]:
                    future.result()
        # Without this the time measured below could be that of dispatching only.
        with worker_activity.task(WorkerTask.COMPUTE):
            jax.block_until_ready([part.total for part in contributions.parts.values()])
        counts = [len(assignment.by_replica[number]) for number in replicas]
        # Without the exchange, in which a fast host waits for slow ones: it would look as slow as they are.
        taken_s = time.monotonic() - started_s - exchange.seconds
        self._speeds.add(contributions.spec.name, taken_s / sum(counts) if any(counts) else None)
        # The hosts of one replica wait for each other in each microbatch.
        if self.watch is not None and all(replica.is_on_one_host for replica in replicas.values()):
            self.watch.add(contributions.spec, counts, taken_s, accumulator.inputs)

    def _audit(
        self,
        audits: Sequence[Audit],
        accumulator: MicrobatchAccumulator,
        spec: AccumulationSpec,
        assignment: Assignment,
        replicas: dict[int, Replica],
    ) -> None:
        """Return if what has been computed may be reduced."""
        assert self._auditor is not None
        own = OwnResults(
            digests=accumulator.digests,
            replicas=frozenset(replicas),
            compute=lambda number, index: accumulator.compute_digest(replicas[number], index),
            doubt=lambda: self._kept.pop(spec.name, None),
        )
        self._auditor.run(audits, spec, assignment, own, self.exchange)
