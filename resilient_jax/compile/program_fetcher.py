"""Fetches compiled programs from other hosts, so that a program that several hosts need is compiled by one of them.

A host that lacks a program asks the owner of its key (see `program_exchange`), and waits while another host compiles
it. The host that has the claim renews it, from a thread of its own, until the program is there. Whatever fails, the
program is compiled here.
"""

import dataclasses
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from resilient_jax.compile.compile_claims import LEASE_S, Claimant, Verdict
from resilient_jax.compile.program_exchange import (
    FETCH_PROGRAM,
    MAX_WAIT_S,
    PROGRAM_SERVICE,
    REPORT_CLAIM,
    ClaimReport,
    ProgramAnswer,
    ProgramDirectory,
    ProgramRequest,
)
from resilient_jax.errors import ChecksumMismatch, ResilientJaxError
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationScoped
from resilient_jax.transport import Credentials, PeerChannel

logger = logging.getLogger(__name__)

RENEWAL_INTERVAL_S: Final = LEASE_S / 4
TRAINING_WAIT_S: Final = 0.1
"""The longest wait of a request of a training thread, which must notice soon that its generation has ended."""
WAIT_TIMEOUT_S: Final = 1800.0
"""The longest wait for another host's compilation, however alive that host is; after it, two hosts compile."""
REQUEST_TIMEOUT_S: Final = 2.0
"""The longest wait for an answer: a host that is gone answers late or never."""
THREAD_NAME: Final = "resilient-jax-claims"


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How a thread that lacks a program waits for another host.

    Attributes:
        is_ahead: whether the thread compiles in the background.
        check: called before each request; raises to end the wait.
    """

    is_ahead: bool
    check: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPeer:
    """A live host that serves its programs."""

    host: HostName
    endpoint: str


class ProgramFetcher(GenerationScoped):
    """Fetches programs, and holds this host's claims.

    Args:
        directory: directory of this host's programs; None: there is none, and nothing is fetched.
        find_patience: returns how the calling thread waits; None: the thread does not wait, and takes only what is
            there.
        on_failure: called with a host that could not be asked or sent damaged bytes, and the error.
    """

    def __init__(
        self,
        host: HostName,
        credentials: Credentials,
        directory: ProgramDirectory | None,
        find_patience: Callable[[], Patience | None],
        on_failure: Callable[[HostName, str], None],
    ) -> None:
        self._host, self._credentials, self._directory = host, credentials, directory
        self._find_patience, self._on_failure = find_patience, on_failure
        self._lock = threading.Lock()
        self._generation = GenerationNumber(0)
        self._peers: tuple[ProgramPeer, ...] = ()
        self._claims: dict[int, tuple[str, ProgramPeer, Claimant]] = {}
        """By thread: the key that it compiles, the owner, and the host that claimed it."""
        self._channels: dict[str, PeerChannel] = {}
        """Guarded by the lock, as all above."""
        self._renewing: threading.Thread | None = None

    def begin_generation(self, generation: Generation) -> None:
        """Fetch from the members of a generation; this host is one of them, or is to be."""
        peers = [
            ProgramPeer(host=m.host, endpoint=m.endpoint) for m in generation.membership.members if m.endpoint
        ]
        self._set_peers(generation.number, peers)

    def _set_peers(self, number: GenerationNumber, peers: Sequence[ProgramPeer]) -> None:
        with self._lock:
            self._generation = number
            self._peers = tuple(sorted(peers, key=lambda peer: peer.host))
            gone = self._channels.keys() - {peer.endpoint for peer in peers}
            channels = [self._channels.pop(endpoint) for endpoint in gone]
        for channel in channels:
            channel.close()

    def end(self) -> None:
        """Fetch and claim nothing from now on: training is over, and other hosts may have ended."""
        with self._lock:
            number = self._generation
        self._set_peers(number, [])
        if self._directory is not None:
            self._directory.drop_claims(number, [])

    def fetch(self, key: str) -> bytes | None:
        """Return a program that another host has or compiles; None: compile it here, then call `finish`."""
        with self._lock:
            owner, me = find_owner(key, self._peers), self._describe_self()
        if owner is None or self._directory is None or (me is not None and len(self._peers) == 1):
            return None
        # A host that is to be a member, and rehearses, takes what there is: members wait for none but members.
        patience = self._find_patience() if me is not None else None
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while time.monotonic() < deadline_s:
            asked_s, wait_s = time.monotonic(), 0.0
            if patience is not None:
                patience.check()
                wait_s = MAX_WAIT_S if patience.is_ahead else TRAINING_WAIT_S
            # A thread that does not wait makes no claim, either.
            claimant = (
                msgspec.structs.replace(me, is_ahead=patience.is_ahead)
                if me is not None and patience
                else None
            )
            answer = self._ask(owner, ProgramRequest(key=key, claimant=claimant, wait_s=wait_s))
            found = answer.data if answer.holder is None else self._read_from_holder(answer.holder, key)
            if found or answer.verdict is not Verdict.WAIT:
                if claimant is not None and answer.verdict is Verdict.COMPILE:
                    self._hold_claim(key, owner, claimant)
                return found
            # An early answer means that at the owner no more requests may wait.
            time.sleep(max(0.0, asked_s + wait_s - time.monotonic()))
        return None

    def finish(self) -> bool:
        """Report what became of the calling thread's claim; return whether it had one."""
        with self._lock:
            # By thread: JAX's cache compiles on the thread that has missed, and passes nothing else to `finish`.
            claimed = self._claims.pop(threading.get_ident(), None)
        if claimed is None:
            return False
        key, owner, claimant = claimed
        assert self._directory is not None, "without it nothing is claimed"
        is_kept = self._directory.has(key)
        self._report(owner, ClaimReport(key=key, claimant=claimant, is_done=True, is_kept=is_kept))
        return True

    def _describe_self(self) -> Claimant | None:
        for peer in self._peers:
            if peer.host == self._host:
                return Claimant(host=self._host, generation=self._generation, endpoint=peer.endpoint)
        return None

    def _ask(self, owner: ProgramPeer, request: ProgramRequest) -> ProgramAnswer:
        """Return the owner's answer, which is empty if the owner is gone."""
        assert self._directory is not None, "checked by `fetch`"
        if owner.host == self._host:
            return self._directory.answer(request)
        try:
            return self._request(owner.endpoint, request)
        except ResilientJaxError as error:
            self._on_failure(owner.host, str(error))
            return ProgramAnswer()

    def _read_from_holder(self, endpoint: str, key: str) -> bytes | None:
        try:
            return self._request(endpoint, ProgramRequest(key=key)).data
        except ResilientJaxError as error:
            with self._lock:
                names = [peer.host for peer in self._peers if peer.endpoint == endpoint]
            self._on_failure(names[0] if names else HostName(endpoint), str(error))
            return None

    def _request(self, endpoint: str, request: ProgramRequest) -> ProgramAnswer:
        timeout_s = request.wait_s + REQUEST_TIMEOUT_S
        answer = self._connect(endpoint).call(FETCH_PROGRAM, request, timeout_s=timeout_s)
        if answer.data is not None and (found := zlib.crc32(answer.data)) != answer.crc32:
            raise ChecksumMismatch(
                f"program {request.key} from {endpoint}: found {len(answer.data)} bytes with CRC-32 {found:08x}, "
                f"expected {answer.crc32:08x}; it is compiled here instead"
            )
        return answer

    def _connect(self, endpoint: str) -> PeerChannel:
        with self._lock:
            if endpoint not in self._channels:
                self._channels[endpoint] = PeerChannel(endpoint, self._credentials, PROGRAM_SERVICE)
            return self._channels[endpoint]

    def _report(self, owner: ProgramPeer, report: ClaimReport) -> None:
        assert self._directory is not None, "without it nothing is claimed"
        if owner.host == self._host:
            self._directory.note(report)
            return
        try:
            self._connect(owner.endpoint).call(REPORT_CLAIM, report, timeout_s=REQUEST_TIMEOUT_S)
        except ResilientJaxError as error:
            # The claim expires; a host that waits then compiles the program, too.
            logger.debug("reporting a claim to %s: %s", owner.host, error)

    def _hold_claim(self, key: str, owner: ProgramPeer, claimant: Claimant) -> None:
        with self._lock:
            self._claims[threading.get_ident()] = (key, owner, claimant)
            if self._renewing is None:
                self._renewing = threading.Thread(target=self._renew_claims, name=THREAD_NAME, daemon=True)
                self._renewing.start()

    def _renew_claims(self) -> None:
        while True:
            time.sleep(RENEWAL_INTERVAL_S)
            with self._lock:
                claims = list(self._claims.values())
            for key, owner, claimant in claims:
                self._report(owner, ClaimReport(key=key, claimant=claimant))


def find_owner(key: str, peers: Sequence[ProgramPeer]) -> ProgramPeer | None:
    """Return the host that decides which host compiles a program."""
    # owner = crc32(key) mod hosts: the same on every host, since `peers` are sorted by name.
    return peers[zlib.crc32(key.encode()) % len(peers)] if peers else None
