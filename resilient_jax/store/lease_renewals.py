"""Renewals of leases, on connections and a thread of their own, apart from all else that the store answers.

The threads of gRPC take the newest work first. So while strangers connect to the store's port, or call it, a renewal
that came before them may wait there for as long as they go on, although the store itself is idle. A renewal is
therefore a call between peers: the kernel keeps it in a socket of its own, and a thread that does nothing else answers
it, in the store as in the agent, also while their event loops answer others.

A client whose renewals cannot get through here, or that is one too many, renews by a call.
"""

import asyncio
import concurrent.futures
import socket
from types import TracebackType
from typing import Final, Self

from resilient_jax.errors import MessageError, PeerUnreachable, Unauthenticated
from resilient_jax.ids import LeaseId
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.messages import LeaseReply, LeaseRequest
from resilient_jax.threads import start_thread_pool
from resilient_jax.transport import Credentials, Method, PeerChannel, PeerServer
from resilient_jax.transport.peer_calls import CallService
from resilient_jax.transport.server_address import parse_address

MAX_CLIENTS: Final = 384
"""Each has a thread, and all together fewer than `incoming_connections.MAX_CONNECTIONS`."""
TRIES_PER_TTL: Final = 4
"""The part of a lease's time to live after which a renewal goes by a call instead: most of it is left for that."""
SERVICE: Final = "leases"
RENEW: Final = Method("renew", LeaseRequest, LeaseReply)


class RenewalServer:
    """Renews leases of a store on a port of its own; enter it (`async with`) while the store is served."""

    def __init__(self, address: str, credentials: Credentials, store: MemoryStore) -> None:
        """Create the server without listener.

        Args:
            address: host:port at which the store is served; this server listens on another port of that host.

        Raises:
            ConfigError: the address has another form.
        """
        self._host, _ = parse_address(address)
        self._credentials = credentials
        self._store = store
        self._server: PeerServer | None = None

    async def __aenter__(self) -> Self:
        family, *_, found = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
        assert family in (socket.AF_INET, socket.AF_INET6), family
        services = {SERVICE: CallService({RENEW: self._renew})}
        self._server = PeerServer(str(found[0]), self._credentials, services, name="rj-renewals")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.shut_down()
            self._server = None

    def offer(self) -> int | None:
        """Return the port where a client may renew its leases; None while there is no place for one more."""
        if self._server is None or len(self._server) >= MAX_CLIENTS:
            return None
        return self._server.port

    def _renew(self, request: LeaseRequest) -> LeaseReply:
        return LeaseReply(lease=request.lease, ttl_s=self._store.renew(request.lease))


class RenewalChannel:
    """The connection of one client to a `RenewalServer`, for one event loop."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Begin without a connection.

        Args:
            address: host:port at which the client calls the store.
        """
        self._host = address.rpartition(":")[0]
        self._credentials = credentials
        self._timeout_s = float("inf")
        self._port: int | None = None
        self._channel: PeerChannel | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._reading: concurrent.futures.Future[LeaseReply] | None = None

    def take_offer(self, reply: LeaseReply) -> None:
        """Use the port that an answer of the store names from now on."""
        if reply.renewals is None or (reply.renewals == self._port and self._channel is not None):
            return
        self._forget()
        self._port = reply.renewals
        self._timeout_s = min(self._timeout_s, reply.ttl_s / TRIES_PER_TTL)
        self._channel = PeerChannel(f"{self._host}:{self._port}", self._credentials, SERVICE)
        if self._pool is None:
            self._pool = start_thread_pool(1, "rj-renewal")

    async def try_renew(self, lease: LeaseId) -> float | None:
        """Extend a lease; return the seconds until it expires, or None: it must be renewed by a call.

        Raises:
            LeaseExpired: the lease is gone.
        """
        is_free = self._reading is None or self._reading.done()  # else it looks for the host's name
        if self._channel is None or self._pool is None or not is_free:
            return None
        request = LeaseRequest(lease=lease)
        self._reading = self._pool.submit(self._channel.call, RENEW, request, timeout_s=self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                return (await asyncio.wrap_future(self._reading)).ttl_s
        except (PeerUnreachable, MessageError, Unauthenticated, TimeoutError):
            self._forget()
            return None
        except asyncio.CancelledError:
            self._forget()  # an answer may still come, and the thread must not wait for it
            raise

    def close(self) -> None:
        """Close the connection, and end the thread."""
        self._forget()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _forget(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
