"""How client and server of a gRPC call prove to each other that they have the job's token, which is not sent.

Rules:
1. A client asks a server for its nonce, which a server makes when it starts. It introduces itself with a nonce of its
   own and a proof that it has the token. The server answers with a proof of its own. A client that gets none, or a
   wrong one, makes no call. With both nonces both derive a key: that is a session.
2. Each call carries both nonces, a number that no other call of the session has, and a signature by that key of number,
   method and request. A server accepts a number once.
3. Each answer carries a signature of the number: it says that this server, and not one that has taken its address
   since, has admitted this call. It does not cover what is answered: who can change that on its way can be kept out by
   TLS alone.
4. A server whose nonce is another by now refuses a call, which it has not served: the client begins at 1.
5. The proofs of 1 cover the address that the client has called. A server proves itself only at an address of its
   machine, or on loopback, which nobody else could have put there: else an impostor could pass on the proofs of a
   server that has the token, to which it is connected itself. Under TLS certificates have names instead.

Signatures are HMAC-SHA256 (RFC 2104); the window of numbers is that of IPsec (RFC 4303, 3.4.3).
"""

import hashlib
import hmac
import secrets
import struct
from typing import Final

import msgspec

from resilient_jax.transport.method import Method

SERVICE: Final = "rj.admission"
CALL_KEY: Final = "rj-call-bin"
"""The metadata of a call."""
ANSWER_KEY: Final = "rj-answer-bin"
"""The metadata of an answer."""
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
WINDOW: Final = 1024
"""A call may arrive after so many later ones of its session; older ones are refused as if repeated."""
MAX_SESSIONS: Final = 65_536
"""Then a server takes another nonce, and all clients introduce themselves again: so memory has a bound."""
_CALL: Final = struct.Struct(f"<{NONCE_BYTES}s{NONCE_BYTES}sQ{PROOF_BYTES}s")
_NUMBER: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")


class AskNonce(msgspec.Struct, frozen=True):
    """Asks a server for its nonce."""


class ServerNonce(msgspec.Struct, frozen=True):
    """The nonce of a server."""

    nonce: bytes


class Introduction(msgspec.Struct, frozen=True):
    """A client's nonce, and its proof.

    Attributes:
        proof: signature of the nonces and the address by the token.
    """

    client: bytes
    server: bytes
    address: str
    proof: bytes = b""

    def signed_text(self, who: bytes) -> bytes:
        """Return what one of both signs, by its name."""
        return b"grpc " + who + self.client + self.server + self.address.encode()


class Welcome(msgspec.Struct, frozen=True):
    """The proof of a server."""

    proof: bytes


ASK_NONCE: Final = Method("ask_nonce", AskNonce, ServerNonce)
INTRODUCE: Final = Method("introduce", Introduction, Welcome)


class StaleSession(Exception):
    """The server's nonce is another than the one that a call has: it was not served."""


class Token:
    """The job's token, as a key."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def sign(self, text: bytes) -> bytes:
        """Return a proof that this process has the token, for this text only."""
        return hmac.digest(self._token, text, "sha256")

    def is_signature(self, text: bytes, proof: bytes) -> bool:
        """Return whether a process that has the token has signed the text."""
        return hmac.compare_digest(self.sign(text), proof)


class CallSession:
    """What a client and a server share: the key of their nonces."""

    def __init__(self, token: Token, client: bytes, server: bytes) -> None:
        self.client = client
        self.server = server
        self._key = token.sign(b"grpc session" + client + server)
        self._last_number = 0

    def sign_call(self, path: str, data: bytes) -> tuple[int, tuple[tuple[str, bytes], ...]]:
        """Return the number of a new call, and its metadata."""
        self._last_number += 1
        number = self._last_number
        call = _CALL.pack(self.client, self.server, number, self._prove_call(number, path, data))
        return number, ((CALL_KEY, call),)

    def is_call(self, number: int, path: str, data: bytes, proof: bytes) -> bool:
        """Return whether the client has signed a call."""
        return hmac.compare_digest(self._prove_call(number, path, data), proof)

    def sign_answer(self, number: int) -> bytes:
        """Return the server's signature of a call that it has admitted."""
        return hmac.digest(self._key, b"answer" + _NUMBER.pack(number), "sha256")

    def is_answer(self, number: int, proof: object) -> bool:
        """Return whether the server has admitted a call."""
        return isinstance(proof, bytes) and hmac.compare_digest(self.sign_answer(number), proof)

    def _prove_call(self, number: int, path: str, data: bytes) -> bytes:
        signed = hmac.new(self._key, b"call" + _NUMBER.pack(number), hashlib.sha256)
        signed.update(_LENGTH.pack(len(path)) + path.encode())
        signed.update(data)
        return signed.digest()


class NumberWindow:
    """The numbers that were used in a session."""

    def __init__(self) -> None:
        self._highest = 0
        self._used = 0
        """Bit i: `_highest` - i was used."""

    def use(self, number: int) -> bool:
        """Use a number; return False if it was used, or may have been."""
        age = self._highest - number
        if age < 0:
            self._used = (self._used << min(-age, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self._highest = number
            return True
        if age >= WINDOW or self._used >> age & 1:
            return False
        self._used |= 1 << age
        return True


class ServerSessions:
    """The sessions of a server. Only those take memory of whose client a call was admitted."""

    def __init__(self, token: Token) -> None:
        self._token = token
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._sessions: dict[bytes, tuple[CallSession, NumberWindow]] = {}

    def get_nonce_for_new(self) -> bytes:
        """Return the nonce for a new session; another one, if there are many, so that all of these end."""
        if len(self._sessions) >= MAX_SESSIONS:
            self.nonce = secrets.token_bytes(NONCE_BYTES)
            self._sessions.clear()
        return self.nonce

    def admit(self, call: bytes, path: str, data: bytes) -> bytes | None:
        """Return the signature of the answer to a call, or None: its metadata proves nothing, or was used before.

        Raises:
            StaleSession: the call is of a session with an earlier nonce.
        """
        if len(call) != _CALL.size:
            return None
        client, server, number, proof = _CALL.unpack(call)
        known = self._sessions.get(client) if server == self.nonce else None
        session, window = known or (CallSession(self._token, client, server), NumberWindow())
        if not session.is_call(number, path, data, proof):
            return None
        if server != self.nonce:  # only now, so that strangers are told nothing
            raise StaleSession
        if not window.use(number):
            return None
        self._sessions[client] = session, window
        return session.sign_answer(number)
