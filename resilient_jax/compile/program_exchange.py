"""Exchange of compiled programs between hosts: a program that all hosts need is compiled by one of them.

Rules:
- A program's key is a digest of all that it was made from (the program itself, versions, flags, kinds of devices), so
  a host that has an entry under a key has the right one, however old.
- Every key has one owner among the live hosts. A host that lacks a program asks the owner, and compiles it only if the
  owner does not have it in time. The owner asks no other host.
- A background thread waits for the owner, which is then compiling the same program; a thread that training waits for
  does not.
- What arrives is checked (CRC-32 and length) before it is kept. Callers and servers are those of the job: they have its
  token, and certificates where they are configured.
"""

import dataclasses
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from resilient_jax.errors import ChecksumMismatch, MessageError, PeerError
from resilient_jax.ids import HostName
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.method import Method
from resilient_jax.transport.sync_channel import SyncChannel

PROGRAM_SERVICE: Final = "programs"
CHUNK_BYTES: Final = 2**22
POLL_INTERVAL_S: Final = 0.05
OWNER_TIMEOUT_S: Final = 60.0
"""The longest wait for an owner that is compiling; after it, two hosts compile the program."""
REQUEST_WAIT_S: Final = 0.5
"""The longest wait of one request; between two requests the caller checks whether it still needs the program."""
MAX_WAITING_REQUESTS: Final = 8
"""Requests that wait at a time, each on a thread that others may need; more are answered at once and repeated."""
REQUEST_TIMEOUT_S: Final = 2.0
"""How long training waits for an answer: a host that is gone answers late or never."""
KEY_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.<>")


class ProgramRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a program; the owner waits `wait_s` at most for one that it does not have yet."""

    key: str
    wait_s: float = 0.0


class ProgramChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of the answer: size and CRC-32 first (a size of -1: the owner lacks the program), then the bytes."""

    size: int = 0
    crc32: int = 0
    data: bytes = b""


FETCH_PROGRAM = Method("fetch", ProgramRequest, ProgramChunk, is_streaming=True)


class ProgramDirectory:
    """This host's programs, as files that are written atomically.

    Args:
        folder: of the files.
        suffix: follows the key in the name of a file.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self._folder, self._suffix = folder, suffix
        self._waiters = threading.BoundedSemaphore(MAX_WAITING_REQUESTS)

    def read(self, key: str) -> bytes | None:
        """Return a program; None: this host lacks it.

        Raises:
            MessageError: the key is not one.
        """
        # The key is part of a file's path, so only a digest with a name in front is accepted from another host.
        if not key or key.startswith(".") or not set(key) <= KEY_CHARACTERS:
            raise MessageError(
                f"programs: found the key {key[:80]!r}, expected a digest with a name in front"
            )
        try:
            return (self._folder / f"{key}{self._suffix}").read_bytes()
        except FileNotFoundError:
            return None

    def serve(self, request: ProgramRequest) -> Iterator[ProgramChunk]:
        """Answer another host as soon as the program is there, or when the request's wait is over."""
        found = self.read(request.key)
        # At most MAX_WAITING_REQUESTS threads of the server wait; a request beyond is answered at once, and is
        # repeated.
        if found is None and request.wait_s > 0 and self._waiters.acquire(blocking=False):
            try:
                found = self._wait_for(request.key, min(request.wait_s, REQUEST_WAIT_S))
            finally:
                self._waiters.release()
        if found is None:
            yield ProgramChunk(size=-1)
            return
        # The head comes first, so that the receiver can detect a stream that ended early.
        yield ProgramChunk(size=len(found), crc32=zlib.crc32(found))
        for start in range(0, len(found), CHUNK_BYTES):
            yield ProgramChunk(data=found[start : start + CHUNK_BYTES])

    def _wait_for(self, key: str, wait_s: float) -> bytes | None:
        deadline_s = time.monotonic() + wait_s
        while (found := self.read(key)) is None and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPeer:
    """A live host that serves its programs."""

    host: HostName
    endpoint: str


class ProgramFetcher:
    """Fetches programs from their owners.

    Args:
        host: this one.
        credentials: of the job.
        may_wait: returns whether the calling thread may wait for an owner that is compiling; called before each
            request, and may raise to end the wait.
        on_failure: called with an owner that could not be asked or sent damaged bytes, and the error.
    """

    def __init__(
        self,
        host: HostName,
        credentials: Credentials,
        may_wait: Callable[[], bool],
        on_failure: Callable[[HostName, str], None],
    ) -> None:
        self._host, self._credentials = host, credentials
        self._may_wait, self._on_failure = may_wait, on_failure
        self._lock = threading.Lock()
        self._peers: tuple[ProgramPeer, ...] = ()
        """Guarded by the lock."""

    def set_peers(self, peers: Sequence[ProgramPeer]) -> None:
        """Set the hosts of this generation, this one among them; the same on every host."""
        with self._lock:
            self._peers = tuple(sorted(peers, key=lambda peer: peer.host))

    def fetch(self, key: str) -> bytes | None:
        """Return a program from its owner; None: compile it here."""
        with self._lock:
            peers = self._peers
        owner = find_owner(key, peers)
        if owner is None or owner.host == self._host:
            return None
        try:
            with SyncChannel(owner.endpoint, self._credentials) as channel:
                return self._fetch_from(owner.host, channel, key)
        except PeerError as error:
            self._on_failure(owner.host, str(error))
            return None

    def _fetch_from(self, owner: HostName, channel: SyncChannel, key: str) -> bytes | None:
        deadline_s = time.monotonic() + OWNER_TIMEOUT_S
        while True:
            asked_s = time.monotonic()
            wait_s = REQUEST_WAIT_S if self._may_wait() else 0.0
            found = _request_program(owner, channel, key, wait_s)
            if found is not None or not wait_s or time.monotonic() > deadline_s:
                return found
            # An early answer means that the owner had no thread left to wait on.
            time.sleep(max(0.0, asked_s + wait_s - time.monotonic()))


def find_owner(key: str, peers: Sequence[ProgramPeer]) -> ProgramPeer | None:
    """Return the host that compiles a program for all of them."""
    # owner = crc32(key) mod hosts: the same on every host, since `peers` are sorted by name.
    return peers[zlib.crc32(key.encode()) % len(peers)] if peers else None


def _request_program(owner: HostName, channel: SyncChannel, key: str, wait_s: float) -> bytes | None:
    request = ProgramRequest(key=key, wait_s=wait_s)
    parts = channel.stream(PROGRAM_SERVICE, FETCH_PROGRAM, request, timeout_s=wait_s + REQUEST_TIMEOUT_S)
    head = next(parts, None)
    if head is None or head.size < 0:
        return None
    found = b"".join(part.data for part in parts)
    if len(found) != head.size or zlib.crc32(found) != head.crc32:
        raise ChecksumMismatch(
            f"program {key} from {owner}: found {len(found)} bytes with CRC-32 {zlib.crc32(found):08x}, expected "
            f"{head.size} with {head.crc32:08x}; it is compiled here instead"
        )
    return found
