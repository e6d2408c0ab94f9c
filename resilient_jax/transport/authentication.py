"""Authentication of calls: a check of the token, and a report of the first refusal of each peer."""

import collections
import hmac
import threading
from collections.abc import Callable, Iterable
from typing import Any

from resilient_jax.errors import MessageError, Unauthenticated
from resilient_jax.events import EventKind
from resilient_jax.transport.method import AnyMethod, ByteStreamMethod, decode

TOKEN_METADATA_KEY = "rj-token"
MAX_PEERS_REPORTED = 1000
"""Bounds the memory when many addresses scan this port; refusals of further peers are only counted."""

Metadata = Iterable[tuple[str, str | bytes]]
EventFields = dict[str, str | int | float | bool]
OnEvent = Callable[[EventKind, EventFields], None]
"""A callback for what the transport observed; the owner adds host and time. It runs on the event loop."""


class Authenticator:
    """Checks tokens, decodes requests and counts refusals. Safe to share between threads."""

    def __init__(self, token: str, on_event: OnEvent | None) -> None:
        self._token = token.encode()
        self._on_event = on_event
        self._lock = threading.Lock()  # guards the counter below
        self._refusals: collections.Counter[tuple[EventKind, str]] = collections.Counter()

    @property
    def num_unauthenticated(self) -> int:
        """How many calls had no token or a wrong one."""
        with self._lock:
            return sum(
                n for (kind, _), n in self._refusals.items() if kind is EventKind.REQUEST_UNAUTHENTICATED
            )

    def decode_authenticated(
        self,
        data: bytes,
        method: AnyMethod | ByteStreamMethod[Any],
        metadata: Metadata | None,
        peer: str,
        path: str,
    ) -> Any:  # noqa: ANN401 an instance of method.request
        """Return the request in `data`, if its token is right.

        Raises:
            Unauthenticated: the token is missing or wrong.
            MessageError: the request does not decode.
        """
        self._check_token(metadata or (), peer, path)
        try:
            return decode(data, method.request, f"request of {path} from {peer}")
        except MessageError as error:
            self._report(EventKind.REQUEST_MALFORMED, peer, {"method": path, "reason": str(error)})
            raise

    def sign(self, text: bytes) -> bytes:
        """Return a proof that this process has the token, for this text only (HMAC, RFC 2104)."""
        return hmac.digest(self._token, text, "sha256")

    def is_signature(self, text: bytes, proof: bytes) -> bool:
        """Return whether a process that has the token has signed the text."""
        return hmac.compare_digest(self.sign(text), proof)

    def check_signature(self, text: bytes, proof: bytes, peer: str, path: str) -> None:
        """Check that a peer that has the token has signed the text.

        Raises:
            Unauthenticated: it has another token.
        """
        if not self.is_signature(text, proof):
            reason = "the proof of it is wrong"
            self._report(
                EventKind.REQUEST_UNAUTHENTICATED, peer, {"method": path, "reason": f"token: {reason}"}
            )
            raise Unauthenticated(reason)

    def _check_token(self, metadata: Metadata, peer: str, path: str) -> None:
        token = next((value for key, value in metadata if key == TOKEN_METADATA_KEY), None)
        if token is None:
            reason = "it is missing"
        # Takes the same time for every wrong token, so the time tells nothing about the right one.
        elif not hmac.compare_digest(token.encode() if isinstance(token, str) else token, self._token):
            reason = "it is wrong"
        else:
            return
        self._report(EventKind.REQUEST_UNAUTHENTICATED, peer, {"method": path, "reason": f"token: {reason}"})
        raise Unauthenticated(reason)

    def _report(self, kind: EventKind, peer: str, detail: EventFields) -> None:
        """Count a refusal, and report it the first time that `kind` occurs with the address of `peer`."""
        host = parse_peer_host(peer)
        with self._lock:
            is_known = (kind, host) in self._refusals
            key = host if is_known or len(self._refusals) < MAX_PEERS_REPORTED else "others"
            is_first = (kind, key) not in self._refusals
            self._refusals[kind, key] += 1
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
