"""The events that must follow a fault, so that no degradation is silent. Pure."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from resilient_jax.errors import ChecksumMismatch
from resilient_jax.events import Event, EventKind
from resilient_jax.health.finding import FindingKind
from tests.chaos.faults import (
    TEMPORARY_FAULTS,
    BitFlip,
    DeviceLoss,
    LossyLink,
    NanGradients,
    NetworkPartition,
    ProcessExit,
    ProcessKill,
    ProcessStop,
    SilentCorruption,
    SlowDevice,
    SlowInput,
    SlowLink,
    SlowProcess,
    UserException,
    fault_kind,
    is_message_flip,
)
from tests.chaos.invariants import Invariant, Violation
from tests.chaos.manifest import Incident, TargetPart

NOTICEABLE_STOP_S = 1.0
"""Shorter stops need no event: a busy machine has such pauses without a fault."""
LEASES_MISSED = 2.0
"""A silence longer than so many leases must have an event."""

EVENTS_OF_PART = {
    TargetPart.WORKER: (EventKind.WORKER_EXITED, EventKind.WORKER_DYING),
    TargetPart.AGENT: (EventKind.HOST_LOST, EventKind.AGENT_STARTED),
    TargetPart.HOST: (EventKind.HOST_LOST, EventKind.AGENT_STARTED),
    TargetPart.SERVICE: (EventKind.COORDINATION_SERVICE_EXITED,),
    TargetPart.SNAPSHOTS: (EventKind.SNAPSHOT_SERVER_EXITED,),
}
EVENTS_OF_WORKER_FAULT = {
    ProcessExit: EVENTS_OF_PART[TargetPart.WORKER],
    UserException: (EventKind.USER_ERROR,),
    NanGradients: (EventKind.NONFINITE, EventKind.USER_ERROR),
    SilentCorruption: (EventKind.HOST_CORRUPT,),
}
_FINDINGS = (EventKind.HANG_NAMED, EventKind.HOST_SLOW, EventKind.HOST_QUARANTINED)
EVENTS_OF_SILENCE = (EventKind.HOST_LOST, EventKind.STORE_LOST, EventKind.AGENT_STARTED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """An incident as it was carried out.

    Attributes:
        index: the incident's index in the manifest.
        hosts: the hosts that the fault hit.
        started_s: the monotonic time just before the fault.
        skip_reason: why the incident could not be carried out; empty if it was.
    """

    index: int
    incident: Incident
    hosts: tuple[str, ...] = ()
    started_s: float = 0.0
    skip_reason: str = ""

    def describe(self) -> str:
        """Return the incident as a line for people."""
        what = f"{fault_kind(self.incident.fault)} {self.incident.target.part}"
        return f"incident {self.index}: {what} on {', '.join(self.hosts) or 'no host'}"


def list_expected_events(incident: Incident, lease_ttl_s: float) -> tuple[EventKind, ...]:
    """Return the events of which at least one must follow on each host that was hit; empty if none must."""
    part, fault = incident.target.part, incident.fault
    match fault:
        case ProcessKill():
            return EVENTS_OF_PART.get(part, ())
        case ProcessStop(duration_s=duration_s):
            is_long = duration_s is None or duration_s > NOTICEABLE_STOP_S
            if part is TargetPart.WORKER and is_long:
                return (EventKind.WORKER_UNRESPONSIVE, *EVENTS_OF_PART[part])
            if part in (TargetPart.SERVICE, TargetPart.SNAPSHOTS) and is_long:
                return EVENTS_OF_PART[part]
            is_silent = duration_s is None or duration_s > LEASES_MISSED * lease_ttl_s
            is_of_host = part not in (TargetPart.LINK, TargetPart.ZYGOTE)
            return EVENTS_OF_SILENCE if is_silent and is_of_host else ()
        case ProcessExit() | UserException() | NanGradients() | SilentCorruption():
            return EVENTS_OF_WORKER_FAULT[type(fault)]
        case BitFlip(region="message"):
            return (EventKind.SNAPSHOT_PEER_FAILED, EventKind.SNAPSHOT_BLOCK_CORRUPT)
        case DeviceLoss():
            return (EventKind.DEVICES_CHANGED, EventKind.HOST_QUARANTINED)
        case NetworkPartition(duration_s=duration_s):
            return EVENTS_OF_SILENCE if duration_s > LEASES_MISSED * lease_ttl_s else ()
        case _:
            return ()


def check_expected_events(
    records: Sequence[IncidentRecord], events: Sequence[Event], lease_ttl_s: float
) -> list[Violation]:
    """Return a violation for each incident without an expected event, and for each event that an incident forbids.

    Args:
        records: incidents that have ended.
        events: the events of all hosts.
        lease_ttl_s: the lease of the job's hosts.
    """
    found = []
    carried_out = [record for record in records if not record.skip_reason]
    for record, following in itertools.zip_longest(carried_out, carried_out[1:]):
        later = [event for event in events if event.monotonic_s >= record.started_s]
        hits_member = record.incident.target.part is TargetPart.STORE_MEMBER  # which is no part of the job
        expected = () if hits_member else list_expected_events(record.incident, lease_ttl_s)
        # The loss of a host covers all of its processes.
        if expected and not is_message_flip(record.incident.fault):
            expected = (*expected, EventKind.HOST_LOST)
        silent = [h for h in record.hosts if expected and not any(_matches(e, expected, h) for e in later)]
        if silent:
            text = f"{record.describe()}: no {' or '.join(expected)} of {', '.join(silent)} followed"
            found.append(Violation(invariant=Invariant.EVENTS, description=text))
        needs = record.incident.required_events
        if needs and not any(event.kind in needs for event in later):
            text = f"{record.describe()}: no {' or '.join(needs)} followed"
            found.append(Violation(invariant=Invariant.EVENTS, description=text))
        found += _find_forbidden(record, later, following)
    return found


def check_findings(records: Sequence[IncidentRecord], events: Sequence[Event]) -> list[Violation]:
    """Return a violation for each finding about a host that no incident before it explains.

    A hang may be a process that hangs, is stopped or is slow, or a link; of a slow host a process, its input or its
    link was slow; a quarantine follows any fault. In a campaign without such incidents nothing may be found.
    """
    return [
        Violation(
            invariant=Invariant.EVENTS,
            description=f"{event.kind} of {event.host}, which no fault explains: {event.detail}",
        )
        for event in events
        if event.kind in _FINDINGS
        and not any(
            _explains(record, event)
            for record in records
            if not record.skip_reason and record.started_s <= event.monotonic_s
        )
    ]


def _explains(record: IncidentRecord, event: Event) -> bool:
    """Return whether what was done may be what an event has found."""
    fault = record.incident.fault
    match event.kind:
        case EventKind.HANG_NAMED:
            return isinstance(fault, TEMPORARY_FAULTS)
        case EventKind.HOST_SLOW:
            match event.detail["part"]:
                case FindingKind.INPUT:
                    is_known = isinstance(fault, SlowInput | SlowProcess)
                case FindingKind.LINK:
                    is_known = isinstance(fault, SlowLink | LossyLink)
                case _:
                    is_known = isinstance(fault, SlowProcess | SlowDevice)
            return is_known and event.detail["slow"] in record.hosts
        case _:
            return True


def _find_forbidden(
    record: IncidentRecord, later: Sequence[Event], following: IncidentRecord | None
) -> list[Violation]:
    """Return a violation for each event that an incident forbids until the following one."""
    end_s = following.started_s if following is not None else math.inf
    return [
        Violation(
            invariant=Invariant.EVENTS,
            description=f"{record.describe()}: {event.kind} of {event.host} followed, which must not",
        )
        for event in later
        if event.kind in record.incident.forbidden_events and event.monotonic_s < end_s
    ]


def _matches(event: Event, expected: Sequence[EventKind], host: str) -> bool:
    if event.kind not in expected:
        return False
    detail = event.detail
    match event.kind:
        case EventKind.USER_ERROR:  # a host that another's error interrupts does not report its own
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
