"""Hosts that were no peers for a generation are peers in the next one, whoever begins it first."""

import contextlib
import time
from collections.abc import Iterator

import pytest

from resilient_jax.errors import ResilientJaxError
from resilient_jax.ids import HostName
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind
from resilient_jax.transport.mail_service import MailService
from tests.process.transport.mail_peers import CREDENTIALS, WAIT_S
from tests.support.patience import wait_until

A, B = HostName("a"), HostName("b")


class Peer:
    """A mail service, and the hosts that it has lost."""

    def __init__(self, name: HostName) -> None:
        self.name = name
        self.lost: list[HostName] = []
        self.service = MailService(name, "127.0.0.1", CREDENTIALS, self._note_lost)

    def _note_lost(self, peer: HostName, error: ResilientJaxError) -> None:
        self.lost.append(peer)

    def begin(self, generation: int, *peers: "Peer") -> None:
        self.lost.clear()
        self.service.enter(generation, {peer.name: peer.service.address for peer in (self, *peers)})

    def send(self, generation: int, to: "Peer") -> None:
        self.service.send(to.name, Mail(key=make_key(generation), data=memoryview(b"bits")))

    def take(self, generation: int, sender: "Peer") -> bytes:
        deadline_s = time.monotonic() + WAIT_S
        found = self.service.take(
            make_key(generation), sender=sender.name, deadline_s=deadline_s, check=lambda: None
        )
        return bytes(found.data)


def make_key(generation: int) -> MailKey:
    return MailKey(generation=generation, step=0, kind=MailKind("state"), microbatch=0, block=0)


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    """Two hosts that have sent each other mail in generation 1."""
    with contextlib.ExitStack() as stack:
        found = Peer(A), Peer(B)
        for peer in found:
            stack.callback(peer.service.close)
        exchange(1, *found)
        yield found


def exchange(generation: int, first: Peer, second: Peer) -> None:
    first.begin(generation, second)
    second.begin(generation, first)
    for sender, receiver in ((first, second), (second, first)):
        sender.send(generation, receiver)
        assert receiver.take(generation, sender) == b"bits"


@pytest.mark.parametrize("is_left_first", [True, False])
def test_a_host_that_was_left_out_and_is_a_peer_again_is_not_lost(
    peers: tuple[Peer, Peer], *, is_left_first: bool
) -> None:
    left, other = peers
    other.begin(2)  # it ends its connection to the host that is left out, which is still in generation 1
    wait_until("the loss", lambda: left.lost, WAIT_S)
    exchange(3, *((left, other) if is_left_first else (other, left)))
    exchange(4, other, left)
    assert (left.lost, other.lost) == ([], [])
