"""Measures what a host takes for a matrix product, a pass over memory, and a read of its input files."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.data.input_disk import measure_input_disk
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.step.device_throttle import DeviceThrottle

MEASURE_S: Final = 0.1
"""Of each of the two, shared by a host's devices. One device gets the usual period of a quota of processor time."""
CPU_SIZES: Final = (512, 2048)
ACCELERATOR_SIZES: Final = (4096, 6144)
"""Rows and columns of the matrices of the product, and of the one that is passed over. With its result that takes 32
MiB on a CPU, and 288 MiB on an accelerator, where smaller ones would measure how fast programs are started."""
MAX_DEVICES: Final = 64
"""Of a host, whose speeds hosts tell each other: more than any has."""


class DeviceSeconds(NamedTuple):
    """What the slowest of a host's devices takes, and its disk.

    Attributes:
        compute_s: seconds of a matrix product.
        memory_s: seconds of a pass over memory.
        disk_s: seconds of a read of its input files; 0: none is on a disk.
        speeds: of each device, by its number on the host, as a part of that of the host's fastest one: the lower one of
            product and pass; 0: the worker does not use it.
    """

    compute_s: float
    memory_s: float
    disk_s: float = 0.0
    speeds: tuple[float, ...] = ()

    def encode(self) -> list[float]:
        """Return the seconds and `MAX_DEVICES` speeds: as many numbers on each host."""
        padding = [0.0] * (MAX_DEVICES - len(self.speeds))
        return [self.compute_s, self.memory_s, self.disk_s, *self.speeds[:MAX_DEVICES], *padding]

    @classmethod
    def decode(cls, row: Sequence[float]) -> "DeviceSeconds":
        """Return what `encode` was given, without zeros behind the last speed."""
        compute_s, memory_s, disk_s, *speeds = row
        return cls(compute_s, memory_s, disk_s, tuple(np.trim_zeros(np.array(speeds), "b").tolist()))


UNKNOWN_SECONDS: Final = DeviceSeconds(0.0, 0.0)


class DeviceSpeed:
    """Measures the devices of this host, one after the other.

    Args:
        list_devices: gives the devices; called when they are first measured.
        numbers: of these devices on the host; (): they are all that it has.
        throttle: makes devices slow that a chaos campaign has slowed down.
    """

    def __init__(
        self,
        list_devices: Callable[[], Sequence[Device]],
        numbers: Sequence[int] = (),
        throttle: DeviceThrottle | None = None,
    ) -> None:
        self._list_devices = list_devices
        self._numbers = tuple(numbers)
        self._throttle = throttle
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
        compute_s = [self._time(self._multiply, sizes[0], device) for device in self._devices]
        memory_s = [self._time(self._pass_over, sizes[1], device) for device in self._devices]
        numbers = self._numbers or range(len(self._devices))
        speeds = [0.0] * (1 + max(numbers))
        for number, of_product, of_pass in zip(numbers, compute_s, memory_s, strict=True):
            speeds[number] = min(min(compute_s) / of_product, min(memory_s) / of_pass)
        return DeviceSeconds(max(compute_s), max(memory_s), measure_input_disk(), tuple(speeds))

    def _time(self, program: Callable[[jax.Array], jax.Array], size: int, device: Device) -> float:
        """Return the mean seconds of a program on a square matrix of a size."""
        matrix = jax.device_put(jnp.ones((size, size), jnp.float32), device)
        program(matrix).block_until_ready()  # compiles it
        began_s = time.monotonic()
        limit_s = MEASURE_S / len(self._devices)
        num_rounds = 0
        while (taken_s := time.monotonic() - began_s) < limit_s or not num_rounds:
            self._run(lambda: program(matrix), device).block_until_ready()
            num_rounds += 1
        return taken_s / num_rounds

    def _run(self, program: Callable[[], jax.Array], device: Device) -> jax.Array:
        return program() if self._throttle is None else self._throttle.run(program, [device])
