"""The local topology of a spare seat: what a process that joined a world would publish of its devices.

A CPU backend waits, when it is made, until the devices of every seat of its world are known: each process publishes a
`LocalTopologyProto` (XLA, xla/pjrt/distributed/protocol.proto), and the first one combines them. A seat that is taken
later has the same devices as the first, under other ids. So its topology is a copy of that one with these ids; what is
unknown of it is kept. Imports no jax.
"""

from typing import Final

from google.protobuf.message import Error as ProtobufError

from resilient_jax.ids import DEVICE_IDS_PER_SEAT, Seat
from resilient_jax.protocol.protobuf_classes import make_message_classes

_CLASSES: Final = make_message_classes(
    "resilient_jax.xla",
    {
        "LocalTopologyProto": {
            "node_id": (1, "int64"),
            "boot_id": (2, "bytes"),
            "devices": (3, "DeviceProto[]"),
        },
        "DeviceProto": {
            "local_device_ordinal": (1, "int64"),
            "global_device_id": (4, "int64"),
            "to_string": (9, "bytes"),
            "debug_string": (10, "bytes"),
        },
    },
)
"""The fields that name a process or a device, the last two among other words as `id=`."""


def copy_local_topology(encoded: bytes, seat: Seat) -> bytes:
    """Return a process's encoded local topology as that of another seat.

    Args:
        encoded: a `LocalTopologyProto`, as a process of the world published it.
        seat: the one whose devices the copy describes.

    Raises:
        ValueError: `encoded` is no such message.
    """
    try:
        topology = _CLASSES["LocalTopologyProto"].FromString(encoded)
    except ProtobufError as error:
        raise ValueError(f"found {len(encoded)} bytes that are no LocalTopologyProto: {error}") from error
    topology.node_id = seat
    for device in topology.devices:
        before = b"id=%d" % device.global_device_id
        device.global_device_id = seat * DEVICE_IDS_PER_SEAT + device.local_device_ordinal
        for name in ("to_string", "debug_string"):
            if device.HasField(name):
                setattr(
                    device, name, getattr(device, name).replace(before, b"id=%d" % device.global_device_id)
                )
    return topology.SerializeToString()
