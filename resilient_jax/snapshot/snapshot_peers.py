"""The hosts that have a snapshot complete: a reader's clients of them, and its record of which ones failed."""

import threading
from collections.abc import Callable

from resilient_jax.errors import ChecksumMismatch, MessageError, ResilientJaxError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotPlan
from resilient_jax.snapshot.manifest import PartManifest, decode_manifest
from resilient_jax.snapshot.messages import MANIFEST, READ, SERVICE, ManifestRequest, ReadRequest, Region
from resilient_jax.transport import Credentials, PeerChannel

MANIFEST_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0
"""For a few MiB from a server that others read from at the same time."""

RecordEvent = Callable[..., object]
"""Called as `record_event(kind, **detail)`."""


class SnapshotPeers:
    """A client for each survivor, created when first used; safe to share between threads.

    A host that did not answer, or answered wrongly, is a suspect: it is used again only where no other host can help.
    """

    def __init__(self, plan: SnapshotPlan, credentials: Credentials, note: RecordEvent) -> None:
        self._id = plan.id
        self._servers = {source.host: source.endpoint for source in plan.sources}
        self._credentials = credentials
        self._note = note
        self._lock = threading.Lock()
        """Guards what follows, and the order of events."""
        self._peers: dict[HostName, PeerChannel] = {}
        self._failures: dict[HostName, str] = {}
        self._recorded: set[tuple[str, ...]] = set()
        self._closed = False

    def __contains__(self, host: HostName) -> bool:
        return host in self._servers

    def is_suspect(self, host: HostName) -> bool:
        """Return whether a host has failed before."""
        return host in self._failures

    def failure_reason(self, host: HostName) -> str:
        """Return why a host cannot be read from: its recorded failure, or that it does not have the snapshot."""
        return self._failures.get(host, "it is not among those that have the snapshot complete")

    def fetch_manifest(self, survivor: HostName, host: HostName) -> PartManifest:
        """Fetch a host's manifest from a survivor, which is a member of the host's group.

        Raises:
            ResilientJaxError: the survivor does not have the manifest or fails; an event records the failure.
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
            self._record_failure(survivor, error, f"the manifest of {host}")
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
        """Read bytes of the survivor's own part, or of a parity chunk that it keeps; verified only with `verify`.

        Raises:
            ChecksumMismatch: some bytes are corrupt, in memory or in transit; an event records the corruption.
            ResilientJaxError: the survivor does not have the bytes or fails; an event records the failure.
        """
        length = len(out)
        request = ReadRequest(
            id=self._id, region=region, row=row, offset=offset, length=length, verify=verify
        )
        try:
            self._peer(survivor).read_into(READ, request, out, timeout_s=READ_TIMEOUT_S)
        except ResilientJaxError as error:
            self._record_failure(survivor, error, f"{region} {row} from {offset}")
            raise

    def record_event(self, kind: EventKind, **detail: str) -> None:
        """Record an event, unless one with the same details was recorded."""
        with self._lock:
            key = (kind, *detail.values())
            if key not in self._recorded and not self._closed:
                self._recorded.add(key)
                self._note(kind, snapshot_step=self._id.step, **detail)

    def close(self) -> None:
        """End every call; later calls fail."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def _peer(self, survivor: HostName) -> PeerChannel:
        with self._lock:
            if survivor not in self._peers:
                self._peers[survivor] = PeerChannel(self._servers[survivor], self._credentials, SERVICE)
                # A client made after `close` is closed at once, so that
                # the call it is made for fails and does not wait.
                if self._closed:
                    self._peers[survivor].close()
            return self._peers[survivor]

    def _record_failure(self, survivor: HostName, error: ResilientJaxError, asked: str) -> None:
        # A corrupt block makes no suspect: the host's other blocks are as good as before.
        if isinstance(error, ChecksumMismatch):
            self.record_event(
                EventKind.SNAPSHOT_BLOCK_CORRUPT, source=survivor, asked=asked, reason=str(error)
            )
            return
        with self._lock:
            # `close` makes every running call fail, which says nothing about the host.
            is_known = self._closed or survivor in self._failures
            self._failures.setdefault(survivor, str(error))
        if not is_known:
            self.record_event(EventKind.SNAPSHOT_SOURCE_FAILED, source=survivor, reason=str(error))
