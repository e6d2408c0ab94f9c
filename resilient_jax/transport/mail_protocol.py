"""The protocol of mail: keyed arrays of bytes that one process sends to another, unasked.

Rules of a connection, after the handshake (`peer_handshake`); mail goes one way only:
1. The caller sends mail: a header, which is a msgpack frame, and the announced number of raw bytes.
2. The receiver sends nothing, so that a sender with nothing to send sees the end of the connection.
3. A side that receives anything else closes the connection.
"""

import dataclasses
import socket
import time
from typing import Final, NewType

import msgspec

from resilient_jax.errors import MessageError
from resilient_jax.ids import HostName
from resilient_jax.protocol.framing import encode_frame
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.socket_io import receive_bytes, receive_frame, send_all

MAX_MAIL_BYTES: Final = 2**34
"""More is damage, or no message of ours: no boundary value or sum of a block has 16 GiB."""
IDLE_TIMEOUT_S: Final = 14 * 86_400.0
"""The limit between two mails; keepalive finds machines that vanish long before."""
SEND_TIMEOUT_S: Final = 60.0
"""The limit for one mail: a peer that reads nothing for so long is not going to finish the step."""

MailKind = NewType("MailKind", str)
"""What a mail carries: a name that the room of its senders owns, and this package does not interpret."""


class MailKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Names one value, which has the same bits whichever host sends it.

    Attributes:
        generation: generation of the routes in which the value is sent; the only part that a second copy does not
            share.
        step: number by which old mail is told from new. The owner of the kind says what this and the two numbers that
            follow count.
    """

    generation: int
    step: int
    kind: MailKind
    microbatch: int
    block: int

    def __str__(self) -> str:
        return (
            f"{self.kind} of microbatch {self.microbatch} for block {self.block}, "
            f"step {self.step}, generation {self.generation}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """A value with its key.

    Attributes:
        data: contiguous bytes, which must not change until they are sent.
        dtype: name of the numbers' type, for the receiver; this package does not interpret the name.
        shape: shape of the value, for the receiver; this package does not interpret the shape.
    """

    key: MailKey
    data: memoryview
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()


class MailHeader(msgspec.Struct, frozen=True, array_like=True):
    """Announces the bytes of a mail."""

    key: MailKey
    length: int
    dtype: str
    shape: tuple[int, ...]


_ENCODER: Final = msgspec.msgpack.Encoder()
_HEADER: Final = msgspec.msgpack.Decoder(MailHeader)


def send_mail(connection: socket.socket, mail: Mail) -> None:
    """Send one mail.

    Raises:
        OSError: the connection is broken, or the peer took nothing for SEND_TIMEOUT_S.
    """
    header = MailHeader(mail.key, mail.data.nbytes, mail.dtype, mail.shape)
    deadline_s = time.monotonic() + SEND_TIMEOUT_S
    send_all(connection, encode_frame(_ENCODER.encode(header)), deadline_s)
    send_all(connection, mail.data, deadline_s)


def receive_mail(connection: socket.socket, sender: HostName) -> tuple[Mail, float]:
    """Return the next mail, in memory of its own, and the seconds from when its header was here to its last byte.

    Raises:
        MessageError: what comes is no mail.
        OSError, EOFError: the connection has ended.
    """
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    header = decode_message(_HEADER, receive_frame(connection, deadline_s), f"a mail of {sender}")
    if not 0 <= header.length <= MAX_MAIL_BYTES:
        raise MessageError(
            f"a mail of {sender} announces {header.length} bytes, expected {MAX_MAIL_BYTES} at most"
        )
    began_s = time.monotonic()
    data = receive_bytes(connection, header.length, deadline_s)
    seconds = time.monotonic() - began_s
    return Mail(key=header.key, data=data, dtype=header.dtype, shape=header.shape), seconds
