"""The interfaces of the snapshot server, the reader and the failpoints, for which tests have fakes."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.manifest import HeldPart, PartContents
from resilient_jax.snapshot.snapshot_reader import PartRead


class PartServer(Protocol):
    """The server that takes this host's part: `snapshot.local_client.LocalServerClient`."""

    def begin(self, id: SnapshotId) -> memoryview:
        """Return memory exactly as long as the part. Raise SnapshotDropped if the server refuses the snapshot."""
        ...

    def wait_settled(self, id: SnapshotId, timeout_s: float) -> bool:
        """Return whether the snapshot is committed or dropped on all hosts before the timeout."""
        ...

    def finish(self, id: SnapshotId, contents: PartContents) -> None:
        """Finish a part that is written."""
        ...

    def abandon(self, id: SnapshotId) -> None:
        """Abandon a part that will not be completed."""
        ...


class PartReader(Protocol):
    """The reader of what hosts hold: `snapshot.snapshot_reader.SnapshotReader`, `peer_transfer.WorkerReader`."""

    def read_manifests(self) -> Mapping[HostName, HeldPart]:
        """Return what each host holds, those to be read from first at the front; without hosts that have failed."""
        ...

    @property
    def has_copies(self) -> bool:
        """Whether several hosts may hold the same elements."""
        ...

    @property
    def local_host(self) -> HostName | None:
        """The host whose part is in this process's memory, if there is one."""
        ...

    def read_all(self, reads: Sequence[PartRead]) -> list[int]:
        """Fill all targets with verified bytes; return the indices of those whose host has failed."""
        ...


class EventRecorder(Protocol):
    """Records an event; called from any thread."""

    def __call__(self, kind: EventKind, **detail: str | float | bool) -> object:
        """Record an event with its details."""
        ...


class FailPointHook(Protocol):
    """Passes a failpoint, where a test may stop this worker; implemented by `FailPoints.hit`."""

    def __call__(self, place: FailPoint, step: int) -> None:
        """Pass a failpoint in the snapshot of `step`."""
        ...


def ignore_failpoint(place: FailPoint, step: int) -> None:
    """Pass a failpoint without effect, where no hook is given."""
