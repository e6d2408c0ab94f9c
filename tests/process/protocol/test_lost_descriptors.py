"""A connection of a process that is at its limit of open files."""

import contextlib
import os
import socket

import msgspec
import pytest

from resilient_jax.errors import MessageError
from resilient_jax.protocol.connection import Connection
from tests.support.open_descriptors import free_descriptors
from tests.support.own_process import in_own_process
from tests.support.patience import patience

WAIT_S = patience(3)


class Memory(msgspec.Struct, frozen=True, tag=True):
    """A message that comes with one descriptor."""

    number: int


@in_own_process
def test_a_message_loses_its_descriptors_and_the_next_one_keeps_its_own() -> None:
    decoder: msgspec.msgpack.Decoder[Memory] = msgspec.msgpack.Decoder(Memory)
    here, there = (Connection(end.detach(), decoder) for end in socket.socketpair())
    file = os.memfd_create("memory")
    with contextlib.closing(here), contextlib.closing(there):
        with free_descriptors(0):
            here.send(Memory(1), [file])
            (received,) = there.receive(WAIT_S)
        with pytest.raises(MessageError, match="lost 1 because this process has no room"):
            received.take_descriptors(1)
        here.send(Memory(2), [file])
        (received,) = there.receive(WAIT_S)
        (copy,) = received.take_descriptors(1)
        os.close(copy)
    os.close(file)
