"""The doctor's checks, each with what it would find on other machines, and the table that a person reads."""

import importlib.metadata
import io
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from resilient_jax.cli.doctor import MAX_WIDTH, print_examination
from resilient_jax.doctor.check_result import CheckResult, CheckVerdict, Examination
from resilient_jax.doctor.examination import choose_platform, list_devices
from resilient_jax.doctor.experiments import Experiments
from resilient_jax.doctor.gpu_health_check import check_gpu_health
from resilient_jax.doctor.gpu_inventory import GpuInventory, check_gpus, parse_gpu
from resilient_jax.doctor.installed_versions import check_versions, find_bounds, is_within
from resilient_jax.doctor.network_checks import check_host_name, check_loopback, judge_ports
from resilient_jax.doctor.system_limits import (
    MIB,
    check_system_calls,
    judge_descriptors,
    judge_disk,
    judge_memory,
    judge_processes,
    judge_shared_memory,
)
from resilient_jax.doctor.xla_flags import check_environment
from resilient_jax.health.gpu_reading import GpuReading
from resilient_jax.jax_runtime import TESTED_VERSIONS
from resilient_jax.jax_runtime.worker_environment import Platform

OK, WARNING, PROBLEM, NOT_RUN = CheckVerdict
REQUIREMENTS = ("jax<0.13,>=0.10", "flax>=0.12", "optax>=0.2.6", "jax[cuda12]<0.13; extra == 'cuda12'")
GPU_LINE = "1, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default, Disabled"
GOOD = {
    "jax": TESTED_VERSIONS[0],
    "jaxlib": TESTED_VERSIONS[0],
    "flax": "0.12.8",
    "optax": "0.2.8",
    "orbax-checkpoint": "0.12.8",
    "jax-cuda12-plugin": TESTED_VERSIONS[0],
    "nvidia-nccl-cu12": "2.27.5",
}


def find(results: Sequence[CheckResult], name: str) -> CheckResult:
    (found,) = (result for result in results if result.name == name)
    return found


def find_package(name: str, platform: Platform = "gpu", **changes: str | None) -> CheckResult:
    installed = {**GOOD, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return find(check_versions(platform, installed.get, REQUIREMENTS), name)


def test_versions_that_fit_are_ok() -> None:
    results = check_versions("gpu", GOOD.get, REQUIREMENTS)
    assert [result.verdict for result in results] == [OK] * 8
    assert [result.name for result in results][:3] == ["python", "jax", "jaxlib"]


def test_a_package_that_is_missing_or_out_of_bounds_is_a_problem_with_the_command_that_mends_it() -> None:
    for found in (find_package("flax", flax=None), find_package("flax", flax="0.11.2")):
        assert (found.verdict, found.remedy) == (PROBLEM, "pip install 'flax>=0.12'")
    assert find_package("jax", jax="0.13.0", jaxlib="0.13.0").verdict is PROBLEM
    assert find_package("jax", jax="0.11.1", jaxlib="0.11.1").verdict is WARNING, "not a tested one"
    assert find_package("jaxlib", jaxlib="0.11.0").remedy == f"pip install jaxlib=={TESTED_VERSIONS[0]}"


def test_the_cuda_plugin_and_nccl_matter_on_gpus_alone() -> None:
    assert find_package("CUDA plugin", jax_cuda12_plugin=None).verdict is PROBLEM
    assert find_package("CUDA plugin", jax_cuda12_plugin="0.11.0").verdict is WARNING
    assert find_package("CUDA plugin", "cpu", jax_cuda12_plugin=None).verdict is NOT_RUN
    for version, verdict in {"2.28.2": OK, "2.28.3": WARNING, "2.28.8.1": WARNING, "2.28.9": OK}.items():
        assert find_package("NCCL", nvidia_nccl_cu12=version).verdict is verdict, version
    assert find_package("NCCL", nvidia_nccl_cu12=None).verdict is WARNING


def test_bounds_come_from_this_packages_own_metadata() -> None:
    requirements = importlib.metadata.requires("resilient_jax") or []
    assert is_within(TESTED_VERSIONS[0], find_bounds("jax", requirements))
    assert is_within("0.12.8", find_bounds("orbax-checkpoint", requirements))
    assert not is_within("0.13", find_bounds("jax", requirements))
    assert find_bounds("no-such-package", requirements) == ""


def check_flags(
    platform: Platform, environment: dict[str, str], unknown: str | None = ""
) -> list[CheckResult]:
    return check_environment(platform, environment, lambda _: unknown)


def test_a_flag_that_xla_does_not_know_is_a_problem() -> None:
    assert find(check_flags("cpu", {}), "flags known to XLA").verdict is OK
    found = find(check_flags("gpu", {}, "--xla_gpu_old"), "flags known to XLA")
    assert (found.verdict, "XLA refuses --xla_gpu_old" in found.found) == (PROBLEM, True)
    assert find(check_flags("cpu", {}, None), "flags known to XLA").verdict is PROBLEM


def test_xla_is_asked_about_the_flags_of_gpu_workers_also_on_cpu() -> None:
    asked: list[str] = []
    check_environment("cpu", {"XLA_FLAGS": "--mine=1"}, lambda found: asked.append(found["XLA_FLAGS"]) or "")
    (flags,) = asked
    assert "--xla_gpu_execution_terminate_timeout=" in flags
    assert flags.endswith("--mine=1")


def test_what_contradicts_a_gpu_worker_in_the_environment_is_named() -> None:
    theirs = {"XLA_FLAGS": "--xla_gpu_nccl_async_execution=false --other", "JAX_PLATFORMS": "cpu"}
    results = check_flags("gpu", theirs)
    found = find(results, "settings for survival")
    assert (found.verdict, "--xla_gpu_nccl_async_execution=false" in found.found) == (WARNING, True)
    assert find(results, "JAX_PLATFORMS").verdict is PROBLEM
    assert [result.verdict for result in check_flags("cpu", theirs)] == [OK] * 4
    assert find(check_flags("gpu", {"JAX_PLATFORMS": "cuda,cpu"}), "JAX_PLATFORMS").verdict is OK


def test_a_proxy_is_named_and_no_obstacle() -> None:
    found = find(check_flags("cpu", {"https_proxy": "http://proxy:3128"}), "proxies")
    assert (found.verdict, found.found) == (OK, "https_proxy; a job's own connections use none")
    assert find(check_flags("cpu", {}), "proxies").found == "none"


def test_limits_are_judged_by_what_a_worker_needs() -> None:
    assert judge_memory(1000 * MIB, None).verdict is WARNING
    assert judge_memory(64_000 * MIB, 512 * MIB).verdict is WARNING, "the container's limit counts"
    assert judge_memory(64_000 * MIB, 32_000 * MIB).verdict is OK
    assert judge_shared_memory("gpu", 64 * MIB).verdict is WARNING
    assert judge_shared_memory("cpu", 64 * MIB).verdict is OK, "snapshots need none of it"
    assert judge_descriptors((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).verdict is OK
    assert judge_descriptors((1024, 65_536)).remedy == "ulimit -n 65536"
    assert judge_descriptors((128, 128)).verdict is PROBLEM
    assert "limits.conf" in judge_descriptors((128, 128)).remedy
    assert judge_processes(200).verdict is WARNING
    assert judge_processes(resource.RLIM_INFINITY).verdict is OK
    assert judge_disk(Path("/data"), 3 * MIB).verdict is WARNING


def test_what_an_agent_needs_works_on_this_machine() -> None:
    assert check_system_calls().verdict is OK
    assert check_loopback().verdict is OK
    assert check_host_name("no-such-host.invalid").verdict is WARNING


def test_a_narrow_range_of_ports_is_a_warning() -> None:
    assert judge_ports("32768\t60999\n").verdict is OK
    assert judge_ports("60000 60999").verdict is WARNING
    assert judge_ports("").verdict is NOT_RUN


def make_inventory(count: int = 2, topology: str = "", **changes: str | int) -> GpuInventory:
    gpu = parse_gpu(GPU_LINE)
    assert (gpu.index, gpu.name, gpu.total_mib, gpu.driver) == (
        1,
        "NVIDIA H100 80GB HBM3",
        81559,
        "550.54.15",
    )
    values = {field: getattr(gpu, field) for field in gpu.__struct_fields__}
    return GpuInventory(
        gpus=tuple(type(gpu)(**{**values, **changes, "index": index}) for index in range(count)),
        topology=topology,
    )


def test_gpus_are_judged_by_what_nvidia_smi_lists() -> None:
    topology = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
    results = check_gpus("gpu", make_inventory(topology=topology))
    assert [result.verdict for result in results] == [OK] * 5
    assert (find(results, "links").found, find(results, "links").details) == ("NVLink", topology)
    assert find(check_gpus("gpu", make_inventory(driver="470.1")), "driver").verdict is PROBLEM
    exclusive = find(check_gpus("gpu", make_inventory(compute_mode="Exclusive_Process")), "modes")
    assert (exclusive.verdict, "nvidia-smi -c DEFAULT" in exclusive.remedy) == (WARNING, True)
    assert find(check_gpus("gpu", make_inventory(mig_mode="Enabled")), "modes").verdict is WARNING
    assert find(check_gpus("gpu", make_inventory(used_mib=60_000)), "in use").verdict is WARNING
    plain = topology.replace("NV18", "PHB")
    assert find(check_gpus("gpu", make_inventory(topology=plain)), "links").found == "PCIe only"
    with pytest.raises(ValueError, match="expected the fields index, name"):
        parse_gpu("0, NVIDIA")


def test_no_gpu_is_a_problem_only_where_one_is_asked_for() -> None:
    missing = GpuInventory(is_installed=False, error="nvidia-smi is not installed")
    assert [result.verdict for result in check_gpus("gpu", missing)] == [PROBLEM]
    assert [result.verdict for result in check_gpus("cpu", missing)] == [NOT_RUN]
    assert (choose_platform(missing), choose_platform(make_inventory())) == ("cpu", "gpu")


def test_experiments_use_the_gpus_that_are_visible() -> None:
    inventory = make_inventory(4)
    assert list_devices("gpu", inventory, {}) == ("0", "1", "2", "3")
    assert list_devices("gpu", inventory, {"CUDA_VISIBLE_DEVICES": "2, GPU-5ab"}) == ("2", "GPU-5ab")
    assert list_devices("gpu", inventory, {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert list_devices("gpu", make_inventory(1), {}) == ("0", "0", "0"), "processes share the only one"
    assert list_devices("gpu", inventory, {"CUDA_VISIBLE_DEVICES": "3"}) == ("3", "3", "3")
    assert len(list_devices("cpu", inventory, {"CUDA_VISIBLE_DEVICES": ""})) == 3


def test_experiments_are_not_made_with_one_device_and_it_is_said() -> None:
    results = list(Experiments("gpu", ["0"], {}).run())
    assert [result.name for result in results] == [
        "world",
        "collective abort",
        "rejoin",
        "live nodes",
        "clear_backends",
    ]
    assert {(r.verdict, r.found) for r in results} == {(NOT_RUN, "devices: found 1, expected two or more")}


def test_the_table_shows_every_check_with_its_remedy_in_100_columns() -> None:
    results = (
        CheckResult(group="versions", name="jax", verdict=OK, found="0.10.2"),
        CheckResult(
            group="limits", name="disk", verdict=WARNING, found="3 MiB [in] /data", remedy="free " * 40
        ),
        CheckResult(group="limits", name="calls", verdict=PROBLEM, found="x" * 300, remedy="Linux 5.3"),
        CheckResult(group="GPUs", name="links", verdict=NOT_RUN, found="one GPU", details="GPU0 [X]"),
    )
    shown = io.StringIO()
    print_examination(Console(file=shown, width=MAX_WIDTH), Examination(platform="gpu", results=results))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= MAX_WIDTH
    for word in ("jax", "3 MiB [in] /data", "-> free", "-> Linux 5.3", "not run", "GPU0 [X]"):
        assert word in text
    assert text.count("x") >= 300, "nothing is cut off"
    assert "1 ok, 1 warning, 1 problem, 1 not run" in text


def test_each_check_has_a_name_of_its_own_and_every_trouble_a_remedy() -> None:
    results = [
        *check_versions("gpu", {}.get, REQUIREMENTS),
        *check_gpus("gpu", make_inventory(compute_mode="Prohibited", driver="1", used_mib=9999)),
        *check_flags("gpu", {"JAX_PLATFORMS": "cpu", "http_proxy": "p"}, "--old"),
    ]
    names = [(result.group, result.name) for result in results]
    assert len(names) == len(set(names))
    assert [r.name for r in results if r.verdict in (WARNING, PROBLEM) and not r.remedy] == []


def test_the_health_of_gpus_is_judged_as_an_agent_does() -> None:
    healthy = GpuReading(index=0, temperature_c=61, throttle_bits=0x4)
    hot = GpuReading(index=1, temperature_c=91, throttle_bits=0x40)
    broken = GpuReading(index=2, has_remap_failed=True)
    cases = {(healthy,): OK, (healthy, hot): WARNING, (healthy, hot, broken): PROBLEM}
    assert {readings: check_gpu_health(readings).verdict for readings in cases} == cases
    found = check_gpu_health((healthy, hot, broken))
    assert found.found == (
        "GPU 2: a row of its memory could not be replaced: the vendor exchanges such GPUs; "
        "GPU 1: hardware thermal slowdown, 91 C"
    )
    assert found.figures == {"hottest_c": 91.0}
    unwatched = check_gpu_health("found no module pynvml")
    assert unwatched.verdict is WARNING
    assert "gpu-health" in unwatched.remedy
