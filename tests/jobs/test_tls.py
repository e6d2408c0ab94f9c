"""A job under mutual TLS: store, agents, and the state that one worker sends another."""

import os
import shutil
import signal
from pathlib import Path

import psutil

from resilient_jax.events import EventKind
from resilient_jax.telemetry.event_log import read_events
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.support.agents import TOKEN, HandStartedAgent, free_port, run_command
from tests.support.authority import Authority
from tests.support.patience import wait_until
from tests.support.process_ends import read_name
from tests.support.tiny_job import CONFIG, RECOVERY_S, SCRIPT, check_steps, newest_step, read_logs

ADDRESSES = {"host-0": "127.0.2.2", "host-1": "127.0.2.3"}


def lay_out(authority: Authority, host: str, folder: Path) -> Path:
    """Return the folder that `--tls` expects, for one host."""
    folder.mkdir(exist_ok=True)
    files = authority.sign(host, host=ADDRESSES[host])
    for source, name in (
        (files.certificate, "cert.pem"),
        (files.key, "key.pem"),
        (files.authority, "ca.pem"),
    ):
        shutil.copy(source, folder / name)
    return folder


def renew(old: Authority, new: Authority, folders: dict[str, Path]) -> None:
    """Have all hosts trust both authorities, then show certificates of the new one, then trust that one alone."""
    both = old.path.read_bytes() + new.path.read_bytes()
    for folder in folders.values():
        (folder / "ca.pem").write_bytes(both)
    for host, folder in folders.items():
        lay_out(new, host, folder)
        (folder / "ca.pem").write_bytes(both)
    for folder in folders.values():
        (folder / "ca.pem").write_bytes(new.path.read_bytes())


def worker_of(agent: HandStartedAgent) -> psutil.Process:
    children = psutil.Process(agent.process.pid).children(recursive=True)
    (found,) = [child for child in children if read_name(child.pid) == SCRIPT.name]
    return found


def test_a_worker_that_comes_back_fetches_the_state_under_tls_with_renewed_certificates(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "authority", "job")
    folders = {host: tmp_path / f"tls-{host}" for host in ADDRESSES}
    (tmp_path / "job.toml").write_text(CONFIG)
    store = f"{ADDRESSES['host-0']}:{free_port()}"
    agents: dict[str, HandStartedAgent] = {}
    try:
        for host, address in ADDRESSES.items():
            words = [
                *("--store", store, "--job", "secret", "--host-name", host, "--address", address),
                *("--num-hosts", "2", "--devices-per-host", "1", "--platform", "cpu"),
                *("--config", str(tmp_path / "job.toml"), "--run-dir", str(tmp_path / host)),
                *("--tls", str(lay_out(authority, host, folders[host]))),
            ]
            serve = ["--serve-store"] if host == "host-0" else []
            agents[host] = HandStartedAgent(
                [*words, *serve, str(SCRIPT), str(tmp_path)], tmp_path / f"{host}.out"
            )
        wait_until("training", lambda: newest_step(tmp_path) > 5, RECOVERY_S)
        renew(authority, Authority(tmp_path / "new", "renewed"), folders)
        os.kill(worker_of(agents["host-1"]).pid, signal.SIGKILL)
        wait_until("a second worker's steps", lambda: count_of(tmp_path, "host-1") == 2, RECOVERY_S)
        command = [
            "events",
            "--store",
            store,
            "--job",
            "secret",
            "--host",
            "host-1",
            "--tls",
            str(folders["host-1"]),
        ]
        code, shown = run_command(command, {TOKEN_VARIABLE: TOKEN})
        assert (code, "host-1 state.fetched " in shown) == (0, True), shown
        (tmp_path / "stop").write_text(str(newest_step(tmp_path) + 20))
        for agent in agents.values():
            assert agent.wait(RECOVERY_S) == 0, agent.output()
    finally:
        for agent in agents.values():
            agent.kill()
    check_steps(tmp_path)
    events = [event for path in tmp_path.glob("*/*.events.jsonl") for event in read_events(path)]
    assert any(event.kind is EventKind.STATE_FETCHED and event.host == "host-1" for event in events)


def count_of(work: Path, host: str) -> int:
    """Return how many workers of this host have committed steps."""
    return sum(name.startswith(host) and bool(rows) for name, rows in read_logs(work).items())
