"""Measures what a host takes for a matrix product, a pass over memory, and a read of its input files."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from resilient_jax.data.input_disk import measure_input_disk
from resilient_jax.jax_runtime.jaxlib_types import Device

MEASURE_S: Final = 0.1
"""Of each of the two, shared by a host's devices. One device gets the usual period of a quota of processor time."""
CPU_SIZES: Final = (512, 2048)
ACCELERATOR_SIZES: Final = (4096, 6144)
"""Rows and columns of the matrices of the product, and of the one that is passed over. With its result that takes 32
MiB on a CPU, and 288 MiB on an accelerator, where smaller ones would measure how fast programs are started."""


class DeviceSeconds(NamedTuple):
    """What the slowest of a host's devices takes, and its disk.

    Attributes:
        compute_s: seconds of a matrix product.
        memory_s: seconds of a pass over memory.
        disk_s: seconds of a read of its input files; 0: none is on a disk.
    """

    compute_s: float
    memory_s: float
    disk_s: float = 0.0


UNKNOWN_SECONDS: Final = DeviceSeconds(0.0, 0.0)


class DeviceSpeed:
    """Measures the devices of this host, one after the other; the slowest one counts.

    Args:
        list_devices: gives the devices; called when they are first measured.
    """

    def __init__(self, list_devices: Callable[[], Sequence[Device]]) -> None:
        self._list_devices = list_devices
        # Programs of their own: they refer to the devices, and go with this object.
        self._multiply = jax.jit(lambda matrix: matrix @ matrix)
        self._pass_over = jax.jit(lambda matrix: matrix + 1)

    @functools.cached_property
    def _devices(self) -> tuple[Device, ...]:
        return tuple(self._list_devices())

    def measure(self) -> DeviceSeconds:
        """Return what all take now; this takes twice `MEASURE_S`, the first time with compilation, and the reads."""
        is_cpu = self._devices[0].platform == "cpu"
        sizes = CPU_SIZES if is_cpu else ACCELERATOR_SIZES
        return DeviceSeconds(
            max(self._time(self._multiply, sizes[0], device) for device in self._devices),
            max(self._time(self._pass_over, sizes[1], device) for device in self._devices),
            measure_input_disk(),
        )

    def _time(self, program: Callable[[jax.Array], jax.Array], size: int, device: Device) -> float:
        """Return the mean seconds of a program on a square matrix of a size."""
        matrix = jax.device_put(jnp.ones((size, size), jnp.float32), device)
        program(matrix).block_until_ready()  # compiles it
        began_s = time.monotonic()
        limit_s = MEASURE_S / len(self._devices)
        num_rounds = 0
        while (taken_s := time.monotonic() - began_s) < limit_s or not num_rounds:
            program(matrix).block_until_ready()
            num_rounds += 1
        return taken_s / num_rounds
