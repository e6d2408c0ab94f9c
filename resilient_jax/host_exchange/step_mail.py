"""The mail of one host in one step of one generation: arrays and messages, by what they are.

An exchange over mail goes from each host to each: where only some take part, or no collective can be formed.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from resilient_jax.host_exchange.array_packing import pack_arrays, unpack_arrays
from resilient_jax.host_exchange.messages import SMALL_BYTES, MessageT
from resilient_jax.ids import HostName
from resilient_jax.pipeline_schedule.tasks import Boundary, BoundaryKind
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind
from resilient_jax.transport.mailbox import Mailbox
from resilient_jax.transport.received_mail import ReceivedMailCounter

ACTIVATION_MAIL: Final = MailKind("activation")
"""The input of a block, in a forward task."""
GRADIENT_MAIL: Final = MailKind("gradient")
"""The gradient of the loss by the input of a block, in a backward task."""
TOTAL_MAIL: Final = MailKind("total")
"""A part of a block's gradient sums: of some microbatches, of which the key has the first."""
STEP_MAIL: Final = frozenset({ACTIVATION_MAIL, GRADIENT_MAIL, TOTAL_MAIL})
"""What every ordinary step sends. States and evaluations come now and then, and are larger."""

MAIL_KINDS = {
    BoundaryKind.ACTIVATION: ACTIVATION_MAIL,
    BoundaryKind.GRADIENT: GRADIENT_MAIL,
}


class MailCarrier(Protocol):
    """What carries the mail of a host: a `MailService`, or within a process a `LocalMailService`."""

    box: Mailbox
    received: ReceivedMailCounter
    address: str

    def enter(self, generation: int, addresses: Mapping[HostName, str]) -> None:
        """Have these peers from now on, with no mail of older generations."""
        ...

    def add_peer(self, peer: HostName, address: str, *, may_be_lost: bool = False) -> None:
        """Have one more peer to send to in this generation."""
        ...

    def has_sent(self, to: HostName) -> bool:
        """Return whether all that was to be sent to a peer is sent, or the peer is lost."""
        ...

    def send(self, to: HostName, mail: Mail) -> None:
        """Send a value, without waiting."""
        ...

    def take(self, key: MailKey, *, sender: HostName, deadline_s: float, check: Callable[[], None]) -> Mail:
        """Wait for a value; see `Mailbox.take`."""
        ...

    def finish_step(self, step: int) -> None:
        """Drop what has come of this step and those before it."""
        ...

    def wait_sent(self, deadline_s: float) -> None:
        """Wait until everything is sent."""
        ...

    def close(self) -> None:
        """End every wait."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMail:
    """Sends and takes the values of a step.

    Attributes:
        service: carrier of this host's mail.
        generation: generation of the routes.
        step: number of committed steps of the state.
        wait_timeout_s: the longest wait for one value.
        check: raises what ends a wait, such as the end of the generation.
    """

    service: MailCarrier
    generation: int
    step: int
    wait_timeout_s: float
    check: Callable[[], None]

    def make_key(self, kind: MailKind, microbatch: int, block: int) -> MailKey:
        """Return the key of a value of this step."""
        return MailKey(self.generation, self.step, kind, microbatch, block)

    def make_boundary_key(self, boundary: Boundary) -> MailKey:
        """Return the key of a boundary value."""
        return self.make_key(MAIL_KINDS[boundary.kind], boundary.microbatch, boundary.block)

    def pack(self, arrays: Sequence[Any]) -> memoryview:
        """Return arrays as they are sent."""
        return pack_arrays(arrays)

    def send(self, to: HostName, key: MailKey, data: memoryview) -> None:
        """Send what `pack` returned, without waiting.

        Raises:
            PeerUnreachable: the host is lost.
        """
        self.service.send(to, Mail(key=key, data=data, shape=(data.nbytes,)))

    def take_arrays(self, sender: HostName, key: MailKey, shapes: Sequence[Any]) -> tuple[Any, ...]:
        """Wait for arrays; they are views of the memory that they were received into.

        Raises:
            PeerUnreachable: the sender is lost, or late.
            MessageError: other arrays came.
        """
        return unpack_arrays(self.take_bytes(sender, key), shapes, f"{key} from {sender}")

    def take_bytes(self, sender: HostName, key: MailKey) -> memoryview:
        """Wait for bytes.

        Raises:
            PeerUnreachable: the sender is lost, or late.
        """
        deadline_s = time.monotonic() + self.wait_timeout_s
        return self.service.take(key, sender=sender, deadline_s=deadline_s, check=self.check).data

    def send_message(self, to: HostName, key: MailKey, message: object) -> None:
        """Send a message, without waiting."""
        self.send(to, key, memoryview(msgspec.msgpack.encode(message)))

    def take_message(self, sender: HostName, key: MailKey, kind: type[MessageT]) -> MessageT:
        """Wait for a message of a type.

        Raises:
            PeerUnreachable: the sender is lost, or late.
            MessageError: what came does not decode as a message of this type.
        """
        decoder: Any = msgspec.msgpack.Decoder(kind)
        return decode_message(decoder, self.take_bytes(sender, key), f"{key} from {sender}")

    def make_exchange(self, hosts: Sequence[HostName], own: HostName, kind: MailKind) -> "MailExchange":
        """Return the exchanges of a kind between hosts, in the same order everywhere, of which `own` is this one."""
        return MailExchange(mail=self, hosts=hosts, own=own, kind=kind)


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

    mail: StepMail
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
        speaking, own_index = range(self.num_hosts) if speakers is None else speakers, self.host_index
        if own_index in speaking:
            for host in self.hosts:
                if host != self.own:
                    self.tell(host, message)
        number, self.num_made = self.num_made, self.num_made + 1
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

    def tell(self, host: HostName, message: object) -> None:
        """Send a host what this one says in the next exchange, without waiting; `gather` does that, too."""
        key = self.mail.make_key(self.kind, self.host_index, self.num_made)
        self.mail.send_message(host, key, message)
