"""Authentication of peers: a check of their proofs, and a report of the first refusal of each peer."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from resilient_jax.errors import MessageError, Unauthenticated
from resilient_jax.events import EventKind
from resilient_jax.transport.call_proofs import (
    CALL_KEY,
    NONCE_BYTES,
    Introduction,
    ServerNonce,
    ServerSessions,
    StaleSession,
    Token,
    Welcome,
)
from resilient_jax.transport.method import AnyMethod, ByteStreamMethod, decode

MAX_PEERS_REPORTED = 1000
"""Bounds the memory when many addresses scan this port; refusals of further peers are only counted."""

Metadata = Iterable[tuple[str, str | bytes]]
EventFields = dict[str, str | int | float | bool]
OnEvent = Callable[[EventKind, EventFields], None]
"""A callback for what the transport observed; the owner adds host and time. It runs on the event loop."""


class Authenticator:
    """Checks proofs, decodes requests and reports refusals.

    Signatures and their refusals are safe to share between threads; what is about calls belongs to one event loop.
    """

    def __init__(self, token: str, on_event: OnEvent | None) -> None:
        self._token = Token(token)
        self._sessions = ServerSessions(self._token)
        self._on_event = on_event
        self._lock = threading.Lock()  # guards the set below
        self._refused: set[tuple[EventKind, str]] = set()

    def decode_authenticated(
        self,
        data: bytes,
        method: AnyMethod | ByteStreamMethod[Any],
        metadata: Metadata | None,
        peer: str,
        path: str,
    ) -> tuple[Any, bytes]:
        """Return the request in `data`, an instance of `method.request`, and the signature of its answer.

        Raises:
            Unauthenticated: nothing proves that the sender has the token.
            StaleSession: the request is of a session that this server does not know any more.
            MessageError: the request does not decode.
        """
        answer = self._admit(data, metadata or (), peer, path)
        try:
            return decode(data, method.request, f"request of {path} from {peer}"), answer
        except MessageError as error:
            self._report(EventKind.REQUEST_MALFORMED, peer, {"method": path, "reason": str(error)})
            raise

    def sign(self, text: bytes) -> bytes:
        """Return a proof that this process has the token, for this text only (HMAC, RFC 2104)."""
        return self._token.sign(text)

    def is_signature(self, text: bytes, proof: bytes) -> bool:
        """Return whether a process that has the token has signed the text."""
        return self._token.is_signature(text, proof)

    def check_signature(self, text: bytes, proof: bytes, peer: str, path: str) -> None:
        """Check that a peer that has the token has signed the text.

        Raises:
            Unauthenticated: the peer has another token.
        """
        if not self.is_signature(text, proof):
            reason = "the proof of it is wrong"
            self._report(
                EventKind.REQUEST_UNAUTHENTICATED, peer, {"method": path, "reason": f"token: {reason}"}
            )
            raise Unauthenticated(reason)

    def tell_nonce(self) -> ServerNonce:
        """Return the nonce of the sessions that clients open now."""
        return ServerNonce(self._sessions.get_nonce_for_new())

    def welcome(self, introduction: Introduction, peer: str, path: str) -> Welcome:
        """Return the proof for a client that has proved that it has the token.

        Raises:
            Unauthenticated: the client has another token.
            StaleSession: the server's nonce has changed meanwhile.
        """
        text = introduction.signed_text(b"hello")
        self.check_signature(text, introduction.proof, peer, path)
        if introduction.server != self._sessions.nonce:
            raise StaleSession
        if len(introduction.client) != NONCE_BYTES:
            raise MessageError(
                f"the nonce of {peer}: found {len(introduction.client)} bytes, expected {NONCE_BYTES}"
            )
        return Welcome(self.sign(introduction.signed_text(b"welcome")))

    def _admit(self, data: bytes, metadata: Metadata, peer: str, path: str) -> bytes:
        call = next((value for key, value in metadata if key == CALL_KEY), None)
        if call is None:
            reason = "a proof of it is missing"
        elif not isinstance(call, bytes) or (answer := self._sessions.admit(call, path, data)) is None:
            reason = "the proof of it is wrong"
        else:
            return answer
        self._report(EventKind.REQUEST_UNAUTHENTICATED, peer, {"method": path, "reason": f"token: {reason}"})
        raise Unauthenticated(reason)

    def _report(self, kind: EventKind, peer: str, detail: EventFields) -> None:
        """Report a refusal the first time that `kind` occurs with the address of `peer`."""
        host = parse_peer_host(peer)
        with self._lock:
            is_known = (kind, host) in self._refused
            key = host if is_known or len(self._refused) < MAX_PEERS_REPORTED else "others"
            is_first = (kind, key) not in self._refused
            self._refused.add((kind, key))
        if is_first and self._on_event is not None:
            self._on_event(kind, {"peer": key, **detail})


def parse_peer_host(peer: str) -> str:
    """Return the address in gRPC's name of a peer, without the port, which changes with each connection.

    Example:
        >>> parse_peer_host("ipv4:127.0.0.1:50312"), parse_peer_host("ipv6:%5B::1%5D:50312"), parse_peer_host("unix:")
        ('127.0.0.1', '::1', 'unix')
    """
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return scheme
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
