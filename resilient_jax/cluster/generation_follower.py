"""Follows the generation in the store, and carries out what it means for this host.

A thin shell of `generation_orders`, whose docstring has the table: the store's watch, relays and the worker's process.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import assert_never

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.generation_orders import (
    CheckDue,
    CheckUnwound,
    EndJob,
    GenerationRead,
    HostCommand,
    HostRegistered,
    IntoWorldCommand,
    KillWorker,
    LeaveJob,
    LeaveNoticed,
    OrdersCommand,
    OrdersConfig,
    OrdersEvent,
    OrdersState,
    RecordStale,
    RegistrationBegan,
    ReplaceWorker,
    ReportLostSeats,
    SendIntoWorld,
    SendOrder,
    SetUrgency,
    StopOtherServices,
    WorkerChanged,
    WorkerCommand,
    handle,
    is_start_urgent,
)
from resilient_jax.cluster.relay import Relay
from resilient_jax.cluster.standby_orders import (
    DismissStandby,
    FailStandby,
    OrderStandby,
    SendStandbyToSeat,
    StandbyCommand,
    TakeOver,
)
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.cluster.worker_process import WorkerProcess
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.cluster.worker_view import WorkerView
from resilient_jax.events import EventKind
from resilient_jax.ids import JobName, Revision
from resilient_jax.protocol.generation import Generation, JobOutcome
from resilient_jax.protocol.generation_change import GenerationChange, apply_change
from resilient_jax.protocol.store_keys import make_change_key, make_generation_key
from resilient_jax.protocol.worker_messages import FormWorld, TakeSeat
from resilient_jax.store.interface import PutEvent, Store

RELAY_GRACE_S = 2.0
"""JAX's client takes up to 5 s more than its own deadline to give up."""
CHECK_INTERVAL_S = 0.1
"""How often a worker that has to stop is looked at."""


class GenerationFollower:
    """Has every generation of the leader carried out on this host, whether its worker is a member or not."""

    def __init__(
        self,
        context: AgentContext,
        supervisor: WorkerSupervisor,
        services: CoordinationServices,
        *,
        on_end: Callable[[JobOutcome], None],
        on_leave: Callable[[], None],
        on_generation: Callable[[Generation], None],
    ) -> None:
        """Call `on_end` when the job has ended, `on_leave` when a host that leaves is not needed any more, and
        `on_generation` when a generation was read, and carried out.
        """
        self._context = context
        self._supervisor = supervisor
        self._services = services
        self._on_end = on_end
        self._on_leave = on_leave
        self._on_generation = on_generation
        self._state = OrdersState()
        self._config = OrdersConfig(
            host=context.settings.host,
            quiesce_timeout_s=context.settings.config.quiesce_timeout_s,
            replaces_workers=context.settings.replaces_workers,
            reports_lost_seats=context.settings.uses_live_nodes,
        )
        self._relay: Relay | None = None
        self._old_relays: list[Relay] = []
        """Of worlds that the worker has left, but to which it may be connected still."""
        self._check: asyncio.TimerHandle | None = None

    @property
    def generation(self) -> Generation | None:
        """The newest that this host has seen."""
        return self._state.generation

    @property
    def is_leaving(self) -> bool:
        """Whether the host got a notice to leave."""
        return self._state.is_leaving

    def is_past(self, generation: Generation) -> bool:
        """Return whether a generation is the end of the job as it was before this agent started."""
        return generation.number == self._state.past

    def is_start_urgent(self) -> bool:
        """Return whether a worker that starts now may slow down others."""
        return is_start_urgent(self._state)

    def begin_registration(self, known: Generation | None) -> None:
        """Void this host's membership in a generation from before this host lost the store."""
        self._react(RegistrationBegan(known))

    def end_registration(self, known: Generation | None) -> None:
        """Begin with the generation that stood before this host registered, if it has seen none yet."""
        self._react(HostRegistered(known))

    def leave_when_possible(self) -> None:
        """Leave as soon as no other host needs this one."""
        self._react(LeaveNoticed())

    def on_worker_changed(self) -> None:
        """Look at the worker again."""
        self._react(WorkerChanged())

    def cancel(self) -> None:
        """End the wait for a worker that has to stop."""
        if self._check is not None:
            self._check.cancel()

    async def close(self) -> None:
        """End the relays; the worker must have ended before."""
        for relay in (self._relay, *self._old_relays):
            if relay is not None:
                await relay.close()

    async def watch(self) -> None:
        """Follow the stored generation and each later one, until the watch fails."""
        reading = read_generations(self._context.store, self._context.settings.job)
        async with contextlib.aclosing(reading) as generations:
            async for generation in generations:
                await self._handle(GenerationRead(generation))
                self._on_generation(generation)

    async def _handle(self, event: OrdersEvent) -> None:
        worker, standby = self._supervisor.worker, self._supervisor.standby.process
        for command in self._decide(event):
            if isinstance(command, SendIntoWorld | SendStandbyToSeat):
                sent = worker if isinstance(command, SendIntoWorld) else standby
                assert sent is not None, "only a worker is sent into a world"
                await self._send_into_world(command, sent)
            else:
                self._carry_out(command)

    def _react(self, event: OrdersEvent) -> None:
        """Handle an event that sends no worker into a world."""
        for command in self._decide(event):
            assert not isinstance(command, SendIntoWorld | SendStandbyToSeat), "only a generation does"
            self._carry_out(command)

    def _decide(self, event: OrdersEvent) -> tuple[OrdersCommand, ...]:
        now_s = self._context.clock.monotonic_s()
        worker = _view_worker(self._supervisor.worker)
        standby = _view_standby(self._supervisor.standby.process)
        self._state, commands = handle(self._state, event, worker, standby, now_s, self._config)
        return commands

    def _carry_out(self, command: WorkerCommand | StandbyCommand | HostCommand) -> None:
        match command:
            case SendOrder() | KillWorker() | ReplaceWorker() | CheckUnwound():
                self._command_worker(command)
            case OrderStandby() | DismissStandby() | FailStandby() | TakeOver():
                self._command_standby(command)
            case LeaveJob():
                self._on_leave()
            case EndJob(outcome):
                self._on_end(outcome)
            case SetUrgency(is_urgent):
                self._supervisor.set_urgency(is_urgent=is_urgent)
            case StopOtherServices(world, address):
                self._services.stop_others(world, address)
            case ReportLostSeats(address, seats):
                self._services.report_lost(address, seats)
            case RecordStale(refused, newest):
                self._context.log.record(EventKind.GENERATION_STALE, generation=refused, newest=newest)
            case _:
                assert_never(command)

    def _command_worker(self, command: WorkerCommand) -> None:
        match command:
            case SendOrder(order):
                self._supervisor.send_order(order)
            case KillWorker(why):
                self._supervisor.kill(why)
            case ReplaceWorker(why, takes_stacks):
                self._supervisor.replace(why, takes_stacks=takes_stacks)
            case CheckUnwound():
                self.cancel()
                loop = asyncio.get_running_loop()
                self._check = loop.call_later(CHECK_INTERVAL_S, self._react, CheckDue())
            case _:
                assert_never(command)

    def _command_standby(self, command: StandbyCommand) -> None:
        standby = self._supervisor.standby
        match command:
            case OrderStandby(order):
                standby.send_order(order)
            case DismissStandby():
                standby.dismiss()
            case FailStandby(why):
                standby.fail(why, is_retried=True)
            case TakeOver():
                self._supervisor.take_over()
            case _:
                assert_never(command)

    async def _send_into_world(self, command: IntoWorldCommand, worker: WorkerProcess) -> None:
        """Send the worker that the decision was about, which may have ended meanwhile."""
        generation, host = command.generation, self._context.settings.host
        relay = await self._relay_to(generation)
        if isinstance(command, SendIntoWorld) and not command.is_newcomer:
            worker.send_order(FormWorld(generation=generation, host=host, relay_address=relay))
            return
        newcomer = generation.membership.find_newcomer(host, worker.incarnation)
        assert newcomer is not None, "only newcomers take seats"
        worker.send_order(TakeSeat(generation=generation, host=host, seat=newcomer.seat, relay_address=relay))

    async def _relay_to(self, generation: Generation) -> str:
        # To a service that has ended workers stay connected: with their connection they would end.
        if self._relay is None or generation.membership.service_address not in {"", self._relay.service}:
            credentials = self._context.settings.credentials
            old, self._relay = self._relay, Relay(generation.membership.service_address, credentials)
            await self._relay.start()
            if old is not None:
                # An attempt to connect that the worker abandoned exists until its timeout.
                stop_after_s = self._context.settings.config.forming_timeout_s + RELAY_GRACE_S
                asyncio.get_running_loop().call_later(stop_after_s, old.stop_listening)
                self._old_relays = [relay for relay in (*self._old_relays, old) if relay.has_connections]
        return self._relay.address


def _view_worker(worker: WorkerProcess | None) -> WorkerView | None:
    if worker is None:
        return None
    return WorkerView(
        incarnation=worker.incarnation,
        report=worker.report,
        is_unresponsive=worker.is_unresponsive,
        is_dying=worker.is_dying,
        has_exited=worker.child.exit_code is not None,
    )


def _view_standby(standby: WorkerProcess | None) -> WorkerView | None:
    view = _view_worker(standby)
    if view is None or standby is None:
        return None
    # At the lowest priority it may be silent for long, and responds when it is the worker.
    return dataclasses.replace(view, is_unresponsive=standby.child.is_stopped())


async def read_generations(store: Store, job: JobName) -> AsyncGenerator[Generation, None]:
    """Yield the stored generation and each later one, until the watch fails; close it to stop before.

    Only changes are read, and the record where one does not fit to what was read before.

    Raises:
        PeerError: the store does not answer, or no longer has what was missed.
        JoinRefused: what is stored is no generation.
    """
    key = make_generation_key(job)
    revision, records = await store.range(key)
    known = decode_record(records[0], Generation) if records else None
    if known is not None:
        yield known
    async with contextlib.aclosing(store.watch(make_change_key(job), Revision(revision + 1))) as batches:
        async for batch in batches:
            for event in batch:
                if not isinstance(event, PutEvent) or event.mod_revision <= revision:
                    continue  # of a record that was read since
                known = apply_change(known, decode_record(event.key_value, GenerationChange))
                if known is None and (record := await store.get(key)) is not None:
                    known, revision = decode_record(record, Generation), record.mod_revision
                if known is not None:
                    yield known
