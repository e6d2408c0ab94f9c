"""Follows the generation in the store, and turns it into orders for the worker of this host."""

import asyncio
import contextlib
from collections.abc import Callable

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.relay import Relay
from resilient_jax.cluster.stored_records import decode_generation
from resilient_jax.cluster.worker_process import WorkerProcess
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, Revision, Seat
from resilient_jax.protocol.records import Generation, GenerationPhase, JobOutcome, WorkerState, is_busy
from resilient_jax.protocol.store_keys import make_generation_key
from resilient_jax.protocol.worker_messages import FormWorld, Pause, Quiesce, RunToBoundary, TakeSeat
from resilient_jax.store.interface import PutEvent

RELAY_GRACE_S = 2.0
"""JAX's client takes up to 5 s more than its own deadline to give up."""


def list_given_up_seats(before: Generation, after: Generation) -> tuple[Seat, ...]:
    """Return the seats whose workers were members, and were given up: by death, a lost lease, or a hang.

    A seat that has another worker by now is not one of them, and a member that leaves between two steps is not given
    up. A new world has no seats of the old one.
    """
    if after.number == before.number or after.world != before.world:
        return ()
    taken = {member.seat for member in (*after.members, *after.newcomers)}
    return tuple(member.seat for member in before.members if member.seat not in taken)


class GenerationFollower:
    """Turns every generation of the leader into an order for the worker, which is a member of the generation or is not.

    Attributes:
        generation: the newest that this host has seen.
    """

    def __init__(
        self,
        context: AgentContext,
        supervisor: WorkerSupervisor,
        services: CoordinationServices,
        *,
        on_end: Callable[[JobOutcome], None],
        on_leave: Callable[[], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        """Call `on_end` when the job has ended, and `on_leave` when a host that leaves is not needed any more."""
        self.generation: Generation | None = None
        self._context = context
        self._supervisor = supervisor
        self._services = services
        self._on_end = on_end
        self._on_leave = on_leave
        self._is_leaving = is_leaving
        self._void_generation: GenerationNumber | None = None
        self._relay: Relay | None = None
        self._old_relays: list[Relay] = []
        """Of worlds that the worker has left, but to which it may be connected still."""
        self._killing: asyncio.Task[None] | None = None
        self._in_world: WorkerProcess | None = None
        """The newest worker that was ordered to form a world or to take a seat of one."""

    def is_outsider(self) -> bool:
        """Return whether a generation stands in which this host is no member."""
        host = self._context.settings.host
        return self.generation is not None and self.generation.find_member(host) is None

    def is_start_urgent(self) -> bool:
        """Return whether a worker that starts now may slow down others: none trains, or they have the last copy of the
        state.
        """
        generation = self.generation
        return generation is None or not generation.members or generation.losses_left == 0

    def is_needed(self) -> bool:
        """Return whether other hosts may need this one: as a member, or for its part of a snapshot."""
        generation = self.generation
        return generation is not None and not (self.is_outsider() and generation.snapshot is None)

    def void_seat(self, known: Generation | None) -> None:
        """Void this host's membership in a generation from before this host lost the store.

        Where the host is no member, the generation may be changing just now, and admit the host.
        """
        has_seat = known is not None and known.find_member(self._context.settings.host) is not None
        self._void_generation = known.number if known is not None and has_seat else None

    def cancel(self) -> None:
        """End the wait for a worker that has to stop."""
        if self._killing is not None:
            self._killing.cancel()

    async def close(self) -> None:
        """End the relays; the worker must have ended before."""
        for relay in (self._relay, *self._old_relays):
            if relay is not None:
                await relay.close()

    async def watch(self) -> None:
        """Follow the stored generation and each later one, until the watch fails."""
        key = make_generation_key(self._context.settings.job)
        record = await self._context.store.get(key)
        revision = record.mod_revision if record else Revision(0)
        if record is not None:
            await self._obey(decode_generation(record))
        async with contextlib.aclosing(self._context.store.watch(key, Revision(revision + 1))) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, PutEvent):
                        await self._obey(decode_generation(event.key_value))

    async def _obey(self, generation: Generation) -> None:
        """Turn the leader's decision into an order for the worker."""
        known = self.generation
        if known is not None and generation.number < known.number:
            self._context.log.record(
                EventKind.GENERATION_STALE, generation=generation.number, newest=known.number
            )
            return
        self.generation = generation
        self._supervisor.set_urgency(is_urgent=generation.losses_left == 0)
        # First of all: the members that are left may wait for these, and cannot obey before.
        self._report_lost(known, generation)
        if generation.phase is GenerationPhase.FINISHED:
            assert generation.outcome is not None, "a finished generation has an outcome"
            self._on_end(generation.outcome)
            return
        worker = self._supervisor.worker
        member = generation.find_member(self._context.settings.host)
        # A worker that was started since has nothing of what made its predecessor a member.
        seated = member is not None and worker is not None and member.incarnation == worker.incarnation
        if worker is None or not seated or generation.number == self._void_generation:
            newcomer = generation.find_newcomer(self._context.settings.host)
            if worker is None or newcomer is None or newcomer.incarnation != worker.incarnation:
                await self._obey_as_outsider(generation)
            else:
                await self._obey_as_newcomer(generation, worker)
            return
        match generation.phase:
            case GenerationPhase.QUIESCE:
                worker.send_order(Quiesce(generation=generation.number, reason=generation.reason))
            case GenerationPhase.PAUSE:
                worker.send_order(Pause(generation=generation.number))
            case GenerationPhase.BOUNDARY:
                assert generation.boundary_step is not None, "a boundary has a step"
                worker.send_order(
                    RunToBoundary(generation=generation.number, boundary_step=generation.boundary_step)
                )
            case GenerationPhase.FORM:
                relay = await self._relay_to(generation)
                self._in_world = worker
                worker.send_order(
                    FormWorld(generation=generation, host=self._context.settings.host, relay_address=relay)
                )
            case GenerationPhase.ACTIVE:
                # Only now, when all members are in the new world: until then some may still be leaving the old one.
                self._services.stop_older(generation.world)

    def _report_lost(self, before: Generation | None, after: Generation) -> None:
        """Tell the members' coordination service, if it runs here, which of them were given up."""
        if before is not None and self._context.settings.uses_live_nodes:
            self._services.report_lost(before.service_address, list_given_up_seats(before, after))

    async def _obey_as_newcomer(self, generation: Generation, worker: WorkerProcess) -> None:
        """Have the worker take the seat that it was given; one that has it waits while the members change."""
        if generation.phase is GenerationPhase.ACTIVE and not self._is_leaving():
            relay = await self._relay_to(generation)
            self._in_world = worker
            worker.send_order(
                TakeSeat(generation=generation, host=self._context.settings.host, relay_address=relay)
            )
        elif worker.report.state is WorkerState.RUNNING or self._is_leaving():
            # It trained in an earlier generation, from which it was left out.
            await self._obey_as_outsider(generation)
        elif worker.report.state is WorkerState.IDLE:
            # An idle worker answers at once; it may join only with that answer (Generation.dropped_workers).
            worker.send_order(Quiesce(generation=generation.number, reason="not a member yet"))

    async def _obey_as_outsider(self, generation: Generation) -> None:
        """Keep the worker of a host that is no member from training; it may ask to join."""
        if self._is_leaving() and generation.phase in (
            GenerationPhase.FORM,
            GenerationPhase.ACTIVE,
        ):
            # While there is a snapshot the others still read what only this host's memory may have.
            if generation.snapshot is None:
                self._on_leave()
            return
        worker = self._supervisor.worker
        if worker is None or worker.child.exit_code is not None:
            return
        if worker.is_unresponsive:
            self._supervisor.kill("it was suspended, and the others continued without it")
            return
        if self._context.settings.replaces_workers and worker is self._in_world:
            self._supervisor.replace(generation.reason)
            return
        # An idle worker answers at once; it may join only with that answer (Generation.dropped_workers).
        worker.send_order(Quiesce(generation=generation.number, reason="left out of the generation"))
        if is_busy(worker.report.state) and (self._killing is None or self._killing.done()):
            self._killing = asyncio.create_task(self._kill_unless_idle(worker))

    async def _kill_unless_idle(self, worker: WorkerProcess) -> None:
        deadline_s = self._context.clock.monotonic_s() + self._context.settings.config.quiesce_timeout_s
        while is_busy(worker.report.state) and worker.child.exit_code is None:
            if self._context.clock.monotonic_s() > deadline_s and not worker.report.is_compiling:
                # Only the worker that was waited for: its successor has done nothing wrong.
                if worker is self._supervisor.worker:
                    self._supervisor.kill("it was left out of the generation and did not stop training")
                return
            await asyncio.sleep(0.1)

    async def _relay_to(self, generation: Generation) -> str:
        if self._relay is None or self._relay.service != generation.service_address:
            old, self._relay = self._relay, Relay(generation.service_address)
            await self._relay.start(self._context.settings.address)
            if old is not None:
                # An attempt to connect that the worker abandoned exists until its timeout.
                stop_after_s = self._context.settings.config.forming_timeout_s + RELAY_GRACE_S
                asyncio.get_running_loop().call_later(stop_after_s, old.stop_listening)
                self._old_relays = [relay for relay in (*self._old_relays, old) if relay.has_connections]
        return self._relay.address
