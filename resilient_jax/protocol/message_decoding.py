"""Decoding of bytes that came from elsewhere: a socket, the store, a file, the environment.

msgspec reports bytes that do not decode by three unrelated errors: its own for syntax and types, `UnicodeDecodeError`
for strings, and `RecursionError` for containers nested deeper than the stack, which is no bug of the receiver.
"""

from typing import TypeVar

import msgspec

from resilient_jax.errors import MessageError

DecodedT = TypeVar("DecodedT")


def decode_message(
    decoder: msgspec.msgpack.Decoder[DecodedT] | msgspec.json.Decoder[DecodedT],
    data: bytes | memoryview,
    source: str,
) -> DecodedT:
    """Return the value in `data`.

    Args:
        data: msgpack or JSON, as `decoder` reads.
        source: where the bytes came from, for the error message.

    Raises:
        MessageError: the bytes do not decode; the message names `source`, the field, the found and the expected type.
    """
    try:
        return decoder.decode(data)
    except RecursionError:
        reason = "its containers are nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    expected = getattr(decoder.type, "__name__", decoder.type)
    raise MessageError(
        f"{source} does not decode as {expected}: {reason}. Run the same version of resilient_jax everywhere"
    )
