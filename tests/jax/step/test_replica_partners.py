"""The hosts of a replica begin each of its programs together or not at all, whenever each of them leaves the step.

Each host is a thread with a mailbox of its own; mail goes over real sockets.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import PeerUnreachable
from resilient_jax.host_exchange import CollectiveExchange, MailAddress
from resilient_jax.ids import HostName, Seat
from resilient_jax.step.assignment import ReplicaLocation
from resilient_jax.step.replica_partners import ReplicaPartners
from resilient_jax.step.replicas import Replica
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.mail_service import MailService
from tests.support.patience import Deadline, patience
from tests.support.summing_hosts import add_messages

NUM_PROGRAMS = 4
HOSTS = (HostName("host-0"), HostName("host-1"), HostName("host-2"))
DEADLINE_S = patience(3)


class Ended(BaseException):
    """What ends a generation here."""


class Cliques:
    """Notes whether each program left the cliques intact."""

    def __init__(self) -> None:
        self.are_intact: list[bool] = []

    def begin_program(self, seats: frozenset[Seat]) -> None:
        """Do nothing: nothing interrupts these hosts."""

    def end_program(self, *, is_intact: bool) -> None:
        self.are_intact.append(is_intact)


class Host:
    """One host of a replica of three."""

    def __init__(self, index: int, generation: int, mail: MailService) -> None:
        self.index = index
        self.mail = mail
        self.ended = threading.Event()
        self.begun: list[int] = []
        self.index = index
        self.cliques = Cliques()
        self.error: BaseException | None = None
        self.partners = ReplicaPartners(
            generation,
            HOSTS,
            index,
            open_mail=lambda: mail,
            wait_timeout_s=DEADLINE_S,
            raise_if_ended=self.raise_if_ended,
            cliques=self.cliques,
        )
        self.replica = Replica(jax.local_devices()[:1], jax.local_devices()[:1], {"data": 1})

    def raise_if_ended(self) -> None:
        if self.ended.is_set():
            raise Ended

    def prepare(self, addresses: list[str]) -> None:
        def all_reduce(vector: np.ndarray) -> np.ndarray:
            others = [
                (index, MailAddress(address))
                for index, address in enumerate(addresses)
                if index != self.index
            ]
            return add_messages(vector, others)

        exchange = CollectiveExchange(self.index, len(HOSTS), all_reduce)
        self.partners.prepare(
            (ReplicaLocation((0, 1, 2)),), {0: self.replica}, [Seat(0), Seat(1), Seat(2)], exchange
        )

    def train(self, leave_before: int) -> None:
        """Run all programs, but for those from `leave_before` on; then leave, as a worker does that unwinds."""
        try:
            for program in range(NUM_PROGRAMS):
                if program == leave_before:
                    self.ended.set()
                self.partners.run(self.replica, self.begun.append, program)
        except BaseException as error:
            self.error = error
        finally:
            self.partners.leave()


@pytest.fixture(scope="module")
def mailboxes() -> Iterator[list[MailService]]:
    with contextlib.ExitStack() as stack:
        found = []
        for host in HOSTS:
            service = MailService(host, "127.0.0.1", Credentials("token"), lambda *_: None)
            stack.callback(service.close)
            found.append(service)
        yield found


generations = iter(range(1, 10**6))


def make_hosts(mailboxes: list[MailService]) -> list[Host]:
    generation = next(generations)
    hosts = [Host(index, generation, mail) for index, mail in enumerate(mailboxes)]
    for host in hosts:
        host.prepare([mail.address for mail in mailboxes])
    return hosts


def train_all(hosts: list[Host], leave_before: list[int]) -> None:
    threads = [
        threading.Thread(target=host.train, args=(program,))
        for host, program in zip(hosts, leave_before, strict=True)
    ]
    for thread in threads:
        thread.start()
    first = hosts[leave_before.index(min(leave_before))]
    deadline = Deadline(DEADLINE_S)
    while first.error is None and threads[first.index].is_alive():
        assert deadline.find_rest_s() > 0
        threads[first.index].join(0.01)
    if min(leave_before) < NUM_PROGRAMS:  # all are told, sooner or later, that the generation has ended
        for host in hosts:
            host.ended.set()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a host waits for one that has left"


@given(leave_before=st.lists(st.integers(0, NUM_PROGRAMS), min_size=3, max_size=3))
def test_all_hosts_begin_a_program_or_none_does(
    mailboxes: list[MailService], leave_before: list[int]
) -> None:
    hosts = make_hosts(mailboxes)
    train_all(hosts, leave_before)
    expected = list(range(min(leave_before)))
    assert [host.begun for host in hosts] == [expected] * 3
    assert all(host.error is None or isinstance(host.error, Ended) for host in hosts)
    assert all(all(host.cliques.are_intact) for host in hosts), "no clique is aborted"


def test_a_host_that_leaves_outside_of_the_programs_frees_one_that_waits_for_it(
    mailboxes: list[MailService],
) -> None:
    hosts = make_hosts(mailboxes)
    waiting = [threading.Thread(target=host.train, args=(NUM_PROGRAMS,)) for host in hosts[:2]]
    for thread in waiting:
        thread.start()
    for host in hosts[:2]:
        host.ended.set()
    hosts[2].partners.leave()  # as if a sum over all hosts had failed before its first program
    for thread in waiting:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert [host.begun for host in hosts] == [[], [], []]
    assert all(isinstance(host.error, Ended) and all(host.cliques.are_intact) for host in hosts[:2])


def test_a_host_whose_partner_is_lost_breaks_the_cliques_off() -> None:
    with contextlib.ExitStack() as stack:
        mailboxes = []
        for host in HOSTS:
            mailboxes.append(MailService(host, "127.0.0.1", Credentials("token"), lambda *_: None))
            stack.callback(mailboxes[-1].close)
        hosts = make_hosts(mailboxes)
        waiting = [threading.Thread(target=host.train, args=(NUM_PROGRAMS,)) for host in hosts[:2]]
        for thread in waiting:
            thread.start()
        mailboxes[2].close()  # as the kernel does for a process that is killed
        for thread in waiting:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    for host in hosts[:2]:
        assert isinstance(host.error, PeerUnreachable)
        assert host.begun == []
        assert not host.cliques.are_intact[-1]
