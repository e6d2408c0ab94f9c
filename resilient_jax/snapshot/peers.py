"""The other servers, as one of them calls them: one channel each, a deadline on every call."""

import threading
from collections.abc import Iterable
from typing import Final

from resilient_jax.errors import ChecksumMismatch, MessageError
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.held import checksum_named
from resilient_jax.snapshot.messages import READ, SERVICE, ReadRequest, Region
from resilient_jax.transport import Credentials, Method, SyncChannel
from resilient_jax.transport.method import RequestT, ResponseT

CALL_DEADLINE_S: Final = 15.0
"""Of one call, of a message of a MiB at most; whoever calls tries again."""


class Peers:
    """Channels by address, made when first used; safe to share between threads."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()  # guards the table
        self._channels: dict[str, SyncChannel] = {}

    def call(self, address: str, method: Method[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """The answer; raises as `SyncChannel.call`."""
        return self._channel(address).call(SERVICE, method, request, timeout_s=CALL_DEADLINE_S)

    def read_part(self, address: str, id: SnapshotId, offset: int, length: int) -> bytes:
        """Bytes of a part, as they were in its host's memory; raises as `SyncChannel.stream`.

        Raises:
            ChecksumMismatch: they were changed on the way.
            MessageError: there are too few.
        """
        request = ReadRequest(id=id, region=Region.PART, offset=offset, length=length)
        pieces: list[bytes] = []
        for reply in self._channel(address).stream(SERVICE, READ, request, timeout_s=CALL_DEADLINE_S):
            found = checksum_named(reply.checksum).compute(reply.data)
            if found != reply.digest:
                raise ChecksumMismatch(
                    f"bytes {offset} to {offset + length} of the part at {address} came with {reply.checksum} "
                    f"{found:08x}, expected {reply.digest:08x}"
                )
            pieces.append(reply.data)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(data) != length:
            raise MessageError(f"{address} sent {len(data)} bytes of its part, expected {length}")
        return data

    def keep_only(self, addresses: Iterable[str]) -> None:
        """Closes the channels to all others."""
        kept = set(addresses)
        with self._lock:
            gone = [self._channels.pop(address) for address in list(self._channels) if address not in kept]
        for channel in gone:
            channel.close()

    def _channel(self, address: str) -> SyncChannel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = SyncChannel(address, self._credentials)
            return self._channels[address]
