"""A job whose store is an etcd cluster, under the loss of members of the cluster and of parts of the job."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.chaos.etcd_cluster import EtcdCluster
from tests.chaos.paths import COMMAND
from tests.support.agents import run_command
from tests.support.etcd_needed import needs_etcd
from tests.support.patience import patience
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob, prolong_leases

CAMPAIGN_S = patience(30)
INCIDENTS = 10
CONFIG = prolong_leases(CONFIG_WITHOUT_STANDBYS, 4.0)
"""Several times as long as an election, so that a host counts as alive through one."""

pytestmark = needs_etcd


@pytest.mark.full
def test_a_job_survives_the_loss_of_members_of_its_store_of_the_majority_and_of_its_own_parts_meanwhile(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [*COMMAND, "--json", "--campaign", "etcd", "--run-dir", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CAMPAIGN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["violations"] == 0, done.stderr
    assert figures["incidents"] + figures["skipped"] == INCIDENTS, done.stderr


def test_a_job_is_broken_and_looked_at_from_anywhere_while_a_member_is_away(tmp_path: Path) -> None:
    folder = tmp_path / "etcd"
    folder.mkdir()
    with EtcdCluster(folder) as cluster:
        options = (*ONE_DEVICE, "--store", f"{cluster.address}/tests")
        with TinyJob(tmp_path / "job", 2, CONFIG, options) as tiny:
            before = tiny.wait_training(2)
            assert before.generation is not None
            cluster.kill((cluster.find_leader() + 1) % 3)
            kill_from_anywhere(tiny, next(host.host for host in before.hosts if host.host != before.leader))
            leader = tiny.wait_training(2, before.generation.number).leader
            assert leader is not None
            tiny.signal(JobComponent.AGENT, leader, signal.SIGKILL)
            tiny.wait_training(2, before.generation.number + 1)
            tiny.finish()


def kill_from_anywhere(tiny: TinyJob, host: str) -> None:
    """Kill a worker as one does without the job's run folder; check that logs and events are read so, too."""
    contact = read_contact(tiny.work / "run")
    where, token = ("--store", contact.store, "--job", contact.job), {TOKEN_VARIABLE: contact.token}
    code, said = run_command(["status", *where], {TOKEN_VARIABLE: ""})
    assert (code, host in said) == (0, True), "what the store has needs no token of the job's: " + said
    code, said = run_command(["kill", *where, "worker", host], token)
    assert code == 0, said
    assert said.startswith(f"SIGKILL to worker on {host}: process ")
    code, said = run_command(["events", *where, "--host", host], token)
    assert code == 0, said
    assert f" {host} signal.ordered component=worker signal=SIGKILL" in said
    code, said = run_command(["logs", *where, "-n", "1"], token)
    assert code == 0, said
    assert f"[{host}] " in said
