"""The mail of the stages of one process, each on devices of its own: arrays stay on devices until they are taken.

Who takes them copies them to its own devices (`jax.device_put`), so no value goes through host memory where JAX can
copy from device to device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.ids import HostName
from resilient_jax.transport.mail_protocol import Mail, MailKey
from resilient_jax.transport.mailbox import Mailbox
from resilient_jax.transport.received_mail import ReceivedMailCounter


@dataclasses.dataclass(frozen=True, slots=True)
class ArraysInMail:
    """Arrays on devices, in place of the bytes of a mail."""

    arrays: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


class LocalMailService:
    """What a stage has in place of a `MailService`.

    Attributes:
        box: what has arrived.
        received: nothing; no mail is under way.
        address: none; there is no socket.
    """

    def __init__(self, own_name: HostName, boxes: Mapping[HostName, Mailbox]) -> None:
        """Use the boxes of all stages, which they share."""
        self.box, self.address = boxes[own_name], ""
        self.received = ReceivedMailCounter()
        self._boxes = boxes

    def enter(self, generation: int, addresses: Mapping[HostName, str]) -> None:
        """Drop what older generations sent."""
        self.box.enter(generation)

    def add_peer(self, peer: HostName, address: str, *, may_be_lost: bool = False) -> None:
        """Do nothing: a stage sends to every box from the beginning."""

    def has_sent(self, to: HostName) -> bool:
        """Return that all is sent: it has arrived at once."""
        return True

    def send(self, to: HostName, mail: Mail) -> None:
        """Put a value into the box of a stage."""
        self._boxes[to].put(mail)

    def take(self, key: MailKey, *, sender: HostName, deadline_s: float, check: Callable[[], None]) -> Mail:
        """Wait for a value; see `Mailbox.take`."""
        return self.box.take(key, sender=sender, deadline_s=deadline_s, check=check)

    def finish_step(self, step: int) -> None:
        """Drop what has come of this step and those before it."""
        self.box.finish_step(step)

    def wait_sent(self, deadline_s: float) -> None:
        """Return at once: what is sent has arrived."""

    def close(self) -> None:
        """End every wait."""
        self.box.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalStepMail(StepMail):
    """The mail of a stage in one step: arrays are not packed."""

    def pack(self, arrays: Sequence[Any]) -> Any:  # noqa: ANN401 - see the class
        """Return the arrays themselves."""
        return ArraysInMail(tuple(arrays))

    def take_arrays(
        self, sender: HostName, key: MailKey, shapes: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[Any, ...]:
        """Wait for arrays, and return them where the sender has them."""
        found: Any = self.take_bytes(sender, key)
        assert isinstance(found, ArraysInMail), "it was sent by `pack`"
        return found.arrays
