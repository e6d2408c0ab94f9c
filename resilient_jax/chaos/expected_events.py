"""Which events must follow a fault: a job that is damaged must say so. Pure."""

import dataclasses
from collections.abc import Sequence

from resilient_jax.chaos.faults import (
    Exit,
    Flip,
    Kill,
    Nan,
    Partition,
    Raise,
    Stop,
    is_of_message,
    kind_of,
)
from resilient_jax.chaos.invariants import Invariant, Violation
from resilient_jax.chaos.manifest import Incident, TargetPart
from resilient_jax.errors import ChecksumMismatch
from resilient_jax.events import Event, EventKind

STOP_SEEN_S = 1.0
"""A shorter stop is a blink that a busy machine has, too: it need not be noticed."""
LEASES_MISSED = 2.0
"""A silence of so many leases must be noticed."""

OF_A_PART = {
    TargetPart.WORKER: (EventKind.WORKER_EXITED, EventKind.WORKER_DYING),
    TargetPart.AGENT: (EventKind.HOST_LOST, EventKind.AGENT_STARTED),
    TargetPart.HOST: (EventKind.HOST_LOST, EventKind.AGENT_STARTED),
    TargetPart.SERVICE: (EventKind.COORDINATION_SERVICE_EXITED,),
    TargetPart.SNAPSHOTS: (EventKind.SNAPSHOT_SERVER_EXITED,),
}
OF_SILENCE = (EventKind.HOST_LOST, EventKind.STORE_LOST, EventKind.AGENT_STARTED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An incident as it was carried out.

    Attributes:
        number: in the manifest.
        hosts: whose parts were hit.
        begun_s: monotonic, just before.
        skipped: why it could not be done here; empty if it was.
    """

    number: int
    incident: Incident
    hosts: tuple[str, ...] = ()
    begun_s: float = 0.0
    skipped: str = ""

    def describe(self) -> str:
        """For people, in one line."""
        what = f"{kind_of(self.incident.fault)} {self.incident.target.part}"
        return f"incident {self.number}: {what} on {', '.join(self.hosts) or 'nobody'}"


def expected_events(incident: Incident, lease_ttl_s: float) -> tuple[EventKind, ...]:
    """Any one of these must follow on each host that was hit; empty: none must."""
    part, fault = incident.target.part, incident.fault
    match fault:
        case Kill():
            return OF_A_PART.get(part, ())
        case Stop(for_s=for_s):
            is_long = for_s is None or for_s > STOP_SEEN_S
            if part is TargetPart.WORKER and is_long:
                return (EventKind.WORKER_UNRESPONSIVE, *OF_A_PART[part])
            if part in (TargetPart.SERVICE, TargetPart.SNAPSHOTS) and is_long:
                return OF_A_PART[part]
            is_silent = for_s is None or for_s > LEASES_MISSED * lease_ttl_s
            return OF_SILENCE if is_silent and part is not TargetPart.LINK else ()
        case Exit():
            return OF_A_PART[TargetPart.WORKER]
        case Raise():
            return (EventKind.USER_ERROR,)
        case Nan():
            return (EventKind.NONFINITE, EventKind.USER_ERROR)
        case Flip(where="message"):
            return (EventKind.SNAPSHOT_PEER_FAILED, EventKind.SNAPSHOT_BLOCK_CORRUPT)
        case Partition(for_s=for_s):
            return OF_SILENCE if for_s > LEASES_MISSED * lease_ttl_s else ()
        case _:
            return ()


def check_told(done: Sequence[Done], events: Sequence[Event], lease_ttl_s: float) -> list[Violation]:
    """Incidents that nobody has told of.

    Args:
        done: that are over.
        events: of all hosts.
        lease_ttl_s: of the job.
    """
    found = []
    for item in done:
        if item.skipped:
            continue
        later = [event for event in events if event.monotonic_s >= item.begun_s]
        expected = expected_events(item.incident, lease_ttl_s)
        if expected and not is_of_message(item.incident.fault):  # with the host goes all that runs there
            expected = (*expected, EventKind.HOST_LOST)
        silent = [h for h in item.hosts if expected and not any(_tells(e, expected, h) for e in later)]
        if silent:
            text = f"{item.describe()}: no {' or '.join(expected)} of {', '.join(silent)} followed"
            found.append(Violation(invariant=Invariant.EVENTS, found=text))
        needs = item.incident.needs
        if needs and not any(event.kind in needs for event in later):
            text = f"{item.describe()}: no {' or '.join(needs)} followed"
            found.append(Violation(invariant=Invariant.EVENTS, found=text))
    return found


def _tells(event: Event, expected: Sequence[EventKind], host: str) -> bool:
    if event.kind not in expected:
        return False
    detail = event.detail
    match event.kind:
        case EventKind.USER_ERROR:  # the first host that tells of it ends the job for all, whoever's it was
            return True
        case EventKind.HOST_LOST:
            return detail.get("lost") == host
        case EventKind.SNAPSHOT_PEER_FAILED:
            return detail.get("peer") == host and str(detail.get("error", "")).startswith(
                ChecksumMismatch.__name__
            )
        case EventKind.SNAPSHOT_BLOCK_CORRUPT:
            return detail.get("source") == host
        case _:
            return event.host == host
