"""The client of another host's snapshot server: small messages through gRPC, bytes through bulk reads."""

import threading

from resilient_jax.errors import PeerUnreachable
from resilient_jax.snapshot.messages import BULK_ADDRESS, SERVICE, BulkAddressRequest, ReadRequest
from resilient_jax.transport import BulkChannel, Credentials, Method, SyncChannel
from resilient_jax.transport.method import RequestT, ResponseT


class PeerClient:
    """A client of one server, connected when first used; safe to share between threads."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._grpc = SyncChannel(address, credentials)
        self._lock = threading.Lock()  # guards what follows
        self._bulk: BulkChannel | None = None
        self._closed = False

    def call(self, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """Call a method and return the reply; raise as `SyncChannel.call`."""
        return self._grpc.call(SERVICE, method, request, timeout_s=timeout_s)

    def read_into(self, request: ReadRequest, out: memoryview, *, timeout_s: float) -> None:
        """Fill `out` with the requested bytes; raise as `SyncChannel.call` and `BulkChannel.read_into`."""
        self._open_bulk_channel(timeout_s).read_into(request, out, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connections, which ends every call on them."""
        with self._lock:
            self._closed = True
            bulk = self._bulk
        self._grpc.close()
        if bulk is not None:
            bulk.close()

    def _open_bulk_channel(self, timeout_s: float) -> BulkChannel:
        with self._lock:
            if self._bulk is not None:
                return self._bulk
        # Without the lock, for which `close` would have to wait. Of two
        # threads that ask, the first one's channel is used.
        reply = self.call(BULK_ADDRESS, BulkAddressRequest(), timeout_s=timeout_s)
        host = self._address.rpartition(":")[0]
        with self._lock:
            if self._closed:
                raise PeerUnreachable(f"our channel to {self._address} was closed")
            if self._bulk is None:
                self._bulk = BulkChannel(f"{host}:{reply.port}", reply.ticket, self._credentials)
            return self._bulk
