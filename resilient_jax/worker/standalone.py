"""The control of a script that was started without an agent: one host, which survives nothing."""

import dataclasses
import time
from collections.abc import Callable

from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.state_records import StatePart
from resilient_jax.protocol.worker_messages import StepCommitted
from resilient_jax.worker.worker_protocol import Transition


@dataclasses.dataclass(slots=True)
class StandaloneControl:
    """Lets every step start, and writes events nowhere."""

    host: str

    def begin_step(self, step: int) -> None:
        """Return at once: every step may start."""

    def raise_if_ended(self) -> None:
        """Return: without an agent the generation never ends."""

    def report_commit(self, commit: StepCommitted, *, holds_state: bool, part: StatePart | None) -> None:
        """Ignore the commit: without an agent no other process counts steps."""

    def report_found(self, change: Callable[..., Transition], found: object) -> None:
        """Ignore it: without an agent no leader decides."""

    @property
    def is_leaving(self) -> bool:
        """False: without an agent there is no notice to leave."""
        return False

    @property
    def held_pause(self) -> None:
        """None: without an agent no member leaves or comes."""
        return

    def answer_pause(self, generation: GenerationNumber) -> None:
        """Return: there is no pause to answer."""

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """Return the event, which is written nowhere."""
        return Event(
            kind=kind, host=self.host, monotonic_s=time.monotonic(), wall_s=time.time(), detail=dict(detail)
        )
