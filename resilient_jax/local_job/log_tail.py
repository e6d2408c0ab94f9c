"""Incremental readers of the logs that a running job writes, a record a line."""

import contextlib
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.events import Event
from resilient_jax.protocol.message_decoding import decode_message

T = TypeVar("T")


class LogTail(Generic[T]):
    """Reads the records in all files that match a pattern; torn lines and lines that do not decode are skipped.

    Attributes:
        records: all records read so far; those of one file are in the file's order.
    """

    def __init__(self, directory: Path, pattern: str, decoder: msgspec.json.Decoder[T]) -> None:
        self._directory = directory
        self._pattern = pattern
        self._decoder = decoder
        self._offsets: dict[Path, int] = {}
        self.records: list[T] = []

    def poll(self) -> list[T]:
        """Return the records that were written since the last call."""
        new: list[T] = []
        for path in sorted(self._directory.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            for line in complete.split(b"\n")[:-1]:
                with contextlib.suppress(MessageError):
                    new.append(decode_message(self._decoder, line, str(path)))
        self.records += new
        return new


def tail_events(directory: Path) -> LogTail[Event]:
    """Return a reader of the event logs of all hosts in a run folder."""
    return LogTail(directory, "*.events.jsonl", msgspec.json.Decoder(Event))
