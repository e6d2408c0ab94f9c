"""Which devices a host uses when some are out, and what its workers see of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.cluster.device_selection import count_devices, list_named_gpus, restrict_environment
from resilient_jax.cluster.host_devices import HostDevices
from resilient_jax.config import JobConfig
from resilient_jax.ids import HostName
from resilient_jax.policy.devices_after_loss import select_devices
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord
from tests.support.agent_parts import make_agent_settings

FLAGS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3 --other=1"}


@given(st.integers(1, 16), st.sets(st.integers(0, 15)), st.sampled_from(["even", "all", "host"]))
def test_no_lost_device_is_used_and_meshes_still_fit(num_devices: int, lost: set[int], after_loss) -> None:
    used = select_devices(num_devices, lost, after_loss)
    left = set(range(num_devices)) - lost
    assert set(used) <= left
    assert list(used) == sorted(set(used))
    if len(left) == num_devices or after_loss == "all":
        assert set(used) == left
    elif after_loss == "host":
        assert used == ()
    else:
        larger = range(len(used) + 1, len(left) + 1)
        assert not used or num_devices % len(used) == 0
        assert all(num_devices % size for size in larger), "no more of them divide the number"


@given(st.integers(1, 16), st.sets(st.integers(0, 15)), st.integers(0, 15))
def test_another_loss_never_leaves_more_devices(num_devices: int, lost: set[int], another: int) -> None:
    for after_loss in ("even", "all", "host"):
        now, then = (select_devices(num_devices, gone, after_loss) for gone in (lost, {*lost, another}))
        assert len(then) <= len(now)


@pytest.mark.parametrize(
    ("environment", "given_count", "names", "expected"),
    [
        (FLAGS, None, (), 3),
        (FLAGS, 2, (), 2),
        ({"JAX_PLATFORMS": "cpu"}, None, (), 1),
        ({"JAX_PLATFORMS": "cuda,cpu"}, None, ("0", "1"), 2),
        ({}, 4, (), None),
    ],
    ids=["flag", "told", "one", "GPUs", "unknown"],
)
def test_the_devices_of_a_host_are_known_without_jax(environment, given_count, names, expected) -> None:
    assert count_devices(environment, given_count, names) == expected


def test_a_worker_sees_the_devices_that_are_left() -> None:
    cpu = restrict_environment(FLAGS, (0, 2), ())
    assert cpu["XLA_FLAGS"].split() == ["--xla_force_host_platform_device_count=2", "--other=1"]
    gpu = restrict_environment({"A": "b"}, (0, 2), ("GPU-a", "GPU-b", "GPU-c"))
    assert gpu == {"A": "b", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c"}


def test_parts_of_gpus_are_not_counted() -> None:
    assert list_named_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}) == ()
    assert list_named_gpus({}) == ()


def test_workers_change_only_if_they_use_other_devices() -> None:
    settings = make_agent_settings(Path("job.py"), JobConfig(devices_after_loss="even"))
    settings.environment.update({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS["XLA_FLAGS"].replace("=3", "=4")})
    devices = HostDevices(settings)

    def record(device: int) -> dict[int, DeviceQuarantineRecord]:
        found = DeviceQuarantineRecord(
            host=HostName("host-0"), device=device, reason="XID 79", since_wall_s=0.0, until_wall_s=1.0
        )
        return {device: found}

    assert devices.take_out(record(0))
    assert (devices.used, devices.num_used, devices.settings.devices_per_host) == (
        (1, 2),
        2,
        2,
    )
    assert not devices.take_out(record(0) | record(3)), "device 3 stood by"
    assert not devices.take_out(record(0) | record(1) | record(2) | record(3)), "none is left"
    assert devices.take_out({})
    assert (devices.settings, devices.num_used) == (settings, 0)


def test_a_gpu_is_found_by_its_uuid_when_numbers_have_changed() -> None:
    settings = make_agent_settings(Path("job.py"), JobConfig())
    settings.environment.update({"JAX_PLATFORMS": "cuda,cpu"})
    devices = HostDevices(settings)

    def record(uuid: str) -> DeviceQuarantineRecord:
        return DeviceQuarantineRecord(
            host=HostName("host-0"), device=1, reason="XID 79", since_wall_s=0.0, until_wall_s=1.0, uuid=uuid
        )

    devices.gpu_names = ("GPU-c", "GPU-a")
    assert devices.locate(record("GPU-c")) == 0
    assert devices.locate(record("GPU-b")) is None, "it is gone, and GPU-a is well"
    assert devices.locate(record("")) == 1
    devices.gpu_names = ("0", "1")
    assert devices.locate(record("GPU-b")) == 1, "nobody knows better"
