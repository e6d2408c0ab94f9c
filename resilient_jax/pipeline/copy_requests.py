"""What hosts ask each other for before the members change: which units each of them is to have copies of."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.mail_protocol import MailKind

COPIES_WANTED_MAIL: Final = MailKind("copies_wanted")
"""What each host is to hold after a change of members: they want copies of what they lack, while training goes
on."""
COPY_MAIL: Final = MailKind("copy")
"""Weights and optimizer state of a unit that the receiver is about to hold."""
COPY_SUMS_MAIL: Final = MailKind("copy_sums")
"""The gradient sums of a step with which such a copy is updated."""
COPIES_HERE_MAIL: Final = MailKind("copies_here")
"""The sender has all the copies that it wanted."""
COPIES_STOPPED_MAIL: Final = MailKind("copies_stopped")
"""The sender sends no more sums for copies."""

ANY_STEP: Final = 2**62
"""In the keys of this mail a step is at least so much: what is finished with a step is refused, and hosts differ in
theirs."""
REQUEST_BITS: Final = 31
MAX_GENERATIONS: Final = 2**31
"""Numbers of generations are below."""


class CopyRequest(msgspec.Struct, frozen=True):
    """What a worker that joins tells the members, or the first member tells all.

    Attributes:
        host: host that asks, which is told who has all copies.
        addresses: mailbox addresses of the hosts that are no members.
        wanted: the units that each host, whether member or not, is to hold after the change.
        number: number in the keys of all mail about this request, so that mail of an earlier request is not taken for
            mail of this one. Of a change that the first member asks for, it is the generation that the change leads to.
            Of a worker that joins, it is a random number above all generations, since another worker of the same host
            may have asked before.
    """

    host: HostName
    addresses: Mapping[HostName, str]
    wanted: Mapping[HostName, tuple[int, ...]]
    number: int

    @property
    def is_planned(self) -> bool:
        """Whether a member has asked, for a change that it knows of; else a worker that joins."""
        return self.number < MAX_GENERATIONS

    @property
    def about(self) -> int:
        """In place of a step in the keys of all mail about this request."""
        return ANY_STEP + self.number


def read_request(data: memoryview) -> CopyRequest:
    """Return what a host has asked for.

    Raises:
        MessageError: the data is no request.
    """
    return decode_message(_REQUEST, data, "a request for copies")


_REQUEST: Any = msgspec.msgpack.Decoder(CopyRequest)
