"""Which GPUs each host of a local job gets, and how hosts share one."""

import pytest

from resilient_jax.jax_runtime.local_gpus import (
    has_shared_gpus,
    list_gpu_shares,
    make_gpu_share_environment,
)


def test_hosts_get_different_gpus_where_there_are_enough() -> None:
    shares = list_gpu_shares(("0", "1", "2", "3", "4"), num_hosts=2, gpus_per_host=2)
    assert shares == [("0", "1"), ("2", "3")]
    assert not has_shared_gpus(shares)
    assert make_gpu_share_environment("host-1", shares, 1, {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_hosts_share_gpus_evenly_where_there_are_fewer() -> None:
    shares = list_gpu_shares(("0", "1"), num_hosts=4, gpus_per_host=1)
    assert shares == [("0",), ("1",), ("0",), ("1",)]
    assert has_shared_gpus(shares)
    assert list_gpu_shares(("0", "1", "2"), num_hosts=2, gpus_per_host=2) == [("0", "1"), ("2", "0")]


def test_nccl_takes_hosts_that_share_a_gpu_for_machines() -> None:
    shares = list_gpu_shares(("GPU-5ab",), num_hosts=3, gpus_per_host=1)
    found = [make_gpu_share_environment(f"host-{index}", shares, index, {}) for index in range(3)]
    assert len({environment["NCCL_HOSTID"] for environment in found}) == 3
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in found} == {"GPU-5ab"}
    assert {environment["XLA_PYTHON_CLIENT_PREALLOCATE"] for environment in found} == {"false"}
    assert {environment["NCCL_SOCKET_IFNAME"] for environment in found} == {"lo"}


def test_between_network_namespaces_nccl_finds_the_interface_itself() -> None:
    found = make_gpu_share_environment("host-0", [("4",), ("4",)], 0, {}, is_on_loopback=False)
    assert "NCCL_SOCKET_IFNAME" not in found


def test_what_the_user_has_set_is_kept_except_for_the_gpus() -> None:
    theirs = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "CUDA_VISIBLE_DEVICES": "4",
    }
    found = make_gpu_share_environment("host-0", [("4",), ("4",)], 0, theirs)
    assert found.keys() == {"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_IB_DISABLE"}


@pytest.mark.parametrize("gpus_per_host", [0, 3])
def test_a_host_needs_gpus_of_its_own(gpus_per_host: int) -> None:
    with pytest.raises(
        ValueError, match=f"found {gpus_per_host} GPUs for each host, expected 1 to 2, as many as there are"
    ):
        list_gpu_shares(("0", "1"), num_hosts=1, gpus_per_host=gpus_per_host)
