"""The mail of one host: what it sends to its peers, and what they send to it.

To send does not wait for the receiver, and what has arrived is found by its key: so no order of messages is wrong, and
none deadlocks.
"""

import copy
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from resilient_jax.errors import CallerError, MessageError, PeerUnreachable, ResilientJaxError
from resilient_jax.ids import HostName
from resilient_jax.transport.authentication import OnEvent
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.incoming_connections import Visit
from resilient_jax.transport.mail_protocol import Mail, MailKey, receive_mail
from resilient_jax.transport.mail_sender import MailSender
from resilient_jax.transport.mailbox import Mailbox
from resilient_jax.transport.peer_connection import PeerConnector
from resilient_jax.transport.peer_handshake import PeerHello
from resilient_jax.transport.peer_server import PeerServer, PeerService
from resilient_jax.transport.received_mail import ReceivedMailCounter

OnPeerLost = Callable[[HostName, ResilientJaxError], None]
"""Called once for each peer that is lost in a generation, on a thread of the service, which it must not close."""

logger = logging.getLogger(__name__)


class MailService:
    """Sends and receives keyed values; safe to share between threads.

    Attributes:
        box: mail that has arrived.
        received: bytes that have arrived, and the time that mail was under way.
        address: address of this host's mailbox, for its peers.
    """

    def __init__(
        self,
        own_name: HostName,
        host: str,
        credentials: Credentials,
        on_peer_lost: OnPeerLost,
        on_event: OnEvent | None = None,
        services: Mapping[str, PeerService] = MappingProxyType({}),
    ) -> None:
        """Listen on a free port.

        Args:
            own_name: name of this host; peers that expect another one here are refused.
            host: address of this machine that peers reach.
            on_peer_lost: called with each peer whose connection ended, or to which no connection can be made.
            on_event: called with connections that are refused for their token.
            services: what else peers find at the address.

        Raises:
            ConfigError, OutOfResources, OperatorError: as `PeerServer`.
        """
        self.box = Mailbox()
        self.received = ReceivedMailCounter()
        self._own_name = own_name
        self._credentials = credentials
        self._on_peer_lost = on_peer_lost
        self._lock = threading.Lock()  # guards the attributes below
        self._senders: dict[HostName, MailSender] = {}
        self._incoming: dict[HostName, socket.socket] = {}
        self._addresses: dict[HostName, str] = {}
        self._lost: dict[HostName, ResilientJaxError] = {}
        self._may_be_lost: set[HostName] = set()
        self._generation = 0
        self._server = PeerServer(
            host,
            credentials,
            {_name_mailbox(own_name): self, **services},
            name=f"rj-mail-{own_name}",
            on_event=on_event,
        )
        self.address = self._server.address

    def enter(self, generation: int, addresses: Mapping[HostName, str]) -> None:
        """Have these peers from now on, with no mail of older generations in any queue or box.

        Connections to peers that stay are kept. A peer to which the connection ended is dialled again. Call this
        on one thread, and not in `on_peer_lost`.

        Raises:
            CallerError: the generation is older than the present one.
        """
        with self._lock:
            if generation < self._generation:
                raise CallerError(
                    f"generation: found {generation}, expected {self._generation} or a later one"
                )
            self._generation = generation
            self._addresses = dict(addresses)
            # A peer that is lost only because it sends no more keeps the connection to it. To end that would have the
            # peer lose this host, which would then lose the peer, in one generation after the other.
            ended = [
                self._senders.pop(peer)
                for peer, sender in list(self._senders.items())
                if addresses.get(peer) != sender.address or sender.has_ended
            ]
        for sender in ended:
            sender.close()  # before the box forgets what is lost: afterwards these can report nothing
        self.box.enter(generation)
        with self._lock:
            self._lost.clear()
            self._may_be_lost.clear()
            for sender in self._senders.values():
                sender.drop(lambda mail: mail.key.generation < generation)
            for peer in sorted(set(addresses) - set(self._senders) - {self._own_name}):
                self._senders[peer] = self._make_sender(peer, addresses[peer])

    def add_peer(self, peer: HostName, address: str, *, may_be_lost: bool = False) -> None:
        """Have one more peer to send to in this generation; a process of it that was there before is none any more.

        Args:
            may_be_lost: True: what is sent to the peer after its loss is dropped, and is no error.
        """
        with self._lock:
            if may_be_lost:
                self._may_be_lost.add(peer)
            else:
                self._may_be_lost.discard(peer)
            known = self._senders.get(peer)
            if known is not None and known.address == address and peer not in self._lost:
                return
            self._senders.pop(peer, None)
        if known is not None:
            known.close()  # before what it has reported is forgotten
        sender = self._make_sender(peer, address)
        with self._lock:
            self._lost.pop(peer, None)
            self._senders[peer] = sender
        self.box.mark_silent(peer, None)

    def send(self, to: HostName, mail: Mail) -> None:
        """Send a value, which must not change afterwards; this does not wait. To this host itself nothing is copied.

        Raises:
            StaleGeneration: the value is of an older generation or of a finished step.
            PeerUnreachable: the peer is lost, or is none of this generation.
            Unauthenticated: the peer has another token.
        """
        self.box.check_current(mail.key)
        if to == self._own_name:
            self.box.put(mail)
            return
        with self._lock:
            if to in self._lost:
                if to in self._may_be_lost:
                    return
                raise copy.copy(self._lost[to])  # each raise adds to a traceback of its own
            sender = self._senders.get(to)
        if sender is None:
            raise PeerUnreachable(
                f"{mail.key}: found {to} as its receiver, expected one of generation {self._generation}: "
                f"{', '.join(sorted(self._senders)) or 'none'}"
            )
        sender.send(mail)

    def has_sent(self, to: HostName) -> bool:
        """Return whether the kernel has all that was to be sent to a peer, or the peer is lost."""
        with self._lock:
            sender = self._senders.get(to)
        return sender is None or sender.has_sent

    def take(self, key: MailKey, *, sender: HostName, deadline_s: float, check: Callable[[], None]) -> Mail:
        """Wait for a value; see `Mailbox.take`."""
        return self.box.take(key, sender=sender, deadline_s=deadline_s, check=check)

    def finish_step(self, step: int) -> None:
        """Drop what has come of this step and those before it. What is still to be sent is sent: peers may need it."""
        self.box.finish_step(step)

    def wait_sent(self, deadline_s: float) -> None:
        """Wait until the kernel has everything that was to be sent to peers that are not lost.

        Raises:
            PeerUnreachable: the deadline, of the monotonic clock, has passed.
        """
        with self._lock:
            senders = [sender for peer, sender in self._senders.items() if peer not in self._lost]
        for sender in senders:
            sender.wait_sent(deadline_s)

    def close(self) -> None:
        """End every wait, thread and connection; what is not sent is lost. Not to be called in `on_peer_lost`."""
        self.box.close()
        self._server.close()
        with self._lock:
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.close()

    def serve(self, visit: Visit, hello: PeerHello, welcome: Callable[[], None]) -> None:
        """Receive the mail of one connection until it ends."""
        connection, sender = visit.connection, HostName(hello.caller)
        # Before the welcome: once the peer has it, its mail may be on the way, and its end, too.
        with self._lock:
            self._incoming[sender] = connection
        try:
            welcome()
            while True:
                mail, seconds = receive_mail(connection, sender)
                self.received.add(mail, seconds)
                self.box.put(mail)
        except (OSError, EOFError, MessageError) as error:
            with self._lock:
                # An older connection, or that of an older process, says nothing about the peer as it is now.
                is_current = self._incoming.get(sender) is connection
                if is_current:
                    del self._incoming[sender]
                is_current = is_current and self._addresses.get(sender) == hello.caller_address
            if is_current and not self.box.is_closed:
                text = f"{sender} at {hello.caller_address} sends no more mail: {error}"
                self._report_lost(sender, PeerUnreachable(text))

    def _make_sender(self, peer: HostName, address: str) -> MailSender:
        connector = PeerConnector(
            address, self._credentials, _name_mailbox(peer), self._own_name, self.address
        )
        return MailSender(self._own_name, peer, connector, self._report_lost)

    def _report_lost(self, peer: HostName, error: ResilientJaxError) -> None:
        with self._lock:
            is_new = peer not in self._lost
            self._lost.setdefault(peer, error)
            may_send = peer in self._incoming or peer in self._may_be_lost  # of which nobody waits for mail
        if not may_send:  # else that connection will end, too, after what is still on its way
            self.box.mark_silent(peer, error)
        if is_new:
            logger.info("%s", error)
            self._on_peer_lost(peer, error)


def _name_mailbox(host: HostName) -> str:
    return f"the mailbox of {host}"
