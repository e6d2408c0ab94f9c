"""The messages of an attack: bytes that no peer of ours sends, and well-formed messages of no sense."""

import enum
import functools
import random
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
LARGEST = 3000


def draw_bytes(draw: random.Random, at_most: int = LARGEST) -> bytes:
    """Return random bytes, short ones more often."""
    return draw.randbytes(int(at_most * draw.random() ** 3))


def garbage(draw: random.Random) -> bytes:
    """Return bytes that are no beginning of any protocol."""
    return draw_bytes(draw)


def broken_http2(draw: random.Random) -> bytes:
    """Return a proper beginning of HTTP/2, then garbage."""
    return HTTP2_PREFACE + EMPTY_SETTINGS + draw_bytes(draw)


def truncated_http2(draw: random.Random) -> bytes:
    """Return a proper beginning of HTTP/2 that ends in the middle of a frame."""
    whole = HTTP2_PREFACE + EMPTY_SETTINGS + b"\0\0\x64\1\4\0\0\0\1" + draw.randbytes(90)
    return whole[: draw.randrange(1, len(whole))]


def oversized(draw: random.Random) -> bytes:
    """Return the header of a frame that announces more than any peer takes."""
    announced = draw.choice(
        (b"\xff\xff\xff\xff", b"\xff\xff\xff", (2**31).to_bytes(4, "little"), b"\x7f" * 8)
    )
    return draw.choice((b"", HTTP2_PREFACE)) + announced + draw_bytes(draw)


RAW: tuple[Callable[[random.Random], bytes], ...] = (garbage, broken_http2, truncated_http2, oversized)


def draw_value(draw: random.Random, kind: Any) -> Any:
    """Return a random value of a type that our messages have."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return draw.random() < 0.5
    if kind is int or getattr(kind, "__supertype__", None) is int:
        return draw.choice((0, 1, -1, 2**31, 2**53, draw.randrange(10_000)))
    if kind is float:
        return draw.choice((0.0, -1.0, 1e300, draw.random()))
    if kind is bytes:
        return draw_bytes(draw, 300)
    if kind is str or getattr(kind, "__supertype__", None) is str:
        return "".join(map(chr, draw.choices(range(32, 0x2FF), k=draw.randrange(20))))
    if kind is type(None):
        return None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return draw.choice(list(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return draw_struct(draw, kind)
    if origin is typing.Annotated:
        return draw_value(draw, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return draw_value(draw, draw.choice(arguments))
    if origin is typing.Literal:
        return draw.choice(arguments)
    if origin in (tuple, list):
        count = draw.randrange(4) if origin is list or arguments[-1] is ... else len(arguments)
        return origin(
            draw_value(draw, arguments[min(n, len(arguments) - 1)])
            if arguments[-1] is not ...
            else draw_value(draw, arguments[0])
            for n in range(count)
        )
    if origin is dict:
        return {
            draw_value(draw, arguments[0]): draw_value(draw, arguments[1]) for _ in range(draw.randrange(3))
        }
    raise NotImplementedError(kind)


def draw_struct(draw: random.Random, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Return a message of this type with random fields; what its own checks refuse is drawn again."""
    hints = _get_hints(kind)
    while True:
        try:
            return kind(**{name: draw_value(draw, hints[name]) for name in kind.__struct_fields__})
        except ValueError:
            continue


@functools.cache
def _get_hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def mutations(draw: random.Random, encoded: bytes) -> Iterator[bytes]:
    """Yield an encoded message with one change each, for ever."""
    while True:
        position = draw.randrange(len(encoded) + 1)
        match draw.randrange(3):
            case 0:
                yield encoded[:position]
            case 1:
                yield encoded[:position] + draw_bytes(draw, 20) + encoded[position:]
            case _:
                yield encoded + draw_bytes(draw, 200)
