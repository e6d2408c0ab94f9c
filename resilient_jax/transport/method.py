"""One remote procedure as a value: its name and the types of its two messages."""

import dataclasses
import functools
from typing import Any, Generic, TypeVar

import msgspec

from resilient_jax.protocol.message_decoding import decode_message

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ResponseT = TypeVar("ResponseT", bound=msgspec.Struct)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The limit of both sides. Chunks of data have up to 8 MiB, so there is room for the rest of their message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One remote procedure: a request, and one response or, where it `is_streaming`, many.

    Example:
        >>> class Ping(msgspec.Struct):
        ...     text: str
        >>> Method("ping", Ping, Ping).name
        'ping'
    """

    name: str
    request: type[RequestT]
    response: type[ResponseT]
    is_streaming: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ByteStreamMethod(Generic[RequestT]):
    """A procedure whose request opens a stream of bytes in both directions (`ByteStream`)."""

    name: str
    request: type[RequestT]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadMethod(Generic[RequestT]):
    """A procedure between peers that is answered with bytes out of memory (`peer_calls`)."""

    name: str
    request: type[RequestT]


AnyMethod = Method[Any, Any]
"""A method in a table whose methods have different message types."""


def format_method_path(service: str, method: AnyMethod | ByteStreamMethod[Any]) -> str:
    """Return the path by which gRPC names the method."""
    return f"/{service}/{method.name}"


def encode(message: msgspec.Struct) -> bytes:
    """Return `message` as msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview, message_type: type[ResponseT], context: str) -> ResponseT:
    """Return the message in `data`.

    Args:
        data: msgpack.
        context: method and direction, for the error message.

    Raises:
        MessageError: the bytes do not decode; the message names `context`, the field, and the found and expected types.
    """
    return decode_message(_decoder(message_type), data, context)


@functools.cache
def _decoder(message_type: type[ResponseT]) -> "msgspec.msgpack.Decoder[ResponseT]":
    return msgspec.msgpack.Decoder(message_type)
