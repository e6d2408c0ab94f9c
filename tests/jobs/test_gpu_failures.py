"""A GPU fails in a job that trains: the others go on without its host, which comes back when its quarantine ends.

The job computes on CPU. Its agents take their hosts for ones with GPUs, and ask a library in NVML's place.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from resilient_jax.events import EventKind
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.jobs.pod import Pod, loopback_sites, wait_steps
from tests.support.agents import TOKEN, HandStartedAgent, run_command, served_store
from tests.support.fake_nvml import FakeNvml
from tests.support.paths import SCRIPTS
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, EACH_DEVICE, read_logs

SCRIPT = SCRIPTS / "on_cpu.py"
HOSTS = ("host-0", "host-1")
CONFIG = f'{CONFIG_WITHOUT_STANDBYS}abort = "interrupt"\nlive_nodes = "off"\ndevices_after_loss = "host"\n'
"""As for workers on CPU, which these are."""


class GpuPod(Pod):
    """Two hosts, each with a library of its own in NVML's place."""

    def __init__(self, work: Path, store: str) -> None:
        super().__init__(work, store, loopback_sites(len(HOSTS)))
        self.where = ("--store", store, "--job", "pod")
        self.nvml = {host: FakeNvml(work / f"nvml-{host}") for host in HOSTS}
        self.words: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}
        self.config = work / "job.toml"
        self.config.write_text(CONFIG)

    def start(self, host: str, words: Sequence[str] = ()) -> None:
        options = [
            "--host-name",
            host,
            "--address",
            self._sites[host].address,
            "--num-hosts",
            str(len(HOSTS)),
        ]
        options += ["--run-dir", str(self.work / host), "--config", str(self.config), "--platform", "gpu"]
        self.agents[host] = HandStartedAgent(
            [*self.where, *options, str(SCRIPT), str(self.work), *self.words, *words],
            self.work / f"{host}.out",
            environment={**self.nvml[host].environment, **self.environment},
        )

    def run_hosts(self, *words: str) -> str:
        code, said = run_command(["hosts", *self.where, *words], {TOKEN_VARIABLE: TOKEN})
        assert code == 0, said
        return said

    def count_devices(self) -> dict[str, int]:
        """Return on how many devices each host has trained last."""
        newest: dict[str, tuple[int, int]] = {}
        for process, rows in read_logs(self.work).items():
            if rows:
                host, found = process.rpartition("-")[0], (rows[-1]["step"], rows[-1]["devices"])
                newest[host] = max(newest.get(host, found), found)
        return {host: devices for host, (_, devices) in newest.items()}


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[GpuPod]:
    with served_store() as store:
        running = GpuPod(tmp_path, store)
        with running:
            yield running


@pytest.fixture
def wide_pod(tmp_path: Path) -> Iterator[GpuPod]:
    """Two hosts with three GPUs each, whose script computes microbatches on each GPU by itself."""
    with served_store() as store:
        running = GpuPod(tmp_path, store)
        running.config.write_text(CONFIG.replace('"host"', '"all"'))
        running.environment = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
        for nvml in running.nvml.values():
            nvml.answer(count=3)
        running.words = (EACH_DEVICE,)
        with running:
            yield running


@pytest.mark.parametrize("xid", [79, 64], ids=["its work is lost", "it may finish the step"])
def test_the_others_go_on_without_a_host_whose_gpu_failed_until_it_is_cleared(pod: GpuPod, xid: int) -> None:
    report = pod.wait_training(2)
    assert report.generation is not None
    pod.nvml["host-1"].report_xid(0, xid)
    report = pod.wait_training(1, after_generation=report.generation.number)
    assert report.generation is not None
    assert [member.host for member in report.generation.membership.members] == ["host-0"]
    assert [record.host for record in report.quarantine] == ["host-1"]
    wait_steps(pod, 3)
    assert [event.host for event in pod.events() if event.kind is EventKind.GPU_FAILED] == ["host-1"]
    killed = [event.host for event in pod.events() if event.kind is EventKind.WORKER_KILLED]
    assert killed == (["host-1"] if xid == 79 else [])
    pod.run_hosts("clear", "host-1")
    pod.wait_training(2, after_generation=report.generation.number)
    pod.finish()


def test_a_host_trains_on_the_gpus_that_are_left_with_the_bits_of_a_run_without_failures(
    wide_pod: GpuPod,
) -> None:
    report = wide_pod.wait_training(2)
    assert report.generation is not None
    wide_pod.nvml["host-1"].report_xid(1, 79)
    report = wide_pod.wait_training(2, after_generation=report.generation.number)
    assert report.generation is not None
    wait_steps(wide_pod, 2)
    assert wide_pod.count_devices() == {"host-0": 3, "host-1": 2}
    assert report.quarantine == ()
    assert [record.label for record in report.device_quarantine] == ["host-1:1"]
    assert {status.host: status.devices.describe() for status in report.hosts} == {
        "host-0": "",
        "host-1": "2 of 3 devices",
    }
    assert "host-1:1: for " in wide_pod.run_hosts("list")
    (changed,) = (event for event in wide_pod.events() if event.kind is EventKind.DEVICES_CHANGED)
    assert (changed.host, changed.detail["devices"], changed.detail["num_devices"]) == ("host-1", "0, 2", 3)
    assert "XID 79" in str(changed.detail["why"])
    wide_pod.finish(wide_pod.words)
