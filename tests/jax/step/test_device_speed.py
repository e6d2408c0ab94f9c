"""A device of a host that is slow is measured slow, by its number, beside sound ones."""

import time
from pathlib import Path

import jax
import pytest

from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.failpoints import (
    ANY_STEP,
    FailPoint,
    FailPointController,
    FailPointOrder,
    FailPoints,
    SlowDeviceAction,
)
from resilient_jax.step.device_speed import DeviceSpeed
from resilient_jax.step.device_throttle import DeviceThrottle, make_throttle
from tests.support.eight_devices import eight_devices

__all__ = ["eight_devices"]
FACTOR = 20.0
NUMBERS = (0, 2, 5)
"""Of three devices on their host, whose others are out."""


class Host:
    """A worker on three devices of a host, and a campaign that slows devices down."""

    def __init__(self, work: Path) -> None:
        self._controller = FailPointController(work)
        self.throttle = DeviceThrottle(FailPoints(work, "host-0"), self.list_devices, NUMBERS)

    def list_devices(self) -> list[Device]:
        return jax.devices()[: len(NUMBERS)]

    def slow_down(self, number: int, host: str = "host-0") -> None:
        action = SlowDeviceAction(factor=FACTOR)
        self._controller.set_order(
            FailPointOrder(
                failpoint=FailPoint.ON_DEVICE, step=ANY_STEP, hosts=(host,), index=number, action=action
            )
        )

    def heal(self) -> None:
        self._controller.release()

    def has_been_slow(self) -> bool:
        return bool(self._controller.list_held_hosts())


def test_a_slow_device_is_measured_slow_by_its_number(tmp_path: Path) -> None:
    host = Host(tmp_path)
    speed = DeviceSpeed(host.list_devices, NUMBERS, host.throttle)
    host.slow_down(2)
    found = speed.measure()
    for speeds in (found.compute_speeds, found.memory_speeds):
        assert [number for number, one in enumerate(speeds) if one > 0] == list(NUMBERS)
        assert speeds[2] < 0.5
        assert speeds[2] < min(speeds[0], speeds[5])
        assert max(speeds) == 1.0


@pytest.mark.parametrize(
    ("number", "host", "is_slow"), [(5, "host-0", True), (3, "host-0", False), (5, "b", False)]
)
def test_what_is_computed_on_a_slow_device_takes_so_many_times_as_long(
    number: int, host: str, is_slow: bool, tmp_path: Path
) -> None:
    work = Host(tmp_path)
    work.slow_down(number, host)
    began_s = time.monotonic()
    assert work.throttle.run(lambda: time.sleep(0.01) or 7, work.list_devices()) == 7
    assert work.has_been_slow() is is_slow
    assert not is_slow or time.monotonic() - began_s >= FACTOR * 0.01


def test_a_device_is_as_fast_as_before_when_the_fault_is_over(tmp_path: Path) -> None:
    work = Host(tmp_path)
    work.slow_down(0)
    work.heal()
    work.throttle.run(lambda: 7, work.list_devices())
    assert not work.has_been_slow()
    assert make_throttle(None, work.list_devices) is None
