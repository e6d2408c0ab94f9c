"""Measures the links between hosts by mail: pairs of hosts send each other the same bytes, as a step does its values.

No pipeline waits inside JAX, so what `step.link_speed` does by collectives is done by mail here. Each host waits for
its own partner alone.
"""

import time
from collections.abc import Sequence
from typing import Final

from resilient_jax.health.link_comparison import Pairs
from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.ids import HostName
from resilient_jax.step.link_speed import REPEATS
from resilient_jax.transport.mail_protocol import MailKind

LINKS_MAIL: Final = MailKind("links")
"""Bytes without a meaning, of a measurement of links."""

WARM_UPS: Final = 1
"""Exchanges that do not count: after them both ends of a pair begin the next one at the same time."""


class MailExchanges:
    """A measurement that is prepared.

    Args:
        mail: mail of the step that begins.
        hosts: all hosts in the order of their indexes.
        own: index of this host.
        rounds: who exchanges with whom.
        size: bytes that a host sends in an exchange.
    """

    def __init__(
        self, mail: StepMail, hosts: Sequence[HostName], own: int, rounds: Sequence[Pairs], size: int
    ) -> None:
        self._mail = mail
        self._hosts = hosts
        self._own = own
        self._partners = [_find_partner(own, pairs) for pairs in rounds]
        self._data = memoryview(bytes(size))

    def run(self) -> list[float]:
        """Return by round what an exchange with this host's partner takes, in seconds; 0 where it has none.

        Raises:
            PeerUnreachable: a partner is lost, or late.
        """
        taken: list[float] = []
        for number, partner in enumerate(self._partners):
            if partner is None:
                taken.append(0.0)
                continue
            first = number * (WARM_UPS + REPEATS)
            seconds = [self._exchange(partner, first + repeat) for repeat in range(WARM_UPS + REPEATS)]
            taken.append(min(seconds[WARM_UPS:]))
        return taken

    def _exchange(self, partner: int, number: int) -> float:
        peer = self._hosts[partner]
        began_s = time.monotonic()
        self._mail.send(peer, self._mail.make_key(LINKS_MAIL, number, self._own), self._data)
        self._mail.take_bytes(peer, self._mail.make_key(LINKS_MAIL, number, partner))
        return time.monotonic() - began_s


def _find_partner(own: int, pairs: Pairs) -> int | None:
    """Return the host that exchanges with this one in a round; None: it has no partner."""
    return next((b if own == a else a for a, b in pairs if own in (a, b)), None)
