"""Statuses of several hosts, written to the store in one transaction.

When a generation begins or ends all hosts of a job write their statuses at once, and a store does some thousand
transactions a second. So a host that reports to another agent than the leader (`progress_tree`) hands its status to
that agent, its parent, which writes together what has come while its last transaction was under way (a group commit).

1. A status replaces the one that its host names by revision, and ends with the host's lease, as if the host had written
   it. So it is written once or not at all, and never over a newer one, however late.
2. A status that does not fit (another was written since, its lease is gone) holds up no other: a transaction that fails
   is divided in halves.
3. A host whose parent does not answer in time, or is not sure, writes to the store itself, at once, and has the leader
   name another parent. A lost parent costs its children `ANSWER_TIMEOUT_S`, once.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.cluster.status_messages import NOT_WRITTEN, SERVICE, WRITE, StatusReceipt, StatusWrite
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.errors import ConfigError, LeaseExpired, ResilientJaxError
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.store.interface import Compare, CompareOperator, CompareTarget, PutOp, Store
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.server import Server

ANSWER_TIMEOUT_S: Final = 0.5
"""A parent takes some milliseconds. One that is stopped, or cut off, takes so long from its children."""
MAX_STATUSES: Final = 64
"""In one transaction; `MAX_TRANSACTION_OPERATIONS` allows twice as many."""
MAX_BYTES: Final = 512 * 1024
"""The same, but for a single status; `MAX_TRANSACTION_BYTES` allows twice as many."""


class _Waiting:
    """A status that is to be written, and the caller that waits for it."""

    def __init__(self, job: JobName, write: StatusWrite) -> None:
        key = make_host_key(job, write.status.host)
        self.compare = Compare(key, CompareTarget.MOD_REVISION, CompareOperator.EQUAL, write.replaced)
        self.put = PutOp(key, ENCODER.encode(write.status), write.lease)
        self._answer: asyncio.Future[Revision] = asyncio.get_running_loop().create_future()

    @property
    def is_wanted(self) -> bool:
        """Whether the caller still waits."""
        return not self._answer.done()

    def answer(self, revision: Revision) -> None:
        """Tell the caller, if it still waits."""
        if self.is_wanted:
            self._answer.set_result(revision)

    async def wait(self) -> Revision:
        """Return the revision in which the status was written, or `NOT_WRITTEN`."""
        return await self._answer


class StatusCombiner:
    """Writes the statuses that other agents hand to this one."""

    def __init__(self, context: AgentContext, server: Server) -> None:
        """Add the method to the agent's server."""
        self._job = context.settings.job
        self._store: Store = context.store
        self._waiting: dict[HostName, _Waiting] = {}
        self._writing: asyncio.Task[None] | None = None
        server.add(SERVICE, {WRITE: self._receive})

    async def close(self) -> None:
        """Write nothing any more; call it after the server has stopped."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _receive(self, request: StatusWrite) -> StatusReceipt:
        waiting = _Waiting(self._job, request)
        if (older := self._waiting.get(request.status.host)) is not None:
            older.answer(NOT_WRITTEN)
        self._waiting[request.status.host] = waiting
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_all())
        return StatusReceipt(revision=await waiting.wait())

    async def _write_all(self) -> None:
        while self._waiting:
            batch = self._take_batch()
            try:
                await self._write(batch)
            finally:
                for status in batch:
                    status.answer(NOT_WRITTEN)  # those that have no answer yet

    def _take_batch(self) -> list[_Waiting]:
        """Take the oldest statuses that one transaction can write, without those for which no caller waits any more."""
        batch: list[_Waiting] = []
        nbytes = 0
        for host, waiting in list(self._waiting.items()):
            nbytes += len(waiting.put.value)
            if len(batch) == MAX_STATUSES or (batch and nbytes > MAX_BYTES):
                break
            del self._waiting[host]
            if waiting.is_wanted:
                batch.append(waiting)
        return batch

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        if not batch:
            return
        try:
            result = await self._store.transaction(
                [status.compare for status in batch], [status.put for status in batch]
            )
        except LeaseExpired:
            pass  # of one of them; nothing was written
        except ResilientJaxError:
            return  # each caller finds out for itself
        else:
            if result.succeeded:
                for status in batch:
                    status.answer(result.revision)
                return
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._write(batch[:middle])
            await self._write(batch[middle:])


class StatusForwarder:
    """Hands this host's status to its parent in the tree."""

    def __init__(self, credentials: Credentials, relay: ProgressRelay) -> None:
        self._credentials = credentials
        self._relay = relay
        self._channel: Channel | None = None

    async def write(self, request: StatusWrite) -> Revision:
        """Return the revision in which the parent has written a status; `NOT_WRITTEN`: write it to the store."""
        parent = self._relay.parent
        if not parent:
            return NOT_WRITTEN
        try:
            channel = await self._connect(parent)
            receipt = await channel.call(SERVICE, WRITE, request, timeout_s=ANSWER_TIMEOUT_S)
        except ConfigError:  # certificates that are being replaced
            return NOT_WRITTEN
        except ResilientJaxError:
            self._relay.abandon(parent)
            return NOT_WRITTEN
        return receipt.revision

    async def close(self) -> None:
        """Close the connection to the parent, if there is one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _connect(self, parent: str) -> Channel:
        if self._channel is None or self._channel.address != parent:
            await self.close()
            self._channel = Channel(parent, self._credentials)
        return self._channel
