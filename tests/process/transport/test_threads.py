"""The synchronous transport: the guarantees of the asyncio one, from threads, and between both."""

import asyncio
import concurrent.futures
import os
import threading
import time

import msgspec
import pytest

from resilient_jax.errors import (
    AddressInUse,
    ChecksumMismatch,
    InternalError,
    MessageError,
    PeerUnreachable,
    Unauthenticated,
)
from resilient_jax.events import EventKind
from resilient_jax.transport import Channel, Credentials, Method, Server, SyncChannel, SyncServer
from tests.support.patience import patience, wait_until

CREDENTIALS = Credentials("test-token")
SERVICE = "test"
WAIT_S = patience(1)


class Blob(msgspec.Struct):
    data: bytes
    times: int = 1


class Other(msgspec.Struct):
    data: int


ECHO = Method("echo", Blob, Blob)
REPEAT = Method("repeat", Blob, Blob, is_streaming=True)
FAIL = Method("fail", Blob, Blob)


def echo(request):
    return request


def repeat(request):
    for _ in range(request.times):
        yield Blob(request.data)


def serving(handlers, *, on_event=None, num_threads=4):
    server = SyncServer(credentials=CREDENTIALS, on_event=on_event, num_threads=num_threads)
    server.add(SERVICE, handlers)
    return server


def test_chunks_of_8_mib_arrive_unchanged():
    chunk = os.urandom(8 * 1024 * 1024)
    with (
        serving({ECHO: echo, REPEAT: repeat}) as server,
        SyncChannel(server.address, CREDENTIALS) as channel,
    ):
        assert channel.call(SERVICE, ECHO, Blob(chunk), timeout_s=WAIT_S).data == chunk
        got = list(channel.stream(SERVICE, REPEAT, Blob(chunk, times=4), timeout_s=WAIT_S))
        assert [blob.data == chunk for blob in got] == [True] * 4


def test_calls_of_several_threads_run_concurrently():
    together = threading.Barrier(4)

    def meet(request):
        together.wait(timeout=WAIT_S)
        return request

    with serving({ECHO: meet}) as server, SyncChannel(server.address, CREDENTIALS) as channel:
        call = lambda n: channel.call(SERVICE, ECHO, Blob(b"", n), timeout_s=WAIT_S).times  # noqa: E731
        with concurrent.futures.ThreadPoolExecutor(4) as executor:
            assert list(executor.map(call, range(4))) == [0, 1, 2, 3]


def test_a_wrong_token_is_refused_and_reported_once():
    seen = []
    report = lambda kind, detail: seen.append((kind, detail["peer"]))  # noqa: E731
    with (
        serving({ECHO: echo, REPEAT: repeat}, on_event=report) as server,
        SyncChannel(server.address, Credentials("wrong")) as channel,
    ):
        for _ in range(3):
            with pytest.raises(Unauthenticated, match=r"the proof of it is wrong"):
                channel.call(SERVICE, ECHO, Blob(b""), timeout_s=WAIT_S)
        with pytest.raises(Unauthenticated):
            next(channel.stream(SERVICE, REPEAT, Blob(b"")))
    assert seen == [(EventKind.REQUEST_UNAUTHENTICATED, "127.0.0.1")]


def test_errors_of_this_package_keep_their_class_and_bugs_are_internal_errors(caplog):
    def mismatch(request):
        raise ChecksumMismatch("block 3")

    def late_bug(request):
        yield request
        raise KeyError("lost")

    with (
        serving({FAIL: mismatch, REPEAT: late_bug}) as server,
        SyncChannel(server.address, CREDENTIALS) as channel,
    ):
        with pytest.raises(ChecksumMismatch, match=r"^block 3$"):
            channel.call(SERVICE, FAIL, Blob(b""), timeout_s=WAIT_S)
        stream = channel.stream(SERVICE, REPEAT, Blob(b"1"))
        assert next(stream).data == b"1"
        with pytest.raises(InternalError, match=r"/test/repeat failed: KeyError: 'lost'"):
            next(stream)
        with pytest.raises(MessageError, match=r"Expected `bytes`, got `int` - at `\$.data`"):
            channel.call(SERVICE, Method("fail", Other, Blob), Other(1), timeout_s=WAIT_S)
    assert [record.getMessage() for record in caplog.records] == ["/test/repeat failed"]


def test_a_deadline_is_honored():
    release = threading.Event()

    def hang(request):
        release.wait()
        return request

    with serving({ECHO: hang}) as server, SyncChannel(server.address, CREDENTIALS) as channel:
        with pytest.raises(PeerUnreachable, match=r"did not answer /test/echo within 0.2 s") as late:
            channel.call(SERVICE, ECHO, Blob(b""), timeout_s=0.2)
        release.set()
        assert not late.value.is_refused


def is_refused(channel):
    with pytest.raises(PeerUnreachable) as gone:
        channel.call(SERVICE, ECHO, Blob(b""), timeout_s=WAIT_S)
    return gone.value.is_refused


def test_a_stopped_server_refuses_at_once_and_a_closed_channel_reports_itself():
    with serving({ECHO: echo}) as server, SyncChannel(server.address, CREDENTIALS) as channel:
        channel.call(SERVICE, ECHO, Blob(b""), timeout_s=WAIT_S)
        server.stop()
        # A call that is on its way when the connection breaks may have been served: it is not called refused.
        wait_until("a refusal", lambda: is_refused(channel))
        channel.close()
        with pytest.raises(PeerUnreachable, match=r"our channel to it"):
            channel.call(SERVICE, ECHO, Blob(b""), timeout_s=WAIT_S)
        with pytest.raises(PeerUnreachable, match=r"our channel to it"):
            next(channel.stream(SERVICE, REPEAT, Blob(b"")))


def test_the_error_names_an_address_in_use():
    with serving({}) as server:
        second = SyncServer(server.address, credentials=CREDENTIALS)
        with pytest.raises(AddressInUse, match=f"cannot listen on {server.address}"):
            second.start()


def test_no_thread_or_descriptor_leaks():
    earlier = set(threading.enumerate())  # of other tests in this process

    def once():
        with (
            serving({ECHO: echo, REPEAT: repeat}) as server,
            SyncChannel(server.address, CREDENTIALS) as channel,
        ):
            channel.call(SERVICE, ECHO, Blob(b""), timeout_s=WAIT_S)
            stream = channel.stream(SERVICE, REPEAT, Blob(b"x", times=50))
            next(stream)
            stream.close()

    def held():
        ours = [t for t in threading.enumerate() if t.name.startswith("rj-transport") and t not in earlier]
        return len(ours), len(os.listdir("/proc/self/fd"))

    once()  # gRPC's own descriptors are opened once per process
    descriptors = held()[1]
    for _ in range(10):
        once()
    wait_until("the threads and descriptors of before", lambda: held()[0] == 0 and held()[1] <= descriptors)


def test_a_call_that_finds_no_free_thread_waits_within_its_deadline(monkeypatch):
    release, served = threading.Event(), []

    def hang(request):
        served.append(request.times)
        release.wait(WAIT_S)
        return request

    with serving({ECHO: hang}, num_threads=1) as server, SyncChannel(server.address, CREDENTIALS) as channel:
        submit, submitted = server._submit, []
        monkeypatch.setattr(server, "_submit", lambda *work: submitted.append(submit(*work)) or submitted[-1])
        call = lambda n, timeout_s: channel.call(SERVICE, ECHO, Blob(b"", n), timeout_s=timeout_s).times  # noqa: E731
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            first = executor.submit(call, 1, WAIT_S)
            wait_until("the first call", lambda: served == [1])
            with pytest.raises(PeerUnreachable, match=r"did not answer /test/echo within 0.2 s"):
                call(2, 0.2)
            wait_until("the end of the second", lambda: submitted[1].cancelled())
            third = executor.submit(call, 3, WAIT_S)
            release.set()
            assert (first.result(WAIT_S), third.result(WAIT_S)) == (1, 3)
    assert served == [1, 3], "a call whose deadline passed in the queue is not served"


def test_streams_that_wait_for_their_callers_occupy_no_thread():
    with (
        serving({ECHO: echo, REPEAT: repeat}, num_threads=1) as server,
        SyncChannel(server.address, CREDENTIALS) as channel,
    ):
        chunk = os.urandom(4 * 1024 * 1024)  # more than gRPC's flow control sends ahead
        streams = [channel.stream(SERVICE, REPEAT, Blob(chunk, times=20)) for _ in range(3)]
        assert [next(stream).data == chunk for stream in streams] == [True] * 3
        assert channel.call(SERVICE, ECHO, Blob(b"x"), timeout_s=WAIT_S).data == b"x"
        for stream in streams:
            stream.close()


def test_closing_a_stream_closes_its_handler_at_the_next_yield():
    closed, computing, go_on = threading.Event(), threading.Event(), threading.Event()

    def endless(request):
        try:
            yield request
            computing.set()
            go_on.wait(WAIT_S)
            yield request
        finally:
            closed.set()

    with serving({REPEAT: endless}) as server, SyncChannel(server.address, CREDENTIALS) as channel:
        stream = channel.stream(SERVICE, REPEAT, Blob(b"1"))
        assert next(stream).data == b"1"
        assert computing.wait(WAIT_S)
        stream.close()
        assert not closed.wait(0.1)
        go_on.set()
        assert closed.wait(WAIT_S)


def test_closing_a_channel_ends_the_calls_of_other_threads():
    release = threading.Event()

    def hang(request):
        release.wait(WAIT_S)
        return request

    with (
        serving({ECHO: hang}) as server,
        SyncChannel(server.address, CREDENTIALS) as channel,
        concurrent.futures.ThreadPoolExecutor(1) as executor,
    ):
        call = executor.submit(channel.call, SERVICE, ECHO, Blob(b""), timeout_s=WAIT_S)
        time.sleep(0.05)
        channel.close()
        with pytest.raises(PeerUnreachable, match=r"our channel to it"):
            call.result(WAIT_S)
        release.set()


def test_synchronous_and_asyncio_peers_interoperate():
    async def async_echo(request):
        return request

    async def main():
        server = Server(credentials=CREDENTIALS)
        server.add(SERVICE, {ECHO: async_echo})
        async with server:
            with SyncChannel(server.address, CREDENTIALS) as blocking:
                call = lambda: blocking.call(SERVICE, ECHO, Blob(b"1"), timeout_s=WAIT_S)  # noqa: E731
                assert (await asyncio.to_thread(call)).data == b"1"
        with serving({REPEAT: repeat}) as thread_server:
            async with Channel(thread_server.address, CREDENTIALS) as channel:
                stream = channel.stream(SERVICE, REPEAT, Blob(b"2", times=3))
                assert [blob.data async for blob in stream] == [b"2"] * 3

    asyncio.run(main())
