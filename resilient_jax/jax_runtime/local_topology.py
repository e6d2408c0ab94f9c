"""The local topology of a spare seat: what a process that joined a world would publish of its devices.

A CPU backend waits, when it is made, until the devices of every seat of its world are known: each process publishes a
`LocalTopologyProto` (XLA, xla/pjrt/distributed/protocol.proto), and the first one combines them. A seat that is taken
later has the same devices as the first, under other ids. So its topology is a copy of that one with these ids:

    LocalTopologyProto   1 node_id   3 devices (repeated DeviceProto)
    DeviceProto          1 local_device_ordinal   4 global_device_id   9 and 10 strings that name the id

where on CPU `global_device_id = node_id * 2048 + local_device_ordinal`. The messages are edited field by field: no
generated code, and what is unknown is kept. Imports no jax.
"""

from collections.abc import Iterator
from typing import Final

from resilient_jax.ids import Seat

DEVICE_IDS_PER_PROCESS: Final = 2048
"""XLA's `kMaxDevicesPerProcess` of CPU clients."""

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED_SIZES: Final = {FIXED64: 8, FIXED32: 4}

NODE_ID, DEVICES = 1, 3
LOCAL_DEVICE_ORDINAL, GLOBAL_DEVICE_ID = 1, 4
STRINGS_WITH_ID: Final = (9, 10)

Field = tuple[int, int, int | bytes]
"""Number, wire type and value of a field: an int for a varint, else its bytes."""


def copy_local_topology(encoded: bytes, seat: Seat) -> bytes:
    """Return a process's encoded local topology as that of another seat.

    Args:
        encoded: a `LocalTopologyProto`, as a process of the world published it.
        seat: the one whose devices the copy describes.

    Raises:
        ValueError: `encoded` is no such message.
    """
    fields: list[Field] = [(NODE_ID, VARINT, seat)]
    for number, wire_type, value in _parse(encoded):
        if number == DEVICES and isinstance(value, bytes):
            fields.append((number, wire_type, _copy_device(value, seat)))
        elif number != NODE_ID:
            fields.append((number, wire_type, value))
    return _encode(fields)


def _copy_device(encoded: bytes, seat: Seat) -> bytes:
    fields = list(_parse(encoded))
    # Fields with the default value 0 are absent.
    ordinal = next((value for number, _, value in fields if number == LOCAL_DEVICE_ORDINAL), 0)
    before = next((value for number, _, value in fields if number == GLOBAL_DEVICE_ID), 0)
    assert isinstance(ordinal, int)
    device_id = seat * DEVICE_IDS_PER_PROCESS + ordinal
    copied: list[Field] = [(GLOBAL_DEVICE_ID, VARINT, device_id)]
    for number, wire_type, value in fields:
        if number in STRINGS_WITH_ID and isinstance(value, bytes):
            copied.append(
                (number, wire_type, value.replace(f"id={before}".encode(), f"id={device_id}".encode()))
            )
        elif number != GLOBAL_DEVICE_ID:
            copied.append((number, wire_type, value))
    return _encode(copied)


def _parse(encoded: bytes) -> Iterator[Field]:
    """Yield the fields of a message in the wire format of protocol buffers."""
    at = 0
    while at < len(encoded):
        tag, at = _read_varint(encoded, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            value, at = _read_varint(encoded, at)
            yield number, wire_type, value
            continue
        if wire_type == LENGTH_DELIMITED:
            size, at = _read_varint(encoded, at)
        elif wire_type in FIXED_SIZES:
            size = FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"found wire type {wire_type} at byte {at}, expected 0, 1, 2 or 5")
        if at + size > len(encoded):
            raise ValueError(f"found the end of the message in a field of {size} bytes at byte {at}")
        yield number, wire_type, encoded[at : at + size]
        at += size


def _read_varint(encoded: bytes, at: int) -> tuple[int, int]:
    """Return a number and the position after it."""
    value = shift = 0
    while at < len(encoded):
        byte = encoded[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("found the end of the message in a number")


def _encode(fields: list[Field]) -> bytes:
    encoded = bytearray()
    for number, wire_type, value in fields:
        encoded += _encode_varint(number << 3 | wire_type)
        if isinstance(value, int):
            encoded += _encode_varint(value)
            continue
        if wire_type == LENGTH_DELIMITED:
            encoded += _encode_varint(len(value))
        encoded += value
    return bytes(encoded)


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
