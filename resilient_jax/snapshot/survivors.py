"""The hosts that have a snapshot complete, as a reader sees them: what they give, and which of them failed."""

import threading
from collections.abc import Callable

from resilient_jax.errors import ChecksumMismatch, MessageError, ResilientJaxError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.snapshot.manifest import PartManifest, decode_manifest
from resilient_jax.snapshot.messages import MANIFEST, ManifestRequest, ReadRequest, Region
from resilient_jax.snapshot.peer_client import PeerClient
from resilient_jax.transport import Credentials

MANIFEST_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0
"""For a few MiB from a server that others read from at the same time."""

RecordEvent = Callable[..., object]
"""`note(kind, **detail)` makes an event."""


class Survivors:
    """One channel to each, made when first used; safe to share between threads.

    A host that did not answer, or not as agreed, is a suspect: it is asked again only where nobody else can help.
    """

    def __init__(self, plan: SnapshotPlan, credentials: Credentials, note: RecordEvent) -> None:
        self._id = plan.id
        self._servers = {source.host: source.endpoint for source in plan.sources}
        self._credentials = credentials
        self._note = note
        self._lock = threading.Lock()
        """Guards what follows, and the order of events."""
        self._peers: dict[HostName, PeerClient] = {}
        self._failures: dict[HostName, str] = {}
        self._noted: set[tuple[str, ...]] = set()
        self._closed = False

    def __contains__(self, host: HostName) -> bool:
        return host in self._servers

    def is_suspect(self, host: HostName) -> bool:
        """Whether it failed before."""
        return host in self._failures

    def failure_reason(self, host: HostName) -> str:
        """Why a host gives nothing, as far as is known."""
        return self._failures.get(host, "it is not among those that have the snapshot complete")

    def fetch_manifest(self, survivor: HostName, host: HostName) -> PartManifest:
        """A host's manifest, as a member of its group keeps it.

        Raises:
            ResilientJaxError: the survivor does not give it; an event says so.
        """
        request = ManifestRequest(id=self._id, host=host)
        try:
            reply = self._peer(survivor).call(MANIFEST, request, timeout_s=MANIFEST_TIMEOUT_S)
            manifest = decode_manifest(reply.data)
            if (manifest.id, manifest.host) != (self._id, host):
                raise MessageError(
                    f"{survivor} gave the manifest of {manifest.host} in {manifest.id}, expected {host} in {self._id}"
                )
        except ResilientJaxError as error:
            self._failed(survivor, error, f"the manifest of {host}")
            raise
        return manifest

    def read_into(
        self,
        survivor: HostName,
        offset: int,
        out: memoryview,
        *,
        region: Region = Region.PART,
        row: int = 0,
        verify: bool = False,
    ) -> None:
        """Bytes of the survivor's own part, or of a parity chunk that it keeps; right only if `verify` is asked for.

        Raises:
            ChecksumMismatch: they were verified, and some are damaged, there or on the way; an event says so.
            ResilientJaxError: the survivor does not give them; an event says so.
        """
        length = len(out)
        request = ReadRequest(
            id=self._id, region=region, row=row, offset=offset, length=length, verify=verify
        )
        try:
            self._peer(survivor).read_into(request, out, timeout_s=READ_TIMEOUT_S)
        except ResilientJaxError as error:
            self._failed(survivor, error, f"{region} {row} from {offset}")
            raise

    def record_event(self, kind: EventKind, **detail: str) -> None:
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
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def _peer(self, survivor: HostName) -> PeerClient:
        with self._lock:
            if survivor not in self._peers:
                self._peers[survivor] = PeerClient(self._servers[survivor], self._credentials)
                if self._closed:
                    self._peers[survivor].close()
            return self._peers[survivor]

    def _failed(self, survivor: HostName, error: ResilientJaxError, asked: str) -> None:
        if isinstance(error, ChecksumMismatch):
            self.record_event(
                EventKind.SNAPSHOT_BLOCK_CORRUPT, source=survivor, asked=asked, reason=str(error)
            )
            return
        with self._lock:
            is_known = self._closed or survivor in self._failures
            self._failures.setdefault(survivor, str(error))
        if not is_known:
            self.record_event(EventKind.SNAPSHOT_SOURCE_FAILED, source=survivor, reason=str(error))
