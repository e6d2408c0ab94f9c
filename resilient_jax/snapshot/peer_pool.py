"""The clients of all other snapshot servers, with a timeout on every call."""

import threading
from collections.abc import Iterable
from typing import Final

from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.messages import READ, SERVICE, ReadRequest, Region
from resilient_jax.transport import Credentials, Method, PeerChannel
from resilient_jax.transport.method import RequestT, ResponseT

CALL_TIMEOUT_S: Final = 15.0
"""Of one call, which transfers a MiB at most and is repeated by its caller."""


class PeerPool:
    """Clients by address, created when first used; safe to share between threads."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()  # guards the table
        self._peers: dict[str, PeerChannel] = {}

    def call(self, address: str, method: Method[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """Call a method of a server and return the reply; raise as `PeerChannel.call`."""
        return self._peer(address).call(method, request, timeout_s=CALL_TIMEOUT_S)

    def read_part(self, address: str, id: SnapshotId, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of a part, for the caller to verify; raise as `PeerChannel.read_into`."""
        request = ReadRequest(id=id, region=Region.PART, offset=offset, length=len(out), verify=False)
        self._peer(address).read_into(READ, request, out, timeout_s=CALL_TIMEOUT_S)

    def keep_only(self, addresses: Iterable[str]) -> None:
        """Close the clients of all other addresses."""
        kept = set(addresses)
        with self._lock:
            gone = [self._peers.pop(address) for address in list(self._peers) if address not in kept]
        for peer in gone:
            peer.close()

    def _peer(self, address: str) -> PeerChannel:
        with self._lock:
            if address not in self._peers:
                self._peers[address] = PeerChannel(address, self._credentials, SERVICE)
            return self._peers[address]
