"""The leader: feeds the store's statuses to the membership machine and writes what the machine decides.

Leadership is a key bound to a lease; its create revision is the fencing token. Every decision is one transaction that
succeeds only if that key and the generation are those that this leader has read, so of two agents that both believe
they lead, at most one can write.
"""

import asyncio
import contextlib
from typing import assert_never

import msgspec

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.dead_hosts import DeadHostFinder
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
from resilient_jax.cluster.stored_records import (
    ENCODER,
    decode_generation,
    decode_host_status,
    decode_leader_record,
)
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, LeaseId, Revision
from resilient_jax.membership.commands import (
    MembershipCommand,
    PublishGeneration,
    QuarantineDevice,
    QuarantineHost,
)
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.facts import MembershipState, join_names, list_late_members
from resilient_jax.membership.job_start import make_initial_state
from resilient_jax.membership.machine import (
    HostChanged,
    HostLeft,
    HostProgressed,
    MembershipEvent,
    MembershipMachine,
    QuarantineChanged,
    Tick,
)
from resilient_jax.membership.redundancy import measure_redundancy
from resilient_jax.membership.severities import Action
from resilient_jax.membership.spare_hosts import list_unseated, list_used
from resilient_jax.membership.state_loss import count_lost_steps, explain_state_loss
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation_change import describe_change
from resilient_jax.protocol.leader_record import LeaderRecord
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord
from resilient_jax.protocol.records import Generation, GenerationPhase, HostStatus
from resilient_jax.protocol.recovery_records import RecoveryDecision
from resilient_jax.protocol.state_records import StateLoss
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


class _LeadershipLost(Exception):
    """Another leader wrote, or this one's key is gone."""


class Leader:
    """One agent's candidacy, and its term while it leads."""

    def __init__(
        self,
        context: AgentContext,
        config: MembershipConfig,
        services: CoordinationServices,
        relay: ProgressRelay,
    ) -> None:
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
        leading = decode_leader_record(found.key_values[0])
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
        self._unseated: list[HostName] = []
        """The spares that were last found to have no seat."""

    async def run(self) -> None:
        prefix = make_hosts_prefix(self._leader._job)
        stored = await self._store.get(self._generation_key)
        generation = decode_generation(stored) if stored else None
        self._known_revision = stored.mod_revision if stored else Revision(0)
        self._published = generation
        # The watch begins with the revision after this read: no change is missed, and none is seen twice.
        revision, records = await self._store.range(prefix)
        statuses = [decode_host_status(record) for record in records]
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
                if isinstance(event, HostLeft):
                    self._note_loss(machine.state, event.host)
                commands = machine.handle(event, self._now())
                for command in commands:
                    await self._execute(command, machine.state)
                for host in self._losses.take(self._now()):
                    await note_host_loss(self._leader._context, host, self._token)
                if commands or isinstance(event, Tick):
                    self._record_unseated(machine.state)
                    late = list_late_members(machine.state)
                    self._leader._dead_hosts.look_at((s.host, s.agent_id, s.agent_endpoint) for s in late)
                event = await self._next(watching)
        finally:
            for task in watching:
                task.cancel()
            self._leader._relay.follow("", on_refused=lambda: None)

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
        self._inbox.put_nowait(HostProgressed(progress.host, progress.agent_id, progress.step))

    def _add_to_tree(self, status: HostStatus) -> None:
        if status.host != self._leader._record.host:
            self._tree.add(status.host, status.agent_endpoint)

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
            status = decode_host_status(event.key_value)
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
        if generation.losses_left != (before.losses_left if before is not None else None):
            self._record_redundancy(state)
        old = (before.decision, before.slowness.decision) if before is not None else ()
        for decision in (generation.decision, generation.slowness.decision):
            if decision is not None and decision not in old:
                self._record_decision(generation, decision)
        measured = {
            "progress": generation.progress,
            "losses_left": generation.losses_left,
            "history": generation.history,
            "decision": generation.decision,
            "slowness": generation.slowness,
        }
        if before is not None and msgspec.structs.replace(before, **measured) == generation:
            return  # only progress, redundancy or a decision to wait was recorded
        self._leader._log.record(
            EventKind.GENERATION_PHASE,
            generation=generation.number,
            step=generation.step,
            phase=str(generation.phase),
            change=str(generation.change),
            hosts=len(generation.members),
            reason=generation.reason,
            token=self._token,
            revision=result.revision,
        )
        if generation.hang and (before is None or before.number < generation.number):
            self._record_hang(before, generation)
        for spare in list_used(before, state):
            self._record_used(spare, generation)
        if generation.state_loss is not None and (
            before is None or generation.state_loss != before.state_loss
        ):
            self._record_state_loss(generation, generation.state_loss)
        if is_over:
            await self._let_records_expire(lease)

    async def _let_records_expire(self, lease: LeaseId) -> None:
        """Have the records that the job's hosts share end with a lease, and forget how often hosts were lost.

        Host statuses have leases of their own.
        """
        for key in (make_job_key(self._leader._job), make_script_key(self._leader._job)):
            if (found := await self._store.get(key)) is not None:
                await self._store.transaction([require_unchanged(found)], [PutOp(key, found.value, lease)])
        await forget_host_losses(self._store, self._leader._job)

    def _record_redundancy(self, state: MembershipState) -> None:
        redundancy = measure_redundancy(state)
        if redundancy is None:
            return  # the job begins, or its state is lost, which is an event of its own
        self._leader._log.record(
            EventKind.STATE_REDUNDANCY,
            generation=state.generation.number,
            step=redundancy.step,
            losses=redundancy.losses,
            copies=redundancy.copies,
            snapshot=redundancy.snapshot is not None,
        )

    def _record_decision(self, generation: Generation, decision: RecoveryDecision) -> None:
        self._leader._log.record(
            EventKind.RECOVERY_DECIDED,
            generation=decision.number,
            step=generation.progress,
            action=str(decision.action),
            reason=decision.reason,
            options="; ".join(option.describe() for option in decision.options),
            next_failure_s=round(decision.next_failure_s, 1),
            wait_s=round(decision.wait_s, 3),
        )

    def _record_hang(self, before: Generation | None, generation: Generation) -> None:
        """Record and print what hangs, and what is done about it."""
        trained = before.members if before is not None else ()
        left_out = [member.host for member in trained if generation.find_member(member.host) is None]
        is_left_out = generation.keeps_workers and bool(left_out)
        action = Action.RESTART_WORKER if left_out else Action.RETRY_IN_PLACE
        self._leader._log.record(
            EventKind.HANG_NAMED,
            generation=generation.number,
            step=generation.step,
            hosts=", ".join(left_out) if is_left_out else generation.failed_host or "",
            why=generation.hang,
            action=action.value,
        )
        self._leader._print_line(f"{generation.hang}; {action}")

    def _record_used(self, spare: HostName, generation: Generation) -> None:
        self._leader._log.record(
            EventKind.HOST_SPARE_USED,
            generation=generation.number,
            step=generation.step,
            spare=spare,
            change=str(generation.change),
        )
        self._leader._print_line(f"{spare} spared, and takes part from step {generation.step} on")

    def _record_unseated(self, state: MembershipState) -> None:
        """Record which spares have no seat, whenever there are others, and print what to do about it."""
        before, self._unseated = self._unseated, list_unseated(state, self._leader._config)
        if not self._unseated or self._unseated == before:
            return
        generation = state.generation
        spares, seats = join_names(self._unseated), generation.num_seats
        self._leader._log.record(
            EventKind.HOST_SPARE_UNSEATED, generation=generation.number, spares=spares, seats=seats
        )
        self._leader._print_line(
            f"{spares}: found no seat for this spare, expected one of the {seats} of this world to be free; a spare "
            "without a seat joins by a re-form, which takes seconds longer. Raise spare_seats, or start fewer spares"
        )

    def _record_state_loss(self, generation: Generation, lost: StateLoss) -> None:
        """Record that steps are lost, and print it for the user."""
        self._leader._log.record(
            EventKind.STATE_LOST,
            generation=generation.number,
            step=lost.step,
            source="the initial state" if lost.checkpoint_step is None else "checkpoint",
            goes_on_from=lost.checkpoint_step or 0,
            steps_lost=count_lost_steps(lost),
            at_least=lost.is_lower_bound,
            reason=lost.reason,
        )
        self._leader._print_line(f"{explain_state_loss(lost)}: {lost.reason}")

    def _now(self) -> float:
        return self._leader._clock.monotonic_s()
