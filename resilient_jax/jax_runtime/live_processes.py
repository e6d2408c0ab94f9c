"""What JAX says of processes and devices, restricted to the members of the present generation.

A world has seats that no process has taken yet, and others whose process is dead; XLA lists the devices of all of
them. JAX's own functions (`jax.devices`, `jax.process_count`, ...), and with them `multihost_utils`, Orbax and Grain,
would count them. So the methods from which all of these are made give the members alone, and number them densely:

    client.devices(), client.device_count()         of members only
    client.process_index(), device.process_index    index among the members; for other seats, numbers beyond these

They are consistent with each other, so what JAX derives from them (which devices are addressable, say) stays right.
C++ does not use them: inside of XLA the ids are those of the seats. Where no members are set, nothing is changed.
"""

from collections.abc import Sequence
from typing import Final

import jax
from jax._src import xla_bridge

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.jaxlib_types import Backend, BackendClass, Device, DeviceClass

_own_devices: Final = BackendClass.devices
_own_process_index: Final = BackendClass.process_index
_own_process_index_of_device: Final = DeviceClass.process_index

_indexes: dict[int, int] | None = None
"""Process indexes of the members by their seats. It is replaced as a whole, so every thread reads a consistent one."""


def set_members(seats: Sequence[Seat] | None) -> None:
    """Set the seats of the members, in the order of their process indexes; None: as JAX itself has it."""
    global _indexes
    _install()
    _indexes = None if seats is None else {seat: index for index, seat in enumerate(seats)}
    # JAX caches what these two say.
    for name in ("process_count", "local_devices"):
        getattr(xla_bridge, name).cache_clear()


def get_seat(device: Device) -> Seat:
    """Return the seat of the process that has a device, whoever the members are."""
    return Seat(_own_process_index_of_device.__get__(device))


def list_spare_devices() -> list[Device]:
    """Return the devices of the seats after the members' last one, in the order in which processes take them.

    Programs can be compiled for them, but not run. Without members there are none.
    """
    indexes = _indexes
    if indexes is None:
        return []
    last = max(indexes, default=-1)
    backend = jax.devices()[0].client
    return [d for d in _own_devices(backend) if _own_process_index_of_device.__get__(d) > last]


def _install() -> None:
    BackendClass.devices = _list_devices
    BackendClass.device_count = _count_devices
    BackendClass.process_index = _get_process_index
    DeviceClass.process_index = property(_get_process_index_of_device)


def _list_devices(backend: Backend) -> list[Device]:
    devices, indexes = _own_devices(backend), _indexes
    if indexes is None:
        return devices
    return [device for device in devices if _own_process_index_of_device.__get__(device) in indexes]


def _count_devices(backend: Backend) -> int:
    return len(_list_devices(backend))


def _get_process_index(backend: Backend) -> int:
    return _to_index(_own_process_index(backend))


def _get_process_index_of_device(device: Device) -> int:
    return _to_index(_own_process_index_of_device.__get__(device))


def _to_index(seat: int) -> int:
    indexes = _indexes
    if indexes is None:
        return seat
    # Of other seats each has a number of its own, in their order, so that devices can be grouped by process.
    return indexes.get(seat, len(indexes) + seat)
