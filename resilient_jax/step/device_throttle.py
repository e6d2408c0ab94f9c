"""Makes a device slow where a chaos campaign has ordered it: what is computed on it takes so many times as long."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.failpoints import FailPoints
from resilient_jax.step.microbatch_accumulator import ComputeFunction, Microbatch

Result = TypeVar("Result")


class DeviceThrottle:
    """Holds what computes on a slow device for as long as that device would need more than a sound one.

    The time is real: the thread that computes does not go on until it is over. So a replica is as slow as the slowest
    of its devices, a step as slow as that replica, and a measurement finds the device slow. Additional work instead
    would slow all devices of the process on CPU, which share its cores.

    Args:
        failpoints: where campaigns give their orders to this worker.
        list_devices: gives the devices of this worker.
        numbers: which of the host's devices these are; (): they are all that it has.
    """

    def __init__(
        self,
        failpoints: FailPoints,
        list_devices: Callable[[], Sequence[Device]],
        numbers: Sequence[int] = (),
    ) -> None:
        self._failpoints = failpoints
        self._list_devices = list_devices
        self._numbers = tuple(numbers)

    def run(self, compute: Callable[[], Result], devices: Iterable[Device]) -> Result:
        """Return what is computed on these devices, later if one of them is slow."""
        local = self._list_devices()
        numbers = dict(zip(local, self._numbers or range(len(local)), strict=True))
        factor = self._failpoints.find_slow_factor({numbers[one] for one in devices if one in numbers})
        if factor <= 1:
            return compute()
        began_s = time.monotonic()
        result = jax.block_until_ready(compute())
        time.sleep((factor - 1) * (time.monotonic() - began_s))
        return result

    def wrap(self, compute_fn: ComputeFunction[Any]) -> ComputeFunction[Any]:
        """Return a function that computes a microbatch, later if a device of its replica is slow."""

        def compute(microbatch: Microbatch) -> Any:  # noqa: ANN401 - a tree
            return self.run(lambda: compute_fn(microbatch), microbatch.replica.mesh.devices.flat)

        return compute


def make_throttle(
    failpoints: FailPoints | None, list_devices: Callable[[], Sequence[Device]], numbers: Sequence[int] = ()
) -> DeviceThrottle | None:
    """Return the throttle of a worker; None where nobody can order a slow device."""
    return None if failpoints is None else DeviceThrottle(failpoints, list_devices, numbers)
