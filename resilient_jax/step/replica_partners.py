"""Has the hosts of a replica that spans several begin each of its programs together, or none of them.

A program of such a replica waits, inside of a collective, for the other hosts of the replica. When a host of another
replica dies, its own hosts leave the step one after the other. If one has left before a program that another has begun,
the other's wait could only be ended by breaking their clique for good, and with it the world. So before each program

1. a host tells its partners that it begins the program, or, once it leaves the step, that it does not,
2. and runs it only if all partners have said that they begin it.

A host that has said so keeps waiting for its partners' answers even if its generation has ended meanwhile, since they
may have had all answers. That wait ends: each partner begins the program, or leaves the step, or dies, which ends its
connections. What was begun by all is finished by all: their cliques are intact when the step goes on in the next
generation. The price is a message to each partner for each microbatch.

The hosts with the same rank in their replicas, which hold the same shards, add up their totals alike.

On GPU nothing of this is needed: there a failure replaces the workers.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol

from resilient_jax.errors import PeerUnreachable, ResilientJaxError
from resilient_jax.host_exchange import HostExchange, MailExchange, gather_mail_addresses
from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.ids import HostName, Seat
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.step.assignment import ReplicaLocation, list_holders
from resilient_jax.step.replicas import Replica
from resilient_jax.transport.mail_protocol import MailKind
from resilient_jax.transport.mail_service import MailService

READY_MAIL: Final = MailKind("ready")
"""Says whether a host begins the next program of a replica on several hosts."""

PATIENCE_S: Final = 1.5
"""Time for a partner's answer, once the generation has ended: one that is alive comes to its next program, or leaves
the step. It is less than `quiesce_timeout_s`, which leaves a worker out."""
ORDER_PATIENCE_S: Final = 2.0
"""Time until this host, too, is told that the generation has ended, once a partner has left it."""
ORDER_CHECK_INTERVAL_S: Final = 0.005
MAX_GROUPS: Final = 2
"""Of one host, by shape: its replica, and the hosts with the same shards."""


class ReplicaCliques(Protocol):
    """Knows which connections an interruption must spare; `WorldConnector` is one."""

    def begin_program(self, seats: frozenset[Seat]) -> None:
        """Note that this process is about to run a program of a replica of these seats."""
        ...

    def end_program(self, *, is_intact: bool) -> None:
        """Note that it has; break the replica's cliques off if they are not intact."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class _Group:
    """The hosts of one replica of this host, or those with the same shards.

    Attributes:
        seats: where its processes are in the world, this one included.
        exchange: place where they say of each program whether they begin it.
    """

    seats: frozenset[Seat]
    exchange: MailExchange


class ReplicaPartners:
    """The other hosts of this host's replicas, in one generation.

    Args:
        generation: number that the keys of messages begin with, so that none is taken for one of another generation.
        hosts: the names of the live hosts.
        host_index: position of this host in `hosts`.
        open_mail: returns the mailbox of this process; called when the first replica spans hosts.
        wait_timeout_s: how long to wait for a partner at most.
        raise_if_ended: raises if the generation has ended.
        cliques: what knows the connections of this process; None: failures do not spare any, so nothing is agreed on.

    Attributes:
        have_several_hosts: whether any replica, of this host or another, spans several hosts.
    """

    def __init__(
        self,
        generation: int,
        hosts: Sequence[HostName],
        host_index: int,
        *,
        open_mail: Callable[[], MailService],
        wait_timeout_s: float,
        raise_if_ended: Callable[[], None],
        cliques: ReplicaCliques | None,
    ) -> None:
        self._generation = generation
        self._hosts = tuple(hosts)
        self._host_index = host_index
        self._open_mail = open_mail
        self._wait_timeout_s = wait_timeout_s
        self._raise_if_ended = raise_if_ended
        self._cliques = cliques
        self._mail: MailService | None = None
        self._groups: dict[Hashable, _Group] = {}
        """By replica, and by the indexes of the hosts that hold the same shards."""
        self._prepared: list[Mapping[int, Replica]] = []
        """The replicas of this host, by shape."""
        self.have_several_hosts = False

    def prepare(
        self,
        locations: tuple[ReplicaLocation, ...],
        replicas: Mapping[int, Replica],
        seats: Sequence[Seat],
        exchange: HostExchange,
    ) -> None:
        """Meet the partners in replicas of a shape. For all hosts at once, in the first accumulation with that shape.

        Args:
            locations: where all replicas are, by their numbers.
            replicas: the ones that this host belongs to, by their numbers.
            seats: seat of each host, by its index.
            exchange: what all hosts take part in.
        """
        if all(len(location.host_indexes) == 1 for location in locations):
            return
        self.have_several_hosts = True
        if self._cliques is None or any(replicas is prepared for prepared in self._prepared):
            return
        if self._mail is None:
            self._mail = self._open_mail()
            addresses = gather_mail_addresses(exchange, self._hosts, self._mail.address)
            self._mail.enter(self._generation, addresses)
        found: list[tuple[Hashable, Sequence[int]]] = [
            (replica, locations[number].host_indexes) for number, replica in replicas.items()
        ]
        found += [(hosts, hosts) for hosts in list_holders(locations) if len(hosts) > 1]
        own = [(group, indexes) for group, indexes in found if self._host_index in indexes]
        for number, (group, indexes) in enumerate(own):
            mail = StepMail(
                service=self._mail,
                generation=self._generation,
                # The same on all of them, by the order in which the shapes came up.
                step=MAX_GROUPS * len(self._prepared) + number,
                wait_timeout_s=self._wait_timeout_s,
                check=_Patience(self._raise_if_ended).check,
            )
            self._groups[group] = _Group(
                seats=frozenset(seats[index] for index in indexes),
                exchange=mail.make_exchange(
                    [self._hosts[index] for index in indexes], self._hosts[self._host_index], READY_MAIL
                ),
            )
        self._prepared.append(replicas)

    def run(self, of: Hashable, program: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - arrays
        """Return what a program of several hosts returns, once its arrays are computed.

        Args:
            of: a replica, or the indexes of the hosts that hold the same shards.

        Raises:
            PeerUnreachable: a partner does not begin it, or is dead. If this host's generation has ended by then,
                `raise_if_ended` raises instead.
        """
        group = self._groups.get(of)
        if group is None or self._cliques is None:
            return collective_thread.run(program, *arguments)
        # The last look: who has said that it begins must not leave before its partners have answered.
        self._raise_if_ended()
        # Before the message, so that an interruption spares the clique from the moment that partners may use it.
        self._cliques.begin_program(group.seats)
        is_intact = False
        try:
            begins = group.exchange.gather_by_host(True)
            leaving = [host for host, does_begin in begins.items() if not does_begin]
            result = None if leaving else collective_thread.run(program, *arguments)
            # Also if partners leave: then nobody has begun, and the clique is as it was.
            is_intact = True
        finally:
            self._cliques.end_program(is_intact=is_intact)
        if leaving:
            self._leave_with(leaving)
        return result

    def leave(self) -> None:
        """Tell the partners that this host begins no program any more in this generation."""
        # Of the next program: partners that wait for this host wait for that one.
        for exchange in (group.exchange for group in self._groups.values()):
            for partner in exchange.hosts:
                if partner != exchange.own:
                    with contextlib.suppress(ResilientJaxError):  # it is dead, so it waits for nothing
                        exchange.tell(partner, False)

    def _leave_with(self, partners: list[HostName]) -> None:
        """Raise, as soon as this host is told of the end of the generation, which its partners have left."""
        deadline_s = time.monotonic() + ORDER_PATIENCE_S
        while time.monotonic() < deadline_s:
            self._raise_if_ended()
            time.sleep(ORDER_CHECK_INTERVAL_S)
        raise PeerUnreachable(
            f"a microbatch of a replica on several hosts: {', '.join(partners)} left the step, and after "
            f"{ORDER_PATIENCE_S:g} s nobody has said why. Look at the log of these hosts"
        )


class _Patience:
    """Lets a wait go on for `PATIENCE_S` after the end of the generation."""

    def __init__(self, raise_if_ended: Callable[[], None]) -> None:
        self._raise_if_ended = raise_if_ended
        self._until_s: float | None = None

    def check(self) -> None:
        """Raise if the generation ended so long ago."""
        try:
            self._raise_if_ended()
        except BaseException:  # what ends a generation is the caller's
            now_s = time.monotonic()
            self._until_s = now_s + PATIENCE_S if self._until_s is None else self._until_s
            if now_s > self._until_s:
                raise
