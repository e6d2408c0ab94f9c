"""The topology of a spare seat is that of another process, under its own ids."""

import pytest

from resilient_jax.ids import DEVICE_IDS_PER_SEAT, Seat
from resilient_jax.jax_runtime.local_topology import copy_local_topology


def field(number: int, value: int | bytes) -> bytes:
    """Encode a field with a small number, of a varint below 2**14 or of fewer than 128 bytes."""
    if isinstance(value, int):
        low, high = value & 0x7F, value >> 7
        return bytes([number << 3, low | 0x80, high]) if high else bytes([number << 3, low])
    return bytes([number << 3 | 2, len(value)]) + value


def device(ordinal: int, device_id: int) -> bytes:
    text = f"TFRT_CPU_{ordinal} (id={device_id})".encode()
    parts = [field(1, ordinal)] if ordinal else []
    return b"".join([*parts, field(2, b"cpu"), field(4, device_id), field(9, text)])


def test_a_copy_has_the_seats_node_and_device_ids_and_keeps_all_else():
    topology = field(1, 0) + field(2, b"boot") + field(3, device(0, 0)) + field(3, device(1, 1))
    base = 5 * DEVICE_IDS_PER_SEAT
    found = copy_local_topology(topology, Seat(5))
    assert found.startswith(field(1, 5) + field(2, b"boot"))
    for ordinal in (0, 1):
        assert f"(id={base + ordinal})".encode() in found
        assert field(4, base + ordinal) in found
    assert copy_local_topology(found, Seat(6)).count(b"cpu") == 2


@pytest.mark.parametrize("damaged", [b"\x1a\x7fabc", b"\x0b", b"\x08\xff"])
def test_damaged_bytes_are_refused(damaged: bytes):
    with pytest.raises(ValueError, match="found"):
        copy_local_topology(damaged, Seat(1))
