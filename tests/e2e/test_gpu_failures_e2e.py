"""A GPU fails in a job that trains: the others go on without its host, which comes back when its quarantine ends.

The job computes on CPU. Its agents take their hosts for ones with GPUs, and ask a library in NVML's place.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from agents import TOKEN, HandStartedAgent, run_command, served_store
from fake_nvml import FakeNvml
from pod import Pod, loopback_sites, wait_steps
from tiny_job import CONFIG_WITHOUT_STANDBYS

from resilient_jax.events import EventKind
from resilient_jax.transport.credentials import TOKEN_VARIABLE

pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).parent / "jobs" / "on_cpu.py"
HOSTS = ("host-0", "host-1")
CONFIG = f'{CONFIG_WITHOUT_STANDBYS}abort = "interrupt"\nlive_nodes = "off"\ndevices_after_loss = "host"\n'
"""As for workers on CPU, which these are."""


class GpuPod(Pod):
    """Two hosts, each with a library of its own in NVML's place."""

    def __init__(self, work: Path, store: str) -> None:
        super().__init__(work, store, loopback_sites(len(HOSTS)))
        self.where = ("--store", store, "--job", "pod")
        self.nvml = {host: FakeNvml(work / f"nvml-{host}") for host in HOSTS}
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
            [*self.where, *options, str(SCRIPT), str(self.work), *words],
            self.work / f"{host}.out",
            environment=self.nvml[host].environment,
        )


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[GpuPod]:
    with served_store() as store:
        running = GpuPod(tmp_path, store)
        with running:
            yield running


@pytest.mark.parametrize("xid", [79, 64], ids=["its work is lost", "it may finish the step"])
def test_the_others_go_on_without_a_host_whose_gpu_failed_until_it_is_cleared(pod: GpuPod, xid: int) -> None:
    report = pod.wait_training(2)
    assert report.generation is not None
    pod.nvml["host-1"].report_xid(0, xid)
    report = pod.wait_training(1, after_generation=report.generation.number)
    assert report.generation is not None
    assert [member.host for member in report.generation.members] == ["host-0"]
    assert [record.host for record in report.quarantine] == ["host-1"]
    wait_steps(pod, 3)
    assert [event.host for event in pod.events() if event.kind is EventKind.GPU_FAILED] == ["host-1"]
    killed = [event.host for event in pod.events() if event.kind is EventKind.WORKER_KILLED]
    assert killed == (["host-1"] if xid == 79 else [])
    code, said = run_command(["hosts", *pod.where, "clear", "host-1"], {TOKEN_VARIABLE: TOKEN})
    assert code == 0, said
    pod.wait_training(2, after_generation=report.generation.number)
    pod.finish()
