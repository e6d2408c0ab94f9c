"""Keeps a host registered in the store: a session, what runs only with one, and another session when one is lost."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.generation_follower import GenerationFollower
from resilient_jax.cluster.leader import Leader
from resilient_jax.cluster.name_holder import ask_name_holder
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.cluster.quarantine import read_quarantine
from resilient_jax.cluster.status_combiner import StatusForwarder
from resilient_jax.cluster.store_session import SessionLost, StoreSession
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.errors import PeerError, StoreUnreachable
from resilient_jax.events import EventKind
from resilient_jax.membership.config import MembershipConfig
from resilient_jax.membership.state_loss import StateLossPolicy
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.store_keys import make_generation_key
from resilient_jax.protocol.worker_messages import HoldTraining, LeaseRenewed

CANCEL_INTERVAL_S = 1.0
REGROUP_SLACK_S = 2.0
"""Beyond a lease, for hosts that lost the store together to register again."""


class HostRegistration:
    """One host's registration: lease and status in the store, the watch of the generation, and the candidacy to lead.

    Attributes:
        session: session with the store; None before the first one, and while the store is away.
    """

    def __init__(
        self,
        context: AgentContext,
        supervisor: WorkerSupervisor,
        services: CoordinationServices,
        follower: GenerationFollower,
        relay: ProgressRelay,
        make_status: Callable[[], HostStatus],
        forwarder: StatusForwarder,
    ) -> None:
        self.session: StoreSession | None = None
        self._context = context
        self._supervisor = supervisor
        self._services = services
        self._follower = follower
        self._relay = relay
        self._make_status = make_status
        self._forwarder = forwarder

    def mark_changed(self) -> None:
        """Have the host's status written to the store soon."""
        if self.session is not None:
            self.session.mark_changed()

    async def close(self) -> None:
        """Give up the lease, so that the others need not wait for its end."""
        if self.session is not None:
            with contextlib.suppress(PeerError, TimeoutError):
                await self.session.close()

    def _new_session(self) -> StoreSession:
        return StoreSession(
            self._context.store,
            self._context.settings.job,
            self._context.settings.config.lease_ttl_s,
            self._context.clock,
            self._make_status,
            lambda until_s: self._supervisor.send_order(LeaseRenewed(valid_until_s=until_s)),
            write_through=self._forwarder.write,
            ask_holder=lambda holder: ask_name_holder(holder, self._context.settings.credentials),
        )

    async def stay_registered(self, session: StoreSession) -> None:
        """Keep the session alive; when it is lost, stop training, then register again."""
        host = self._context.settings.host
        while True:
            session.mark_changed()
            why = await self._use_session(session)
            self.session = None
            self._context.log.record(EventKind.STORE_LOST, why=why)
            self._context.print_line(
                f"{self._context.settings.host}: {why}; training stops here until the store is back"
            )
            # Before the host registers again: the others may have gone on without
            # it, and it must not train in two generations.
            self._supervisor.send_order(HoldTraining())
            session = await self.register(why)
            self._context.log.record(EventKind.STORE_RECONNECTED)
            self._context.print_line(f"{host}: the store is back")

    async def _use_session(self, session: StoreSession) -> str:
        """Run everything that needs a session; return the reason for the session's end."""
        loop = asyncio.get_running_loop()
        leader = _make_leader(self._context, self._services, self._relay, self._follower)
        tasks = [
            loop.create_task(session.keep_alive()),
            loop.create_task(session.publish_changes()),
            loop.create_task(_retry_after_faults(self._follower.watch)),
            loop.create_task(_retry_after_faults(lambda: leader.campaign(session.lease))),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                error = task.exception()
                if isinstance(error, SessionLost):
                    return str(error)
                if error is not None:
                    raise error
            raise AssertionError("a session's tasks end only by an error")
        finally:
            await _end_all(tasks)

    async def register(self, why: str) -> StoreSession:
        """Return a new session, the first one or after the loss of another; `why` is the reason of that loss.

        Raises:
            JoinRefused: the job does not let this host in.
            LogUnwritable: the script cannot be kept in the run folder.
            StoreUnreachable: no session could be opened within `JobConfig.store_timeout_s`.
        """
        settings, clock = self._context.settings, self._context.clock
        deadline_s = clock.monotonic_s() + settings.config.store_timeout_s
        while True:
            session = self._new_session()
            try:
                # Read before the session opens: a later generation may seat this host again, and that seat is valid.
                known = await self._read_generation()
                self._follower.begin_registration(known)
                await session.open()
                self._follower.end_registration(known)
                await self._tell_quarantine()
                await self._context.admission.settle()
                session.mark_changed()  # the status has the program from now on
                self.session = session
                return session
            except PeerError as error:
                if clock.monotonic_s() > deadline_s:
                    raise StoreUnreachable(
                        f"host {settings.host} lost the store ({why}) and could not reach it again within "
                        f"{settings.config.store_timeout_s:g} s; training stopped here, its state is given "
                        "up. Start the store again, then this agent"
                    ) from error
                await asyncio.sleep(0.2)

    async def _tell_quarantine(self) -> None:
        """Print why this host will take no part for a while, if so."""
        settings = self._context.settings
        for record in await read_quarantine(self._context.store, settings.job):
            if record.host == settings.host:
                left_s = record.until_wall_s - self._context.clock.wall_s()
                self._context.print_line(
                    f"{settings.host}: in quarantine for {left_s:.0f} s more, and takes no part: {record.reason}; "
                    "`resilient-jax hosts clear` ends it"
                )

    async def _read_generation(self) -> Generation | None:
        """Return the generation that stands while this host registers."""
        record = await self._context.store.get(make_generation_key(self._context.settings.job))
        return decode_record(record, Generation) if record is not None else None


def _make_leader(
    context: AgentContext,
    services: CoordinationServices,
    relay: ProgressRelay,
    follower: GenerationFollower,
) -> Leader:
    settings, config = context.settings, context.settings.config
    return Leader(
        context,
        MembershipConfig(
            num_hosts=settings.num_hosts,
            min_hosts=config.min_hosts,
            start_timeout_s=config.start_timeout_s,
            regroup_grace_s=config.lease_ttl_s + REGROUP_SLACK_S,
            state_loss_grace_s=config.state_loss_grace_s,
            quiesce_timeout_s=config.quiesce_timeout_s,
            forming_timeout_s=config.forming_timeout_s,
            max_collective_retries=config.max_collective_retries,
            max_error_restarts=config.max_error_restarts,
            state_loss_policy=StateLossPolicy(config.state_loss_policy),
            notice_s=settings.grace.seconds,
            spare_seats=config.spare_seats if settings.has_cpu_workers else 0,
            replaces_workers=settings.replaces_workers,
            act_on_slow_hosts=config.slow_hosts == "act",
        ),
        services,
        relay,
        is_leaving=lambda: follower.is_leaving,
        is_past=follower.is_past,
    )


async def _retry_after_faults(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run `work` again after a fault of the store; the lease decides when an outage is too long."""
    while True:
        try:
            await work()
        except PeerError:
            await asyncio.sleep(0.1)


async def _end_all(tasks: "Sequence[asyncio.Task[None]]") -> None:
    """Cancel tasks until they are done: a task that swallowed a cancellation must not keep a host out forever."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)
    await asyncio.gather(
        *tasks, return_exceptions=True
    )  # their errors were handled, or have no effect any more
