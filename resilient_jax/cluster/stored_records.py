"""The records of a job in the store, decoded. What else writes there is refused: no agent can follow it."""

from typing import Final, TypeVar

import msgspec

from resilient_jax.errors import JoinRefused, MessageError
from resilient_jax.store.interface import KeyValue
from resilient_jax.transport.method import decode

ENCODER: Final = msgspec.msgpack.Encoder()

RecordT = TypeVar("RecordT", bound=msgspec.Struct)


def decode_record(stored: KeyValue, record_type: type[RecordT]) -> RecordT:
    """Return a record that an agent stored, as a value of this type.

    Raises:
        JoinRefused: the value is no such record; the message names its key.
    """
    try:
        return decode(stored.value, record_type, f"the record {stored.key} in the store")
    except MessageError as error:
        # Not a fault of the store, which agents wait out: the record stays as it is.
        raise JoinRefused(f"{error}, and give each job a name of its own") from error
