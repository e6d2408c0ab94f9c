"""The journal of an embedded store: what it needs to go on after its process was killed or its machine was restarted.

A file of frames. The first one has all keys and leases as of a revision, each other one what changed in one group of
changes, which is read completely or not at all. A frame is on the disk (fdatasync) before its changes are confirmed to
the client that made them, and before a watcher sees them. So only the last frame can be torn by the end of a process
or a machine: it was not confirmed, and is overwritten by the next one. All else that does not fit is damage, and an
error: a shorter history would be another one.
"""

import asyncio
import contextlib
import errno
import fcntl
import itertools
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

MAGIC: Final = b"resilient_jax store journal 2\n"
REWRITE_FACTOR: Final = 8
MIN_REWRITE_BYTES: Final = 4 * 1024 * 1024
"""The journal is written anew when it is so large, and so many times as large as the keys and leases in it."""
_LENGTH: Final = struct.Struct("<II")
"""Of a frame's body: its length, and CRC-32."""
_CHECKSUM: Final = struct.Struct("<I")
"""CRC-32 of what stands before it: a wrong length leads nowhere."""
_HEADER_BYTES: Final = _LENGTH.size + _CHECKSUM.size
SECTOR_BYTES: Final = 512
"""A disk writes so much or nothing. What was not written of a file that had become longer is read as zeros."""
WITHOUT_LOCKS: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Some network file systems have no locks of files."""


class StoreImage(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """A store as of a revision.

    Attributes:
        store_id: the same for as long as the store's journal lives.
        revision: revision of the last change.
        leases: times to live in seconds, by lease.
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
    """The file, locked for as long as it is open: one process at a time reads and writes it.

    Attributes:
        on_trouble: called with why the file cannot be written, at the first write that fails, and with an empty text
            at the first one that does not fail any more.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.on_trouble: Callable[[str], None] = _ignore_trouble
        self._has_trouble = False
        self._descriptor = descriptor
        self._size = size
        """Of the frames that are complete; what a torn write has left behind them is cut off by the next one."""
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
            OperatorError: the file is damaged, no journal, or locked by another process.
        """
        try:
            descriptor = _open_locked(path)
        except BlockingIOError as error:
            raise OperatorError(
                f"the journal {path} of the store belongs to another process that runs; expected one process that "
                "serves this store. Start this agent without --serve-store, or choose another folder with --run-dir"
            ) from error
        except OSError as error:
            raise LogUnwritable(
                f"the journal {path} of the store cannot be opened: {error.strerror}; expected a file that this user "
                "may write. Choose another folder with --run-dir"
            ) from error
        try:
            records, size = _read_frames(_read_all(descriptor), path)
        except BaseException:
            os.close(descriptor)
            raise
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
            make_image: returns the present store, for a journal that has grown so much that it is written anew.

        Raises:
            PeerUnreachable: the disk does not take it; the next call tries again.
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
            self._note_trouble(error.strerror or str(error))
            return error
        self._durable = appended
        self._note_trouble("")
        return None

    def _note_trouble(self, why: str) -> None:
        if bool(why) != self._has_trouble:
            self._has_trouble = bool(why)
            self.on_trouble(why)

    def _write(self, records: list[JournalRecord]) -> None:
        frame = _encode_frame(records)
        # What a torn write has left would follow a shorter frame as one that is damaged.
        os.ftruncate(self._descriptor, self._size)
        _write_all(self._descriptor, frame, self._size)
        os.fdatasync(self._descriptor)
        self._size += len(frame)

    def _rewrite(self, image: StoreImage) -> None:
        """Replace the file by one with this image alone."""
        unfinished = self.path.with_suffix(".unfinished")
        content = MAGIC + _encode_frame([image])
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor)
            _write_all(descriptor, content, 0)
            os.fsync(descriptor)
            unfinished.replace(self.path)
            _sync_folder(self.path.parent)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._size, self._image_bytes = descriptor, len(content), len(content)


def _ignore_trouble(why: str) -> None:
    """Tell nobody: the caller of `sync` has the error."""


def _read_frames(content: bytes, path: Path) -> tuple[list[JournalRecord], int]:
    """Return the records of all complete frames, and where they end."""
    if len(content) < len(MAGIC) and MAGIC.startswith(content):
        return [], 0  # killed while it began
    if not content.startswith(MAGIC):
        raise _damaged(path, 0, "another beginning than that of a journal")
    records: list[JournalRecord] = []
    position = len(MAGIC)
    while (end := _find_frame_end(content, position, path)) is not None:
        try:
            records += decode_message(_DECODER, content[position + _HEADER_BYTES : end], "a frame")
        except MessageError as error:
            raise _damaged(path, position, str(error)) from error
        position = end
    return records, position


def _find_frame_end(content: bytes, position: int, path: Path) -> int | None:
    """Return where the frame at a position ends; None if there is none, or it is torn.

    Raises:
        OperatorError: the file is damaged.
    """
    begin = position + _HEADER_BYTES
    header = content[position:begin]
    if len(header) < _HEADER_BYTES or not any(content[position:]):
        return None
    if not _is_header(header):
        if _is_torn(content, position, begin) and not _has_frame(content, position + 1):
            return None
        raise _damaged(path, position, "a wrong checksum of a length")
    length, expected = _LENGTH.unpack_from(header)
    end = begin + length
    if end > len(content):
        return None
    if zlib.crc32(content[begin:end]) != expected:
        if end == len(content) and _is_torn(content, begin, end):
            return None
        raise _damaged(path, position, "a wrong checksum")
    return end


def _is_header(header: bytes) -> bool:
    """Return whether a frame's header is as it was written."""
    (expected,) = _CHECKSUM.unpack_from(header, _LENGTH.size)
    return zlib.crc32(header[: _LENGTH.size]) == expected


def _is_torn(content: bytes, begin: int, end: int) -> bool:
    """Return whether a sector of these bytes was never written."""
    cuts = [begin, *range(begin - begin % SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES), end]
    return any(not any(content[first:last]) for first, last in itertools.pairwise(cuts))


def _has_frame(content: bytes, begin: int) -> bool:
    """Return whether a complete frame stands somewhere in what follows: then it was confirmed, as was all before it."""
    for position in range(begin, len(content) - _HEADER_BYTES + 1):
        if _is_header(content[position : position + _HEADER_BYTES]):
            length, expected = _LENGTH.unpack_from(content, position)
            body = content[position + _HEADER_BYTES : position + _HEADER_BYTES + length]
            if length > 0 and len(body) == length and zlib.crc32(body) == expected:
                return True
    return False


def _damaged(path: Path, position: int, found: str) -> OperatorError:
    return OperatorError(
        f"the journal {path} of the store is damaged: found {found} at byte {position}, expected a frame of records. "
        "Move it away to begin with an empty store: a job then continues from its newest checkpoint"
    )


def _encode_frame(records: list[JournalRecord]) -> bytes:
    body = _ENCODER.encode(records)
    header = _LENGTH.pack(len(body), zlib.crc32(body))
    return header + _CHECKSUM.pack(zlib.crc32(header)) + body


def _open_locked(path: Path) -> int:
    """Open a journal, or make an empty one, and lock it.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the file cannot be opened.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor)
            # A writer that replaces the file, or removes it at the end, has locked what it replaces.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


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
