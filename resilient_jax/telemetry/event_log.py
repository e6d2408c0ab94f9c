"""The event log of a host: one JSON line for each event, written by the host's agent alone."""

import collections
from collections.abc import Mapping
from pathlib import Path

import msgspec

from resilient_jax.clock import Clock, SystemClock
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.telemetry.log_file import LogFile

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Event)


class EventLog:
    """Appends events to a file, and keeps the newest in memory for tables.

    A line is one `write`, so a killed writer leaves at most one incomplete last line, which `read_events` skips. What a
    full disk refuses is written when there is space again; beyond `MAX_KEPT` events the oldest are dropped, and an
    event gives their number.
    """

    MAX_KEPT = 1000

    def __init__(self, path: Path | None, host: str, clock: Clock | None = None) -> None:
        """Write to `path`; None keeps events in memory only."""
        self.host = host
        self.recent: collections.deque[Event] = collections.deque(maxlen=self.MAX_KEPT)
        self._clock = clock or SystemClock()
        self._file = (
            LogFile(path, max_kept=self.MAX_KEPT, format_lost=self._encode_lost) if path is not None else None
        )

    def record(
        self,
        kind: EventKind,
        *,
        generation: int | None = None,
        step: int | None = None,
        **detail: str | float | bool,
    ) -> None:
        """Record that `kind` happened now on this host."""
        self.record_detail(kind, detail, generation=generation, step=step)

    def record_detail(
        self,
        kind: EventKind,
        detail: Mapping[str, str | int | float | bool],
        *,
        generation: int | None = None,
        step: int | None = None,
    ) -> None:
        """Record an event whose details are a mapping; else as `record`."""
        self.append(self._make(kind, detail, generation, step))

    def _make(
        self,
        kind: EventKind,
        detail: Mapping[str, str | int | float | bool],
        generation: int | None = None,
        step: int | None = None,
    ) -> Event:
        return Event(
            kind=kind,
            host=self.host,
            monotonic_s=self._clock.monotonic_s(),
            wall_s=self._clock.wall_s(),
            generation=generation,
            step=step,
            detail=dict(detail),
        )

    def _encode_lost(self, lost: int) -> bytes:
        return _ENCODER.encode(self._make(EventKind.LOG_UNWRITABLE, {"lost": lost}))

    def append(self, event: Event) -> None:
        """Write an event that another process of this host recorded."""
        self.recent.append(event)
        if self._file is not None:
            self._file.write(_ENCODER.encode(event))

    def close(self) -> None:
        """Close the file, if there is one; a later event opens it again."""
        if self._file is not None:
            self._file.close()


def read_events(path: Path) -> list[Event]:
    """Return the events of a log, oldest first. An incomplete last line (its writer was killed) is skipped.

    Raises:
        MessageError: another line is not an event; the error names file, line and field.
    """
    lines = path.read_bytes().split(b"\n")
    events: list[Event] = []
    for number, line in enumerate(lines[:-1], start=1):
        events.append(decode_message(_DECODER, line, f"{path}, line {number},"))
    return events
