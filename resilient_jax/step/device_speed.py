"""Measures what a host takes for a matrix product, a pass over memory, and a read of its input files."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from resilient_jax.data.input_disk import measure_input_disk
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.step.device_throttle import DeviceThrottle

MEASURE_S: Final = 0.1
"""Time for products, and for passes, shared by a host's devices. One device gets the usual period of a quota of
processor time."""
CPU_SIZES: Final = (512, 2048)
ACCELERATOR_SIZES: Final = (4096, 6144)
"""Rows and columns of the matrices of the product, and of the one that is passed over. With its result that takes 32
MiB on a CPU, and 288 MiB on an accelerator, where smaller ones would measure how fast programs are started."""
MIN_ROUNDS: Final = 5
"""Rounds in which each device has its turn, however long they take: most may meet a busy moment."""


class DeviceSeconds(NamedTuple):
    """What the slowest of a host's devices takes, and its disk.

    Attributes:
        compute_s: seconds of a matrix product.
        memory_s: seconds of a pass over memory.
        disk_s: seconds of a read of its input files; 0: none is on a disk.
        compute_speeds: parts of the speed of the host's fastest device in a matrix product, by the number of the
            device on the host; 0: the worker does not use it.
        memory_speeds: the same in a pass over memory.
    """

    compute_s: float
    memory_s: float
    disk_s: float = 0.0
    compute_speeds: tuple[float, ...] = ()
    memory_speeds: tuple[float, ...] = ()


UNKNOWN_SECONDS: Final = DeviceSeconds(0.0, 0.0)


class DeviceSpeed:
    """Measures the devices of this host, one after the other.

    Args:
        list_devices: gives the devices; called when they are first measured.
        numbers: which of the host's devices these are; (): they are all that it has.
        throttle: makes devices slow that a chaos campaign has slowed down; None: no campaign can.
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
        product, a_pass = self._time(self._multiply, sizes[0]), self._time(self._pass_over, sizes[1])
        return DeviceSeconds(
            max(map(statistics.mean, product)),
            max(map(statistics.mean, a_pass)),
            measure_input_disk(),
            self._compare(product),
            self._compare(a_pass),
        )

    def _compare(self, seconds: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Return the speed of each device, by its number, as a part of that of the fastest one."""
        # In the best round: nothing that runs beside it makes a device faster, and a slow one is slow in all of them.
        best = list(map(min, seconds))
        numbers = self._numbers or range(len(best))
        speeds = [0.0] * (1 + max(numbers))
        for number, best_s in zip(numbers, best, strict=True):
            speeds[number] = min(best) / best_s
        return tuple(speeds)

    def _time(self, program: Callable[[jax.Array], jax.Array], size: int) -> list[list[float]]:
        """Return the seconds that a program on a square matrix of a size takes in each round, by device.

        Devices take turns: what else runs on the machine at a moment must not be taken for one of them being slow.
        """
        matrices = [jax.device_put(jnp.ones((size, size), jnp.float32), device) for device in self._devices]
        for matrix in matrices:
            program(matrix).block_until_ready()  # compiles it
        began_s = time.monotonic()
        seconds: list[list[float]] = [[] for _ in matrices]
        while time.monotonic() - began_s < MEASURE_S or len(seconds[-1]) < MIN_ROUNDS:
            for device, matrix, of_device in zip(self._devices, matrices, seconds, strict=True):
                round_s = time.monotonic()
                self._run(functools.partial(program, matrix), device).block_until_ready()
                of_device.append(time.monotonic() - round_s)
        return seconds

    def _run(self, program: Callable[[], jax.Array], device: Device) -> jax.Array:
        return program() if self._throttle is None else self._throttle.run(program, [device])
