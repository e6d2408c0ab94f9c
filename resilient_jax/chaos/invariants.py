"""What is told when an invariant does not hold."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from resilient_jax.events import Event, EventKind


class Invariant(enum.StrEnum):
    """Closed set of what must be true of a job, whatever is done to it."""

    STEPS = "every step is committed, by each process once and in order"
    MICROBATCHES = "every microbatch of every step is once among the committed"
    BITS = "weights and optimizer state are bit for bit those of an undisturbed run"
    RESTORED_BYTES = "restored bytes are those that were committed"
    FENCING = "nobody commits beyond the step in flight in a generation that has ended"
    GENERATION_NUMBERS = "no generation number is given out twice"
    SINGLE_LEADER = "no two leaders act"
    EVENTS = "every degradation has its event"
    RECOVERY = "everybody trains again after an incident"
    EXIT = "the job ends by itself, as it should"
    NO_LEFTOVERS = "nothing is left of the job"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One invariant that does not hold, and how that was seen."""

    invariant: Invariant
    description: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.description}"


ROUTINE_EVENTS = frozenset(
    {EventKind.SNAPSHOT_COPIED, EventKind.SNAPSHOT_COMPLETE, EventKind.SNAPSHOT_COMMITTED}
)
"""They come with every step of a healthy job, and would bury what does not."""
MAX_TIMELINE_EVENTS = 60
"""Of the end of a story: what is older rarely tells."""


def format_timeline(events: Iterable[Event], notes: Iterable[tuple[float, str]] = ()) -> list[str]:
    """The last events of all hosts and what the campaign did, merged by time, a line each.

    Args:
        events: of all hosts, in any order.
        notes: monotonic time and text of what the campaign did.
    """
    lines = [
        (event.monotonic_s, describe_event(event)) for event in events if event.kind not in ROUTINE_EVENTS
    ]
    lines += [(when_s, f"campaign: {text}") for when_s, text in notes]
    lines.sort()
    return [f"{when_s:.3f} {text}" for when_s, text in lines[-MAX_TIMELINE_EVENTS:]]


def describe_event(event: Event) -> str:
    """An event without its time, for people."""
    detail = " ".join(f"{name}={value}" for name, value in event.detail.items())
    words = [event.host, str(event.kind)]
    words += [f"g{event.generation}"] if event.generation is not None else []
    words += [f"step {event.step}"] if event.step is not None else []
    return " ".join([*words, detail]).strip()


def deduplicate(violations: Sequence[Violation]) -> list[Violation]:
    """Each once, in order."""
    return list(dict.fromkeys(violations))
