"""Reads what a running job writes, once: events and ledgers, from where the last look ended."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from resilient_jax.events import Event
from resilient_jax.protocol.ledger import ENTRY_DECODER, LedgerEntry

T = TypeVar("T")


class LogTail(Generic[T]):
    """The lines of all files of a pattern, decoded. A line that is torn or no record is left out.

    Attributes:
        records: all so far, each file's in its order.
    """

    def __init__(self, directory: Path, pattern: str, decode: Callable[[bytes], T]) -> None:
        self._directory = directory
        self._pattern = pattern
        self._decode = decode
        self._offsets: dict[Path, int] = {}
        self.records: list[T] = []

    def poll(self) -> list[T]:
        """Those that have come since the last look."""
        new: list[T] = []
        for path in sorted(self._directory.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.split(b"\n")[:-1]:
                with contextlib.suppress(msgspec.DecodeError):
                    new.append(self._decode(line))
        self.records += new
        return new


def tail_events(directory: Path) -> LogTail[Event]:
    """Of all hosts that write into a run folder."""
    return LogTail(directory, "*.events.jsonl", msgspec.json.Decoder(Event).decode)


def tail_ledger(directory: Path) -> LogTail[LedgerEntry]:
    """Of all workers."""
    return LogTail(directory, "*.jsonl", ENTRY_DECODER.decode)
