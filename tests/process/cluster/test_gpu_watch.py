"""An agent and the GPUs of its host: one that is unfit keeps it from joining, one that fails takes it out."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import read_job_report
from resilient_jax.cluster.run_directory import HostLog, JobContact, make_log_path
from resilient_jax.errors import ExitCode
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord
from resilient_jax.telemetry.event_log import read_events
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.support.agents import TOKEN, HandStartedAgent, run_command, served_store
from tests.support.fake_nvml import FakeNvml
from tests.support.patience import patience, wait_until

HOST = "host-0"
STUB = """
import json, os, pathlib, time
written = pathlib.Path(__file__).with_name(f"environment-{os.getpid()}")
written.with_suffix(".new").write_text(json.dumps(dict(os.environ)))
written.with_suffix(".new").rename(written)
mark = pathlib.Path(__file__).with_name("fail")
while True:
    time.sleep(0.02)
    if mark.exists():
        mark.unlink()
        raise RuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")
"""
GPU_IS_LOST, DRIVER_NOT_LOADED = 15, 9
THERMAL = 0x40


class GpuHost:
    """One host with two GPUs, whose worker never gets to `rj.run`."""

    def __init__(self, work: Path, store: str, job: str) -> None:
        self.work = work
        self.nvml = FakeNvml(work / "nvml")
        self._where = ("--store", store, "--job", job)
        self._contact = JobContact(job=job, store=store, token=TOKEN, launcher_pid=os.getpid())
        (work / "stub.py").write_text(STUB)

    def start(
        self,
        *,
        platform: str = "gpu",
        gpu_health: str = "act",
        after_loss: str = "host",
        max_restarts: int = 5,
        is_forked: bool = False,
        environment: dict[str, str] | None = None,
    ) -> HandStartedAgent:
        """Start the agent; a zygote, from which a worker `is_forked`, imports JAX, and the script needs none of it."""
        config = self.work / "job.toml"
        config.write_text(
            f'gpu_health = "{gpu_health}"\ndevices_after_loss = "{after_loss}"\nlease_ttl_s = 60.0\n'
            f"restart_backoff_s = 0.0\nmax_restarts = {max_restarts}\n"
        )
        options = [
            "--host-name",
            HOST,
            "--num-hosts",
            "1",
            "--run-dir",
            str(self.work),
            "--config",
            str(config),
            "--zygote" if is_forked else "--no-zygote",
        ]
        return HandStartedAgent(
            [*self._where, *options, "--platform", platform, str(self.work / "stub.py")],
            self.work / "agent.out",
            environment={**self.nvml.environment, **(environment or {})},
        )

    def events(self, *kinds: EventKind) -> list[Event]:
        path = make_log_path(self.work, HOST, HostLog.EVENTS)
        return [event for event in read_events(path) if event.kind in kinds] if path.exists() else []

    def wait_event(self, kind: EventKind, num: int = 1) -> Event:
        wait_until(f"{num} of {kind}", lambda: len(self.events(kind)) >= num)
        return self.events(kind)[num - 1]

    def status(self) -> HostStatus | None:
        hosts = asyncio.run(read_job_report(self._contact)).hosts
        return hosts[0] if hosts else None

    def quarantine(self) -> list[str]:
        return [record.reason for record in asyncio.run(read_job_report(self._contact)).quarantine]

    def device_quarantine(self) -> tuple[DeviceQuarantineRecord, ...]:
        return asyncio.run(read_job_report(self._contact)).device_quarantine

    def try_hosts(self, *words: str) -> tuple[int, str]:
        code, said = run_command(["hosts", *self._where, *words], {TOKEN_VARIABLE: TOKEN})
        return code, " ".join(said.split())

    def run_hosts(self, *words: str) -> str:
        code, said = run_command(["hosts", *self._where, *words], {TOKEN_VARIABLE: TOKEN})
        assert code == 0, said
        return said

    def wait_worker(self) -> int:
        """Return the process of the worker, once one runs."""
        found: list[int] = []

        def runs() -> bool:
            worker = status.worker if (status := self.status()) is not None else None
            found[:] = [worker.pid] if worker is not None and worker.exit_code is None else []
            return bool(found)

        wait_until("a worker", runs)
        return found[0]

    def show_status(self) -> str:
        code, shown = run_command(["status", *self._where], {TOKEN_VARIABLE: TOKEN, "COLUMNS": "300"})
        assert code == 0, shown
        return shown


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with served_store() as address:
        yield address


_jobs = itertools.count()
"""One for each test: all share a store."""


@pytest.fixture
def host(tmp_path: Path, store: str) -> GpuHost:
    return GpuHost(tmp_path, store, f"gpus-{next(_jobs)}")


def read_environment(host: GpuHost) -> dict[str, str]:
    """Return the variables that the script of the present worker found."""
    found: list[dict[str, str]] = []

    def has_begun() -> bool:
        with contextlib.suppress(FileNotFoundError):
            found[:] = [json.loads((host.work / f"environment-{host.wait_worker()}").read_text())]
        return bool(found)

    wait_until("a worker whose script has begun", has_begun)
    return found[0]


def read_visible(host: GpuHost) -> str:
    """Return which GPUs the worker sees."""
    return read_environment(host)["CUDA_VISIBLE_DEVICES"]


def test_a_gpu_that_fails_is_left_out_and_its_host_goes_on_until_it_is_cleared(host: GpuHost) -> None:
    with host.start(after_loss="even", max_restarts=0, is_forked=True) as agent:
        before = host.wait_worker()
        host.nvml.report_xid(0, 79)
        wait_until("another worker", lambda: host.wait_worker() != before)
        assert read_visible(host) == "GPU-00000001-fake"
        assert host.quarantine() == []
        wait_until("the record", lambda: bool(host.device_quarantine()))
        (record,) = host.device_quarantine()
        assert (record.device, record.host) == (0, HOST)
        assert "GPU 0 (GPU-00000000-fake): the driver reported XID 79" in record.reason
        changed = host.wait_event(EventKind.DEVICES_CHANGED)
        assert (changed.detail["devices"], changed.detail["num_devices"]) == ("1", 2)
        host.wait_event(EventKind.DEVICE_QUARANTINED)
        shown = host.show_status()
        assert "host-0:0: device in quarantine for" in shown
        assert "trains on 1 of 2 devices" in shown
        without = host.wait_worker()
        host.run_hosts("clear", "host-0:0")
        wait_until("a worker with both", lambda: host.wait_worker() != without)
        assert host.wait_event(EventKind.DEVICES_CHANGED, num=2).detail["why"] == "a device is back"
        assert host.device_quarantine() == ()
        assert len(host.events(EventKind.GPU_FAILED)) == 1
        assert agent.interrupt() == ExitCode.INTERRUPTED


@pytest.mark.parametrize("agrees", [False, True])
def test_a_device_that_an_error_blames_is_out_only_if_nvml_agrees(host: GpuHost, *, agrees: bool) -> None:
    with host.start(after_loss="even") as agent:
        before = host.wait_worker()
        host.nvml.answer(gpu0__remap_failed=int(agrees))
        (host.work / "fail").touch()
        wait_until("another worker", lambda: host.wait_worker() != before)
        assert "CUDA_ERROR_LAUNCH_FAILED" in str(host.wait_event(EventKind.GPU_SUSPECTED).detail["error"])
        if agrees:
            wait_until("the record", lambda: bool(host.device_quarantine()))
        else:
            assert host.device_quarantine() == ()
        assert agent.interrupt() == ExitCode.INTERRUPTED


def test_a_host_whose_last_gpu_fails_is_taken_out(host: GpuHost) -> None:
    with host.start(after_loss="even") as agent:
        before = host.wait_worker()
        host.nvml.report_xid(1, 79)
        wait_until("another worker", lambda: host.wait_worker() != before)
        host.nvml.report_xid(0, 95)
        wait_until("the host's quarantine", lambda: bool(host.quarantine()))
        (reason,) = host.quarantine()
        assert "GPU 0 (GPU-00000000-fake): the driver reported XID 95" in reason
        assert agent.interrupt() == ExitCode.INTERRUPTED


def test_a_host_joins_without_an_unfit_gpu_and_an_agent_that_follows_knows_it(host: GpuHost) -> None:
    host.nvml.answer(gpu1__remap_failed=1)
    with host.start(after_loss="all") as agent:
        assert read_visible(host) == "GPU-00000000-fake"
        wait_until("the record", lambda: len(host.device_quarantine()) == 1)
        assert agent.interrupt() == ExitCode.INTERRUPTED
    host.nvml.answer(gpu1__remap_failed=0)
    with host.start(after_loss="all") as agent:
        wait_until("another agent's worker", lambda: len(host.events(EventKind.WORKER_STARTED)) == 2)
        assert read_visible(host) == "GPU-00000000-fake"
        assert agent.interrupt() == ExitCode.INTERRUPTED


def test_an_operator_takes_a_device_out_and_a_number_that_is_none_is_refused(host: GpuHost) -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    with host.start(platform="cpu", after_loss="even", environment=flags) as agent:
        before = host.wait_worker()
        host.run_hosts("drain", "host-0:3", "--for", "600")
        wait_until("another worker", lambda: host.wait_worker() != before)
        assert "--xla_force_host_platform_device_count=2" in read_environment(host)["XLA_FLAGS"]
        assert "host-0:3: for " in host.run_hosts("list")
        before = host.wait_worker()
        code, said = host.try_hosts("drain", "host-0:4")
        assert code != 0
        assert "found no such device, expected a number below 4" in said
        assert host.wait_worker() == before
        assert host.quarantine() == []
        assert agent.interrupt() == ExitCode.INTERRUPTED


def test_a_host_with_an_unfit_gpu_does_not_join(host: GpuHost) -> None:
    host.nvml.answer(gpu1__remap_failed=1)
    with host.start() as agent:
        assert agent.wait() == ExitCode.JOIN_REFUSED
        said = agent.output()
    assert (
        "host host-0 does not join: GPU 1 (GPU-00000001-fake): a row of its memory could not be replaced"
        in said
    )
    assert "Traceback" not in said
    failed = host.wait_event(EventKind.GPU_FAILED)
    assert (failed.detail["what"], failed.detail["is_worker_ended"]) == ("row remap failure", False)
    assert host.events(EventKind.WORKER_STARTED) == []
    assert host.status() is None
    assert host.quarantine() == []


def test_a_gpu_that_cuda_would_leave_out_silently_keeps_the_host_out(host: GpuHost) -> None:
    with host.start(environment={"CUDA_VISIBLE_DEVICES": "0,1,2"}) as agent:
        assert agent.wait() == ExitCode.JOIN_REFUSED
        assert "GPU 2: it cannot be used: CUDA_VISIBLE_DEVICES names it" in agent.output()


def test_a_gpu_that_fails_takes_its_host_out_and_ends_the_worker_once(host: GpuHost) -> None:
    with host.start() as agent:
        before = host.wait_worker()
        host.nvml.report_xid(0, 31)  # the script's own fault
        host.nvml.answer(gpu1__ecc=1)
        host.nvml.report_xid(1, 79)
        wait_until("another worker", lambda: host.wait_worker() != before)
        # The errors of its memory come with the next reading, and end no second worker.
        host.wait_event(EventKind.GPU_FAILED, num=2)
        whys = [event.detail["what"] for event in host.events(EventKind.GPU_FAILED)]
        assert sorted(map(str, whys)) == ["XID 79", "uncorrected memory error"]
        (reason,) = host.quarantine()
        assert "GPU 1 (GPU-00000001-fake): " in reason
        order = [
            event.kind
            for event in host.events(
                EventKind.GPU_FAILED, EventKind.HOST_QUARANTINED, EventKind.WORKER_KILLED
            )
        ]
        assert order.count(EventKind.WORKER_KILLED) == 1
        assert order.index(EventKind.HOST_QUARANTINED) < order.index(EventKind.WORKER_KILLED)
        assert order.count(EventKind.HOST_QUARANTINED) == 1
        assert host.events(EventKind.GPU_NOTED) == []
        assert agent.interrupt() == ExitCode.INTERRUPTED


def test_a_gpu_that_may_finish_the_step_leaves_the_worker_alone(host: GpuHost) -> None:
    with host.start() as agent:
        worker = host.wait_worker()
        host.nvml.report_xid(0, 64)
        wait_until("a quarantine", lambda: len(host.quarantine()) == 1)
        host.nvml.report_xid(0, 63)
        assert host.wait_event(EventKind.GPU_NOTED).detail["what"] == "XID 63"
        assert host.wait_worker() == worker
        assert host.events(EventKind.WORKER_KILLED) == []
        assert agent.interrupt() == ExitCode.INTERRUPTED


def test_a_gpu_that_is_lost_without_an_xid_is_found_by_the_next_reading(host: GpuHost) -> None:
    with host.start():
        host.wait_worker()
        host.nvml.answer(gpu0__error=GPU_IS_LOST, wait__error=GPU_IS_LOST)
        wait_until("a quarantine", lambda: len(host.quarantine()) == 1)
        assert host.wait_event(EventKind.GPU_FAILED).detail["what"] == "unreachable"
        assert "no longer waits for XIDs" in str(host.wait_event(EventKind.GPU_UNWATCHED).detail["why"])
        wait_until("the note in status", lambda: "it cannot be used: GPU is lost" in host.show_status())


def test_report_joins_with_an_unfit_gpu_and_only_records(host: GpuHost) -> None:
    host.nvml.answer(gpu0__pages_pending=1)
    with host.start(gpu_health="report"):
        worker = host.wait_worker()
        host.nvml.report_xid(1, 79)
        host.wait_event(EventKind.GPU_FAILED, num=2)
        status = host.status()
        assert status is not None
        assert status.devices.gpus == (
            "GPU 0 (GPU-00000000-fake): pages of its memory with errors are in use until it is reset",
        )
        assert host.quarantine() == []
        assert host.wait_worker() == worker


@pytest.mark.full
def test_throttling_is_shown_beside_the_host(host: GpuHost) -> None:
    host.nvml.answer(gpu1__throttle=THERMAL, gpu1__temperature=91, gpu1__clock=900)
    with host.start():
        began = host.wait_event(EventKind.GPU_THROTTLED)
        assert began.detail == {
            "gpu": "GPU 1 (GPU-00000001-fake)",
            "why": "hardware thermal slowdown, 91 C, 900 of 1980 MHz",
        }
        note = "GPU 1 (GPU-00000001-fake) throttled: hardware thermal slowdown"
        wait_until("the note in status", lambda: note in " ".join(host.show_status().split()))
        assert host.quarantine() == []
        host.nvml.answer(gpu1__throttle=0)
        assert host.wait_event(EventKind.GPU_THROTTLED_ENDED).detail["gpu"] == began.detail["gpu"]


@pytest.mark.parametrize("case", ["no driver", "no binding", "off"])
def test_without_nvml_a_host_joins_as_ever(host: GpuHost, case: str) -> None:
    host.nvml.answer(gpu0__remap_failed=1)
    environment, said = {}, "found no usable NVML"
    if case == "no driver":
        host.nvml.answer(init__error=DRIVER_NOT_LOADED)
    elif case == "no binding":
        (host.work / "pynvml.py").write_text("raise ImportError('no such module')\n")
        environment, said = {"PYTHONPATH": str(host.work)}, "found no module pynvml"
    with host.start(gpu_health="off" if case == "off" else "act", environment=environment) as agent:
        host.wait_worker()
        unwatched = host.events(EventKind.GPU_UNWATCHED)
        assert [said in str(event.detail["why"]) for event in unwatched] == ([] if case == "off" else [True])
        assert ("GPUs are not watched" in agent.output()) == (case != "off")
        assert host.events(EventKind.GPU_FAILED) == []


def test_an_agent_with_workers_on_cpu_loads_no_nvml(host: GpuHost) -> None:
    host.nvml.answer(gpu0__remap_failed=1)
    with host.start(platform="cpu") as agent:
        host.wait_worker()
        loaded = Path(f"/proc/{agent.process.pid}/maps").read_text()
        assert "libnvidia-ml" not in loaded
        assert host.events(EventKind.GPU_UNWATCHED, EventKind.GPU_FAILED) == []
    program = "import sys, resilient_jax.cluster.agent; print('pynvml' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(6), check=True
    )
    assert done.stdout == "False\n"
