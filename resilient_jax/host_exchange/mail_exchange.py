"""An exchange over mail, from each host to each: where only some hosts take part, or no collective can be formed."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from resilient_jax.host_exchange.messages import SMALL_BYTES, MessageT
from resilient_jax.ids import HostName
from resilient_jax.transport.mail_protocol import MailKey, MailKind


class MessageMail(Protocol):
    """Sends and takes messages by their keys; a `pipeline.StepMail` is one."""

    def make_key(self, kind: MailKind, microbatch: int, block: int) -> MailKey:
        """Return the key of a value of this step and generation."""
        ...

    def send_message(self, to: HostName, key: MailKey, message: Any) -> None:  # noqa: ANN401 - a message
        """Send a message, without waiting."""
        ...

    def take_message(self, sender: HostName, key: MailKey, kind: type[MessageT]) -> MessageT:
        """Wait for a message of a type."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class MailExchange:
    """The exchanges of one kind of mail in one step and generation; see `HostExchange`.

    A host that is lost, or late, ends an exchange with `PeerUnreachable`.

    Attributes:
        mail: mail of this host in that step and generation.
        hosts: all that take part, in the same order everywhere.
        kind: kind of mail that these exchanges have.
        num_made: exchanges so far, which is the number of the next one.
    """

    mail: MessageMail
    hosts: Sequence[HostName]
    own: HostName
    kind: MailKind
    num_made: int = 0

    @property
    def host_index(self) -> int:
        """The index of this host in `hosts`."""
        return self.hosts.index(self.own)

    @property
    def num_hosts(self) -> int:
        """How many hosts take part."""
        return len(self.hosts)

    def gather(
        self, message: MessageT, *, speakers: Sequence[int] | None = None, room_bytes: int = SMALL_BYTES
    ) -> list[MessageT]:
        """Return the messages of all speakers; see `HostExchange.gather`. Mail needs no room."""
        number, self.num_made = self.num_made, self.num_made + 1
        speaking, own_index = range(self.num_hosts) if speakers is None else speakers, self.host_index
        if own_index in speaking:
            for host in self.hosts:
                if host != self.own:
                    self.mail.send_message(host, self.mail.make_key(self.kind, own_index, number), message)
        return [
            message
            if index == own_index
            else self.mail.take_message(
                self.hosts[index], self.mail.make_key(self.kind, index, number), type(message)
            )
            for index in speaking
        ]

    def gather_by_host(self, message: MessageT) -> dict[HostName, MessageT]:
        """Return the messages of all hosts by their names."""
        return dict(zip(self.hosts, self.gather(message), strict=True))
