"""GPUs are read through the real binding from a real library, whose answers a test sets, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from resilient_jax.health.gpu_reading import GpuReading, GpuXid
from tests.support.fake_nvml import FakeNvml
from tests.support.patience import patience

PROGRAM = """
import sys
import msgspec
from resilient_jax.cluster.nvml_reader import NvmlReader
from resilient_jax.errors import GpusUnreadable

try:
    reader = NvmlReader(None if len(sys.argv) < 2 else sys.argv[1])
except GpusUnreadable as error:
    sys.exit(f"unreadable: {error}")
for line in sys.stdin:
    said = reader.read() if line == "read\\n" else reader.wait_xids(0.2)
    print(msgspec.json.encode([said, reader.xid_problem]).decode(), flush=True)
reader.close()
"""
GPU_IS_LOST, NOT_SUPPORTED, NO_PERMISSION, UNKNOWN, DRIVER_NOT_LOADED = 15, 3, 4, 999, 9
"""NVML's codes of errors (nvml.h)."""


class ReaderProcess:
    """A process that reads GPUs when it is told to."""

    def __init__(self, environment: Mapping[str, str], *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "ReaderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self) -> list[GpuReading]:
        return msgspec.convert(self._ask("read")[0], list[GpuReading])

    def wait_xids(self) -> tuple[list[GpuXid] | None, str]:
        said, problem = self._ask("wait")
        return msgspec.convert(said, list[GpuXid] | None), str(problem)

    def end(self) -> tuple[int, str]:
        """End the input; return the exit code and what the process wrote as errors."""
        _, errors = self._process.communicate(timeout=patience(6))
        return self._process.returncode, errors

    def _ask(self, what: str) -> list[object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._process.communicate()
        return msgspec.json.decode(line, type=list)


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path / "nvml")


def test_a_reading_has_what_nvml_answers_of_each_gpu(nvml: FakeNvml) -> None:
    nvml.answer(gpu1__temperature=91, gpu1__clock=900, gpu1__throttle=0x40, gpu1__ecc=3)
    nvml.answer(gpu1__pages_pending=1, gpu1__remap_pending=1, gpu1__remap_failed=1)
    with ReaderProcess(nvml.environment) as reader:
        first, second = reader.read()
        assert first == GpuReading(
            index=0,
            uuid="GPU-00000000-fake",
            name="NVIDIA Fake 100",
            temperature_c=41,
            clock_mhz=1980,
            max_clock_mhz=1980,
            throttle_bits=0,
            uncorrected_ecc=0,
            is_page_pending=False,
            is_remap_pending=False,
            has_remap_failed=False,
        )
        assert (second.index, second.temperature_c, second.clock_mhz) == (1, 91, 900)
        assert (second.throttle_bits, second.uncorrected_ecc) == (0x40, 3)
        assert (second.is_page_pending, second.is_remap_pending, second.has_remap_failed) == (True,) * 3
        nvml.answer(gpu0__temperature=50)
        assert reader.read()[0].temperature_c == 50
        assert reader.end() == (0, "")


def test_what_an_old_driver_lacks_is_asked_by_its_older_name_or_unknown(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path / "old", is_old_driver=True)
    nvml.answer(gpu0__throttle=0x8, gpu0__temperature=77)
    with ReaderProcess(nvml.environment) as reader:
        reading = reader.read()[0]
    assert (reading.throttle_bits, reading.temperature_c) == (0x8, 77)
    assert (reading.is_remap_pending, reading.has_remap_failed, reading.problem) == (None, None, "")


def test_what_a_gpu_does_not_support_is_unknown_and_no_problem(nvml: FakeNvml) -> None:
    nvml.answer(gpu0__ecc__error=NOT_SUPPORTED, gpu0__clock__error=UNKNOWN)
    with ReaderProcess(nvml.environment) as reader:
        reading = reader.read()[0]
    assert (reading.uncorrected_ecc, reading.clock_mhz, reading.problem) == (None, None, "")
    assert reading.temperature_c == 41


def test_a_gpu_that_falls_off_the_bus_keeps_its_name_and_has_a_problem(nvml: FakeNvml) -> None:
    with ReaderProcess(nvml.environment) as reader:
        assert [reading.problem for reading in reader.read()] == ["", ""]
        nvml.answer(gpu1__error=GPU_IS_LOST)
        first, second = reader.read()
    assert (first.problem, second.problem) == ("", "GPU is lost")
    assert (second.index, second.uuid, second.temperature_c) == (1, "GPU-00000001-fake", None)


def test_a_gpu_that_is_lost_from_the_start_is_listed(nvml: FakeNvml) -> None:
    nvml.answer(gpu1__handle__error=GPU_IS_LOST)
    with ReaderProcess(nvml.environment) as reader:
        assert [(reading.index, reading.problem) for reading in reader.read()] == [
            (0, ""),
            (1, "GPU is lost"),
        ]


def test_visible_devices_are_indexes_or_beginnings_of_uuids(nvml: FakeNvml) -> None:
    nvml.answer(count=4)
    cases = {"2,0": [2, 0], "GPU-00000003,1": [3, 1], "1,-1,0": [1], "": []}
    for visible, indexes in cases.items():
        with ReaderProcess(nvml.environment, visible) as reader:
            assert [reading.index for reading in reader.read()] == indexes, visible


def test_indexes_count_only_gpus_that_this_job_may_use(nvml: FakeNvml) -> None:
    nvml.answer(count=3, gpu0__handle__error=NO_PERMISSION)
    with ReaderProcess(nvml.environment, "0,1") as reader:
        assert [reading.index for reading in reader.read()] == [1, 2]


def test_a_visible_device_that_nvml_does_not_list_is_a_problem(nvml: FakeNvml) -> None:
    for visible in ("0,7", "0,GPU-feed", "0,MIG-feed"):
        with ReaderProcess(nvml.environment, visible) as reader:
            there, missing = reader.read()
        assert (there.index, there.problem) == (0, "")
        assert (missing.index, missing.uuid) == (-1, visible.partition(",")[2])
        assert missing.problem.startswith("CUDA_VISIBLE_DEVICES names it")


def test_an_xid_is_heard_with_its_gpu(nvml: FakeNvml) -> None:
    with ReaderProcess(nvml.environment) as reader:
        assert reader.wait_xids() == ([], "")
        nvml.report_xid(1, 79)
        assert reader.wait_xids() == ([GpuXid(index=1, code=79)], "")
        assert reader.wait_xids() == ([], "")


def test_an_xid_of_a_gpu_that_workers_do_not_see_is_not_heard(nvml: FakeNvml) -> None:
    with ReaderProcess(nvml.environment, "1") as reader:
        reader.read()
        nvml.report_xid(0, 79)
        assert reader.wait_xids() == ([], "")
        nvml.report_xid(1, 48)
        assert reader.wait_xids() == ([GpuXid(index=1, code=48)], "")


def test_where_no_gpu_reports_xids_it_says_so_and_reads_on(nvml: FakeNvml) -> None:
    nvml.answer(gpu0__events__error=NOT_SUPPORTED, gpu1__events__error=NOT_SUPPORTED)
    with ReaderProcess(nvml.environment) as reader:
        assert reader.wait_xids() == (None, "no GPU reports XIDs: Not Supported (GPU 1)")
        assert len(reader.read()) == 2


def test_a_wait_that_fails_is_not_repeated(nvml: FakeNvml) -> None:
    with ReaderProcess(nvml.environment) as reader:
        nvml.answer(wait__error=GPU_IS_LOST)
        assert reader.wait_xids() == ([], "NVML no longer waits for XIDs: GPU is lost")
        assert reader.wait_xids()[0] is None


def test_without_driver_library_or_binding_the_error_says_which_and_what_to_do(
    nvml: FakeNvml, tmp_path: Path
) -> None:
    nvml.answer(init__error=DRIVER_NOT_LOADED)
    with ReaderProcess(nvml.environment) as reader:
        code, said = reader.end()
    assert code == 1
    assert "found no usable NVML (Driver Not Loaded), expected libnvidia-ml.so.1" in said
    (tmp_path / "pynvml.py").write_text("raise ImportError('as if it were not installed')\n")
    with ReaderProcess({**nvml.environment, "PYTHONPATH": str(tmp_path)}) as reader:
        code, said = reader.end()
    assert code == 1
    assert "found no module pynvml (as if it were not installed)" in said
    assert "pip install 'resilient_jax[gpu-health]'" in said


def test_a_machine_without_the_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")  # found before one of this machine's
    with ReaderProcess({"LD_LIBRARY_PATH": str(tmp_path)}) as reader:
        code, said = reader.end()
    assert code == 1
    assert "found no usable NVML (NVML Shared Library Not Found)" in said
