"""Another host's snapshot server, as its clients call it: small messages through gRPC, bytes through bulk reads."""

import threading

from resilient_jax.errors import PeerUnreachable
from resilient_jax.snapshot.messages import BULK_ADDRESS, SERVICE, BulkAddressRequest, ReadRequest
from resilient_jax.transport import BulkChannel, Credentials, Method, SyncChannel
from resilient_jax.transport.method import RequestT, ResponseT


class PeerClient:
    """Connects when first used; safe to share between threads."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._grpc = SyncChannel(address, credentials)
        self._lock = threading.Lock()  # guards what follows
        self._bulk: BulkChannel | None = None
        self._closed = False

    def call(self, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """The answer; raises as `SyncChannel.call`."""
        return self._grpc.call(SERVICE, method, request, timeout_s=timeout_s)

    def read_into(self, request: ReadRequest, out: memoryview, *, timeout_s: float) -> None:
        """Fills `out` with what is asked for; raises as `SyncChannel.call` and `BulkChannel.read_into`."""
        self._find_bulk(timeout_s).read_into(request, out, timeout_s=timeout_s)

    def close(self) -> None:
        """Ends the connections and every call on them."""
        with self._lock:
            self._closed = True
            bulk = self._bulk
        self._grpc.close()
        if bulk is not None:
            bulk.close()

    def _find_bulk(self, timeout_s: float) -> BulkChannel:
        with self._lock:
            if self._bulk is not None:
                return self._bulk
        place = self.call(BULK_ADDRESS, BulkAddressRequest(), timeout_s=timeout_s)
        host = self._address.rpartition(":")[0]
        with self._lock:
            if self._closed:
                raise PeerUnreachable(f"our channel to {self._address} was closed")
            if self._bulk is None:
                self._bulk = BulkChannel(f"{host}:{place.port}", place.ticket, self._credentials)
            return self._bulk
