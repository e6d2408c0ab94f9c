"""Which changes of a host's status the store must have at once. Pure.

Whatever may lead to a decision: all but steps, metrics and, while all members train, newer snapshots of a generation of
which the store knows that this host has some. Those go to the leader beside the store (`progress_relay`). When a
generation ends, hosts bring their statuses up to date: members with the report that their worker is idle, the others
with their answer to the generation, which the leader waits for before it chooses a snapshot.
"""

from collections.abc import Iterable

from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.generation import Generation, GenerationPhase
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.snapshots import SnapshotPhase, SnapshotStatus


def are_snapshots_due(generation: Generation | None, written: HostStatus, present: HostStatus) -> bool:
    """Return whether the store must have what a host's snapshot server has now.

    Args:
        generation: newest generation that the host has read; None: none.
        written: status of the host in the store.
    """
    if written.snapshot_server != present.snapshot_server:
        return True
    if generation is None or generation.phase is not GenerationPhase.ACTIVE:
        return written.snapshots != present.snapshots
    return _summarize(written.snapshots) != _summarize(present.snapshots)


def _summarize(snapshots: Iterable[SnapshotStatus]) -> dict[GenerationNumber, bool]:
    """Return the generations of which there are snapshots, and whether one of each is committed."""
    found: dict[GenerationNumber, bool] = {}
    for snapshot in snapshots:
        is_committed = snapshot.phase is SnapshotPhase.COMMITTED
        found[snapshot.id.generation] = is_committed or found.get(snapshot.id.generation, False)
    return found
