"""The leader: feeds the store's statuses to the membership machine and writes what the machine decides.

Leadership is a key bound to a lease; its create revision is the fencing token. Every decision is one transaction that
succeeds only if that key and the generation are those that this leader has read, so of two agents that both believe
they lead, at most one can write.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import assert_never

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.dead_hosts import DeadHostFinder
from resilient_jax.cluster.decision_log import DecisionLog
from resilient_jax.cluster.device_quarantine import quarantine_device
from resilient_jax.cluster.host_losses import (
    SingleLosses,
    forget_host_losses,
    is_loss_counted,
    list_lost_before,
    note_host_loss,
)
from resilient_jax.cluster.progress_messages import HostProgress
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.cluster.progress_tree import ProgressTree
from resilient_jax.cluster.quarantine import (
    extend_quarantine_s,
    follow_quarantine,
    quarantine_host,
    read_quarantine,
)
from resilient_jax.cluster.stored_records import ENCODER, decode_record
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, LeaseId, Revision
from resilient_jax.membership.commands import (
    MembershipCommand,
    PublishGeneration,
    QuarantineDevice,
    QuarantineHost,
)
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, list_late_members
from resilient_jax.membership.job_end import is_any_staying
from resilient_jax.membership.job_start import begin_anew, make_initial_state
from resilient_jax.membership.machine import (
    HostChanged,
    HostLeft,
    HostProgressed,
    MembershipEvent,
    MembershipMachine,
    QuarantineChanged,
    Tick,
)
from resilient_jax.membership.spare_hosts import list_used
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.generation_change import describe_change
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.leader_record import LeaderRecord
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.store_keys import (
    make_change_key,
    make_generation_key,
    make_hosts_prefix,
    make_job_key,
    make_leader_key,
    make_script_key,
)
from resilient_jax.store.interface import (
    NO_LEASE,
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteEvent,
    DeleteOp,
    OperationResponse,
    PutEvent,
    PutOp,
    RangeOp,
    RangeResponse,
    WatchEvent,
    require_absent,
    require_unchanged,
)

FINISHED_RECORD_TTL_S = 3600.0
"""How long the records of a job that is over stay in a store that outlives the job: for agents that are late to read
how it ended, and for `status`."""
TICK_INTERVAL_S = 0.1
"""Longest delay until a timeout is noticed. Events are handled at once."""


RESIGNED_POLL_INTERVAL_S = 0.2
"""How often an agent that is to leave looks whether all others are, too, while no agent leads."""


class _LeadershipLost(Exception):
    """Another leader wrote, or this one's key is gone, or this agent has given it up."""


class Leader:
    """One agent's candidacy, and its term while it leads."""

    def __init__(
        self,
        context: AgentContext,
        config: MembershipConfig,
        services: CoordinationServices,
        relay: ProgressRelay,
        *,
        is_leaving: Callable[[], bool] = lambda: False,
        is_past: Callable[[Generation], bool] = lambda _: False,
    ) -> None:
        """Prepare the candidacy.

        Args:
            is_leaving: tells whether this host got a notice.
            is_past: tells whether a generation is the end of a job that this agent was started to begin anew.
        """
        self._is_leaving = is_leaving
        self._was_quarantined = False
        """Whether this host was in quarantine when it last led: looked up again before it leads the next time."""
        self._is_past = is_past
        self._context = context
        self._store = context.store
        self._job = context.settings.job
        self._record = LeaderRecord(
            host=context.settings.host, agent_id=context.agent_id, endpoint=relay.endpoint
        )
        self._config = config
        self._services = services
        self._relay = relay
        self._dead_hosts = DeadHostFinder(context)
        self._log = context.log
        self._print_line = context.print_line
        self._clock = context.clock

    async def campaign(self, lease: LeaseId) -> None:
        """Lead whenever no other agent does, until cancelled.

        Raises:
            ResilientJaxError: the store cannot be reached.
        """
        try:
            await self._campaign(lease)
        finally:
            await self._dead_hosts.close()

    async def _campaign(self, lease: LeaseId) -> None:
        key = make_leader_key(self._job)
        while True:
            if (self._is_leaving() or self._was_quarantined) and not await self._may_lead():
                await self._follow_another(key)
                continue
            result = await self._store.transaction(
                [require_absent(key)], [PutOp(key, ENCODER.encode(self._record), lease)], [RangeOp(key)]
            )
            # The key was created in this revision, which is therefore its create revision: the fencing token.
            token = result.revision if result.succeeded else self._own_token(result.responses[0], lease)
            if token is None:
                self._follow(result.responses[0])
                await self._wait_vacant(key, result.revision)
                continue
            self._log.record(EventKind.LEADER_ELECTED, token=token)
            self._services.start_standby()
            try:
                await _Term(self, token).run()
            except _LeadershipLost:
                self._log.record(EventKind.LEADER_RESIGNED)

    async def _may_lead(self) -> bool:
        """Return whether no host stays that leads in the place of this one, or this one stays again."""
        quarantined = {record.host for record in await read_quarantine(self._store, self._job)}
        self._was_quarantined = self._record.host in quarantined
        if not (self._is_leaving() or self._was_quarantined):
            return True
        _, found = await self._store.range(make_hosts_prefix(self._job))
        statuses = [decode_record(record, HostStatus) for record in found]
        return not is_any_staying(statuses, self._record.host, quarantined)

    async def _follow_another(self, key: str) -> None:
        """Return when no other agent leads, or soon if none does now."""
        result = await self._store.transaction([], [RangeOp(key)])
        self._follow(result.responses[0])
        await self._wait_vacant(key, result.revision)
        await asyncio.sleep(RESIGNED_POLL_INTERVAL_S)

    def _own_token(self, found: OperationResponse, lease: LeaseId) -> Revision | None:
        """Return the token of our own term if a fault of the store ended only our watch; else None."""
        assert isinstance(found, RangeResponse), "the failure operation is a range"
        ours = [kv for kv in found.key_values if kv.lease == lease]
        return ours[0].create_revision if ours else None

    def _follow(self, found: OperationResponse) -> None:
        """Have progress reported to the leader that has this record."""
        assert isinstance(found, RangeResponse), "the failure operation is a range"
        if not found.key_values:
            return
        leading = decode_record(found.key_values[0], LeaderRecord)
        agent = (leading.host, leading.agent_id, leading.endpoint)
        self._relay.follow(leading.endpoint, on_refused=lambda: self._dead_hosts.look_at([agent]))

    async def _wait_vacant(self, key: str, revision: Revision) -> None:
        if await self._store.get(key) is None:
            return
        async with contextlib.aclosing(self._store.watch(key, Revision(revision + 1))) as batches:
            async for batch in batches:
                if any(isinstance(event, DeleteEvent) and event.key == key for event in batch):
                    return


async def wait_next_event(inbox: "asyncio.Queue[MembershipEvent]") -> MembershipEvent:
    """Return the next event, or a tick after `TICK_INTERVAL_S` without one.

    Not `asyncio.wait_for`: until Python 3.12 it swallows a cancellation that arrives together with the result.
    """
    try:
        async with asyncio.timeout(TICK_INTERVAL_S):
            return await inbox.get()
    except TimeoutError:
        return Tick()


class _Term:
    """One term of leadership, from reading the stored records until another agent leads or the store fails."""

    def __init__(self, leader: Leader, token: Revision) -> None:
        self._leader = leader
        self._token = token
        self._store = leader._store
        self._generation_key = make_generation_key(leader._job)
        self._change_key = make_change_key(leader._job)
        self._known_revision = Revision(0)
        self._published: Generation | None = None
        """The newest generation that this leader has read from the store or written to it."""
        self._inbox: asyncio.Queue[MembershipEvent] = asyncio.Queue()
        self._tree = ProgressTree()
        self._losses = SingleLosses(leader._context.settings.config.lease_ttl_s)
        self._decisions = DecisionLog(leader._log, leader._print_line, leader._config)

    async def run(self) -> None:
        prefix = make_hosts_prefix(self._leader._job)
        stored = await self._store.get(self._generation_key)
        generation = decode_record(stored, Generation) if stored else None
        self._known_revision = stored.mod_revision if stored else Revision(0)
        self._published = generation
        if generation is not None and self._leader._is_past(generation):
            await self._put_shared_records(NO_LEASE)
            generation = begin_anew(generation)
        # The watch begins with the revision after this read: no change is missed, and none is seen twice.
        revision, records = await self._store.range(prefix)
        statuses = [decode_record(record, HostStatus) for record in records]
        for status in statuses:
            self._add_to_tree(status)
        self._leader._relay.lead(self._tree, self._on_progress)
        # Before the first decision: a host in quarantine must not join by it.
        records = await read_quarantine(self._store, self._leader._job)
        initial = make_initial_state(
            generation, statuses, self._now(), quarantined=frozenset(record.host for record in records)
        )
        for host in list_lost_before(initial, self._leader._config.min_hosts):
            self._losses.add(host, self._now(), is_counted=True)
        machine = MembershipMachine(initial, self._leader._config)
        watching = [
            asyncio.create_task(self._watch(prefix, Revision(revision + 1))),
            asyncio.create_task(self._watch_quarantine()),
        ]
        try:
            # Not an event of the store: a new leader decides at once from what
            # it has read, also if nothing changes any more.
            event: MembershipEvent = Tick()
            while True:
                await self._resign_if_leaving(machine.state)
                if isinstance(event, HostLeft):
                    self._note_loss(machine.state, event.host)
                commands = machine.handle(event, self._now())
                for command in commands:
                    await self._execute(command, machine.state)
                for host in self._losses.take(self._now()):
                    await note_host_loss(self._leader._context, host, self._token)
                if commands or isinstance(event, Tick):
                    self._decisions.record_unseated(machine.state)
                    self._decisions.tell_of_separation(machine.state)
                    late = list_late_members(machine.state)
                    self._leader._dead_hosts.look_at((s.host, s.agent.id, s.agent.endpoint) for s in late)
                event = await self._next(watching)
        finally:
            for task in watching:
                task.cancel()
            self._leader._relay.follow("", on_refused=lambda: None)

    async def _resign_if_leaving(self, state: MembershipState) -> None:
        """Let a host lead that stays: what this one starts and begins to change would end with it.

        Or others may not reach it, where that is why it is in quarantine.

        Raises:
            _LeadershipLost: this agent leads no more.
        """
        leader = self._leader
        host = leader._record.host
        leader._was_quarantined = host in state.quarantined
        must_resign = leader._is_leaving() or leader._was_quarantined
        if must_resign and is_any_staying(state.hosts.values(), host, state.quarantined):
            key = make_leader_key(leader._job)
            ours = Compare(key, CompareTarget.CREATE_REVISION, CompareOperator.EQUAL, self._token)
            await self._store.transaction([ours], [DeleteOp(key)])
            raise _LeadershipLost

    def _note_loss(self, state: MembershipState, host: HostName) -> None:
        is_counted = is_loss_counted(state, host, self._leader._config.min_hosts)
        self._losses.add(host, self._now(), is_counted=is_counted)

    async def _next(self, watching: "list[asyncio.Task[None]]") -> MembershipEvent:
        # Without its watches a leader would decide about hosts as they were.
        for task in watching:
            if task.done():
                task.result()  # raises the error that ended the watch
        return await wait_next_event(self._inbox)

    def _on_progress(self, progress: HostProgress) -> None:
        self._inbox.put_nowait(HostProgressed(progress.host, progress.agent_id, progress.progress.step))

    def _add_to_tree(self, status: HostStatus) -> None:
        if status.host != self._leader._record.host:
            self._tree.add(status.host, status.agent.endpoint)

    async def _watch(self, prefix: str, revision: Revision) -> None:
        async with contextlib.aclosing(self._store.watch(prefix, revision)) as batches:
            async for batch in batches:
                for event in batch:
                    self._inbox.put_nowait(self._to_membership_event(event, prefix))

    async def _watch_quarantine(self) -> None:
        async for hosts in follow_quarantine(self._store, self._leader._job):
            self._inbox.put_nowait(QuarantineChanged(hosts))

    def _to_membership_event(self, event: WatchEvent, prefix: str) -> MembershipEvent:
        if isinstance(event, PutEvent):
            status = decode_record(event.key_value, HostStatus)
            self._add_to_tree(status)
            return HostChanged(status)
        host = HostName(event.key.removeprefix(prefix))
        self._tree.remove(host)
        self._leader._log.record(EventKind.HOST_LOST, lost=host)
        return HostLeft(host)

    async def _execute(self, command: MembershipCommand, state: MembershipState) -> None:
        match command:
            case StartCoordinationService():
                self._leader._services.start(command.world, command.num_processes, command.num_seats)
            case QuarantineHost(host, reason, num_before):
                await quarantine_host(
                    self._leader._context, host, reason, num_before=num_before, leader_token=self._token
                )
            case QuarantineDevice():
                await self._quarantine_device(command)
            case PublishGeneration(generation):
                await self._publish(generation, state)
            case _:
                assert_never(command)

    async def _quarantine_device(self, command: QuarantineDevice) -> None:
        context = self._leader._context
        now_s = context.clock.wall_s()
        seconds = extend_quarantine_s(context.settings.config.quarantine_s, command.num_before)
        record = DeviceQuarantineRecord(
            host=command.host,
            device=command.device,
            reason=command.reason,
            since_wall_s=now_s,
            until_wall_s=now_s + seconds,
            uuid=command.uuid,
        )
        await quarantine_device(context, record, leader_token=self._token)

    async def _publish(self, generation: Generation, state: MembershipState) -> None:
        leader = make_leader_key(self._leader._job)
        is_over = generation.phase is GenerationPhase.FINISHED
        lease = await self._store.grant(FINISHED_RECORD_TTL_S) if is_over else NO_LEASE
        result = await self._store.transaction(
            [
                Compare(leader, CompareTarget.CREATE_REVISION, CompareOperator.EQUAL, self._token),
                Compare(
                    self._generation_key,
                    CompareTarget.MOD_REVISION,
                    CompareOperator.EQUAL,
                    self._known_revision,
                ),
            ],
            [
                PutOp(self._generation_key, ENCODER.encode(generation), lease),
                # What the agents watch.
                PutOp(self._change_key, ENCODER.encode(describe_change(self._published, generation)), lease),
            ],
        )
        if not result.succeeded:
            raise _LeadershipLost
        self._known_revision = result.revision
        before, self._published = self._published, generation
        self._record_news(before, generation, state)
        if before is not None and change_fields(before, record=generation.record) == generation:
            return  # only progress, redundancy or a decision to wait was recorded
        self._leader._log.record(
            EventKind.GENERATION_PHASE,
            generation=generation.number,
            step=generation.state.step,
            phase=str(generation.phase),
            change=str(generation.membership.change),
            hosts=len(generation.membership.members),
            reason=generation.reason,
            token=self._token,
            revision=result.revision,
        )
        if generation.failures.hang and (before is None or before.number < generation.number):
            self._decisions.record_hang(before, generation)
        for spare in list_used(before, state):
            self._decisions.record_used(spare, generation)
        if generation.state.state_loss is not None and (
            before is None or generation.state.state_loss != before.state.state_loss
        ):
            self._decisions.record_state_loss(generation, generation.state.state_loss)
        if is_over:
            await self._let_records_expire(lease)

    def _record_news(self, before: Generation | None, generation: Generation, state: MembershipState) -> None:
        """Record what is new in a generation that may be known already."""
        if generation.record.losses_left != (before.record.losses_left if before is not None else None):
            self._decisions.record_redundancy(state)
        self._decisions.tell_of_unsaved(before, dataclasses.replace(state, generation=generation))
        old = (before.record.decision, before.record.slowness.decision) if before is not None else ()
        for decision in (generation.record.decision, generation.record.slowness.decision):
            if decision is not None and decision not in old:
                self._decisions.record_decision(generation, decision)

    async def _let_records_expire(self, lease: LeaseId) -> None:
        """Have the records that the job's hosts share end with a lease, and forget how often hosts were lost.

        Host statuses have leases of their own.
        """
        await self._put_shared_records(lease)
        await forget_host_losses(self._store, self._leader._job)

    async def _put_shared_records(self, lease: LeaseId) -> None:
        for key in (make_job_key(self._leader._job), make_script_key(self._leader._job)):
            if (found := await self._store.get(key)) is not None:
                await self._store.transaction([require_unchanged(found)], [PutOp(key, found.value, lease)])

    def _now(self) -> float:
        return self._leader._clock.monotonic_s()
