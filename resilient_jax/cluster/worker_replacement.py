"""Starts a worker again that lacks devices, or its snapshot server, when that costs no state: one host at a time."""

import asyncio
import contextlib

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.errors import PeerError
from resilient_jax.ids import HostName, Incarnation, LeaseId
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.store_keys import make_generation_key, make_replacement_key
from resilient_jax.protocol.worker_report import WorkerReport
from resilient_jax.store.interface import PutOp, require_absent

CHECK_INTERVAL_S = 1.0
"""How often a worker with other devices, or one that takes the place of such a one, is looked at."""
NO_SNAPSHOTS = "its snapshot server ended"
TURN_TIMEOUT_S = 600.0
"""After which another host's worker may be started again, although this one's has not come back."""


def may_replace(generation: Generation | None, host: HostName) -> bool:
    """Return whether the worker of a host may be ended without a loss of what was committed. Pure.

    While members train, and the state outlives the loss of one of them; always if the host is no member.
    """
    if generation is None:
        return True
    if generation.phase is not GenerationPhase.ACTIVE:
        return False
    if host not in {member.host for member in generation.membership.members}:
        return True
    if generation.record.losses_left is None:
        return True  # nothing is committed
    return generation.record.losses_left >= 1 and len(generation.membership.members) > 1


def is_only_holder(generation: Generation | None, host: HostName, report: WorkerReport) -> bool:
    """Return whether the worker of a host is the only one of the job, and has the state: to end it would lose that."""
    return (
        generation is not None
        and [m.host for m in generation.membership.members] == [host]
        and report.held.holds_state
    )


def is_outdated(context: AgentContext, supervisor: WorkerSupervisor) -> bool:
    """Return whether the worker of this host lacks what the next one has: devices, or its snapshot server."""
    worker = supervisor.worker
    return worker is not None and worker.is_outdated(context.devices.settings)


def end_if_outdated(context: AgentContext, supervisor: WorkerSupervisor, why: str) -> None:
    """End a worker that lacks what the next one has, now; that costs no restart."""
    if is_outdated(context, supervisor):
        worker, devices = supervisor.worker, context.devices
        if worker is not None and worker.started_with is not None and devices.num_devices is not None:
            used = worker.started_with.devices or range(devices.num_devices)
            if devices.records.keys().isdisjoint(used):
                # Leaders must know, whatever they have seen of it: a loss that no failure has caused.
                devices.ended_for_return = worker.incarnation
        supervisor.kill(why, costs_restart=False)


class WorkerReplacement:
    """Ends this host's worker when its devices have changed, and it is this host's turn."""

    def __init__(self, context: AgentContext, supervisor: WorkerSupervisor) -> None:
        self._context = context
        self._supervisor = supervisor
        self._turn: LeaseId | None = None
        """The lease of this host's turn, which lasts until the next worker trains."""
        self._ended: Incarnation | None = None
        """Of the worker that was ended in this turn."""
        self._why = ""
        self._is_wait_told = False

    def begin(self, why: str) -> None:
        """Have a worker that is outdated started again when it may be."""
        self._why, self._is_wait_told = why, False

    async def run(self) -> None:
        """Start the worker again whenever its devices have changed, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._turn is None and not is_outdated(self._context, self._supervisor):
                continue
            with contextlib.suppress(PeerError):
                await self.check()

    async def check(self) -> None:
        """Begin or end this host's turn, if either is due.

        Raises:
            PeerError: the store did not answer.
        """
        generation = await self._read_generation()
        if self._turn is not None:
            await self._end_turn(generation)
        elif is_outdated(self._context, self._supervisor):
            await self._replace(generation)

    async def _replace(self, generation: Generation | None) -> None:
        host = self._context.settings.host
        if not may_replace(generation, host):
            self._tell_wait()
            return
        if generation is not None and host in {member.host for member in generation.membership.members}:
            if not await self._take_turn():
                return
            # Only now are the effects of an earlier turn of another host sure to be in the generation.
            if not may_replace(await self._read_generation(), host):
                await self._give_back()
                return
        worker = self._supervisor.worker
        self._ended = worker.incarnation if worker is not None else None
        end_if_outdated(self._context, self._supervisor, self._explain())

    async def _take_turn(self) -> bool:
        """Return whether it is this host's turn now."""
        settings, store = self._context.settings, self._context.store
        key = make_replacement_key(settings.job)
        if await store.get(key) is not None:
            return False
        lease = await store.grant(TURN_TIMEOUT_S)
        taken = await store.transaction([require_absent(key)], [PutOp(key, settings.host.encode(), lease)])
        if not taken.succeeded:
            await store.revoke(lease)
            return False
        self._turn = lease
        return True

    async def _end_turn(self, generation: Generation | None) -> None:
        """End this host's turn once another worker of it trains, or the host does not take part any more."""
        host = self._context.settings.host
        if generation is not None and generation.phase is GenerationPhase.ACTIVE:
            trains = any(
                one.host == host and one.incarnation != self._ended for one in generation.membership.members
            )
            if trains or not generation.membership.members:
                await self._give_back()

    async def _give_back(self) -> None:
        lease, self._turn = self._turn, None
        if lease is not None:
            await self._context.store.revoke(lease)

    async def _read_generation(self) -> Generation | None:
        stored = await self._context.store.get(make_generation_key(self._context.settings.job))
        return decode_record(stored, Generation) if stored is not None else None

    def _explain(self) -> str:
        worker = self._supervisor.worker
        return NO_SNAPSHOTS if worker is not None and worker.lacks_snapshots else self._why

    def _tell_wait(self) -> None:
        if not self._is_wait_told:
            self._is_wait_told = True
            self._context.print_line(
                f"{self._context.settings.host}: {self._explain()}; its worker is started again once other members "
                "have all of the state"
            )
