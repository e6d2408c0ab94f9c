"""A job whose ports get a hundred thousand messages that no peer of ours sends: it goes on, and keeps its memory."""

import asyncio
from pathlib import Path

import psutil
import pytest

from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids
from resilient_jax.cluster.run_directory import read_contact
from tests.fuzz.attack import attack
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob, prolong_leases, protect

HOSTS = 2
CONFIG = prolong_leases(protect(CONFIG_WITHOUT_STANDBYS, 5), 20.0)
"""Two cores serve the attack, too: no host is to be lost for want of processor time."""
MESSAGES = 100_000
WARM_UP = 5_000
"""After so many all caches and pools of the processes have their size."""
GROWTH_MIB = 24


def measure_mib(report: JobReport) -> dict[str, float]:
    """Return the memory of the processes that others send messages to: agents, and snapshot servers."""
    found: dict[str, float] = {}
    for host in report.hosts:
        for component in (JobComponent.AGENT, JobComponent.SNAPSHOT_SERVER):
            for pid in find_pids(report, component, host.host):
                memory = psutil.Process(pid).memory_full_info()
                found[f"{component} of {host.host}"] = memory.uss / 2**20
    return found


@pytest.mark.full
def test_a_job_goes_on_under_a_hundred_thousand_senseless_messages(tmp_path: Path) -> None:
    # Few steps: it is the messages that take the processors.
    with TinyJob(tmp_path, HOSTS, CONFIG, ONE_DEVICE, words=["pace=0.3"]) as tiny:
        report = tiny.wait_training(HOSTS)
        contact = read_contact(tmp_path / "run")
        generation, step = report.generation, tiny.step()
        assert generation is not None

        def send(messages: int, seed: int) -> None:
            found = asyncio.run(attack(tiny.read_report(), contact.store, contact.token, messages, seed))
            assert not found.bad, found.bad[:5]
            assert found.sent.total() == messages
            assert len(found.sent) == 8, found.sent

        send(WARM_UP, seed=0)
        before = measure_mib(tiny.read_report())
        send(MESSAGES - WARM_UP, seed=1)
        after = measure_mib(tiny.wait_training(HOSTS))
        assert after.keys() == before.keys(), "a process was started again"
        grown = {name: round(after[name] - before[name], 1) for name in after}
        assert max(grown.values()) < GROWTH_MIB, grown
        assert tiny.step() > step
        now = tiny.read_report().generation
        assert now is not None
        assert now.number == generation.number, "a host was lost"
        tiny.finish()
