"""How a world opens a mailbox: with the address and credentials of its host."""

import dataclasses
import secrets

from resilient_jax.errors import ResilientJaxError
from resilient_jax.ids import HostName
from resilient_jax.state.peer_transfer import SERVICE, StateOffers
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.mail_service import MailService


@dataclasses.dataclass(frozen=True, slots=True)
class MailOpener:
    """Opens mailboxes at an address of this machine.

    Attributes:
        address: address of this host, which peers reach.
        wait_timeout_s: the longest time that a step waits for a message of a peer.
        offers: what peers read at the mailbox, too.
    """

    address: str
    credentials: Credentials
    wait_timeout_s: float
    offers: StateOffers

    def open(self, host: HostName) -> MailService:
        """Return a new mailbox of this host."""
        return MailService(
            host,
            self.address,
            self.credentials,
            _ignore_lost_peer,
            services={SERVICE: self.offers.calls},
        )


def make_local_opener() -> MailOpener:
    """Return what opens mailboxes of a host that has no peers."""
    return MailOpener("127.0.0.1", Credentials(secrets.token_hex()), 0.0, StateOffers())


def _ignore_lost_peer(peer: HostName, error: ResilientJaxError) -> None:
    """Do nothing: a wait for this peer raises the error, and the agents find out who has died."""
