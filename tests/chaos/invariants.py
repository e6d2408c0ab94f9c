"""The invariants of a job under faults, and the report of a violation."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from resilient_jax.events import Event, EventKind
from resilient_jax.local_job.observed_job import describe_event


class Invariant(enum.StrEnum):
    """Closed set of the properties that a job keeps under every fault."""

    STEPS = "every step is committed, by each process once and in order"
    MICROBATCHES = "every microbatch of every step is committed once"
    BITS = "weights and optimizer state are bit for bit those of a run without faults"
    RESTORED_BYTES = "restored bytes are those that were committed"
    FENCING = "no host commits beyond the step in flight in a generation that has ended"
    GENERATION_NUMBERS = "no generation number is used twice"
    SINGLE_LEADER = "no two leaders act"
    EVENTS = "every degradation has its event"
    RECOVERY = "all hosts train again after an incident"
    EXIT = "the job ends by itself, with the expected exit code"
    NO_LEFTOVERS = "nothing is left of the job"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violated invariant, and what was found."""

    invariant: Invariant
    description: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.description}"


ROUTINE_EVENTS = frozenset(
    {EventKind.SNAPSHOT_COPIED, EventKind.SNAPSHOT_COMPLETE, EventKind.SNAPSHOT_COMMITTED}
)
"""Events of every step of a healthy job: they would hide the others in a timeline."""
MAX_TIMELINE_EVENTS = 60
"""The length of a timeline: older events rarely explain a violation."""


def format_timeline(events: Iterable[Event], notes: Iterable[tuple[float, str]] = ()) -> list[str]:
    """Return the last events of all hosts and the notes of the campaign, merged by time, a line each.

    Args:
        events: the events of all hosts, in any order.
        notes: monotonic time and text of each note of the campaign.
    """
    lines = [
        (event.monotonic_s, describe_event(event)) for event in events if event.kind not in ROUTINE_EVENTS
    ]
    lines += [(when_s, f"campaign: {text}") for when_s, text in notes]
    lines.sort()
    return [f"{when_s:.3f} {text}" for when_s, text in lines[-MAX_TIMELINE_EVENTS:]]


def deduplicate(violations: Sequence[Violation]) -> list[Violation]:
    """Return each violation once, in order."""
    return list(dict.fromkeys(violations))
