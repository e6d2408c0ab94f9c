"""The one way in which hosts tell each other something: each gives a message, and all get the messages of all."""

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from resilient_jax.ids import HostName

MessageT = TypeVar("MessageT")

SMALL_BYTES: Final = 252
"""The usual room for a message: with its length a row of 64 words, so that the rows of four hosts are one vector."""

MAX_INTEGER_BYTES: Final = 5
"""What a 32-bit integer takes in a message at most; so does the length of a sequence."""
FLOAT_BYTES: Final = 9
"""What a float takes in a message."""


class HostExchange(Protocol):
    """The hosts of one generation, which all make the same exchanges in the same order."""

    @property
    def num_hosts(self) -> int:
        """How many take part."""
        ...

    def gather(
        self, message: MessageT, *, speakers: Sequence[int] | None = None, room_bytes: int = SMALL_BYTES
    ) -> list[MessageT]:
        """Return the messages of all speakers, in their order. Every host must call this, with the same arguments
        but for `message`.

        Args:
            message: what this host says, of a type that msgspec encodes, the same on all hosts. Of a host that is no
                speaker only the type counts.
            speakers: the indexes of the hosts that have something to say; None: all of them.
            room_bytes: what a message takes as a rule. A longer one costs a second round.

        Raises:
            MessageError: a host has said something else: it is in another exchange.
            Exception: what the transport raises, as when a host is lost.
        """
        ...


class MailAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where the mailbox of a host is, which stays the same as long as its worker lives."""

    address: str


def gather_mail_addresses(exchange: HostExchange, hosts: Sequence[HostName], own: str) -> dict[HostName, str]:
    """Return the addresses of the mailboxes of all hosts. Every host must call this.

    Args:
        exchange: between these hosts.
        hosts: in the order of their indexes.
        own: the address of this host's mailbox.
    """
    found = exchange.gather(MailAddress(own))
    return {host: one.address for host, one in zip(hosts, found, strict=True)}
