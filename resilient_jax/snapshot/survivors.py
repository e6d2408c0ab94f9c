"""The hosts that have a snapshot complete, as a reader sees them: what they give, and which of them failed."""

import threading
from collections.abc import Callable, Iterator

from resilient_jax.erasure import Buffer, choose_checksum
from resilient_jax.errors import ChecksumMismatch, MessageError, ResilientJaxError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.snapshot.manifest import Manifest, decode_manifest
from resilient_jax.snapshot.messages import (
    MANIFEST,
    READ,
    SERVICE,
    ManifestRequest,
    ReadRequest,
    Region,
)
from resilient_jax.transport import Credentials, SyncChannel

MANIFEST_DEADLINE_S = 30.0
READ_DEADLINE_S = 60.0
"""For a few MiB from a server that others read from at the same time."""

Note = Callable[..., object]
"""`note(kind, **detail)` makes an event."""


class Survivors:
    """One channel to each, made when first used; safe to share between threads.

    A host that did not answer, or not as agreed, is a suspect: it is asked again only where nobody else can help.
    """

    def __init__(self, plan: SnapshotPlan, credentials: Credentials, note: Note) -> None:
        self._id = plan.id
        self._servers = {source.host: source.server for source in plan.sources}
        self._credentials = credentials
        self._note = note
        self._lock = threading.Lock()
        """Guards what follows, and the order of events."""
        self._channels: dict[HostName, SyncChannel] = {}
        self._failures: dict[HostName, str] = {}
        self._noted: set[tuple[str, ...]] = set()
        self._closed = False

    def __contains__(self, host: HostName) -> bool:
        return host in self._servers

    def is_suspect(self, host: HostName) -> bool:
        """Whether it failed before."""
        return host in self._failures

    def why_not(self, host: HostName) -> str:
        """Why a host gives nothing, as far as is known."""
        return self._failures.get(host, "it is not among those that have the snapshot complete")

    def fetch_manifest(self, survivor: HostName, host: HostName) -> Manifest:
        """A host's manifest, as a member of its group keeps it.

        Raises:
            ResilientJaxError: the survivor does not give it; an event says so.
        """
        request = ManifestRequest(id=self._id, host=host)
        try:
            reply = self._channel(survivor).call(SERVICE, MANIFEST, request, timeout_s=MANIFEST_DEADLINE_S)
            manifest = decode_manifest(reply.data)
            if (manifest.id, manifest.host) != (self._id, host):
                raise MessageError(
                    f"{survivor} gave the manifest of {manifest.host} in {manifest.id}, expected {host} in {self._id}"
                )
        except ResilientJaxError as error:
            self._failed(survivor, error, f"the manifest of {host}")
            raise
        return manifest

    def read_into(self, survivor: HostName, offset: int, out: memoryview) -> None:
        """Bytes of the survivor's own part.

        Raises:
            ChecksumMismatch: some of them are damaged, there or on the way; an event says so.
            ResilientJaxError: the survivor does not give them; an event says so.
        """
        request = ReadRequest(id=self._id, region=Region.PART, offset=offset, length=len(out))
        filled = 0
        for data in self._pieces(survivor, request):
            out[filled : filled + len(data)] = data
            filled += len(data)

    def read(self, survivor: HostName, request: ReadRequest) -> Buffer:
        """Bytes of a part or of a parity chunk; raises as `read_into`."""
        pieces = list(self._pieces(survivor, request))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def request(self, region: Region, row: int, offset: int, length: int) -> ReadRequest:
        """What to `read`, of this snapshot."""
        return ReadRequest(id=self._id, region=region, row=row, offset=offset, length=length)

    def note(self, kind: EventKind, **detail: str) -> None:
        """Makes an event, once for the same words."""
        with self._lock:
            key = (kind, *detail.values())
            if key not in self._noted and not self._closed:
                self._noted.add(key)
                self._note(kind, snapshot_step=self._id.step, **detail)

    def close(self) -> None:
        """Ends every call; what comes after fails."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _pieces(self, survivor: HostName, request: ReadRequest) -> Iterator[bytes]:
        """The answer to a request, all of it, each piece verified against its digest."""
        left = request.length
        channel = self._channel(survivor)
        replies = channel.stream(SERVICE, READ, request, timeout_s=READ_DEADLINE_S)
        try:
            for reply in replies:
                if choose_checksum(reply.checksum).compute(reply.data) != reply.digest:
                    raise ChecksumMismatch(f"{survivor}: bytes were changed on the way from it")
                left -= len(reply.data)
                if left < 0:
                    break
                yield reply.data
            if left:
                raise MessageError(
                    f"{survivor} gave {request.length - left} bytes, expected {request.length}"
                )
        except ResilientJaxError as error:
            self._failed(survivor, error, f"{request.region} {request.row} from {request.offset}")
            raise
        finally:
            replies.close()

    def _channel(self, survivor: HostName) -> SyncChannel:
        with self._lock:
            if survivor not in self._channels:
                self._channels[survivor] = SyncChannel(self._servers[survivor], self._credentials)
                if self._closed:
                    self._channels[survivor].close()
            return self._channels[survivor]

    def _failed(self, survivor: HostName, error: ResilientJaxError, asked: str) -> None:
        if isinstance(error, ChecksumMismatch):
            self.note(EventKind.SNAPSHOT_BLOCK_BAD, source=survivor, asked=asked, reason=str(error))
            return
        with self._lock:
            is_known = self._closed or survivor in self._failures
            self._failures.setdefault(survivor, str(error))
        if not is_known:
            self.note(EventKind.SNAPSHOT_SOURCE_FAILED, source=survivor, reason=str(error))
