"""The client of a store in another process, over the transport."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.errors import PeerUnreachable, StoreUnreachable
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.store.interface import (
    Compare,
    Operation,
    Store,
    TransactionResult,
    WatchEvent,
)
from resilient_jax.store.lease_renewals import RenewalChannel
from resilient_jax.store.messages import (
    GRANT,
    KEEP_ALIVE,
    REVOKE,
    SERVICE,
    STATUS,
    TRANSACTION,
    WATCH,
    GrantRequest,
    LeaseRequest,
    StoreStatusRequest,
    TransactionRequest,
    WatchRequest,
)
from resilient_jax.store.watch_resumption import RETRY_INTERVAL_S, WatchProgress, resume_watch
from resilient_jax.transport import Channel, Credentials
from resilient_jax.transport.method import Method, RequestT, ResponseT

CALL_TIMEOUT_S = 5.0
RESUME_TIMEOUT_S = 5.0
ATTEMPT_TIMEOUT_S = 2.0
"""The limit of one attempt of `connect`: short, so that progress is reported and a store that returns is found."""
MIN_ATTEMPT_TIMEOUT_S = 0.25
"""The last attempt may pass the deadline by this much: enough to learn the reason of the failure."""


class RemoteStore(Store):
    """The client of a `Store` that `service.serve_store` serves in another process.

    It repeats no call: after PeerUnreachable a change may have been made or not. Only watches resume.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        """Create the client without connecting.

        Args:
            address: host:port of the store.
            resume_timeout_s: how long a broken watch tries to resume.
        """
        self.address = address
        self._channel = Channel(address, credentials)
        self._renewals = RenewalChannel(address, credentials)
        self._call_timeout_s = call_timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._clock = clock if clock is not None else SystemClock()
        self._store_id = ""
        self._is_closed = False

    @classmethod
    async def connect(
        cls,
        address: str,
        credentials: Credentials,
        timeout_s: float,
        on_progress: Callable[[float, PeerUnreachable], None] | None = None,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> Self:
        """Return a store that has answered once, after attempts for up to `timeout_s`.

        Raises:
            StoreUnreachable: the store did not answer; the message has the address, the time, the last error and what
                to do.
            Unauthenticated: the store refused the token; raised at once.
        """
        store = cls(address, credentials, call_timeout_s=call_timeout_s, resume_timeout_s=resume_timeout_s)
        try:
            await store._wait_status(timeout_s, on_progress)
        except BaseException:
            await store.close()
            raise
        return store

    async def transaction(
        self,
        compares: Sequence[Compare],
        success_ops: Sequence[Operation],
        failure_ops: Sequence[Operation] = (),
    ) -> TransactionResult:
        """Run a transaction; see `Store.transaction`."""
        request = TransactionRequest(
            compares=tuple(compares), success_ops=tuple(success_ops), failure_ops=tuple(failure_ops)
        )
        return await self._call(TRANSACTION, request)

    async def grant(self, ttl_s: float) -> LeaseId:
        """Return a new lease; see `Store.grant`."""
        reply = await self._call(GRANT, GrantRequest(ttl_s=ttl_s))
        self._renewals.take_offer(reply)
        return reply.lease

    async def keep_alive(self, lease: LeaseId) -> float:
        """Extend a lease; see `Store.keep_alive`."""
        if (ttl_s := await self._renewals.try_renew(lease)) is not None:
            return ttl_s
        reply = await self._call(KEEP_ALIVE, LeaseRequest(lease=lease))
        self._renewals.take_offer(reply)
        return reply.ttl_s

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see `Store.revoke`."""
        await self._call(REVOKE, LeaseRequest(lease=lease))

    async def watch(self, prefix: str, from_revision: Revision) -> AsyncGenerator[list[WatchEvent], None]:
        """Yield as `Store.watch` does, and resume after the last revision received when the stream breaks.

        Raises:
            PeerUnreachable: the stream broke and the store did not answer for `resume_timeout_s`.
            StoreReplaced: another store answers now, in which our revisions and leases have no meaning.
            CompactedRevision: see `Store.watch`.
        """
        watch = resume_watch(
            lambda revision, deadline_s: self._watch_once(prefix, revision, deadline_s),
            from_revision,
            what=f"a watch of {prefix!r} at {self.address}",
            resume_timeout_s=self._resume_timeout_s,
            is_closed=lambda: self._is_closed,
            clock=self._clock,
        )
        async with contextlib.aclosing(watch) as batches:
            async for events in batches:
                yield events

    async def _watch_once(self, prefix: str, from_revision: Revision, deadline_s: float) -> WatchProgress:
        """Yield the progress of one stream, whose first answer must arrive before `deadline_s` of our clock."""
        request = WatchRequest(prefix=prefix, from_revision=from_revision, store_id=self._store_id)
        async with contextlib.aclosing(self._channel.stream(SERVICE, WATCH, request)) as batches:
            try:
                async with asyncio.timeout(
                    max(MIN_ATTEMPT_TIMEOUT_S, deadline_s - self._clock.monotonic_s())
                ):
                    first = await anext(batches)
            except TimeoutError as error:
                raise PeerUnreachable(f"{self.address} did not answer a watch of {prefix!r}") from error
            except StopAsyncIteration:
                return
            self._store_id = first.store_id
            yield first.events, first.next_revision
            async for batch in batches:
                yield batch.events, batch.next_revision

    async def close(self) -> None:
        """Close the connection, which ends all watches; see `Store.close`."""
        self._is_closed = True
        self._renewals.close()
        await self._channel.close()

    async def _call(self, method: Method[RequestT, ResponseT], request: RequestT) -> ResponseT:
        return await self._channel.call(SERVICE, method, request, timeout_s=self._call_timeout_s)

    async def _wait_status(
        self, timeout_s: float, on_progress: Callable[[float, PeerUnreachable], None] | None
    ) -> None:
        started_s = self._clock.monotonic_s()
        while True:
            left_s = started_s + timeout_s - self._clock.monotonic_s()
            attempt_s = max(MIN_ATTEMPT_TIMEOUT_S, min(ATTEMPT_TIMEOUT_S, left_s))
            try:
                status = await self._channel.call(SERVICE, STATUS, StoreStatusRequest(), timeout_s=attempt_s)
            except PeerUnreachable as error:
                elapsed_s = self._clock.monotonic_s() - started_s
                if on_progress is not None:
                    on_progress(elapsed_s, error)
                if elapsed_s >= timeout_s:
                    raise StoreUnreachable(
                        f"no store answered at {self.address} for {elapsed_s:.1f} s (last: {error}). "
                        "Check the address, that the process that serves the store runs there, and that no "
                        "firewall blocks it"
                    ) from error
                await asyncio.sleep(RETRY_INTERVAL_S)
            else:
                self._store_id = status.store_id
                return
