"""The programs that a host serves to the others, and its answers as the owner of keys.

Rules:
- A program's key is a digest of all that it was made from (the program itself, versions, flags, kinds of devices, the
  processor's features), so a host that has an entry under a key has the right one, however old.
- Every key has one owner among the live hosts. A host that lacks a program asks the owner, which sends it, names a host
  that has it, or decides whether the host compiles or waits (`compile_claims`).
- What arrives is checked (CRC-32 and length) before it is kept. Callers and servers are those of the job: they have its
  token, and certificates where they are configured.
"""

import threading
import time
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec

from resilient_jax.compile.compile_claims import Claimant, CompileClaims, Verdict
from resilient_jax.errors import MessageError
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationScoped
from resilient_jax.transport.method import AnyMethod, Method, ReadMethod
from resilient_jax.transport.peer_calls import CallHandler

PROGRAM_SERVICE: Final = "programs"
MAX_WAIT_S: Final = 0.5
"""The longest wait of one request; between two requests the caller checks whether it still needs the program."""
MAX_WAITING_REQUESTS: Final = 8
"""Requests that wait at a time, each in a place that other hosts may need; more are answered at once and repeated."""
KEY_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.<>")


class ProgramRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a program.

    Attributes:
        claimant: the host that compiles the program if no host has it; None: the caller asks for the program only.
        wait_s: how long the owner may wait for a program that another host compiles.
    """

    key: str
    claimant: Claimant | None = None
    wait_s: float = 0.0


class ProgramAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a request.

    Attributes:
        data: the program; None: this host lacks it.
        crc32: checksum of the program.
        holder: endpoint of a host that has the program, where the answer has no program.
        verdict: where the answer has neither program nor holder: what the claimant does.
    """

    data: bytes | None = None
    crc32: int = 0
    holder: str | None = None
    verdict: Verdict | None = None


class ClaimReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a claim: still compiling, or, once `is_done`, compiled and, if it `is_kept`, there to be read."""

    key: str
    claimant: Claimant
    is_done: bool = False
    is_kept: bool = False


class ClaimNoted(msgspec.Struct, frozen=True):
    """The answer to a report."""


FETCH_PROGRAM = Method("fetch", ProgramRequest, ProgramAnswer)
REPORT_CLAIM = Method("report_claim", ClaimReport, ClaimNoted)


class ProgramDirectory(GenerationScoped):
    """This host's programs as files, and the claims on those that it owns.

    Args:
        folder: folder of the files, which are written atomically, by JAX's cache; hosts of one machine may share it.
        suffix: what follows the key in the name of a file.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self._folder, self._suffix = folder, suffix
        self._waiters = threading.BoundedSemaphore(MAX_WAITING_REQUESTS)
        self._changed = threading.Condition()
        self._claims = CompileClaims()
        """Guarded by the condition."""

    @property
    def handlers(self) -> dict[AnyMethod | ReadMethod[Any], CallHandler]:
        """What a server of other hosts calls."""
        return {FETCH_PROGRAM: self.answer, REPORT_CLAIM: self.note}

    def begin_generation(self, generation: Generation) -> None:
        """Drop the claims of hosts that are not members of the generation."""
        self.drop_claims(generation.number, [m.endpoint for m in generation.membership.members if m.endpoint])

    def drop_claims(self, number: GenerationNumber, endpoints: Collection[str]) -> None:
        """Drop the claims of older generations, and what is known of hosts that are not among `endpoints`."""
        with self._changed:
            self._claims.drop_older(number, endpoints)
            self._changed.notify_all()

    def read(self, key: str) -> bytes | None:
        """Return a program; None: this host lacks it.

        Raises:
            MessageError: the key is no key of JAX's cache.
        """
        try:
            return self._find_path(key).read_bytes()
        except FileNotFoundError:
            return None

    def has(self, key: str) -> bool:
        """Return whether the program is here."""
        return self._find_path(key).exists()

    def answer(self, request: ProgramRequest) -> ProgramAnswer:
        """Answer another host: at once, or, if it has to wait, when there is news or the request's wait is over."""
        deadline_s = time.monotonic() + min(request.wait_s, MAX_WAIT_S)
        answer = self._answer_now(request)
        # At most MAX_WAITING_REQUESTS wait; a request beyond is answered at once, and is repeated.
        if answer.verdict is not Verdict.WAIT or not self._waiters.acquire(blocking=False):
            return answer
        try:
            with self._changed:
                while answer.verdict is Verdict.WAIT and (left_s := deadline_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                    answer = self._answer_now(request)
        finally:
            self._waiters.release()
        return answer

    def note(self, report: ClaimReport) -> ClaimNoted:
        """Take in what became of a claim."""
        with self._changed:
            if report.is_done:
                self._claims.finish(report.key, report.claimant, is_kept=report.is_kept)
                self._changed.notify_all()
            else:
                self._claims.renew(report.key, report.claimant.host, time.monotonic())
        return ClaimNoted()

    def _answer_now(self, request: ProgramRequest) -> ProgramAnswer:
        found = self.read(request.key)
        if found is not None:
            return ProgramAnswer(data=found, crc32=zlib.crc32(found))
        claimant = request.claimant
        with self._changed:
            holder = self._claims.find_holder(request.key)
            # A holder that asks no longer has the program, such as after an eviction: it compiles again.
            if holder is not None and (claimant is None or holder != claimant.endpoint):
                return ProgramAnswer(holder=holder)
            if claimant is None:
                return ProgramAnswer()
            return ProgramAnswer(verdict=self._claims.claim(request.key, claimant, time.monotonic()))

    def _find_path(self, key: str) -> Path:
        # The key is part of a file's path, so only a digest with a name in front is accepted from another host.
        if not key or key.startswith(".") or not set(key) <= KEY_CHARACTERS:
            raise MessageError(
                f"programs: found the key {key[:80]!r}, expected a digest with a name in front"
            )
        return self._folder / f"{key}{self._suffix}"
