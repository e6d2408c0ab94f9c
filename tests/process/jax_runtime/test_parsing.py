"""The worker environment, the bytes that gloo publishes, and the errors that mean a lost peer: without processes."""

import socket
import struct
from typing import cast

import pytest

from resilient_jax.jax_runtime.clique_interruption import (
    UNREADABLE_VALUE,
    CliqueInterrupter,
    find_missing_keys,
    parse_rank,
)
from resilient_jax.jax_runtime.failures import FormingInterrupted, is_collective_failure
from resilient_jax.jax_runtime.gloo import GlooSockets
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError, RuntimeClient
from resilient_jax.jax_runtime.worker_environment import Platform, make_worker_environment

SERVICE = ("127.0.0.1", 1)


class Client:
    """The client of a world whose service answers the last of so many requests."""

    def __init__(self, silent: int) -> None:
        self.silent = silent
        self.is_shut = False

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        self.silent -= 1
        if self.silent >= 0:
            raise JaxRuntimeError("DEADLINE_EXCEEDED")
        return ""

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        return []

    def shutdown(self) -> None:
        self.is_shut = True


@pytest.mark.parametrize(("silent", "is_given_up"), [(0, False), (2, False), (4, True)])
def test_a_service_is_dead_when_it_has_been_silent_for_longer_than_a_busy_one(silent, is_given_up) -> None:
    client = Client(silent)
    interrupter = CliqueInterrupter(cast(RuntimeClient, client), SERVICE, GlooSockets(), "key")
    for call in range(8):  # each takes up to `PROBE_TIMEOUT_MS`
        interrupter.interrupt(call * 0.1)
    assert (interrupter.is_detached, client.is_shut) == (is_given_up, is_given_up)


FAILURES = [
    "UNKNOWN: Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer",
    "UNKNOWN: Gloo context initialization failed: basic_string::_M_create",
    "INTERNAL: NCCL operation ncclAllReduce failed: unhandled system error",
    "UNAVAILABLE: failed to connect to all addresses",
    "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:gloo/0,1/1",
    "ABORTED: communicator was aborted",
    "FAILED_PRECONDITION: Task with incarnation id 17 is not connected",  # GPU: the clique was aborted
    "FAILED_PRECONDITION: Incarnation id 17 is stale",
]
OTHERS = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1099511627776 bytes. clique",
    "INVALID_ARGUMENT: Executable expected parameter 0 of size 4 but got buffer with incompatible size 8",
    "INTERNAL: Generated function failed: CpuCallback error: ValueError: user's own",
    "UNIMPLEMENTED: nccl all-to-all",
]


@pytest.mark.parametrize("text", FAILURES)
def test_a_lost_peer_is_recognized(text: str) -> None:
    assert is_collective_failure(JaxRuntimeError(text))


@pytest.mark.parametrize("text", OTHERS)
def test_the_users_own_errors_are_not_taken_for_a_lost_peer(text: str) -> None:
    assert not is_collective_failure(JaxRuntimeError(text))


def test_an_error_caused_by_a_lost_peer_is_recognized() -> None:
    outer = ValueError("loss is not finite")
    outer.__cause__ = JaxRuntimeError(FAILURES[0])
    assert is_collective_failure(outer)
    assert is_collective_failure(ExceptionGroup("both", [KeyError("x"), FormingInterrupted("given up")]))
    assert not is_collective_failure(ValueError("gloo"))
    assert not is_collective_failure(KeyError(FAILURES[0]))


def test_the_users_flags_take_precedence_and_ours_are_added() -> None:
    found = make_worker_environment(
        platform="cpu",
        devices_per_host=None,
        cache_dir="/c",
        collective_timeout_s=2.5,
        base={"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_x=1"},
    )
    assert found["XLA_FLAGS"].split() == [
        "--xla_cpu_collective_timeout_seconds=3",
        "--xla_force_host_platform_device_count=8",
        "--xla_x=1",
    ]
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/c"
    assert found["JAX_ENABLE_PREEMPTION_SERVICE"] == "false"


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, None),
        ({"no_proxy": "a"}, None),
        ({"http_proxy": "http://p"}, "127.0.0.0/8,10.0.0.7"),
        ({"https_proxy": "http://p", "no_proxy": "a,b"}, "a,b,127.0.0.0/8,10.0.0.7"),
        (
            {"grpc_proxy": "http://p", "no_grpc_proxy": "10.0.0.7,c", "no_proxy": "a"},
            "10.0.0.7,c,127.0.0.0/8",
        ),
        ({"http_proxy": "p", "no_grpc_proxy": "127.0.0.0/8,10.0.0.7"}, None),
    ],
)
def test_a_workers_own_host_is_not_behind_a_proxy(base: dict[str, str], expected: str | None) -> None:
    found = make_worker_environment(
        platform="cpu",
        devices_per_host=None,
        cache_dir=None,
        collective_timeout_s=3.0,
        base=base,
        own_addresses=["10.0.0.7"],
    )
    assert found.get("no_grpc_proxy") == expected


def test_workers_on_gpus_have_the_same_kernels_unless_the_user_wants_the_fastest() -> None:
    def find(theirs: str) -> set[str]:
        return set(
            make_worker_environment(
                platform="gpu",
                devices_per_host=None,
                cache_dir=None,
                collective_timeout_s=3.0,
                base={"XLA_FLAGS": theirs},
            )["XLA_FLAGS"].split()
        )

    same = {"--xla_gpu_deterministic_ops=true", "--xla_gpu_enable_triton_gemm=false"}
    whole = "--xla_gpu_shard_autotuning=false"
    assert {*same, whole} <= find("")
    fastest = {"--xla_gpu_deterministic_ops=false", "--xla_gpu_enable_triton_gemm=true"}
    assert {*fastest, whole} <= find(" ".join(fastest))
    assert not same & find(" ".join(fastest))


def test_a_users_tunables_of_malloc_are_kept() -> None:
    def find(platform: Platform, base: dict[str, str]) -> str | None:
        return make_worker_environment(
            platform=platform, devices_per_host=None, cache_dir=None, collective_timeout_s=3.0, base=base
        ).get("GLIBC_TUNABLES")

    assert find("cpu", {}) == "glibc.malloc.hugetlb=1"
    assert find("gpu", {}) is None
    assert find("cpu", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) is None


@pytest.mark.parametrize(
    ("theirs", "merged"),
    [
        ("--xla_force_host_platform_device_count=8 --xla_x=1", ["--xla_x=1"]),
        ("--xla_x=1  --xla_force_host_platform_device_count=8", ["--xla_x=1"]),
        ("--xla_force_host_platform_device_count=8", []),
        ("--xla_force_host_platform_device_count_x=8", ["--xla_force_host_platform_device_count_x=8"]),
        ("", []),
    ],
)
def test_the_device_count_that_was_asked_for_takes_precedence_over_the_users_flags(
    theirs: str, merged: list[str]
) -> None:
    found = make_worker_environment(
        platform="cpu",
        devices_per_host=2,
        cache_dir=None,
        collective_timeout_s=3.0,
        base={"XLA_FLAGS": theirs},
    )
    assert found["XLA_FLAGS"].split() == [
        "--xla_cpu_collective_timeout_seconds=3",
        "--xla_force_host_platform_device_count=2",
        *merged,
    ]


def test_on_gpu_nccl_does_not_end_the_process() -> None:
    found = make_worker_environment(
        platform="gpu",
        devices_per_host=None,
        cache_dir=None,
        collective_timeout_s=60.0,
        base={"XLA_FLAGS": "--a=b"},
    )
    assert "--xla_gpu_nccl_terminate_on_error=false" in found["XLA_FLAGS"].split()
    assert found["XLA_FLAGS"].endswith("--a=b")
    assert found["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] == "1"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ("", "--xla_gpu_execution_terminate_timeout=121s"),
        ("--xla_gpu_execution_terminate_timeout=9m", "--xla_gpu_execution_terminate_timeout=9m"),
    ],
)
def test_on_gpu_a_program_that_hangs_ends_its_process_after_twice_the_collective_timeout(
    theirs: str, expected: str
) -> None:
    def find(platform: Platform) -> list[str]:
        return (
            make_worker_environment(
                platform=platform,
                devices_per_host=None,
                cache_dir=None,
                collective_timeout_s=60.1,
                base={"XLA_FLAGS": theirs},
            )
            .get("XLA_FLAGS", theirs)
            .split()
        )

    assert [flag for flag in find("gpu") if flag.startswith("--xla_gpu_execution")] == [expected]
    assert [flag for flag in find("cpu") if flag.startswith("--xla_gpu")] == theirs.split()


def test_bytes_that_gloo_publishes_are_parsed() -> None:
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", 40715) + socket.inet_aton("127.0.0.2")
    address = address.ljust(136, b"\0")
    value = (
        struct.pack("<Q", 3)
        + b"abc"
        + struct.pack("<Q", len(address))
        + address
        + struct.pack("<3Q", 6, 7, 8)
    )
    assert parse_rank(value) == (("127.0.0.2", 40715), (6, 7, 8))


@pytest.mark.parametrize(
    "value", [b"", b"\0" * 7, UNREADABLE_VALUE, struct.pack("<QQ", 0, 10**9), b"\0" * 40]
)
def test_bytes_of_an_unknown_layout_are_not_parsed(value: bytes) -> None:
    assert parse_rank(value) is None


def test_only_ranks_that_have_not_published_are_missing() -> None:
    published = {"0,1,2048": {0: b"", 2: b""}, "0,1": {0: b"", 1: b""}}
    assert find_missing_keys(published) == ["cpu:gloo/0,1,2048/1"]
