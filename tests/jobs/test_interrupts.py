"""Ctrl-C on all hosts of a job: it ends at once, and its end is on record, in the store or at least in run folders."""

import signal
import time
from pathlib import Path

from resilient_jax.errors import ExitCode
from resilient_jax.events import EventKind
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.chaos.etcd_cluster import EtcdCluster
from tests.jobs.pod import Pod, loopback_sites
from tests.support.agents import TOKEN, run_command, served_store
from tests.support.etcd_needed import needs_etcd
from tests.support.paths import SCRIPTS
from tests.support.patience import patience, wait_until
from tests.support.tiny_job import CONFIG_WITHOUT_STANDBYS, prolong_leases

CONFIG = prolong_leases(CONFIG_WITHOUT_STANDBYS, 4.0)
"""Longer than an election of etcd."""


def interrupt_all(pod: Pod) -> None:
    """Press Ctrl-C in the terminal in which all agents run."""
    for agent in pod.agents.values():
        agent.process.send_signal(signal.SIGINT)
    codes = {host: agent.wait(patience(6)) for host, agent in pod.agents.items()}
    assert set(codes.values()) == {ExitCode.INTERRUPTED}, f"{codes}\n{pod.output()}"


def test_agents_that_are_interrupted_together_record_the_end_and_the_job_begins_anew_with_its_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with (
        served_store() as store,
        Pod(
            tmp_path,
            store,
            loopback_sites(2),
            script=SCRIPTS / "own_loop.py",
            words=[str(checkpoints)],
        ) as pod,
    ):
        pod.wait_training(2)
        wait_until("a checkpoint", lambda: list(checkpoints.glob("*.npz")))
        interrupt_all(pod)
        saved = max(int(path.stem) for path in checkpoints.glob("*.npz"))
        said = "its user pressed Ctrl-C. Started again, the job goes on from its newest checkpoint"
        code, shown = run_command(["status", "--store", store, "--job", "pod"], {TOKEN_VARIABLE: TOKEN})
        assert (code, said in shown) == (0, True), shown
        for host in pod.agents:
            code, shown = run_command(["status", str(tmp_path / host)])
            assert (code, "exit code 130" in shown, said in shown) == (0, True, True), shown
        began_s = time.time()
        for host in list(pod.agents):
            pod.start(host)
        pod.wait_training(2)
        pod.end()
        commits = [
            event.detail["step"] if event.step is None else event.step
            for event in pod.events()
            if event.kind is EventKind.STEP_COMMITTED and event.wall_s > began_s
        ]
        assert min(map(int, commits)) == saved + 1


@needs_etcd
def test_agents_that_are_interrupted_before_they_train_record_it_in_etcd_and_without_it_in_their_folders(
    tmp_path: Path,
) -> None:
    folder, work = tmp_path / "etcd", tmp_path / "job"
    folder.mkdir()
    work.mkdir()
    with EtcdCluster(folder) as cluster:
        store = f"{cluster.address}/tests"
        with Pod(work, store, loopback_sites(2), config=CONFIG) as pod:
            wait_until("both hosts", lambda: len(report.hosts if (report := pod.report()) else ()) == 2)
            interrupt_all(pod)
            code, shown = run_command(["status", "--store", store, "--job", "pod"], {TOKEN_VARIABLE: TOKEN})
            assert (code, "its user pressed Ctrl-C" in shown) == (0, True), shown
            for host in list(pod.agents):
                pod.start(host)
            pod.wait_training(2)
            for member in range(3):
                cluster.kill(member)
            interrupt_all(pod)
    for host in pod.agents:
        code, shown = run_command(["status", str(work / host)])
        assert (code, "this host's user pressed Ctrl-C" in shown) == (0, True), shown


def test_agents_with_a_store_of_their_own_know_the_end_that_was_recorded_there(tmp_path: Path) -> None:
    with Pod(tmp_path, None, loopback_sites(2)) as pod:
        pod.wait_training(2)
        interrupt_all(pod)
        assert pod.output().count("the job ended: interrupted at step ") == 2, pod.output()
        assert not list(tmp_path.glob("host-0/*.journal")), "the next start is a new one"


def test_an_agent_that_is_interrupted_without_a_store_and_a_leader_writes_its_end_into_its_folder(
    tmp_path: Path,
) -> None:
    with Pod(tmp_path, None, loopback_sites(2)) as pod:
        pod.wait_training(2)
        pod.agents.pop("host-0").kill()
        interrupt_all(pod)
    code, shown = run_command(["status", str(tmp_path / "host-1")])
    assert code == 0, shown
    assert shown.startswith("host-1: job pod: ended "), shown
    assert "this host's user pressed Ctrl-C" in shown
