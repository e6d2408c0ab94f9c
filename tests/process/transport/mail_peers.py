"""Processes with mailboxes, and a mailbox in the test's own process."""

import contextlib
import json
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping

from resilient_jax.errors import ResilientJaxError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.transport import Credentials
from resilient_jax.transport.authentication import EventFields
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind
from resilient_jax.transport.mail_service import MailService
from tests.support.forge import share_forge
from tests.support.patience import patience

WORKER = "tests.process.transport.mail_worker"
TOKEN = "mail-token"
CREDENTIALS = Credentials(TOKEN)
WAIT_S = patience(6)


class MailPeer:
    """One `mail_worker.py`."""

    def __init__(self, name: str, token: str = TOKEN, folder: str = "") -> None:
        self.name = HostName(name)
        self.process = share_forge(WORKER).start(f"{WORKER}:main", name, token, folder)
        self.address = self.answer()["address"]

    def tell(self, do: str, **words: object) -> None:
        """Give an order without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **words}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} has ended: {self.process.poll()}"
        return json.loads(line)

    def ask(self, do: str, **words: object) -> dict:
        """Return the answer to an order."""
        self.tell(do, **words)
        return self.answer()

    def end(self) -> int:
        """End the process, if it has not, by closing its input; return its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self.process.stdout.close()


class OwnMail:
    """The test's mailbox, with what it was told of lost peers and of strangers."""

    def __init__(self, name: str, credentials: Credentials) -> None:
        self.name = HostName(name)
        self.lost: list[tuple[HostName, ResilientJaxError]] = []
        self._changed = threading.Condition()
        self.events: list[tuple[EventKind, EventFields]] = []
        self.service = MailService(
            self.name, "127.0.0.1", credentials, self._hear, lambda *event: self.events.append(event)
        )

    def begin(self, generation: int, addresses: Mapping[str, str]) -> None:
        """Begin a generation."""
        found = {HostName(name): address for name, address in addresses.items()}
        self.service.enter(generation, found)

    def send(self, to: str, mail: Mail) -> None:
        """Send a value."""
        self.service.send(HostName(to), mail)

    def _hear(self, peer: HostName, error: ResilientJaxError) -> None:
        with self._changed:
            self.lost.append((peer, error))
            self._changed.notify_all()

    def wait_lost(self, peer: str) -> ResilientJaxError:
        """Wait until the peer is reported as lost, and return why."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(name == peer for name, _ in self.lost), WAIT_S)
        return next(error for name, error in self.lost if name == peer)

    def take(
        self, key: MailKey, sender: str, timeout_s: float = WAIT_S, check: Callable[[], None] = lambda: None
    ) -> Mail:
        """Take a value from the box."""
        return self.service.take(
            key, sender=HostName(sender), deadline_s=time.monotonic() + timeout_s, check=check
        )


@contextlib.contextmanager
def own_mail(name: str = "h0", credentials: Credentials = CREDENTIALS) -> Iterator[OwnMail]:
    """Have a mailbox, and check that closing it leaves no thread."""
    mail = OwnMail(name, credentials)
    try:
        yield mail
    finally:
        mail.service.close()
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith(f"rj-mail-{name}-")
    ] == []


@contextlib.contextmanager
def running(*names: str, token: str = TOKEN, folder: str = "") -> Iterator[list[MailPeer]]:
    """Run peers, and check that those which the test has not killed end with 0."""
    peers = [MailPeer(name, token, folder) for name in names]
    try:
        yield peers
    finally:
        codes = {peer.name: peer.end() for peer in peers}
    assert {name: code for name, code in codes.items() if code not in (0, -signal.SIGKILL)} == {}


KIND = MailKind("x")


def key(
    microbatch: int = 0,
    *,
    generation: int = 1,
    step: int = 0,
    kind: MailKind = KIND,
    block: int = 0,
) -> MailKey:
    """Return a key."""
    return MailKey(generation, step, kind, microbatch, block)


def fields(of: MailKey) -> list:
    """Return a key as an order has it."""
    return [of.generation, of.step, of.kind, of.microbatch, of.block]


def make_bytes(length: int, seed: int) -> bytes:
    """Return at least so many bytes, the same in every process."""
    return bytes((seed + i) % 251 for i in range(min(length, 251))) * (length // 251 + 1)


def crc(mail: Mail) -> int:
    """Return the checksum of a mail's bytes."""
    return zlib.crc32(mail.data)
