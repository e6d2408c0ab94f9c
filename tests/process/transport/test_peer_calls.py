"""Calls between peers: authentication, results, and an error for each way to fail."""

import contextlib
import dataclasses
import gc
import os
import socket
import sys
import threading
import time
import traceback

import msgspec
import pytest

from resilient_jax.erasure import choose_checksum
from resilient_jax.errors import (
    ChecksumMismatch,
    InternalError,
    MessageError,
    OperatorError,
    PeerUnreachable,
    SnapshotMissing,
    Unauthenticated,
)
from resilient_jax.events import EventKind
from resilient_jax.protocol.framing import HEADER, encode_frame
from resilient_jax.transport import Credentials, PeerChannel, PeerServer, incoming_connections, peer_calls
from resilient_jax.transport import peer_channel as peer_channel_module
from resilient_jax.transport.method import Method, ReadMethod, encode
from resilient_jax.transport.peer_calls import CallService, MemoryAnswer, PeerRequest
from resilient_jax.transport.peer_connection import OpenSockets, PeerConnector
from resilient_jax.transport.peer_handshake import NONCE_BYTES, PeerChallenge, PeerWelcome
from resilient_jax.transport.socket_io import receive_frame, send_frame
from tests.support.authority import Authority
from tests.support.open_descriptors import free_descriptors
from tests.support.own_process import in_own_process
from tests.support.patience import NEVER_S, Deadline, patience, wait_until

CREDENTIALS = Credentials("token")
CHECKSUM = choose_checksum()
WAIT_S = patience(6)
MEMORY = os.urandom(3 * 2**20 + 7)


class Range(msgspec.Struct, frozen=True):
    start: int
    length: int


class Blob(msgspec.Struct):
    data: bytes


SERVICE = "test"
READ = ReadMethod("read", Range)
ECHO = Method("echo", Blob, Blob)


def serve(request):
    return MemoryAnswer(memoryview(MEMORY)[request.start :][: request.length])


@contextlib.contextmanager
def serving(handler=serve, credentials=CREDENTIALS, checksum=CHECKSUM, on_event=None):
    service = CallService({READ: handler, ECHO: lambda request: request}, checksum)
    server = PeerServer("127.0.0.1", credentials, {SERVICE: service}, name="rj-test", on_event=on_event)
    try:
        yield server
    finally:
        server.shut_down()


@contextlib.contextmanager
def channel_to(server, credentials=CREDENTIALS, *, host="127.0.0.1", service=SERVICE):
    with PeerChannel(f"{host}:{server.port}", credentials, service) as channel:
        yield channel


def read(channel, start, length, timeout_s=WAIT_S):
    out = bytearray(length)
    channel.read_into(READ, Range(start, length), memoryview(out), timeout_s=timeout_s)
    return bytes(out)


def connect(server):
    """Return a connection to the service, whose ends have proved themselves."""
    return PeerConnector(server.address, CREDENTIALS, SERVICE).connect(
        time.monotonic() + WAIT_S, OpenSockets("test")
    )


def threads_of_servers():
    """Return what each thread of a server runs: "_accept", or "_run" for a connection."""
    return [
        frame.f_code.co_name
        for top in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(top)
        if frame.f_code.co_filename in (incoming_connections.__file__,)
        and frame.f_code.co_name in ("_accept", "_run")
    ]


def test_any_range_of_bytes_arrives_unchanged():
    with serving() as server, channel_to(server) as channel:
        for start, length in ((0, len(MEMORY)), (5, 1), (len(MEMORY), 0), (1, 2**20)):
            assert read(channel, start, length) == MEMORY[start : start + length]


def test_threads_read_concurrently_each_on_its_own_connection():
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


def test_an_error_of_the_handler_reaches_the_client_and_the_connection_is_reused():
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
        assert threads_of_servers().count("_run") == 1


def refuses(server, error, text, **options):
    with channel_to(server, **options) as channel, pytest.raises(error, match=text):
        read(channel, 0, 8)


def test_bytes_changed_in_transit_are_detected():
    wrong = dataclasses.replace(CHECKSUM, compute=lambda data: CHECKSUM.compute(data) ^ 1)
    with serving(checksum=wrong) as server:
        refuses(server, ChecksumMismatch, "changed in transit")


def test_a_response_of_another_length_than_requested_is_refused():
    with serving(lambda request: MemoryAnswer(memoryview(MEMORY)[:7])) as server:
        refuses(server, MessageError, "sends 7 bytes, expected 8")


def test_a_client_with_another_token_is_refused():
    with serving() as server:
        refuses(server, Unauthenticated, "proof of the job token is wrong", credentials=Credentials("toke"))


def test_a_client_of_another_service_is_refused_by_name():
    with serving() as server:
        refuses(server, PeerUnreachable, "other at .* refuses our connection: this is test", service="other")


def test_a_wrong_token_is_reported_once():
    seen = []
    with serving(on_event=lambda kind, detail: seen.append((kind, detail["peer"]))) as server:
        for _ in range(3):
            refuses(server, Unauthenticated, "job token", credentials=Credentials("wrong"))
    assert seen == [(EventKind.REQUEST_UNAUTHENTICATED, "127.0.0.1")]


def test_a_server_that_does_not_prove_itself_gets_no_request():
    with contextlib.ExitStack() as owned:
        listener = owned.enter_context(socket.create_server(("127.0.0.1", 0)))
        heard = []

        def pretend():
            with listener.accept()[0] as accepted:
                accepted.recv(NONCE_BYTES, socket.MSG_WAITALL)
                send_frame(accepted, PeerChallenge(bytes(NONCE_BYTES)), time.monotonic() + WAIT_S)
                receive_frame(accepted, time.monotonic() + WAIT_S)
                send_frame(accepted, PeerWelcome(bytes(32)), time.monotonic() + WAIT_S)
                heard.append(accepted.recv(1))

        impostor = threading.Thread(target=pretend)
        impostor.start()
        owned.callback(impostor.join, WAIT_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with PeerChannel(address, CREDENTIALS, SERVICE) as channel, pytest.raises(Unauthenticated):
            read(channel, 0, 8)
    assert heard == [b""]


def test_a_message_of_8_mib_is_answered_with_one():
    with serving() as server, channel_to(server) as channel:
        blob = Blob(os.urandom(8 * 2**20))
        assert channel.call(ECHO, blob, timeout_s=WAIT_S) == blob


def test_a_request_that_is_none_of_the_service_is_refused_and_the_connection_is_reused():
    with serving() as server, channel_to(server) as channel:
        with pytest.raises(MessageError, match="found no such method"):
            channel.call(Method("other", Blob, Blob), Blob(b""), timeout_s=WAIT_S)
        with pytest.raises(MessageError, match=r"Object missing required field `data`"):
            channel.call(Method("echo", Range, Blob), Range(1, 2), timeout_s=WAIT_S)
        with pytest.raises(MessageError, match=r"the answer of .* to echo does not decode as Range"):
            channel.call(Method("echo", Blob, Range), Blob(b""), timeout_s=WAIT_S)
        assert channel.call(ECHO, Blob(b"x"), timeout_s=WAIT_S) == Blob(b"x")
        assert threads_of_servers().count("_run") == 1


def test_an_address_of_another_machine_is_refused_with_the_reason():
    with pytest.raises(
        OperatorError, match=r"cannot listen on 192\.0\.2\.1: Cannot assign requested address"
    ):
        PeerServer("192.0.2.1", CREDENTIALS, {}, name="rj-test")


def test_an_impostor_that_passes_on_the_proofs_of_a_server_is_refused():
    """A server proves itself only at an address of its machine; 192.0.2.1 is nobody's (RFC 5737)."""
    with serving() as server:
        connector = PeerConnector(server.address, CREDENTIALS, SERVICE)
        connector._hello = msgspec.structs.replace(connector._hello, address=f"192.0.2.1:{server.port}")
        with pytest.raises(PeerUnreachable, match="no address of its machine"):
            connector.connect(time.monotonic() + WAIT_S, OpenSockets("test"))


def test_a_read_from_a_silent_server_fails_at_its_timeout():
    release = threading.Event()

    def hang(request):
        release.wait(WAIT_S)
        return serve(request)

    with serving(hang) as server, channel_to(server) as channel:
        try:
            with pytest.raises(PeerUnreachable, match=r"did not answer read within 0\.2 s"):
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


def test_a_stopped_server_is_distinguished_from_a_slow_one():
    with serving() as server, channel_to(server) as channel:
        read(channel, 0, 8)
        server.shut_down()
        wait_until("the end of all threads", lambda: not threads_of_servers())
        with pytest.raises(PeerUnreachable) as raised:
            read(channel, 0, 8)
        assert raised.value.is_refused


def test_a_connection_that_broke_while_idle_is_replaced(monkeypatch):
    monkeypatch.setattr(peer_calls, "IDLE_TIMEOUT_S", 0.05)
    with serving() as server, channel_to(server) as channel:
        read(channel, 0, 8)
        wait_until("the end of the connection", lambda: "_run" not in threads_of_servers())
        assert read(channel, 0, 8) == MEMORY[:8]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", None])
def test_a_client_that_breaks_the_protocol_is_disconnected(said):
    with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(said if said is not None else bytes(32) + HEADER.pack(2**31))
            stranger.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionError, OSError):  # the server closed with data unread
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1000):
                    pass  # a challenge
        wait_until("the end of the connection", lambda: "_run" not in threads_of_servers())


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("admitted", [True, False])
def test_a_closed_connection_does_not_count_toward_the_limit(secured, admitted, tmp_path, monkeypatch):
    monkeypatch.setattr(incoming_connections, "MAX_CONNECTIONS", 2)
    authority = Authority(tmp_path / "job", "job") if secured else None
    theirs = Credentials("token", authority.sign("server")) if authority else CREDENTIALS
    ours = Credentials("token", authority.sign("client")) if authority else CREDENTIALS
    gc.collect()  # of other tests
    before = len(os.listdir("/proc/self/fd"))
    with serving(credentials=theirs) as server:
        for _ in range(5):
            if admitted:
                with channel_to(server, ours) as channel:
                    assert read(channel, 0, 8) == MEMORY[:8]
            else:
                theirs = Credentials("wrong", ours.tls)
                with channel_to(server, theirs) as channel, pytest.raises(Unauthenticated):
                    read(channel, 0, 8, timeout_s=WAIT_S)
        wait_until("the end of all connections", lambda: "_run" not in threads_of_servers())
    wait_until("the end of all threads", lambda: not threads_of_servers())
    wait_until("the descriptors of before", lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_client_waits_while_the_server_is_at_its_connection_limit(monkeypatch):
    monkeypatch.setattr(incoming_connections, "MAX_CONNECTIONS", 1)
    asked, release = threading.Event(), threading.Event()

    def hang(request):
        if request.start == 0:
            asked.set()
            release.wait(WAIT_S)
        return serve(request)

    with serving(hang) as server, channel_to(server) as first, channel_to(server) as second:
        found = {}

        def run(channel, start):
            found[start] = read(channel, start, 8)

        threads = [threading.Thread(target=run, args=asked) for asked in ((first, 0), (second, 8))]
        threads[0].start()
        assert asked.wait(WAIT_S)
        threads[1].start()
        threads[1].join(0.2)
        assert found == {}
        release.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == {0: MEMORY[:8], 8: MEMORY[8:16]}


def test_of_more_clients_than_places_all_are_served_in_turn(monkeypatch):
    """Who asks takes the place of who asks nothing at the moment, who then connects again."""
    monkeypatch.setattr(incoming_connections, "MAX_CONNECTIONS", 2)
    with serving() as server, contextlib.ExitStack() as opened:
        channels = [opened.enter_context(channel_to(server)) for _ in range(5)]
        for number in range(20):
            assert read(channels[number % 5], number, 8) == MEMORY[number : number + 8]


def test_a_call_on_a_connection_that_ends_before_its_answer_is_made_again_once(monkeypatch):
    """The server may close an idle connection at the moment in which a request comes."""
    with serving() as server, channel_to(server) as channel:
        read(channel, 0, 8)
        (idle,) = channel._idle
        monkeypatch.setattr(peer_channel_module, "_is_quiet", lambda connection: True)
        idle.shutdown(socket.SHUT_RDWR)
        assert read(channel, 8, 8) == MEMORY[8:16]


@in_own_process
def test_a_server_out_of_descriptors_accepts_again_once_some_are_free():
    with serving() as server, socket.socket() as early:
        with free_descriptors(0):
            early.connect(("127.0.0.1", server.port))
            time.sleep(2 * incoming_connections.ACCEPT_RETRY_INTERVAL_S)
        with channel_to(server) as channel:
            assert read(channel, 0, 8) == MEMORY[:8]


def test_a_client_that_reads_its_response_too_slowly_is_disconnected(monkeypatch):
    monkeypatch.setattr(peer_calls, "SEND_TIMEOUT_S", 0.5)
    large = memoryview(bytes(64 * 2**20))  # more than the kernel buffers
    with (
        serving(lambda request: MemoryAnswer(large)) as server,
        connect(server) as slow,
    ):
        slow.sendall(encode_frame(encode(PeerRequest("read", msgspec.Raw(encode(Range(0, len(large))))))))
        deadline = Deadline(WAIT_S)
        while "_run" in threads_of_servers():
            assert deadline.find_rest_s() > 0
            slow.recv(1000)
            time.sleep(0.02)


def test_closing_the_channel_ends_an_unanswered_connect(monkeypatch):
    monkeypatch.setattr(peer_channel_module, "CONNECT_TIMEOUT_S", NEVER_S)
    with contextlib.ExitStack() as owned:
        full = owned.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        for _ in range(4):  # with a full backlog the kernel drops connection requests
            filler = owned.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        channel = PeerChannel(f"127.0.0.1:{address[1]}", CREDENTIALS, SERVICE)
        closing = threading.Timer(0.3, channel.close)
        closing.start()
        with pytest.raises(PeerUnreachable):
            read(channel, 0, 8)
        closing.join(WAIT_S)


def test_a_name_with_several_addresses_is_reached_at_the_one_that_listens():
    with serving() as server:
        names = {name for *_, name in socket.getaddrinfo("localhost", server.port, type=socket.SOCK_STREAM)}
        assert names
        with channel_to(server, host="localhost") as channel:
            assert read(channel, 0, 8) == MEMORY[:8]


def test_with_tls_a_peer_of_the_same_authority_reads(tmp_path):
    authority = Authority(tmp_path / "job", "job")
    theirs, ours = (
        Credentials("token", authority.sign("server")),
        Credentials("token", authority.sign("client")),
    )
    with serving(credentials=theirs) as server, channel_to(server, ours) as channel:
        assert read(channel, 3, len(MEMORY) - 3) == MEMORY[3:]
        assert read(channel, 0, 5) == MEMORY[:5]


def test_with_tls_a_client_without_a_valid_certificate_is_refused_despite_the_token(tmp_path):
    authority, other = Authority(tmp_path / "job", "job"), Authority(tmp_path / "other", "other")
    theirs = Credentials("token", authority.sign("server"))
    with serving(credentials=theirs) as server:
        for credentials in (CREDENTIALS, Credentials("token", other.sign("stranger"))):
            with channel_to(server, credentials) as channel, pytest.raises(PeerUnreachable):
                read(channel, 0, 5)


def test_the_error_of_a_client_without_certificates_says_that_the_server_uses_tls():
    alert = bytes.fromhex("15 0303 0002 0228")  # a handshake failure; a real server's may be lost in a race
    with contextlib.ExitStack() as owned:
        listener = owned.enter_context(socket.create_server(("127.0.0.1", 0)))
        told = threading.Event()

        def refuse():
            with listener.accept()[0] as accepted:
                accepted.sendall(alert)
                told.wait(WAIT_S)  # closing earlier could discard the alert before it is read

        server = threading.Thread(target=refuse)
        server.start()
        owned.callback(server.join, WAIT_S)
        owned.callback(told.set)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        channel = owned.enter_context(contextlib.closing(PeerChannel(address, CREDENTIALS, SERVICE)))
        with pytest.raises(PeerUnreachable, match="uses TLS and we do not"):
            read(channel, 0, 5)
