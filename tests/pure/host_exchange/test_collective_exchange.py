"""Messages of hosts over one all-reduce: all read the same, in vectors of few sizes."""

import threading

import msgspec
import numpy as np
import pytest

from resilient_jax.errors import MessageError
from resilient_jax.host_exchange import SMALL_BYTES, CollectiveExchange, compute_vector_size
from tests.support.summing_hosts import SummingHosts, add_messages


class Words(msgspec.Struct, frozen=True, array_like=True):
    text: str
    numbers: tuple[int, ...] = ()
    share: float = 0.0


LONG = "x" * 3 * SMALL_BYTES


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_hosts_read_the_same_messages_in_the_order_of_hosts(count):
    said = [Words("é" * host, (-host, 2**31 + host), host / 3) for host in range(count)]
    hosts = SummingHosts(count)
    assert hosts.run(lambda exchange: exchange.gather(said[exchange.host_index])) == [said] * count
    assert hosts.sizes == [compute_vector_size(count, SMALL_BYTES)], "one collective"


@pytest.mark.parametrize("longest", [SMALL_BYTES - 3, SMALL_BYTES, SMALL_BYTES + 1, 3 * SMALL_BYTES])
def test_a_message_longer_than_its_room_is_told_in_a_second_round_into_which_all_go(longest):
    said = ["", "y" * longest, "z"]
    sizes = [len(msgspec.msgpack.encode(text)) for text in said]
    hosts = SummingHosts(3)
    assert hosts.run(lambda exchange: exchange.gather(said[exchange.host_index])) == [said] * 3
    assert len(hosts.sizes) == 1 + (max(sizes) > SMALL_BYTES)
    assert hosts.sizes[0] == 256


def test_the_size_of_a_vector_does_not_follow_from_what_is_said():
    sizes = set()
    for text in ("", "short", "x" * 200):
        hosts = SummingHosts(3)
        hosts.run(lambda exchange, text=text: exchange.gather(text, room_bytes=1000))
        sizes.update(hosts.sizes)
    assert sizes == {compute_vector_size(3, 1000)}
    assert len({compute_vector_size(count, SMALL_BYTES) for count in range(1, 5)}) == 1, (
        "the same for few hosts"
    )


def test_only_speakers_take_room_and_their_order_is_kept():
    hosts = SummingHosts(8)
    found = hosts.run(lambda exchange: exchange.gather(f"host {exchange.host_index}", speakers=[5, 2]))
    assert found == [["host 5", "host 2"]] * 8
    assert hosts.sizes == [compute_vector_size(2, SMALL_BYTES)]


def test_numbers_of_any_shape_are_added_up_in_a_vector_of_a_usual_size():
    hosts = SummingHosts(3)
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    for found in hosts.run(lambda exchange: exchange.add_up(table * (1 + exchange.host_index))):
        assert found.tolist() == (6 * table).tolist()
    assert hosts.sizes == [256]


def test_what_is_read_is_no_view_of_what_the_all_reduce_returned():
    """On CPU a view would keep the backend after a re-form."""
    returned = []

    def all_reduce(vector):
        returned.append(np.array(vector))
        return returned[-1]

    found = CollectiveExchange(0, 1, all_reduce).add_up(np.ones(3, np.int32))
    returned[-1][:] = 7
    assert found.tolist() == [1, 1, 1]


def test_a_host_that_dies_in_an_exchange_ends_it_for_all_with_the_error_of_the_all_reduce():
    hosts, errors = SummingHosts(3), []

    def call(exchange):
        if exchange.host_index == 1:
            raise SystemExit
        try:
            exchange.gather(LONG)
        except threading.BrokenBarrierError as error:
            errors.append(error)

    with pytest.raises(SystemExit):
        hosts.run(call)
    assert len(errors) == 2


@pytest.mark.parametrize(
    "wrong",
    [lambda row: row * 0, lambda row: row * 2**20, lambda row: -row],
    ids=["none", "long", "negative"],
)
def test_rows_of_different_exchanges_are_refused(wrong):
    exchange = CollectiveExchange(0, 2, lambda vector: vector + wrong(np.roll(vector, 64)))
    with pytest.raises(MessageError, match="same calls in the same order"):
        exchange.gather("text")


def test_in_a_rehearsal_whose_collectives_give_zeros_all_say_what_this_host_does():
    exchange = CollectiveExchange(1, 3, np.zeros_like)
    assert exchange.gather(LONG) == [LONG] * 3
    assert exchange.gather("text", speakers=[2]) == ["text"]


def test_a_message_of_another_type_is_refused():
    exchange = CollectiveExchange(0, 2, lambda vector: add_messages(vector, [(1, 7)]))
    with pytest.raises(MessageError, match=r"what host 1 of a world said does not decode"):
        exchange.gather("text")
