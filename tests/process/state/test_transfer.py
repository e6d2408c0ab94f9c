"""The transfer of a state over real sockets: complete and verified, from the next source, or refused."""

import threading
import weakref
from collections.abc import Iterator
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.errors import ChecksumMismatch, PeerError, PeerUnreachable
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.state_records import StateSource
from resilient_jax.state.flat_state import FlatState, copy_to_host, flatten_state
from resilient_jax.state.peer_transfer import (
    SERVICE,
    CancellableTransfer,
    StateServer,
    fetch_state,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.peer_calls import CallService

CREDENTIALS = Credentials("secret")
NUMBER = GenerationNumber(4)


def make_state() -> FlatState:
    large = np.random.default_rng(0).standard_normal((1200, 1000)).astype(np.float32)  # more than one chunk
    tree = {
        "large": jnp.asarray(large),
        "half": jnp.ones((3, 5), jnp.bfloat16),
        "scalar": jnp.float32(3.0),
        "empty": jnp.zeros((0, 2)),
        "key": jnp.arange(4, dtype=jnp.uint32),
        "text": "byte_lm",
    }
    return copy_to_host(flatten_state(17, tree))


def source(name: str, server: StateServer) -> StateSource:
    return StateSource(host=HostName(name), endpoint=server.endpoint)


def fetch(sources: list[StateSource], first: int = 0) -> tuple[FlatState, list[tuple[str, PeerError]]]:
    refused: list[tuple[str, PeerError]] = []
    state = fetch_state(
        NUMBER,
        sources,
        first,
        CREDENTIALS,
        CancellableTransfer(),
        lambda: None,
        lambda s, e: refused.append((s.host, e)),
    )
    return state, refused


def assert_same(one: FlatState, other: FlatState) -> None:
    assert (one.step, one.strings) == (other.step, other.strings)
    for a, b in zip(one.leaves, other.leaves, strict=True):
        assert (a.path, a.value.dtype, a.value.shape) == (b.path, b.value.dtype, b.value.shape)
        np.testing.assert_array_equal(np.asarray(a.value), np.asarray(b.value))


@pytest.fixture
def server() -> Iterator[StateServer]:
    server = StateServer("127.0.0.1", CREDENTIALS)
    yield server
    server.close()


def test_a_state_arrives_bit_for_bit(server: StateServer) -> None:
    state = make_state()
    server.offer(NUMBER, state)
    found, refused = fetch([source("a", server)])
    assert_same(found, state)
    assert refused == []


def test_a_state_of_another_generation_is_not_served(server: StateServer) -> None:
    server.offer(GenerationNumber(5), make_state())
    with pytest.raises(
        PeerUnreachable, match="none of the hosts that hold the state of generation 4 sent it: a"
    ):
        fetch([source("a", server)])


def test_changed_bytes_are_detected_and_the_next_source_is_used(
    server: StateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    server.offer(NUMBER, state)

    def flip_a_bit(sent: memoryview) -> memoryview:
        data = bytearray(sent)
        if data:
            data[len(data) // 2] ^= 1
        return memoryview(data)

    bad = StateServer("127.0.0.1", CREDENTIALS)
    service = cast(CallService, bad._server._services[SERVICE])
    monkeypatch.setattr(service, "_transform_sent", flip_a_bit)
    try:
        bad.offer(NUMBER, state)
        found, refused = fetch([source("bad", bad), source("good", server)])
        assert_same(found, state)
        assert [host for host, _ in refused] == ["bad"]
        assert isinstance(refused[0][1], ChecksumMismatch)
    finally:
        bad.close()


def test_the_next_source_is_used_if_one_is_dead(server: StateServer) -> None:
    server.offer(NUMBER, make_state())
    dead = StateSource(host=HostName("dead"), endpoint="127.0.0.1:9")
    found, refused = fetch([dead, source("a", server)])
    assert found.step == 17
    assert [host for host, _ in refused] == ["dead"]


class Ended(Exception):
    """An exception that `check` raises."""


def test_a_fetch_from_a_silent_source_can_be_cancelled(server: StateServer) -> None:
    """A host must be able to stop its fetch when another host dies meanwhile."""
    transfer, ended, found = CancellableTransfer(), threading.Event(), []

    def check() -> None:
        if ended.is_set():
            raise Ended

    def fetch() -> None:
        sources = [source("waits", server), source("waits, too", server)]
        try:
            fetch_state(NUMBER, sources, 0, CREDENTIALS, transfer, check, lambda *words: found.append(words))
        except Ended as error:
            found.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    ended.set()
    for _ in range(100):  # repeated until the thread ends, as in the guard thread
        transfer.cancel()
        thread.join(0.1)
        if not thread.is_alive():
            break
    assert len(found) == 1
    assert isinstance(found[0], Ended)


def test_a_withdrawn_state_is_released(server: StateServer) -> None:
    state = make_state()
    copy = weakref.ref(state.leaves[0].value)
    server.offer(NUMBER, state)
    del state
    assert copy() is not None
    server.withdraw()
    assert copy() is None
