"""How much of the mail of a pipeline's steps has come, and how long its bytes were under way; safe between threads.

A receiver sees the header of a mail and its last byte with its own clock, so no clocks need to agree. What is between
them is the link's: a peer that still computes has not sent the header. Not seen is a link that delays every packet and
sends as many.
"""

import threading
from typing import Final

import msgspec

from resilient_jax.transport.mail_protocol import Mail, MailKind

WATCHED_KINDS: Final = frozenset({MailKind.ACTIVATION, MailKind.GRADIENT, MailKind.TOTAL})
"""What every ordinary step sends. States and evaluations come now and then, and are larger."""


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
        self._total = ReceivedMail()

    def add(self, mail: Mail, seconds: float) -> None:
        """Count a mail, which took so long from its first byte to its last."""
        if mail.key.kind not in WATCHED_KINDS:
            return
        with self._lock:
            before = self._total
            self._total = ReceivedMail(before.num_bytes + mail.data.nbytes, before.seconds + seconds)

    def take(self) -> ReceivedMail:
        """Return what has come since this was called before."""
        with self._lock:
            total, self._total = self._total, ReceivedMail()
        return total
