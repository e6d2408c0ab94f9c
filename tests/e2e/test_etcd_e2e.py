"""A job whose store is an etcd cluster of three members: what dies under it, it goes on, with the bits of a run without
failures."""

import signal
import time
from collections.abc import Iterator

import pytest
from agents import run_command, wait_until
from etcd_cluster import EtcdCluster, needs_etcd
from tiny_job import CONFIG_WITHOUT_STANDBYS, ONE_DEVICE, TinyJob

from resilient_jax.cluster.job_report import JobComponent
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.protocol.records import Generation
from resilient_jax.transport.credentials import TOKEN_VARIABLE

pytestmark = needs_etcd
HOSTS = 3
CONFIG = CONFIG_WITHOUT_STANDBYS.replace("lease_ttl_s = 2.0", "lease_ttl_s = 4.0")
"""Several times as long as an election, so that a host counts as alive through one."""
AWAY_S = 6.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(scope="module")
def tiny(cluster: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyJob]:
    options = (*ONE_DEVICE, "--store", f"{cluster.address}/tests")
    with TinyJob(tmp_path_factory.mktemp("job"), HOSTS, CONFIG, options) as job:
        yield job
        job.finish()


def generation_of(tiny: TinyJob) -> Generation:
    generation = tiny.wait_training(HOSTS).generation
    assert generation is not None
    return generation


def wait_steps(tiny: TinyJob, more: int = 5) -> None:
    """Wait until the job has done so many more steps."""
    end = tiny.step() + more
    tiny.wait_report(f"step {end}", lambda report: tiny.step() >= end)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
def test_the_leader_of_the_cluster_is_lost_and_no_generation_changes(
    fault: signal.Signals, cluster: EtcdCluster, tiny: TinyJob
) -> None:
    before = generation_of(tiny).number
    lost = cluster.find_leader()
    cluster.signal(lost, fault)
    wait_until("another leader", lambda: cluster.find_leader() != lost)  # a signal takes its time, too
    wait_steps(tiny)
    cluster.restore()
    assert generation_of(tiny).number == before


def test_a_worker_and_the_leading_agent_die_while_a_member_is_away(
    cluster: EtcdCluster, tiny: TinyJob
) -> None:
    before = generation_of(tiny).number
    cluster.kill((cluster.find_leader() + 1) % 3)
    leader = tiny.read_report().leader
    assert leader is not None
    other = next(member.host for member in generation_of(tiny).members if member.host != leader)
    kill_from_anywhere(tiny, other)
    tiny.signal(JobComponent.AGENT, leader, signal.SIGKILL)
    tiny.wait_training(HOSTS, before)
    cluster.restore()


def kill_from_anywhere(tiny: TinyJob, host: str) -> None:
    """Kill a worker as one does without the job's run folder; check that logs and events are read so, too."""
    contact = read_contact(tiny.work / "run")
    where, token = ("--store", contact.store, "--job", contact.job), {TOKEN_VARIABLE: contact.token}
    code, said = run_command(["kill", *where, "worker", host], token)
    assert code == 0, said
    assert said.startswith(f"SIGKILL to worker on {host}: process ")
    code, said = run_command(["events", *where, "--host", host], token)
    assert code == 0, said
    assert f" {host} signal.ordered component=worker signal=SIGKILL" in said
    code, said = run_command(["logs", *where, "-n", "1"], token)
    assert code == 0, said
    assert f"[{host}] " in said


def test_the_majority_is_away_and_training_goes_on_once_it_is_back(
    cluster: EtcdCluster, tiny: TinyJob
) -> None:
    generation_of(tiny)
    for member in range(2):
        cluster.kill(member)
    time.sleep(AWAY_S)  # longer than the leases
    cluster.restore()
    wait_steps(tiny)
    generation_of(tiny)


def test_all_members_restart_and_training_goes_on(cluster: EtcdCluster, tiny: TinyJob) -> None:
    generation_of(tiny)
    for member in range(3):
        cluster.kill(member)
    cluster.restore()
    wait_steps(tiny)
    generation_of(tiny)
