"""The link of a script that was started without an agent: nobody to talk to, nothing to survive."""

import dataclasses
import time

from resilient_jax.events import Event, EventKind


@dataclasses.dataclass(slots=True)
class StandaloneControl:
    """Lets every step start; keeps events to itself."""

    host: str

    def begin_step(self, step: int) -> None:
        """Every step may start."""

    def raise_if_ended(self) -> None:
        """Nothing ends a generation here."""

    def report_commit(self, step: int, metrics: dict[str, float], *, holds_state: bool) -> None:
        """Nobody is told."""

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """The event, written nowhere."""
        return Event(
            kind=kind, host=self.host, monotonic_s=time.monotonic(), wall_s=time.time(), detail=dict(detail)
        )
