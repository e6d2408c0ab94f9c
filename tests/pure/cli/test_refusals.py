"""What `launch` and `agent` refuse before they start anything: with what was found, what was expected, and where."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resilient_jax.cli import main
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.support.paths import SCRIPTS

IDLE = str(SCRIPTS / "idle.py")
BROKEN = "def train(world:\n"
AGENT = (
    *("--store", "127.0.0.1:1", "--job", "refused", "--host-name", "host-a"),
    *("--num-hosts", "1", "--run-dir", "host-a"),
)
"""Options of an agent that would find no store."""
Refusal = Callable[[Sequence[str]], str]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, the working directory of the commands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


look_up = socket.getaddrinfo


def find_no_name(host: str, *arguments: Any, **options: Any) -> Any:
    """Find addresses that are written in numbers alone, as a resolver does that knows no name; ask none."""
    if host and not host[0].isdigit():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return look_up(host, *arguments, **options)


@pytest.fixture
def refusal(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Return what runs a command that must refuse, and returns its output."""
    monkeypatch.setenv(TOKEN_VARIABLE, "a token")
    monkeypatch.setattr(socket, "getaddrinfo", find_no_name)

    def run(arguments: Sequence[str]) -> str:
        monkeypatch.setattr("sys.argv", ["resilient-jax", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        output = "".join(capsys.readouterr())
        assert ended.value.code == 2, output
        return output

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "script missing.py: found no such file, expected a Python script. Check the path"),
        (
            ["broken.py"],
            "script broken.py: found what Python cannot compile ('(' was never closed (broken.py, line 1)), expected a",
        ),
        (
            [5000 * "a"],
            f"script {5000 * 'a'}: found a file that cannot be read (File name too long), expected one that",
        ),
        (
            ["/proc/self/mem"],
            "script /proc/self/mem: found a file that cannot be read (Input/output error), expected one",
        ),
        (
            ["broken.py/x.py"],
            "script broken.py/x.py: found no such file, expected a Python script. Check the path",
        ),
        (["--hosts", "0", IDLE], "--hosts: found 0, expected 1 to 250 on one machine"),
        (["--devices-per-host", "0", IDLE], "--devices-per-host: found 0, expected 1 to 256"),
        (
            ["--grace-s", "0", IDLE],
            "--grace-s: found 0, expected the seconds from SIGTERM to SIGKILL, such as 25",
        ),
        (
            ["--grace-s", "nan", IDLE],
            "--grace-s: found nan, expected the seconds from SIGTERM to SIGKILL, such as 25",
        ),
        (["--platform", "tpu", IDLE], "--platform: found 'tpu', expected cpu or gpu"),
        (["--config", "none.toml", IDLE], "none.toml: found no such file, expected a TOML file"),
        (
            ["--config", "unknown.toml", IDLE],
            "unknown.toml: key 'lease_ttl': found an unknown key, expected one of lease_ttl_s,",
        ),
        (
            ["--config", "type.toml", IDLE],
            "type.toml: key 'max_restarts': found 'many' (str), expected an integer >= 0 and <= 1_000_000",
        ),
        (
            ["--hosts", "3", "--config", "parity.toml", IDLE],
            "parity.toml: snapshot_parity: found 3 for a job of 3 hosts, expected fewer than the hosts",
        ),
        (
            ["--hosts", "3", "--config", "least.toml", IDLE],
            "least.toml: min_hosts: found 4 for a job of 3 hosts, expected no more than those",
        ),
        (
            ["--hosts", "9", "--config", "group.toml", IDLE],
            "group.toml: snapshot_parity: found 4 with snapshot_group_size 4, expected fewer than the hosts of a group",
        ),
        (
            ["--config", "every.toml", IDLE],
            "every.toml: key 'snapshot_interval_steps': found 0 (int), expected an integer >= 1 and <= 1_000_000 "
            "or one of",
        ),
        (
            ["--run-dir", "broken.py/run", IDLE],
            "cannot write into the run folder broken.py/run: Not a directory; expected a folder that this user",
        ),
    ],
    ids=lambda value: "-".join(map(str, value[:-1])) or value[-1][:20] if isinstance(value, list) else "",
)
def test_launch_refuses(arguments: list[str], words: str, work: Path, refusal: Refusal) -> None:
    (work / "broken.py").write_text(BROKEN)
    (work / "unknown.toml").write_text("lease_ttl = 3\n")
    (work / "type.toml").write_text('max_restarts = "many"\n')
    (work / "parity.toml").write_text("snapshot_parity = 3\n")
    (work / "group.toml").write_text("snapshot_parity = 4\nsnapshot_group_size = 4\n")
    (work / "every.toml").write_text("snapshot_interval_steps = 0\n")
    (work / "least.toml").write_text("min_hosts = 4\n")
    output = refusal(["launch", *arguments])
    assert output.startswith(f"resilient-jax: {words}"), output


@pytest.mark.parametrize("store", ["nowhere", "host.invalid:7000", "127.0.0.1:port"])
def test_an_invalid_address_is_refused(store: str, refusal: Refusal) -> None:
    output = refusal(["agent", *AGENT, "--store", store, IDLE])
    assert output.startswith(f"resilient-jax: --store {store}: found no address that can be reached ("), (
        output
    )
    assert "expected host:port, or etcd://10.0.0.1:2379," in output


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        (
            "--store",
            "localhost:999999",
            "--store localhost:999999: found no address that can be reached (expected",
        ),
        (
            "--address",
            "nonsense",
            "--address: found 'nonsense' (Name or service not known), expected an address of",
        ),
        (
            "--address",
            "192.0.2.1",
            "--address: found '192.0.2.1' (Cannot assign requested address), expected an",
        ),
        ("--address", "", "--address: found '' (expected an address like"),
        (
            "--host-name",
            "../../x",
            "--host-name: found '../../x', expected 1 to 64 letters, digits, '.', '-' or '_'",
        ),
        ("--host-name", "..", "--host-name: found '..', expected 1 to 64 letters"),
        ("--host-name", "", "--host-name: found '', expected 1 to 64 letters"),
        ("--host-name", 65 * "h", f"--host-name: found '{65 * 'h'}', expected 1 to 64 letters"),
        ("--num-hosts", "-3", "--num-hosts: found -3, expected at least 1"),
    ],
    ids=lambda value: value[:20],
)
def test_an_agent_refuses(
    option: str, value: str, words: str, work: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = refusal(["agent", *AGENT, "--address", "127.0.0.1", option, value, IDLE])
    assert output.startswith(f"resilient-jax: {words}"), output
    assert not (work / "host-a").exists(), "refused before anything is made"


@pytest.mark.parametrize("command", [("launch",), ("agent", *AGENT)])
def test_an_end_of_the_job_that_is_no_time_is_refused_before_anything_starts(
    command: Sequence[str], refusal: Refusal, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    found = refusal([*command, IDLE])
    assert "SLURM_JOB_END_TIME: found 'soon', expected seconds since 1970, as Slurm sets it" in found
    assert not list(work.iterdir())
