"""Messages of hosts by mail: the same as over a collective, numbered, and sent by speakers alone."""

import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from resilient_jax.errors import PeerUnreachable
from resilient_jax.host_exchange import MailExchange
from resilient_jax.ids import HostName
from resilient_jax.transport.mail_protocol import MailKey, MailKind
from tests.support.patience import patience

HOSTS = [HostName(name) for name in "abc"]


class Post:
    """The mail of all hosts, within this process; `sent` are the keys by sender and receiver."""

    def __init__(self):
        self.boxes = defaultdict(queue.Queue)
        self.sent = []
        self.lost = set()

    def of(self, own):
        return HostMail(self, own)


class HostMail:
    def __init__(self, post, own):
        self._post, self._own = post, own

    def make_key(self, kind, microbatch, block):
        return MailKey(1, 7, kind, microbatch, block)

    def send_message(self, to, key, message):
        self._post.sent.append((self._own, to))
        self._post.boxes[to, self._own, key].put(message)

    def take_message(self, sender, key, kind):
        if sender in self._post.lost:
            raise PeerUnreachable(f"{sender} is lost")
        found = self._post.boxes[self._own, sender, key].get(timeout=patience(3))
        assert isinstance(found, kind)
        return found


def run(post, call):
    exchanges = [
        MailExchange(mail=cast("Any", post.of(own)), hosts=HOSTS, own=own, kind=MailKind("rows"))
        for own in HOSTS
    ]
    with ThreadPoolExecutor(len(HOSTS)) as threads:
        return list(threads.map(call, exchanges))


def test_all_hosts_read_the_same_messages_of_each_exchange():
    def call(exchange):
        return [exchange.gather(f"{exchange.own}{number}") for number in range(3)]

    assert run(Post(), call) == [[[f"{host}{number}" for host in HOSTS] for number in range(3)]] * 3


def test_only_speakers_send():
    post = Post()
    assert run(post, lambda exchange: exchange.gather(exchange.own, speakers=[2])) == [["c"]] * 3
    assert sorted(post.sent) == [("c", "a"), ("c", "b")]


def test_messages_are_found_by_the_names_of_hosts():
    found = run(Post(), lambda exchange: exchange.gather_by_host(exchange.host_index))
    assert found == [{"a": 0, "b": 1, "c": 2}] * 3


def test_a_host_that_is_lost_ends_the_exchange_for_all_as_mail_does():
    post = Post()
    post.lost.add("b")

    def call(exchange):
        if exchange.own == "b":
            return
        with pytest.raises(PeerUnreachable, match="b is lost"):
            exchange.gather("here")

    run(post, call)
