"""Bulk reads: who is let in, what comes back, and how each way to fail is told."""

import contextlib
import dataclasses
import os
import socket
import threading
import time

import msgspec
import pytest
from authority import Authority

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import (
    ChecksumMismatch,
    InternalError,
    MessageError,
    PeerUnreachable,
    SnapshotMissing,
)
from resilient_jax.protocol.framing import HEADER
from resilient_jax.transport import BulkChannel, BulkServer, Credentials
from resilient_jax.transport import bulk_server as bulk_server_module
from resilient_jax.transport.bulk_server import Answer

CREDENTIALS = Credentials("token")
CHECKSUM = choose_checksum()
WAIT_S = 60.0
MEMORY = os.urandom(3 * 2**20 + 7)


class Range(msgspec.Struct, frozen=True):
    start: int
    length: int


def serve(request):
    return Answer(memoryview(MEMORY)[request.start :][: request.length])


@contextlib.contextmanager
def serving(handler=serve, credentials=CREDENTIALS, checksum=CHECKSUM):
    server = BulkServer("127.0.0.1", credentials, Range, handler, checksum)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def channel_to(server, credentials=CREDENTIALS, *, ticket=None, host="127.0.0.1"):
    channel = BulkChannel(f"{host}:{server.port}", ticket or server.ticket, credentials)
    with contextlib.closing(channel):
        yield channel


def read(channel, start, length, timeout_s=WAIT_S):
    out = bytearray(length)
    channel.read_into(Range(start, length), memoryview(out), timeout_s=timeout_s)
    return bytes(out)


def threads_of_servers():
    return [t.name for t in threading.enumerate() if t.name in ("rj-bulk", "rj-bulk-accept")]


def wait_until(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_bytes_come_as_they_lie_whatever_their_number():
    with serving() as server, channel_to(server) as channel:
        for start, length in ((0, len(MEMORY)), (5, 1), (len(MEMORY), 0), (1, 2**20)):
            assert read(channel, start, length) == MEMORY[start : start + length]


def test_many_threads_read_at_once_each_on_a_connection_of_its_own():
    together = threading.Barrier(4, timeout=WAIT_S)

    def meet(request):
        together.wait()
        return serve(request)

    with serving(meet) as server, channel_to(server) as channel:
        found = {}

        def run(number):
            found[number] = read(channel, number, 1000)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == {number: MEMORY[number : number + 1000] for number in range(4)}


def test_an_error_of_ours_arrives_as_it_is_and_the_connection_is_used_again():
    def fail(request):
        if request.length == 1:
            raise SnapshotMissing("not here")
        if request.length == 2:
            raise OSError("a bug")
        return serve(request)

    with serving(fail) as server, channel_to(server) as channel:
        with pytest.raises(SnapshotMissing, match="not here"):
            read(channel, 0, 1)
        with pytest.raises(InternalError, match="OSError: a bug"):
            read(channel, 0, 2)
        assert read(channel, 0, 3) == MEMORY[:3]
        assert threads_of_servers().count("rj-bulk") == 1


def refuses(server, error, text, **options):
    with channel_to(server, **options) as channel, pytest.raises(error, match=text):
        read(channel, 0, 8)


def test_bytes_that_were_changed_on_the_way_are_found():
    wrong = dataclasses.replace(CHECKSUM, compute=lambda data: CHECKSUM.compute(data) ^ 1)
    with serving(checksum=wrong) as server:
        refuses(server, ChecksumMismatch, "changed on the way")


def test_another_number_of_bytes_than_asked_for_is_refused():
    with serving(lambda request: Answer(memoryview(MEMORY)[:7])) as server:
        refuses(server, MessageError, "sends 7 bytes, expected 8")


def test_who_has_no_ticket_gets_nothing():
    with serving() as server:
        refuses(server, PeerUnreachable, "broke off", ticket=bytes(16))


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline():
    release = threading.Event()

    def hang(request):
        release.wait(WAIT_S)
        return serve(request)

    with serving(hang) as server, channel_to(server) as channel:
        try:
            with pytest.raises(PeerUnreachable, match=r"did not answer a read within 0\.2 s"):
                read(channel, 0, 8, timeout_s=0.2)
        finally:
            release.set()
        assert read(channel, 0, 8) == MEMORY[:8]


def test_closing_the_channel_ends_a_read_that_waits():
    asked = threading.Event()
    release = threading.Event()

    def hang(request):
        asked.set()
        release.wait(WAIT_S)
        return serve(request)

    with serving(hang) as server, channel_to(server) as channel:
        closing = threading.Thread(target=lambda: (asked.wait(WAIT_S), channel.close()))
        closing.start()
        try:
            with pytest.raises(PeerUnreachable, match="broke off"):
                read(channel, 0, 8)
            with pytest.raises(PeerUnreachable, match="was closed"):
                read(channel, 0, 8)
        finally:
            release.set()
            closing.join(WAIT_S)


def test_a_server_that_is_gone_is_told_from_one_that_is_slow():
    with serving() as server, channel_to(server) as channel:
        read(channel, 0, 8)
        server.stop()
        wait_until(lambda: not threads_of_servers())
        with pytest.raises(PeerUnreachable) as raised:
            read(channel, 0, 8)
        assert raised.value.refused


def test_a_connection_that_broke_while_it_was_idle_is_replaced(monkeypatch):
    monkeypatch.setattr(bulk_server_module, "IDLE_S", 0.05)
    with serving() as server, channel_to(server) as channel:
        read(channel, 0, 8)
        wait_until(lambda: "rj-bulk" not in threads_of_servers())
        assert read(channel, 0, 8) == MEMORY[:8]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", None])
def test_a_stranger_is_sent_away_and_leaves_nothing(said):
    with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(said if said is not None else server.ticket + HEADER.pack(2**31))
            stranger.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionError, OSError):  # closed while something was unread
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(10) == b""
        wait_until(lambda: "rj-bulk" not in threads_of_servers())


def test_with_certificates_peers_of_one_authority_read(tmp_path):
    authority = Authority(tmp_path / "job", "job")
    theirs, ours = (
        Credentials("token", authority.sign("server")),
        Credentials("token", authority.sign("client")),
    )
    with serving(credentials=theirs) as server, channel_to(server, ours) as channel:
        assert read(channel, 3, len(MEMORY) - 3) == MEMORY[3:]
        assert read(channel, 0, 5) == MEMORY[:5]


def test_with_certificates_a_stranger_is_refused_even_with_the_ticket(tmp_path):
    authority, other = Authority(tmp_path / "job", "job"), Authority(tmp_path / "other", "other")
    theirs = Credentials("token", authority.sign("server"))
    with serving(credentials=theirs) as server:
        for credentials in (CREDENTIALS, Credentials("token", other.sign("stranger"))):
            with channel_to(server, credentials) as channel, pytest.raises(PeerUnreachable):
                read(channel, 0, 5)
