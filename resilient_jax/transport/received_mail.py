"""How much mail of each kind has come, and how long its bytes were under way; safe between threads.

A receiver sees the header of a mail and its last byte with its own clock, so no clocks need to agree. What is between
them is the link's: a peer that still computes has not sent the header. Not seen is a link that delays every packet and
sends as many.
"""

import collections
import threading
from collections.abc import Collection

import msgspec

from resilient_jax.transport.mail_protocol import Mail, MailKind


class ReceivedMail(msgspec.Struct, frozen=True):
    """What has come.

    Attributes:
        num_bytes: bytes of all mail.
        seconds: the sum over all mail, each mail from its first byte to its last.
    """

    num_bytes: int = 0
    seconds: float = 0.0


class ReceivedMailCounter:
    """Adds up the mail that comes on any connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the attribute below
        self._totals: collections.defaultdict[MailKind, ReceivedMail] = collections.defaultdict(ReceivedMail)

    def add(self, mail: Mail, seconds: float) -> None:
        """Count a mail, which took so long from its first byte to its last."""
        with self._lock:
            before = self._totals[mail.key.kind]
            self._totals[mail.key.kind] = ReceivedMail(
                before.num_bytes + mail.data.nbytes, before.seconds + seconds
            )

    def take(self, kinds: Collection[MailKind]) -> ReceivedMail:
        """Return what has come of some kinds since this was called before, and forget what has come of all."""
        with self._lock:
            found = [total for kind, total in self._totals.items() if kind in kinds]
            self._totals.clear()
        return ReceivedMail(sum(one.num_bytes for one in found), sum(one.seconds for one in found))
