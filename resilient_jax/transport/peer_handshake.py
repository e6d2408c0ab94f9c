"""How two processes of a job prove to each other, on a socket between them, that they have the job's token.

Rules of a connection:
1. The caller sends a nonce, the server a challenge with its own. The caller says which service it wants, at which
   address it has called, and, if the service asks for it, who it is, with a proof that it has the token. The server
   answers with a proof of its own, or with a refusal. The token itself is not sent.
2. A server proves itself only at an address of its machine, or on loopback, as in `call_proofs`: else an impostor could
   pass on the proofs of a server to which it is connected itself. Under TLS certificates have names instead.
3. Then the connection is the service's: calls (`peer_calls`) or the mail of `mail_protocol`.
4. A side that receives anything else closes the connection.

Signatures are HMAC-SHA256 (RFC 2104).
"""

import secrets
import socket
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from resilient_jax.errors import MessageError, PeerUnreachable, Unauthenticated
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.authentication import Authenticator
from resilient_jax.transport.call_proofs import Token
from resilient_jax.transport.server_address import check_own_address
from resilient_jax.transport.socket_io import receive_frame, receive_into, send_all, send_frame

NONCE_BYTES: Final = 32


class PeerChallenge(msgspec.Struct, frozen=True):
    """The server's nonce."""

    nonce: bytes


class PeerHello(msgspec.Struct, frozen=True, kw_only=True):
    """Says what a caller wants, with the proof that it belongs to the job.

    Attributes:
        service: name of the service.
        address: address that the caller has called, "host:port".
        caller: name of the caller's host; "" where the service does not ask.
        caller_address: address of the caller's own mailbox, which another process of that host does not have.
        proof: signature of these fields and both nonces.
    """

    service: str
    address: str
    caller: str = ""
    caller_address: str = ""
    proof: bytes = b""

    def signed_text(self, callers: bytes, servers: bytes) -> bytes:
        """Return what `proof` is the signature of, with both nonces."""
        said = msgspec.msgpack.encode([self.service, self.address, self.caller, self.caller_address])
        return b"peer hello" + callers + servers + said


class PeerWelcome(msgspec.Struct, frozen=True, tag=True):
    """The server's proof that it belongs to the job; what the service is for may follow at once."""

    proof: bytes


class PeerRefusal(msgspec.Struct, frozen=True, tag=True):
    """Says why the server does not serve this caller."""

    reason: str
    is_token: bool


_CHALLENGE: Final = msgspec.msgpack.Decoder(PeerChallenge)
_HELLO: Final = msgspec.msgpack.Decoder(PeerHello)
_ANSWER: Final[msgspec.msgpack.Decoder[PeerWelcome | PeerRefusal]] = msgspec.msgpack.Decoder(
    PeerWelcome | PeerRefusal
)


def introduce(connection: socket.socket, token: Token, hello: PeerHello, deadline_s: float) -> None:
    """Have a server admit this process; `hello` is not signed yet.

    Raises:
        Unauthenticated: one side has another token.
        PeerUnreachable: another process is at this address.
        MessageError, OSError, EOFError: the other side does not keep to the protocol, or has gone.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    send_all(connection, own, deadline_s)
    where = f"{hello.service} at {hello.address}"
    challenge = decode_message(_CHALLENGE, receive_frame(connection, deadline_s), where)
    if len(challenge.nonce) != NONCE_BYTES:
        raise MessageError(
            f"{where} sends a nonce of {len(challenge.nonce)} bytes, expected {NONCE_BYTES}: it is no peer of ours"
        )
    proof = token.sign(hello.signed_text(own, challenge.nonce))
    send_frame(connection, msgspec.structs.replace(hello, proof=proof), deadline_s)
    answer = decode_message(_ANSWER, receive_frame(connection, deadline_s), where)
    if isinstance(answer, PeerRefusal):
        error = Unauthenticated if answer.is_token else PeerUnreachable
        raise error(f"{where} refuses our connection: {answer.reason}")
    if not token.is_signature(_welcome_text(own, challenge.nonce), answer.proof):
        raise Unauthenticated(
            f"{where} has not proved that it has our job token. Every process of a job must be given the same token"
        )


def admit(
    connection: socket.socket,
    gate: Authenticator,
    services: Collection[str],
    own_address: str | None,
    peer: str,
    deadline_s: float,
) -> tuple[PeerHello, Callable[[], None]]:
    """Return what the caller at the other end says, if it belongs to the job, and what sends it its welcome.

    Args:
        gate: authenticator with the job's token, which reports who does not have the token.
        own_address: address where this process listens; None: certificates say whose it is.
        peer: address of the other end, as gRPC writes it.
        deadline_s: monotonic time of the limit.

    Raises:
        Unauthenticated: the caller's proof is wrong.
        PeerUnreachable: the caller has called another address.
        MessageError, OSError, EOFError: the caller does not keep to the protocol, or has gone.
    """

    def refuse(reason: str, *, is_token: bool = False) -> None:
        send_frame(connection, PeerRefusal(reason, is_token), deadline_s)

    theirs, own = bytearray(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    receive_into(connection, memoryview(theirs), deadline_s)
    send_frame(connection, PeerChallenge(own), deadline_s)
    hello = decode_message(_HELLO, receive_frame(connection, deadline_s), f"the hello of {peer}")
    try:
        gate.check_signature(hello.signed_text(bytes(theirs), own), hello.proof, peer, hello.service)
    except Unauthenticated:
        reason = "our proof of the job token is wrong. Every process of a job must be given the same token"
        refuse(reason, is_token=True)
        raise
    try:
        if own_address is not None:
            check_own_address(hello.address, own_address)
    except PeerUnreachable as error:
        refuse(str(error))
        raise
    if hello.service not in services:
        refuse(f"this is {' and '.join(services)}")
        raise MessageError(f"{peer} wants {hello.service}; found at {own_address}: {', '.join(services)}")
    welcome = PeerWelcome(gate.sign(_welcome_text(bytes(theirs), own)))
    return hello, lambda: send_frame(connection, welcome, deadline_s)


def _welcome_text(callers: bytes, servers: bytes) -> bytes:
    return b"peer welcome" + callers + servers
