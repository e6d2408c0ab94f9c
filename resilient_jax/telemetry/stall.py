"""A stall as a bar of phases, computed from events. Pure.

A stall begins at the fault and ends when every member of the new generation has finished its first step. Phases, each
ending where the next begins:
- *detection*: until the first event that reports the fault;
- *quiesce*: until all survivors have reported to the leader that they are idle, and with which step;
- *rebuild*: until every member has its world and its state;
- *step*: until every member has finished a step in it.
Times are monotonic and comparable on one machine only.
"""

import dataclasses
from collections.abc import Sequence

from resilient_jax.events import Event, EventKind

FAULT_EVENTS = frozenset(
    {
        EventKind.WORKER_EXITED,
        EventKind.WORKER_DYING,
        EventKind.WORKER_UNRESPONSIVE,
        EventKind.HOST_LOST,
        EventKind.HOST_FOUND_DEAD,
        EventKind.COLLECTIVE_FAILED,
        EventKind.COORDINATION_SERVICE_EXITED,
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One fault's cost, in seconds.

    Attributes:
        detected_by: the first event that reported the fault.
        change: how training resumed, "shrink" or "reform".
        generation: number of the generation in which training resumed.
        step: first step after training resumed.
    """

    detected_by: EventKind
    change: str
    generation: int
    num_hosts: int
    step: int
    detection_s: float
    quiesce_s: float
    rebuild_s: float
    step_s: float

    @property
    def total_s(self) -> float:
        """The time from the fault to the end of the next step."""
        return self.detection_s + self.quiesce_s + self.rebuild_s + self.step_s


def measure_stall(events: Sequence[Event], fault_s: float) -> Stall | None:
    """Return the stall after a fault at the monotonic time `fault_s`; None while it lasts.

    Args:
        events: events of all hosts, in order of time.
        fault_s: monotonic time of the fault.
    """
    later = [event for event in events if event.monotonic_s >= fault_s]
    noticed = next((event for event in later if event.kind in FAULT_EVENTS), None)
    if noticed is None:
        return None
    for active in _phases(later, "active"):
        committed = [
            e for e in later if e.kind is EventKind.STEP_COMMITTED and e.generation == active.generation
        ]
        forms = [e for e in _phases(later, "form") if e.generation == active.generation]
        hosts = int(active.detail["hosts"])
        if len(committed) < hosts or not forms:
            continue  # finished no step before the next change, or none yet
        end_s = max(e.monotonic_s for e in committed)
        formed_s = min(active.monotonic_s, end_s)
        return Stall(
            detected_by=noticed.kind,
            change=str(active.detail["change"]),
            generation=active.generation or 0,
            num_hosts=hosts,
            step=active.step or 0,
            detection_s=noticed.monotonic_s - fault_s,
            quiesce_s=forms[0].monotonic_s - noticed.monotonic_s,
            rebuild_s=formed_s - forms[0].monotonic_s,
            step_s=end_s - formed_s,
        )
    return None


def _phases(events: Sequence[Event], phase: str) -> list[Event]:
    return [e for e in events if e.kind is EventKind.GENERATION_PHASE and e.detail.get("phase") == phase]
