"""The client's side of `call_proofs`: it opens a session with the server at an address, once for all calls."""

import asyncio
import secrets
from typing import Final, cast

import grpc.aio
import msgspec

from resilient_jax.errors import MessageError, Unauthenticated
from resilient_jax.transport.call_proofs import (
    ANSWER_KEY,
    ASK_NONCE,
    INTRODUCE,
    NONCE_BYTES,
    SERVICE,
    AskNonce,
    CallSession,
    Introduction,
    Token,
)
from resilient_jax.transport.method import Method, RequestT, ResponseT, decode, encode, format_method_path

OPENING_TIMEOUT_S: Final = 10.0
"""For calls that have no deadline of their own."""


class ClientSessions:
    """The session with the server at one address, for the calls of one event loop."""

    def __init__(self, address: str, token: str) -> None:
        """Begin without a session; `address` is the one that the channel calls."""
        self._address = address
        self._token = Token(token)
        self._opening = asyncio.Lock()  # guards the session
        self._session: CallSession | None = None

    async def get(self, channel: grpc.aio.Channel, timeout_s: float | None) -> CallSession:
        """Return the session, and open one if there is none.

        Raises:
            Unauthenticated: the server does not prove that it has the token.
            MessageError: the answer is not of this protocol.
            TimeoutError: the server did not answer in time.
            grpc.aio.AioRpcError: the server refuses, or cannot be reached.
        """
        if self._session is not None:
            return self._session
        async with asyncio.timeout(OPENING_TIMEOUT_S if timeout_s is None else timeout_s), self._opening:
            if self._session is None:
                self._session = await self._open(channel)
            return self._session

    def forget(self, session: CallSession) -> None:
        """Open another session for the next call: the server does not know this one any more."""
        if self._session is session:
            self._session = None

    async def _open(self, channel: grpc.aio.Channel) -> CallSession:
        own = secrets.token_bytes(NONCE_BYTES)
        theirs = (await self._ask(channel, ASK_NONCE, AskNonce())).nonce
        if len(theirs) != NONCE_BYTES:
            raise MessageError(
                f"{self._address}: found a nonce of {len(theirs)} bytes, expected one of {NONCE_BYTES}"
            )
        unsigned = Introduction(own, theirs, self._address)
        proof = self._token.sign(unsigned.signed_text(b"hello"))
        welcome = await self._ask(channel, INTRODUCE, msgspec.structs.replace(unsigned, proof=proof))
        if not self._token.is_signature(unsigned.signed_text(b"welcome"), welcome.proof):
            raise make_impostor_error(self._address)
        return CallSession(self._token, own, theirs)

    async def _ask(
        self, channel: grpc.aio.Channel, method: Method[RequestT, ResponseT], request: RequestT
    ) -> ResponseT:
        path = format_method_path(SERVICE, method)
        data = await channel.unary_unary(path)(encode(request)) or b""  # None: it has ended without an answer
        return decode(cast(bytes, data), method.response, f"response to {path} from {self._address}")


def has_proof(metadata: object, session: CallSession, number: int) -> bool:
    """Return whether the metadata of an answer prove that the server has admitted the call of this number."""
    answers = [value for key, value in cast("list[tuple[str, object]]", metadata or ()) if key == ANSWER_KEY]
    return bool(answers) and session.is_answer(number, answers[0])


def make_impostor_error(address: str) -> Unauthenticated:
    """Return the error about a server that has not proved itself."""
    return Unauthenticated(
        f"{address} has not proved that it has our job token. Every process of a job must be given the same token"
    )
