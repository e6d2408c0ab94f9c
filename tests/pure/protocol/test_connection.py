"""Connections: typed messages over a socket pair, with file descriptors, blocking and on an event loop."""

import asyncio
import contextlib
import os
import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import MessageError
from resilient_jax.protocol.async_connection import AsyncConnection
from resilient_jax.protocol.connection import Connection, MessageDecoder, encode_message
from tests.support.patience import patience


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    payload: bytes = b""


class Memory(msgspec.Struct, frozen=True, tag=True):
    number: int


Message = Ping | Memory
DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
WAIT_S = patience(3)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    connections = Connection(ours.detach(), DECODER), Connection(theirs.detach(), DECODER)
    yield connections
    for connection in connections:
        connection.close()


@given(sizes=st.lists(st.integers(0, 300)), cuts=st.lists(st.integers(1, 40)))
def test_messages_arrive_complete_and_in_order_however_the_bytes_are_cut(sizes, cuts):
    sent = [Ping(number, bytes(size)) for number, size in enumerate(sizes)]
    stream = b"".join(map(encode_message, sent))
    decoder, found = MessageDecoder(DECODER), []
    for size in cuts:
        piece, stream = stream[:size], stream[size:]
        found += decoder.feed(piece)
    found += decoder.feed(stream)
    assert [received.message for received in found] == sent


def test_descriptors_belong_to_the_message_that_they_were_sent_with(ends):
    here, there = ends
    files = [os.memfd_create(name) for name in "abc"]
    for number, file in enumerate(files):
        os.write(file, str(number).encode())
    here.send(Ping(0))
    here.send(Memory(1), files[:2])
    here.send(Ping(2, bytes(200_000)))
    here.send(Memory(3), files[2:])
    here.shut_down()
    contents = {}
    for received in there:
        count = {1: 2, 3: 1}.get(received.message.number, 0)
        descriptors = received.take_descriptors(count)
        contents[received.message.number] = [os.pread(descriptor, 1, 0) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
    assert contents == {0: [], 1: [b"0", b"1"], 2: [], 3: [b"2"]}
    for file in files:
        os.close(file)


def test_a_message_without_the_descriptors_that_it_should_have_is_an_error(ends):
    here, there = ends
    here.send(Memory(1))
    (received,) = there.receive(WAIT_S)
    with pytest.raises(MessageError, match="Memory: found 0 descriptors, expected 1"):
        received.take_descriptors(1)


def test_receive_returns_nothing_when_the_time_is_over_and_raises_when_the_peer_is_gone(ends):
    here, there = ends
    assert there.receive(timeout_s=0.01) == []
    here.close()
    with pytest.raises(EOFError):
        there.receive(timeout_s=WAIT_S)
    assert list(there) == []


def test_shutting_down_wakes_a_thread_that_receives(ends):
    here, _ = ends
    receiving = threading.Thread(target=lambda: list(here))
    receiving.start()
    here.shut_down()
    receiving.join(WAIT_S)
    assert not receiving.is_alive()


def test_a_message_of_another_kind_is_an_error_that_says_so():
    decoder = MessageDecoder(DECODER)
    with pytest.raises(MessageError, match="a message of another process does not decode as"):
        decoder.feed(encode_message(msgspec.defstruct("Foreign", [("x", int)], tag=True)(x=1)))


def test_a_send_to_a_peer_that_does_not_read_times_out_and_ends_the_connection():
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach(), DECODER, send_timeout_s=1)
    with theirs, contextlib.closing(connection):
        with pytest.raises(BlockingIOError):
            connection.send(Ping(0, bytes(8 * 2**20)))
        with pytest.raises(OSError, match="pipe"):
            connection.send(Ping(1))


def test_the_event_loop_is_never_blocked_by_a_peer_that_does_not_read():
    """An agent sends to a worker that is stopped; when it goes on every message is there, with its descriptor."""

    async def send_and_receive():
        ours, theirs = socket.socketpair()
        loop_end = AsyncConnection(ours, DECODER)
        thread_end = Connection(theirs.detach(), DECODER)
        file = os.memfd_create("memory")
        loop_end.send(Ping(0, bytes(4 * 2**20)))
        loop_end.send(Memory(1), [file])
        loop_end.send(Ping(2))
        os.close(file)

        def answer():
            for received in thread_end:
                count = int(isinstance(received.message, Memory))
                for descriptor in received.take_descriptors(count):
                    os.close(descriptor)
                thread_end.send(Ping(received.message.number))

        answering = asyncio.create_task(asyncio.to_thread(answer))
        numbers = []
        async with asyncio.timeout(WAIT_S):
            async for message in loop_end:
                numbers.append(message.number)
                if len(numbers) == 3:
                    break
        loop_end.close()
        await answering
        thread_end.close()
        return numbers

    assert asyncio.run(send_and_receive()) == [0, 1, 2]


def test_the_event_loop_sees_the_end_of_a_peer_and_may_still_send_to_it():
    async def outlive():
        ours, theirs = socket.socketpair()
        connection = AsyncConnection(ours, DECODER)
        theirs.close()
        received = [message async for message in connection]
        connection.send(Ping(1))
        connection.close()
        connection.send(Ping(2))
        return received

    assert asyncio.run(outlive()) == []
