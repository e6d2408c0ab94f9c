"""What this package needs of its surroundings, so that tests can stand in for them."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.snapshot.manifest import PartContents, PartManifest
from resilient_jax.snapshot.snapshot_reader import PartRead


class PartServer(Protocol):
    """Where this host's part goes: `snapshot.local_client.LocalServerClient`."""

    def begin(self, id: SnapshotId) -> memoryview:
        """Memory for the part, exactly as long. Raises SnapshotDropped."""
        ...

    def wait_settled(self, id: SnapshotId, timeout_s: float) -> bool:
        """Whether it is committed or dropped on all hosts by then."""
        ...

    def finish(self, id: SnapshotId, contents: PartContents) -> None:
        """The part is written."""
        ...

    def abandon(self, id: SnapshotId) -> None:
        """The part will not be completed."""
        ...


class PartReader(Protocol):
    """Where the parts of all hosts are read: `snapshot.snapshot_reader.SnapshotReader`."""

    def read_manifests(self) -> Mapping[HostName, PartManifest]:
        """What is in each host's part."""
        ...

    @property
    def local_host(self) -> HostName | None:
        """Whose part is in memory here."""
        ...

    def read_all(self, reads: Iterable[PartRead]) -> None:
        """Fills all targets with verified bytes."""
        ...


class EventRecorder(Protocol):
    """Writes an event. Called from any thread."""

    def __call__(self, kind: EventKind, **detail: str | float | bool) -> object: ...


class FailPointHook(Protocol):
    """Says that a snapshot of this step is at a place where a test may hold it: `FailPoints.reach`."""

    def __call__(self, place: FailPoint, step: int) -> None: ...


def ignore_failpoint(place: FailPoint, step: int) -> None:
    """Nobody holds us."""
