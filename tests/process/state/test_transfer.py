"""The transfer of a state over real sockets: complete and verified, from the next source, or refused."""

import threading
import weakref
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.errors import ChecksumMismatch, PeerError, PeerUnreachable
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.state_records import StateSource
from resilient_jax.state import box_reads
from resilient_jax.state.box_reads import BoxGatherer, ReadTarget
from resilient_jax.state.flat_state import FlatState, copy_to_host, flatten_state
from resilient_jax.state.index_box import IndexBox, whole_box
from resilient_jax.state.peer_transfer import (
    StateOffer,
    StateOffers,
    StateServer,
    WorkerReader,
)
from resilient_jax.state.restore import read_whole_state
from resilient_jax.transport.credentials import Credentials
from tests.support.patience import patience

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


class Source:
    """A worker that offers a state."""

    def __init__(self) -> None:
        self.offers = StateOffers()
        self._server = StateServer("127.0.0.1", CREDENTIALS, self.offers)
        self.endpoint, self.close = self._server.endpoint, self._server.close


def source(name: str, server: Source) -> StateSource:
    return StateSource(host=HostName(name), endpoint=server.endpoint)


def fetch(sources: list[StateSource]) -> tuple[FlatState, list[tuple[str, PeerError]]]:
    refused: list[tuple[str, PeerError]] = []
    with WorkerReader(
        NUMBER, sources, CREDENTIALS, lambda: None, lambda host, error: refused.append((host, error))
    ) as reader:
        return read_whole_state(reader), refused


def offer(state: FlatState, number: GenerationNumber = NUMBER) -> StateOffer:
    return StateOffer.of_state(HostName("any"), number, state)


def assert_same(one: FlatState, other: FlatState) -> None:
    assert (one.step, one.strings) == (other.step, other.strings)
    for a, b in zip(one.leaves, other.leaves, strict=True):
        assert (a.path, a.value.dtype, a.value.shape) == (b.path, b.value.dtype, b.value.shape)
        np.testing.assert_array_equal(np.asarray(a.value), np.asarray(b.value))


@pytest.fixture
def server() -> Iterator[Source]:
    server = Source()
    yield server
    server.close()


def test_a_state_arrives_bit_for_bit(server: Source) -> None:
    state = make_state()
    server.offers.offer(offer(state))
    found, refused = fetch([source("a", server)])
    assert_same(found, state)
    assert refused == []


def test_a_state_of_another_generation_is_not_served(server: Source) -> None:
    server.offers.offer(offer(make_state(), GenerationNumber(5)))
    with pytest.raises(
        PeerUnreachable, match="none of the hosts that hold the state of generation 4 sent it: a"
    ):
        fetch([source("a", server)])


def test_changed_bytes_are_detected_and_the_next_source_is_used(
    server: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    server.offers.offer(offer(state))

    def flip_a_bit(sent: memoryview) -> memoryview:
        data = bytearray(sent)
        if data:
            data[len(data) // 2] ^= 1
        return memoryview(data)

    bad = Source()
    service = bad.offers.calls
    monkeypatch.setattr(service, "_transform_sent", flip_a_bit)
    try:
        bad.offers.offer(offer(state))
        found, refused = fetch([source("bad", bad), source("good", server)])
        assert_same(found, state)
        assert [host for host, _ in refused] == ["bad"]
        assert isinstance(refused[0][1], ChecksumMismatch)
    finally:
        bad.close()


def test_the_other_source_is_used_if_one_is_dead(server: Source) -> None:
    server.offers.offer(offer(make_state()))
    dead = StateSource(host=HostName("dead"), endpoint="127.0.0.1:9")
    found, refused = fetch([dead, source("a", server)])
    assert found.step == 17
    assert [host for host, _ in refused] == ["dead"]


class Ended(Exception):
    """An exception that `check` raises."""


def test_a_fetch_from_a_silent_source_can_be_cancelled(server: Source) -> None:
    """A host must be able to stop its fetch when another host dies meanwhile."""
    ended, found = threading.Event(), []

    def check() -> None:
        if ended.is_set():
            raise Ended

    def fetch() -> None:
        sources = [source("waits", server), source("waits, too", server)]
        try:
            with WorkerReader(
                NUMBER, sources, CREDENTIALS, check, lambda *words: found.append(words)
            ) as reader:
                read_whole_state(reader)
        except Ended as error:
            found.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    ended.set()
    thread.join(patience(5))
    assert len(found) == 1
    assert isinstance(found[0], Ended)


def test_a_withdrawn_state_is_released(server: Source) -> None:
    state = make_state()
    copy = weakref.ref(state.leaves[0].value)
    server.offers.offer(offer(state))
    del state
    assert copy() is not None
    server.offers.withdraw()
    assert copy() is None


def test_sources_that_have_the_same_share_the_load(server: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    other = Source()
    monkeypatch.setattr(box_reads, "MAX_READ_BYTES", 2**20)  # the large leaf is cut into five
    sent = {}
    try:
        for name, one in (("a", server), ("b", other)):
            one.offers.offer(offer(state))
            sent[name] = count_bytes(one, monkeypatch)
        found, refused = fetch([source("a", server), source("b", other)])
    finally:
        other.close()
    assert_same(found, state)
    assert refused == []
    assert abs(sum(sent["a"]) - sum(sent["b"])) <= 2**20
    assert sum(sent["a"]) + sum(sent["b"]) == state.nbytes, "each byte comes once"


def count_bytes(server: Source, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each answer with a part of the state."""
    sent: list[int] = []
    service = server.offers.calls
    monkeypatch.setattr(service, "_transform_sent", lambda data: sent.append(len(data)) or data)
    return sent


def test_what_a_source_has_not_sent_comes_from_others(
    server: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the source has sent nothing comes again."""
    state = make_state()
    dying = Source()
    monkeypatch.setattr(box_reads, "MAX_READ_BYTES", 2**18)
    service = dying.offers.calls
    sent: list[int] = []

    def die(data: memoryview) -> memoryview:
        sent.append(len(data))
        if len(sent) == 4:
            dying.offers.withdraw()
        return data

    monkeypatch.setattr(service, "_transform_sent", die)
    counted = count_bytes(server, monkeypatch)
    try:
        dying.offers.offer(offer(state))
        server.offers.offer(offer(state))
        found, refused = fetch([source("dying", dying), source("lives", server)])
    finally:
        dying.close()
    assert_same(found, state)
    assert [host for host, _ in refused] == ["dying"]
    assert sum(counted) < state.nbytes
    assert sum(counted) + sum(sent) >= state.nbytes


def test_boxes_come_from_hosts_with_different_parts(server: Source) -> None:
    """Of one leaf two hosts have halves; this host has a quarter itself, and wants a box of all of them."""
    array = np.arange(48, dtype=np.float32).reshape(8, 6)
    rows = {"top": slice(0, 4), "bottom": slice(4, 8), "own": slice(2, 4)}
    offers = {name: offer_rows(name, array, cut) for name, cut in rows.items()}
    other = Source()
    data = np.zeros((5, 3), np.float32)
    try:
        server.offers.offer(offers["top"])
        other.offers.offer(offers["bottom"])
        with WorkerReader(
            NUMBER,
            [source("top", server), source("bottom", other)],
            CREDENTIALS,
            lambda: None,
            lambda *failed: None,
            offers["own"],
        ) as reader:
            BoxGatherer(reader).gather([ReadTarget(0, IndexBox((1, 2), (6, 5)), data)])
    finally:
        other.close()
    np.testing.assert_array_equal(data, array[1:6, 2:5])


def test_a_box_that_nobody_has_is_refused(server: Source) -> None:
    server.offers.offer(offer_rows("top", np.ones((8, 6), np.float32), slice(0, 4)))
    with WorkerReader(
        NUMBER, [source("top", server)], CREDENTIALS, lambda: None, lambda *failed: None
    ) as reader:
        target = ReadTarget(0, IndexBox((3, 0), (5, 6)), np.zeros((2, 6), np.float32))
        with pytest.raises(PeerUnreachable, match=r"leaf w from \[4, 0\] to \[5, 6\]: none of top has it"):
            BoxGatherer(reader).gather([target])


def offer_rows(host: str, array: np.ndarray, rows: slice) -> StateOffer:
    """Return what a host offers that has some rows of the only leaf."""
    box = whole_box(array.shape).narrow(0, rows.start, rows.stop)
    leaf = LeafSpec("w", array.dtype.name, array.shape)
    return StateOffer(SnapshotId(17, NUMBER), HostName(host), [leaf], [(0, box, array[rows])], {})
