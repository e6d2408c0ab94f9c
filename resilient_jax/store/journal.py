"""The journal of an embedded store: what it needs to go on after its process was killed or its machine was restarted.

A file of frames. The first one has all keys and leases as of a revision, each other one what changed in one group of
changes, which is read completely or not at all. A frame is on the disk (fdatasync) before its changes are confirmed to
the client that made them, and before a watcher sees them. A last frame that is incomplete was not confirmed, and is
dropped; damage anywhere else is an error.
"""

import asyncio
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Self

import msgspec

from resilient_jax.errors import LogUnwritable, MessageError, OperatorError, PeerUnreachable
from resilient_jax.ids import LeaseId, Revision
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.store.interface import KeyValue, WatchEvent

MAGIC: Final = b"resilient_jax store journal 1\n"
REWRITE_FACTOR: Final = 8
MIN_REWRITE_BYTES: Final = 4 * 1024 * 1024
"""The journal is written anew when it is so large, and so many times as large as the keys and leases in it."""
_HEADER: Final = struct.Struct("<II")
"""Of a frame: length and CRC-32 of what follows."""


class StoreImage(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """A store as of a revision.

    Attributes:
        store_id: of the store, for as long as its journal lives.
        revision: of the last change.
        key_values: all keys.
        leases: all leases, with their times to live in seconds.
        next_lease: the number of the next one.
    """

    store_id: str
    revision: Revision
    key_values: list[KeyValue]
    leases: dict[LeaseId, float]
    next_lease: LeaseId


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    """A lease began."""

    lease: LeaseId
    ttl_s: float


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A lease expired or was revoked; the end of its keys is a change of its own."""

    lease: LeaseId


class Changed(msgspec.Struct, frozen=True, kw_only=True, tag="changed"):
    """The events of a revision."""

    revision: Revision
    events: tuple[WatchEvent, ...]


JournalRecord = StoreImage | LeaseGranted | LeaseEnded | Changed
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[JournalRecord])


class StoreJournal:
    """The file; one process at a time writes it."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = size
        """Of the frames that are complete; what a failed write has left behind them is overwritten."""
        self._image_bytes = 0
        self._pending: list[JournalRecord] = []
        self._appended = 0
        """How often something was appended."""
        self._durable = 0
        """How much of that is on the disk."""
        self._flushing: asyncio.Task[OSError | None] | None = None

    @property
    def is_durable(self) -> bool:
        """Whether all that was appended is on the disk."""
        return self._durable == self._appended

    @classmethod
    def open(cls, path: Path) -> tuple[Self, list[JournalRecord]]:
        """Return a journal and its records, oldest first; of a new one, or one that never began, none.

        Raises:
            LogUnwritable: the file cannot be created or written.
            OperatorError: it is damaged, or no journal.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            content = path.read_bytes()
        except OSError as error:
            raise LogUnwritable(
                f"the journal {path} of the store cannot be opened: {error.strerror}; expected a file that this user "
                "may write. Choose another folder with --run-dir"
            ) from error
        records, size = _read_frames(content, path)
        os.ftruncate(descriptor, size)
        return cls(path, descriptor, size), records

    def begin(self, image: StoreImage) -> None:
        """Write a new store, so that its id is on the disk before a client is told of it.

        Raises:
            LogUnwritable: the disk does not take it.
        """
        try:
            self._rewrite(image)
        except OSError as error:
            raise LogUnwritable(
                f"the journal {self.path} of the store cannot be written: {error.strerror}; expected free space on its "
                "disk. Free some, or choose another folder with --run-dir"
            ) from error

    def append(self, records: Iterable[JournalRecord]) -> None:
        """Have records written by the next `sync`."""
        self._pending += records
        self._appended += 1

    async def sync(self, make_image: Callable[[], StoreImage]) -> None:
        """Return when all that was appended before is on the disk; calls at a time share a frame.

        Args:
            make_image: returns the store as it is, for a journal that has grown so much that it is written anew.

        Raises:
            PeerUnreachable: the disk does not take it; it is tried again by the next call.
        """
        wanted = self._appended
        while self._durable < wanted:
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush(make_image), name="store-journal")
            # A caller that is cancelled must not leave a thread behind that writes.
            if (error := await asyncio.shield(self._flushing)) is not None:
                raise PeerUnreachable(
                    f"the store cannot write its journal {self.path}: {error.strerror}; free space on its disk"
                ) from error

    async def close(self) -> None:
        """Close the file, which stays; closing twice is allowed."""
        if self._flushing is not None:
            await self._flushing
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    async def _flush(self, make_image: Callable[[], StoreImage]) -> OSError | None:
        """Write all that is pending as one frame; return why it could not be written."""
        records, appended, self._pending = self._pending, self._appended, []
        try:
            if self._size > max(MIN_REWRITE_BYTES, REWRITE_FACTOR * self._image_bytes):
                await asyncio.to_thread(self._rewrite, make_image())
            else:
                await asyncio.to_thread(self._write, records)
        except OSError as error:
            self._pending = records + self._pending
            return error
        self._durable = appended
        return None

    def _write(self, records: list[JournalRecord]) -> None:
        frame = _encode_frame(records)
        _write_all(self._descriptor, frame, self._size)
        os.fdatasync(self._descriptor)
        self._size += len(frame)

    def _rewrite(self, image: StoreImage) -> None:
        """Replace the file by one with this image alone."""
        unfinished = self.path.with_suffix(".unfinished")
        content = MAGIC + _encode_frame([image])
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, content, 0)
            os.fsync(descriptor)
            unfinished.replace(self.path)
            _sync_folder(self.path.parent)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._size, self._image_bytes = descriptor, len(content), len(content)


def _read_frames(content: bytes, path: Path) -> tuple[list[JournalRecord], int]:
    """Return the records of all complete frames, and where they end."""
    if len(content) < len(MAGIC) and MAGIC.startswith(content):
        return [], 0  # killed while it began
    if not content.startswith(MAGIC):
        raise _damaged(path, 0, "another beginning than that of a journal")
    records: list[JournalRecord] = []
    position = len(MAGIC)
    while position < len(content):
        if position + _HEADER.size > len(content) or not any(content[position:]):
            break
        length, expected = _HEADER.unpack_from(content, position)
        end = position + _HEADER.size + length
        if end > len(content):
            break
        body = content[position + _HEADER.size : end]
        if zlib.crc32(body) != expected:
            if end == len(content):
                break  # its pages were not all written
            raise _damaged(path, position, "a wrong checksum")
        try:
            records += decode_message(_DECODER, body, "a frame")
        except MessageError as error:
            raise _damaged(path, position, str(error)) from error
        position = end
    return records, position


def _damaged(path: Path, position: int, found: str) -> OperatorError:
    return OperatorError(
        f"the journal {path} of the store is damaged: found {found} at byte {position}, expected a frame of records. "
        "Move it away to begin with an empty store: a job then continues from its newest checkpoint"
    )


def _encode_frame(records: list[JournalRecord]) -> bytes:
    body = _ENCODER.encode(records)
    return _HEADER.pack(len(body), zlib.crc32(body)) + body


def _write_all(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
