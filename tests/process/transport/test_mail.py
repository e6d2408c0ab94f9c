"""Mail between real processes: what arrives, and what happens when a peer dies, stops, lies or is none of the job."""

import contextlib
import os
import random
import signal
import socket
import threading
import time

import msgspec
import pytest

from resilient_jax.errors import PeerUnreachable, StaleGeneration, Unauthenticated
from resilient_jax.events import EventKind
from resilient_jax.protocol.framing import HEADER
from resilient_jax.transport import Credentials, mail_protocol, peer_handshake
from resilient_jax.transport.mail_protocol import Mail, MailKind
from tests.process.transport.mail_peers import TOKEN, WAIT_S, crc, fields, key, make_bytes, own_mail, running
from tests.support.authority import Authority
from tests.support.open_descriptors import count_descriptors
from tests.support.patience import wait_until

MIB = 2**20


def make_mail(of, length=8, seed=0):
    return Mail(key=of, data=memoryview(make_bytes(length, seed))[:length])


def meet(own, peers, generation=1):
    """Have all of them know each other."""
    addresses = {own.name: own.service.address} | {peer.name: peer.address for peer in peers}
    own.begin(generation, addresses)
    for peer in peers:
        peer.ask("begin", generation=generation, peers=addresses)


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_values_of_any_size_arrive_unchanged_in_both_directions(secured, tmp_path):
    credentials, folder = Credentials(TOKEN), ""
    if secured:
        authority = Authority(tmp_path / "job", "job")
        authority.sign("h1")
        credentials, folder = Credentials(TOKEN, authority.sign("h0")), str(tmp_path / "job")
    with own_mail(credentials=credentials) as own, running("h1", folder=folder) as (peer,):
        meet(own, [peer])
        for number, length in enumerate((0, 1, 64 * 1024, 3 * MIB + 4)):
            own.send(peer.name, make_mail(key(number), length, number))
            found = peer.ask("take", key=fields(key(number)), sender="h0")
            assert (found["length"], found["crc"]) == (length, crc(make_mail(key(), length, number)))
            back = key(number, kind=MailKind("back"))
            peer.ask("send", to="h0", key=fields(back), length=length, seed=number)
            mail = own.take(back, "h1")
            assert (crc(mail), mail.dtype, mail.shape) == (found["crc"], "float32", (length // 4,))


def test_a_value_to_itself_is_not_copied():
    with own_mail() as own:
        mail = make_mail(key())
        own.send(own.name, mail)
        assert own.take(key(), "h0") is mail


def test_a_value_that_is_sent_twice_arrives_once():
    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        peer.ask("send", to="h0", key=fields(key()), length=100, seed=1, copies=3)
        peer.ask("send", to="h0", key=fields(key(1)), length=1, seed=2)
        own.take(key(1), "h1")  # the last: all copies have arrived
        own.take(key(), "h1")
        assert own.service.box.try_take(key()) is None


def test_mail_of_an_older_generation_is_refused_and_of_a_later_one_kept():
    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        own.begin(2, {"h1": peer.address})
        peer.ask("send", to="h0", key=fields(key()), length=100, seed=1)
        peer.ask("flush")
        peer.ask("begin", generation=3, peers={"h0": own.service.address})
        peer.ask("send", to="h0", key=fields(key(generation=3)), length=100, seed=1)
        own.take(key(generation=3), "h1")
        assert own.service.box.try_take(key()) is None
        with pytest.raises(StaleGeneration):
            own.send(peer.name, make_mail(key()))
        found = peer.ask("send", to="h0", key=fields(key()), length=1, seed=0)
        assert found["error"] == "StaleGeneration"


def test_a_killed_peer_is_reported_at_once_and_ends_waits_and_sends_while_others_go_on():
    with own_mail() as own, running("h1", "h2") as (victim, other):
        meet(own, [victim, other])
        for peer in (victim, other):
            own.send(peer.name, make_mail(key()))
            peer.ask("take", key=fields(key()), sender="h0")
        victim.process.kill()
        own.wait_lost("h1")  # by the end of an idle connection: nothing is sent to it any more
        with pytest.raises(PeerUnreachable, match=r"h1 at .* takes no more mail"):
            own.take(key(1), "h1")
        with pytest.raises(PeerUnreachable, match=r"h1 at .* takes no more mail"):
            own.send(victim.name, make_mail(key(2)))
        own.send(other.name, make_mail(key(3)))
        assert other.ask("take", key=fields(key(3)), sender="h0")["lost"] == []
        assert [name for name, _ in own.lost] == ["h1"]


def test_a_peer_that_only_sends_is_reported_when_it_is_killed():
    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        peer.ask("send", to="h0", key=fields(key()), length=8, seed=0)
        own.take(key(), "h1")
        peer.process.kill()
        assert "sends no more mail" in str(own.wait_lost("h1"))


def test_a_peer_that_dies_in_the_middle_of_a_value_leaves_none(monkeypatch):
    began, receive = threading.Event(), mail_protocol.receive_bytes

    def announce(*args):
        began.set()
        return receive(*args)

    monkeypatch.setattr(mail_protocol, "receive_bytes", announce)
    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        peer.tell("send", to="h0", key=fields(key()), length=256 * MIB, seed=0)
        assert began.wait(WAIT_S)
        peer.process.kill()
        own.wait_lost("h1")
        with pytest.raises(PeerUnreachable, match="sends no more mail"):
            own.take(key(), "h1")
        assert own.service.box.try_take(key()) is None


def test_dialling_a_host_that_is_dead_fails_at_once():
    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        peer.process.kill()
        peer.process.wait(WAIT_S)
        own.send(peer.name, make_mail(key()))
        error = own.wait_lost("h1")
        assert isinstance(error, PeerUnreachable)
        assert error.is_refused
        with pytest.raises(PeerUnreachable):
            own.send(peer.name, make_mail(key(1)))


def test_a_peer_that_stops_reading_holds_up_neither_senders_nor_the_end():
    with own_mail() as own, running("h1", "h2") as (stopped, other):
        meet(own, [stopped, other])
        own.send("h1", make_mail(key(9)))
        own.service.wait_sent(time.monotonic() + WAIT_S)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            for number in range(8):
                own.send(stopped.name, make_mail(key(number), 8 * MIB))
            own.send(other.name, make_mail(key(), 8 * MIB, 5))
            assert other.ask("take", key=fields(key()), sender="h0")["length"] == 8 * MIB
            with pytest.raises(PeerUnreachable, match=r"has not taken . mails in time"):
                own.service.wait_sent(time.monotonic() + 0.1)
            own.service.close()  # `own_mail` checks that no thread is left
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)


def test_a_peer_that_takes_nothing_for_too_long_counts_as_lost(monkeypatch):
    monkeypatch.setattr("resilient_jax.transport.mail_protocol.SEND_TIMEOUT_S", 0.3)
    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        own.send(peer.name, make_mail(key(1)))
        own.service.wait_sent(time.monotonic() + WAIT_S)
        os.kill(peer.process.pid, signal.SIGSTOP)
        try:
            own.send(peer.name, make_mail(key(), 64 * MIB))
            assert "takes no more mail" in str(own.wait_lost("h1"))
        finally:
            os.kill(peer.process.pid, signal.SIGCONT)


def test_a_new_generation_drops_what_waits_for_a_stopped_peer_and_keeps_other_connections():
    with own_mail() as own, running("h1", "h2") as (stopped, other):
        meet(own, [stopped, other])
        own.send(other.name, make_mail(key()))
        other.ask("take", key=fields(key()), sender="h0")
        descriptors = len(os.listdir("/proc/self/fd"))
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            own.send(stopped.name, make_mail(key(), 64 * MIB))
            own.begin(2, {"h2": other.address})
            other.ask("begin", generation=2, peers={"h0": own.service.address})
            assert len(os.listdir("/proc/self/fd")) == descriptors - 1  # the eventfd of the other's sender
            own.send(other.name, make_mail(key(generation=2)))
            assert other.ask("take", key=fields(key(generation=2)), sender="h0")["length"] == 8
            with pytest.raises(PeerUnreachable, match="expected one of generation 2: h2"):
                own.send(stopped.name, make_mail(key(generation=2)))
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)


def test_a_lost_peer_that_is_a_member_again_is_dialled_anew():
    with own_mail() as own, running("h1") as (first,):
        meet(own, [first])
        own.send(first.name, make_mail(key()))
        first.ask("take", key=fields(key()), sender="h0")
        first.process.kill()
        own.wait_lost("h1")
        with running("h1") as (second,):
            meet(own, [second], generation=2)
            own.send(second.name, make_mail(key(generation=2)))
            assert second.ask("take", key=fields(key(generation=2)), sender="h0")["lost"] == []


def test_a_peer_with_another_token_is_refused_in_both_directions_and_reported():
    with own_mail() as own, running("h1", token="another") as (peer,):
        meet(own, [peer])
        peer.ask("send", to="h0", key=fields(key()), length=8, seed=0)
        wait_until(
            "an error of the sender",
            lambda: peer.ask("send", to="h0", key=fields(key()), length=8, seed=0).get("error"),
        )
        assert peer.ask("send", to="h0", key=fields(key()), length=8, seed=0)["error"] == "Unauthenticated"
        assert [(kind, found["peer"]) for kind, found in own.events] == [
            (EventKind.REQUEST_UNAUTHENTICATED, "127.0.0.1")
        ]
        own.send("h1", make_mail(key()))
        own.wait_lost("h1")
        with pytest.raises(
            Unauthenticated,
            match="refuses our connection: our proof of the job token is wrong",
        ):
            own.send("h1", make_mail(key()))
        assert own.service.box.try_take(key()) is None


def test_a_receiver_that_does_not_have_the_token_gets_no_mail():
    with own_mail() as own, contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        own.begin(1, {"h1": f"127.0.0.1:{listener.getsockname()[1]}"})
        own.send("h1", make_mail(key()))
        with listener.accept()[0] as connection:
            connection.recv(32, socket.MSG_WAITALL)
            connection.sendall(frame({"nonce": bytes(32)}))
            (length,) = HEADER.unpack(connection.recv(4, socket.MSG_WAITALL))
            connection.recv(length, socket.MSG_WAITALL)
            connection.sendall(frame({"type": "PeerWelcome", "proof": bytes(32)}))
            assert connection.recv(1) == b""
        assert isinstance(own.wait_lost("h1"), Unauthenticated)


def test_mail_for_another_host_at_this_address_is_refused():
    with own_mail() as own, running("h1") as (peer,):
        own.begin(1, {"h9": peer.address})
        own.send("h9", make_mail(key()))
        assert "refuses our connection: this is the mailbox of h1" in str(own.wait_lost("h9"))


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(32) + HEADER.pack(2**31), random.Random(1).randbytes(64)],
    ids=["nothing", "http", "a length without end", "random bytes"],
)
def test_a_stranger_that_does_not_keep_to_the_protocol_is_disconnected(said):
    with own_mail() as own:
        host, port = own.service.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            stranger.settimeout(WAIT_S)
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1000):
                    pass
        assert own.lost == []


def test_garbage_after_the_welcome_ends_the_connection_and_reports_the_peer(monkeypatch):
    with own_mail() as own, own_mail("h1") as liar:
        own.begin(1, {"h1": liar.service.address})
        liar.begin(1, {"h0": own.service.address})
        monkeypatch.setattr(
            "resilient_jax.transport.mail_sender.send_mail",
            lambda connection, mail: connection.sendall(mail.data),
        )
        liar.send("h0", Mail(key=key(), data=memoryview(frame({"no": "header"}))))
        assert "does not decode as MailHeader" in str(own.wait_lost("h1"))


def test_with_tls_a_peer_without_the_jobs_certificate_is_refused(tmp_path):
    authority = Authority(tmp_path / "job", "job")
    with own_mail(credentials=Credentials(TOKEN, authority.sign("h0"))) as own, own_mail("h1") as plain:
        plain.begin(1, {"h0": own.service.address})
        plain.send("h0", make_mail(key()))
        assert isinstance(plain.wait_lost("h0"), PeerUnreachable)
        assert own.service.box.try_take(key()) is None


def test_what_is_to_be_sent_is_sent_after_its_step_is_finished_here():
    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        for number in range(3):
            own.send("h1", make_mail(key(number), 16 * MIB))
        own.service.finish_step(0)
        assert peer.ask("take", key=fields(key(2)), sender="h0")["length"] == 16 * MIB


@pytest.mark.parametrize("slow", ["receive_bytes", "send_frame"])
def test_what_a_peer_sent_before_it_closed_its_mailbox_still_arrives(monkeypatch, slow):
    """Also where this side is slow: it has not read the mail yet, or has only just welcomed the peer."""
    goes_on, module = threading.Event(), {"receive_bytes": mail_protocol, "send_frame": peer_handshake}[slow]
    work = getattr(module, slow)

    def work_slowly(*args):
        result = work(*args)
        if not isinstance(args[1], peer_handshake.PeerChallenge):
            assert goes_on.wait(WAIT_S)
        return result

    with own_mail() as own, running("h1") as (peer,):
        meet(own, [peer])
        own.send("h1", make_mail(key()))
        peer.ask("take", key=fields(key()), sender="h0")
        monkeypatch.setattr(module, slow, work_slowly)
        peer.ask("send", to="h0", key=fields(key(1)), length=64 * 1024, seed=0)
        peer.ask("flush")
        peer.end()
        assert "takes no more mail" in str(own.wait_lost("h1"))
        assert own.take(key(1), "h1", check=goes_on.set).data.nbytes == 64 * 1024


def test_closing_a_mailbox_leaves_no_descriptor():
    before = count_descriptors()
    with own_mail() as own, own_mail("h1") as other:
        own.begin(1, {"h1": other.service.address})
        other.begin(1, {"h0": own.service.address})
        own.send("h1", make_mail(key()))
        other.take(key(), "h0")
        other.send("h0", make_mail(key()))
        own.take(key(), "h1")
    wait_until("the descriptors of before", lambda: count_descriptors() <= before)


def frame(message):
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data
