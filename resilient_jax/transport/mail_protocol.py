"""The protocol of mail: keyed arrays of bytes that one process sends to another, unasked, over a socket of its own.

Rules of a connection, on which mail goes one way only:
1. The sender sends a nonce, the receiver a challenge with its own. The sender says its name and the name that it
   expects of the receiver, with a proof that it has the job's token; the receiver answers with a proof of its own, or
   with a refusal. The token itself is not sent.
2. Then the sender sends mail: a header, which is a msgpack frame, and the announced number of raw bytes.
3. The receiver sends nothing more, so that a sender with nothing to send sees the end of the connection.
4. A side that receives anything else closes the connection.
"""

import ctypes
import dataclasses
import secrets
import socket
import time
from typing import Final, NewType

import msgspec

from resilient_jax.errors import MessageError, PeerUnreachable, Unauthenticated
from resilient_jax.ids import HostName
from resilient_jax.protocol.framing import encode_frame
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.authentication import Authenticator
from resilient_jax.transport.bulk_protocol import (
    receive_frame,
    receive_into,
    send_all,
    send_frame,
)

NONCE_BYTES: Final = 32
MAX_MAIL_BYTES: Final = 2**34
"""More is damage, or no message of ours: no boundary value or sum of a block has 16 GiB."""
IDLE_TIMEOUT_S: Final = 14 * 86_400.0
"""The limit between two mails; keepalive finds machines that vanish long before."""
SEND_TIMEOUT_S: Final = 60.0
"""The limit for one mail: a peer that reads nothing for so long is not going to finish the step."""
KEEPALIVE_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


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


class MailChallenge(msgspec.Struct, frozen=True):
    """The receiver's nonce."""

    nonce: bytes


class MailHello(msgspec.Struct, frozen=True):
    """Says which host wants to send to which, with the proof that it belongs to the job.

    Attributes:
        address: address of the sender's mailbox, which another process of that host does not have.
        proof: signature of these fields and both nonces.
    """

    sender: HostName
    address: str
    receiver: HostName
    proof: bytes

    def signed_text(self, senders: bytes, receivers: bytes) -> bytes:
        """Return what `proof` is the signature of, with both nonces."""
        names = _ENCODER.encode([self.sender, self.address, self.receiver])
        return b"mail hello" + senders + receivers + names


_ENCODER: Final = msgspec.msgpack.Encoder()


class MailWelcome(msgspec.Struct, frozen=True, tag=True):
    """The receiver's proof that it belongs to the job; the sender's mail may follow at once."""

    proof: bytes


class MailRefusal(msgspec.Struct, frozen=True, tag=True):
    """Says why the receiver takes no mail of this sender."""

    reason: str
    is_token: bool


_make_bytearray: Final = ctypes.pythonapi.PyByteArray_FromStringAndSize
_make_bytearray.restype, _make_bytearray.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_HEADER: Final = msgspec.msgpack.Decoder(MailHeader)
_CHALLENGE: Final = msgspec.msgpack.Decoder(MailChallenge)
_HELLO: Final = msgspec.msgpack.Decoder(MailHello)
_ANSWER: Final[msgspec.msgpack.Decoder[MailWelcome | MailRefusal]] = msgspec.msgpack.Decoder(
    MailWelcome | MailRefusal
)


def configure_mail_socket(connection: socket.socket) -> None:
    """Have the kernel find a peer whose machine has vanished, within half a minute."""
    for level, option, value in KEEPALIVE_OPTIONS:
        connection.setsockopt(level, option, value)


def introduce(connection: socket.socket, gate: Authenticator, hello: MailHello, deadline_s: float) -> None:
    """Have a receiver admit this host's mail; `hello` is not signed yet.

    Raises:
        Unauthenticated: one side has another token.
        PeerUnreachable: another host's mailbox is at this address.
        MessageError, OSError, EOFError: the other side is no mailbox, or has gone.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    send_all(connection, own, deadline_s)
    where = f"the mailbox of {hello.receiver}"
    challenge = decode_message(_CHALLENGE, receive_frame(connection, deadline_s), where)
    proof = gate.sign(hello.signed_text(own, challenge.nonce))
    send_frame(connection, msgspec.structs.replace(hello, proof=proof), deadline_s)
    answer = decode_message(_ANSWER, receive_frame(connection, deadline_s), where)
    if isinstance(answer, MailRefusal):
        error = Unauthenticated if answer.is_token else PeerUnreachable
        raise error(f"{where} refuses our mail: {answer.reason}")
    if not gate.is_signature(_welcome_text(own, challenge.nonce), answer.proof):
        raise Unauthenticated(
            f"{where} does not have our job token. Every process of a job must be given the same token"
        )


def admit(
    connection: socket.socket, gate: Authenticator, receiver: HostName, peer: str, deadline_s: float
) -> tuple[MailHello, MailWelcome]:
    """Return what the sender at the other end says, if it belongs to the job, and the answer that it waits for.

    Args:
        connection: a connection just accepted.
        gate: authenticator with the job's token, which reports who does not have the token.
        peer: address of the other end, as gRPC writes it.
        deadline_s: monotonic time of the limit.

    Raises:
        Unauthenticated: the sender's proof is wrong.
        MessageError, OSError, EOFError: the sender does not keep to the protocol, or has gone.
    """
    theirs, own = bytearray(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    receive_into(connection, memoryview(theirs), deadline_s)
    send_frame(connection, MailChallenge(own), deadline_s)
    hello = decode_message(_HELLO, receive_frame(connection, deadline_s), f"the hello of {peer}")
    try:
        gate.check_signature(hello.signed_text(bytes(theirs), own), hello.proof, peer, "mail")
    except Unauthenticated:
        reason = "its proof of the job token is wrong. Every process of a job must be given the same token"
        send_frame(connection, MailRefusal(reason, is_token=True), deadline_s)
        raise
    if hello.receiver != receiver:
        reason = f"this is the mailbox of {receiver}"
        send_frame(connection, MailRefusal(reason, is_token=False), deadline_s)
        raise MessageError(f"{hello.sender} has mail for {hello.receiver}, but {reason}")
    return hello, MailWelcome(gate.sign(_welcome_text(bytes(theirs), own)))


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
    data = memoryview(_allocate(header.length))
    receive_into(connection, data, deadline_s)
    seconds = time.monotonic() - began_s
    return Mail(key=header.key, data=data, dtype=header.dtype, shape=header.shape), seconds


def _allocate(size: int) -> bytearray:
    """Return memory that nothing was written to, which malloc may have used before.

    `bytearray(size)` writes zeros first, and new memory of the kernel is cleared page by page: either takes as long as
    to receive. With 16 MiB, 5.8 ms a mail instead of 15.
    """
    return _make_bytearray(None, size)


def _welcome_text(senders: bytes, receivers: bytes) -> bytes:
    return b"mail welcome" + senders + receivers
