"""Calls between peers: requests, answered with a message or with bytes out of memory, over plain sockets.

Rules of a connection, after the handshake (`peer_handshake`):
1. The caller sends a request; the server answers with a header and, unless the header is a refusal, with the announced
   number of bytes. Then the next request follows. Requests and headers are msgpack frames. The bytes are an encoded
   message, or those of memory, which go from memory to memory without further copies; then the header may have
   their digest.
2. A method does the same if it is called twice. So a caller repeats a request, once, on a new connection, if one that
   was idle ends before an answer begins, as an HTTP client does (RFC 9112, 9.3.1): the server may close what is idle.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from resilient_jax.erasure import Checksum, ChecksumName, choose_checksum
from resilient_jax.errors import MessageError, ResilientJaxError
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.transport.error_codec import name_error
from resilient_jax.transport.incoming_connections import Visit
from resilient_jax.transport.method import MAX_MESSAGE_BYTES, AnyMethod, ReadMethod, decode, encode
from resilient_jax.transport.peer_handshake import PeerHello
from resilient_jax.transport.socket_io import receive_frame, send_all, send_frame

IDLE_TIMEOUT_S: Final = 600.0
"""The limit between two requests; past it the client has leaked its connection, or its machine is gone."""
REQUEST_TIMEOUT_S: Final = 60.0
"""The limit for a request, once it has begun to come."""
SEND_TIMEOUT_S: Final = 60.0
"""The limit for the answer to one request. The client has a deadline of its own."""

CallHandler = Callable[[Any], "msgspec.Struct | MemoryAnswer"]
"""Answers a request, or raises; called from many threads."""

logger = logging.getLogger(__name__)


class MemoryAnswer(NamedTuple):
    """The answer of the handler of a `ReadMethod`.

    Attributes:
        data: requested bytes. If the bytes change while they are sent, the client finds that the digest differs.
        has_digest: whether the client wants a digest.
    """

    data: memoryview
    has_digest: bool = True


class PeerRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request, by the name of its method."""

    method: str
    request: msgspec.Raw


class AnswerHeader(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Announces the bytes that follow.

    Attributes:
        checksum: algorithm of `digest`; None where the client verifies the bytes by other means.
        digest: digest of the bytes, which detects damage in transit.
    """

    length: int
    checksum: ChecksumName | None = None
    digest: int = 0


class CallRefusal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Announces that no bytes follow, because of an error, by the name of its class in `errors.py`."""

    error: str
    message: str


HEADER_DECODER: Final[msgspec.msgpack.Decoder[AnswerHeader | CallRefusal]] = msgspec.msgpack.Decoder(
    AnswerHeader | CallRefusal
)
_REQUEST_DECODER: Final = msgspec.msgpack.Decoder(PeerRequest)


class CallService:
    """Answers calls: a service of a `PeerServer`."""

    def __init__(
        self,
        handlers: Mapping[AnyMethod | ReadMethod[Any], CallHandler],
        checksum: Checksum | None = None,
        transform_sent: Callable[[memoryview], memoryview] = lambda data: data,
    ) -> None:
        """Take the handlers.

        Args:
            handlers: what answers each method; their requests of other types are refused.
            checksum: the algorithm of digests; None: the fastest here.
            transform_sent: applied to memory after its digest was computed, to inject damage.
        """
        self._handlers = {method.name: (method, handler) for method, handler in handlers.items()}
        self._checksum = checksum or choose_checksum()
        self._transform_sent = transform_sent

    def serve(self, visit: Visit, hello: PeerHello, welcome: Callable[[], None]) -> None:
        """Serve one connection until either side ends it."""
        welcome()
        while True:
            visit.wait_asked(IDLE_TIMEOUT_S)
            deadline_s = time.monotonic() + REQUEST_TIMEOUT_S
            data = receive_frame(visit.connection, deadline_s, MAX_MESSAGE_BYTES)
            request = decode_message(_REQUEST_DECODER, data, f"a request of {visit.peer} for {hello.service}")
            header, answer = self._answer(request, f"{hello.service}: {request.method}")
            deadline_s = time.monotonic() + SEND_TIMEOUT_S
            send_frame(visit.connection, header, deadline_s)
            send_all(visit.connection, answer, deadline_s)

    def _answer(
        self, request: PeerRequest, path: str
    ) -> tuple[AnswerHeader | CallRefusal, bytes | memoryview]:
        try:
            if request.method not in self._handlers:
                raise MessageError(
                    f"{path}: found no such method; run the same version of resilient_jax everywhere"
                )
            method, handler = self._handlers[request.method]
            answer = handler(decode(request.request, method.request, path))
            if not isinstance(answer, MemoryAnswer):
                data = encode(answer)
                return AnswerHeader(length=len(data)), data
            header = AnswerHeader(length=len(answer.data))
            if answer.has_digest:
                digest = self._checksum.compute(answer.data)
                header = AnswerHeader(length=len(answer.data), checksum=self._checksum.name, digest=digest)
            return header, self._transform_sent(answer.data)
        except Exception as error:  # the process boundary: the error goes to the caller
            if not isinstance(error, ResilientJaxError):
                logger.exception("%s failed", path)
            name, message = name_error(error, path)
            return CallRefusal(error=name, message=message), b""
