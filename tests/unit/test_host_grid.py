"""The grid of the hosts' devices: what it is made of, and what it refuses."""

import dataclasses

import pytest

from resilient_jax.errors import CallerError
from resilient_jax.training.step.host_grid import HostGrid


@dataclasses.dataclass(frozen=True)
class DeviceOf:
    """What the grid asks of a device before it makes a mesh."""

    process_index: int


def test_hosts_with_different_numbers_of_devices_are_refused_with_what_each_has() -> None:
    devices = [DeviceOf(0), DeviceOf(0), DeviceOf(2)]
    with pytest.raises(CallerError, match=r"process 0 has 2, process 2 has 1\).*--devices-per-host 1"):
        HostGrid(devices, 0)  # pyright: ignore[reportArgumentType]
