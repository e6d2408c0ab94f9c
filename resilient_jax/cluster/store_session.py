"""An agent's membership of the job: one lease, one status record, and the knowledge of when both ended.

The lease is the fence. An agent whose lease has not been renewed for its time to live, counted from before the last
renewal was sent, must count itself as dead, because the others may: it stops training, whatever the reason, and only
then may rejoin.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from resilient_jax.clock import Clock
from resilient_jax.cluster.name_holder import AskHolder, NameHolder, assume_alive
from resilient_jax.cluster.status_messages import NOT_WRITTEN, StatusWrite
from resilient_jax.cluster.stored_records import ENCODER, decode_record
from resilient_jax.errors import JoinRefused, LeaseExpired, PeerUnreachable
from resilient_jax.ids import HostName, JobName, LeaseId, Revision
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.job_records import JobRecord
from resilient_jax.protocol.store_keys import make_host_key, make_job_key
from resilient_jax.protocol.versions import Versions
from resilient_jax.store.interface import (
    Compare,
    CompareOperator,
    CompareTarget,
    KeyValue,
    PutOp,
    RangeOp,
    RangeResponse,
    Store,
    require_absent,
)

RENEWALS_PER_TTL = 3
TAKEN_NAME_POLL_INTERVAL_S = 0.25
LEAVING_S = 2.0
"""Beyond a lease, until the name of an agent that answers counts as taken."""
SILENCE_S = 120.0
"""Beyond a lease, until the name of an agent that does not answer counts as taken: each election of an etcd cluster
prolongs the lease of a dead one by its time to live, and a living one that is cut off from us renews it."""


StatusWriter = Callable[[StatusWrite], Awaitable[Revision]]
"""Has another agent write a status; returns in which revision, or `NOT_WRITTEN`."""


async def write_nothing(_: StatusWrite) -> Revision:
    """Have no other agent write a status."""
    return NOT_WRITTEN


class SessionLost(Exception):
    """The lease ended, or could not be renewed in time: other hosts may count this one as dead."""


class StoreSession:
    """A registered host.

    Use: `await open(...)`, then run `keep_alive` and `publish_changes` until one of them raises `SessionLost`.
    """

    def __init__(
        self,
        store: Store,
        job: JobName,
        ttl_s: float,
        clock: Clock,
        status: Callable[[], HostStatus],
        on_renewed: Callable[[float], None] = lambda until_s: None,
        *,
        write_through: StatusWriter = write_nothing,
        ask_holder: AskHolder = assume_alive,
    ) -> None:
        """Prepare the session.

        Args:
            status: returns the host's present status.
            on_renewed: called with `valid_until_s` after each renewal of the lease.
            write_through: asked first to write a status that has changed.
            ask_holder: tells whether the agent lives that has the host's name.
        """
        self._store = store
        self._job = job
        self._ttl_s = ttl_s
        self._clock = clock
        self._status = status
        self._on_renewed = on_renewed
        self._write_through = write_through
        self._ask_holder = ask_holder
        self._changed = asyncio.Event()
        self._renewed_s = 0.0
        self._written_revision = Revision(0)
        """The `mod_revision` of the status that we know to be in the store."""
        self.lease = LeaseId(0)
        self.written: HostStatus | None = None
        """The status that is in the store."""

    async def open(self) -> None:
        """Register the host, as soon as no other agent has its name.

        Raises:
            JoinRefused: a live agent has the host's name, or the host's versions differ from the job's.
            PeerUnreachable: the store does not answer.
        """
        status = self._status()
        # Before there is a lease: a host that is refused leaves no record that others would see.
        await self._check_versions(status.host, status.agent.versions)
        self._renewed_s = self._clock.monotonic_s()
        self.lease = await self._store.grant(self._ttl_s)
        key = make_host_key(self._job, status.host)
        began_s = self._renewed_s
        while True:
            status = self._status()
            result = await self._store.transaction(
                [require_absent(key)],
                [PutOp(key, ENCODER.encode(status), self.lease)],
                [RangeOp(key)],
            )
            if result.succeeded:
                self._written_revision, self.written = result.revision, status
                return
            found = result.responses[0]
            assert isinstance(found, RangeResponse), "the failure operation is a range"
            if found.key_values:
                await self._settle_name(found.key_values[0], self._clock.monotonic_s() - began_s)
            await asyncio.sleep(TAKEN_NAME_POLL_INTERVAL_S)
            # Taken before the request: the store counts from later, so this
            # host counts itself as dead before the others do.
            self._renewed_s = self._clock.monotonic_s()
            await self._store.keep_alive(self.lease)

    async def _settle_name(self, holder: KeyValue, waited_s: float) -> None:
        """End the lease of an agent that has this host's name, if that agent is gone.

        Raises:
            JoinRefused: the agent lives, or has not answered for too long.
        """
        status, found = decode_record(holder, HostStatus), NameHolder.SILENT
        if status.agent.id == self._status().agent.id:
            found = NameHolder.GONE  # our own session before this one, which was lost
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    self._ttl_s / RENEWALS_PER_TTL
                ):  # our own lease must be renewed meanwhile
                    found = await self._ask_holder(status)
        match found:
            case NameHolder.GONE:
                with contextlib.suppress(LeaseExpired):  # it has ended
                    await self._store.revoke(holder.lease)
            case NameHolder.ALIVE:
                # An agent that is about to end has so long to do it.
                if waited_s > self._ttl_s + LEAVING_S:
                    raise JoinRefused(_name_taken(status, ""))
            case NameHolder.SILENT:
                if waited_s > self._ttl_s + SILENCE_S:
                    raise JoinRefused(_name_taken(status, f", which has not answered for {waited_s:.0f} s"))

    @property
    def valid_until_s(self) -> float:
        """The monotonic time until which no other host may count this one as dead."""
        return self._renewed_s + self._ttl_s

    def mark_changed(self) -> None:
        """Have the changed status written soon, once for many changes."""
        self._changed.set()

    async def publish_changes(self) -> None:
        """Write the status after each change.

        Each writes over the one before it, which it names by its revision. So a status whose writing seemed to have
        failed is not written later over a newer one (a member of an etcd cluster may have been slow).

        Raises:
            SessionLost: the lease is gone.
        """
        while True:
            # Cleared before the status is read and written: a change while
            # that is under way is written by the next round.
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write_status(make_host_key(self._job, self._status().host))
            except LeaseExpired as error:
                raise SessionLost("the lease expired") from error
            except PeerUnreachable:
                self._changed.set()
                await asyncio.sleep(TAKEN_NAME_POLL_INTERVAL_S)

    async def _write_status(self, key: str) -> None:
        status = self._status()
        request = StatusWrite(status=status, lease=self.lease, replaced=self._written_revision)
        if revision := await self._write_through(request):
            self._written_revision, self.written = revision, status
            return
        while True:
            status = self._status()
            result = await self._store.transaction(
                [Compare(key, CompareTarget.MOD_REVISION, CompareOperator.EQUAL, self._written_revision)],
                [PutOp(key, ENCODER.encode(status), self.lease)],
                [RangeOp(key)],
            )
            if result.succeeded:
                self._written_revision, self.written = result.revision, status
                return
            read = result.responses[0]
            assert isinstance(read, RangeResponse), "the failure operation is a range"
            ours = [found for found in read.key_values if found.lease == self.lease]
            if not ours:
                raise LeaseExpired(f"{key} is gone, and with it the lease")
            self._written_revision = ours[0].mod_revision  # a write of ours that seemed to have failed

    async def keep_alive(self) -> None:
        """Renew the lease until that fails for a complete time to live.

        Raises:
            SessionLost: the lease expired, or was not renewed in time.
        """
        interval_s = self._ttl_s / RENEWALS_PER_TTL
        while (left_s := self.valid_until_s - self._clock.monotonic_s()) > 0:
            started_s = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(left_s):
                    await self._store.keep_alive(self.lease)
            except LeaseExpired as error:
                raise SessionLost("the lease expired") from error
            except (PeerUnreachable, TimeoutError):
                # A quarter: several tries are left before the lease ends, and none begins after it.
                next_s = min(self._clock.monotonic_s() + interval_s / 4, self.valid_until_s)
            else:
                self._renewed_s = started_s
                self._on_renewed(self.valid_until_s)
                # Counted from the request: one that took long leaves less time until the next must be answered.
                next_s = started_s + interval_s
            await asyncio.sleep(max(0.0, next_s - self._clock.monotonic_s()))
        raise SessionLost(f"the store did not renew the lease for {self._ttl_s:g} s")

    async def close(self) -> None:
        """Revoke the lease: the others see at once that this host has left."""
        if self.lease:
            async with asyncio.timeout(1.0):
                await self._store.revoke(self.lease)

    async def _check_versions(self, host: HostName, versions: Versions) -> None:
        key = make_job_key(self._job)
        record = JobRecord(versions=versions, first_host=host)
        result = await self._store.transaction(
            [require_absent(key)], [PutOp(key, ENCODER.encode(record))], [RangeOp(key)]
        )
        if result.succeeded:
            return
        read = result.responses[0]
        assert isinstance(read, RangeResponse), "the failure operation is a range"
        first = decode_record(read.key_values[0], JobRecord)
        for name in Versions.__struct_fields__:
            ours, theirs = getattr(versions, name), getattr(first.versions, name)
            if ours != theirs:
                raise JoinRefused(
                    f"host {host} has {name} {ours}, but job {self._job} (host {first.first_host}) runs {name} "
                    f"{theirs}; all hosts of a job need the same version: install {name} {theirs} on {host}"
                )


def _name_taken(holder: HostStatus, remark: str) -> str:
    where = f" (agent process {holder.agent.pid} at {holder.agent.address})"
    return (
        f"host name {holder.host} is taken by another living agent{where}{remark}; every host needs a name of its own: "
        "choose another with --host-name"
    )
