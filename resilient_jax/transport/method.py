"""One remote procedure as a value: its name and the types of its two messages."""

import dataclasses
import functools
from typing import Any, Generic, TypeVar

import msgspec

from resilient_jax.errors import MessageError

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ResponseT = TypeVar("ResponseT", bound=msgspec.Struct)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Both sides refuse more: bulk data goes in chunks of up to 8 MiB, so there is room for their frame."""


@dataclasses.dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One remote procedure: request in, one response out, or many where it `streams`.

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


AnyMethod = Method[Any, Any]
"""A method in a table of methods, where the table's values differ in their message types."""


def format_method_path(service: str, method: AnyMethod) -> str:
    """The path that gRPC puts on the wire."""
    return f"/{service}/{method.name}"


def encode(message: msgspec.Struct) -> bytes:
    """`message` as msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, message_type: type[ResponseT], context: str) -> ResponseT:
    """The message in `data`.

    Args:
        data: msgpack.
        message_type: what it must be.
        where: method and direction, for the error.

    Raises:
        MessageError: names `where`, the field, and found and expected types.
    """
    try:
        return _decoder(message_type).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"{context} does not decode as {message_type.__name__}: {error}") from error


@functools.cache
def _decoder(message_type: type[ResponseT]) -> "msgspec.msgpack.Decoder[ResponseT]":
    return msgspec.msgpack.Decoder(message_type)
