"""Bad input is refused at once, with what was found, what was expected, where, and what to do."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from resilient_jax.cli.options import read_versions
from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.ids import HostName, JobName, LeaseId
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.job_records import JobRecord
from resilient_jax.protocol.store_keys import make_host_key, make_job_key
from resilient_jax.store.remote import RemoteStore
from resilient_jax.transport.credentials import TOKEN_VARIABLE, Credentials
from tests.jobs.launched import JOBS, run_launch
from tests.support.agents import COMMAND, TOKEN, HandStartedAgent, free_port, run_command, served_store
from tests.support.patience import patience, wait_until
from tests.support.patient_job import PatientJob
from tests.support.tiny_job import ONE_DEVICE, TinyJob

IDLE = str(JOBS / "idle.py")
JOB = JobName("bad-input")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, the working directory of the commands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Refused before anything is started. What else is: tests/pure/cli/test_refusals.py.


def test_launch_refuses_in_one_line(work: Path) -> None:
    code, output = run_command(["launch", "missing.py"])
    assert code == 2, output
    assert output.startswith(
        "resilient-jax: script missing.py: found no such file, expected a Python script. Check the path"
    ), output
    assert output.count("\n") == 1, "one line"


def test_a_run_folder_belongs_to_one_job_until_its_launcher_is_gone(work: Path) -> None:
    with PatientJob([IDLE], num_hosts=1, run_directory=work / "run") as first:
        wait_until("the first job's contact", (work / "run" / "job.json").exists)
        before = (work / "run" / "job.json").read_bytes()
        code, output = run_command(["launch", "--hosts", "1", "--run-dir", "run", IDLE])
        assert code == 2, output
        assert output.startswith(
            "resilient-jax: run: found a job that still runs in this folder, expected"
        ), output
        assert (work / "run" / "job.json").read_bytes() == before
        assert first.read_report() is not None, "the first can be reached still"
    assert (work / "run" / "job.json").exists(), "the first was killed"
    (work / "quick.py").write_text("print('quick', 'job')\n")
    _, output = run_command(["launch", "--hosts", "1", "--run-dir", "run", "quick.py"])
    assert "[host-0] quick job" in output, output
    assert not (work / "run" / "job.json").exists()


# An agent and its store.


def agent_arguments(store: str, work: Path, host: str = "host-a") -> list[str]:
    (work / "job.toml").write_text("lease_ttl_s = 0.5\n")
    options = {"--store": store, "--job": JOB, "--host-name": host, "--run-dir": str(work / host)}
    return [*(word for pair in options.items() for word in pair), "--config", str(work / "job.toml"), IDLE]


def run_agent(arguments: list[str], token: str = TOKEN) -> tuple[int, str]:
    return run_command(["agent", *arguments], {TOKEN_VARIABLE: token})


def test_an_agent_without_a_store_retries_until_its_deadline(work: Path) -> None:
    address, lease_ttl_s = f"127.0.0.1:{free_port()}", 0.2
    arguments = agent_arguments(address, work)
    (work / "job.toml").write_text(f"lease_ttl_s = {lease_ttl_s}\n")
    code, output = run_agent(arguments)
    assert code == 80, output
    waiting, end = output.strip().splitlines()
    assert waiting.startswith(f"[host-a] waiting for the store at {address}"), "said once, not on every try"
    start = f"resilient-jax: no store answered at {address} for "
    assert end.startswith(start), output
    assert float(end.removeprefix(start).split()[0]) >= 20 * lease_ttl_s, (
        "while a node of the store may restart"
    )
    assert "Check the address, that the process that serves the store runs there" in end


def test_an_agent_connects_to_a_store_that_starts_late(work: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    arguments = agent_arguments(address, work)
    (work / "job.toml").write_text("lease_ttl_s = 3.0\n")
    with HandStartedAgent(arguments, work / "late") as agent:
        agent.wait_said("waiting for the store")
        with served_store(address):
            wait_until("the agent's registration", lambda: read_status(address, "host-a") is not None)
            assert agent.interrupt() == 130


def test_a_port_in_use_is_named(work: Path) -> None:
    with served_store() as address:
        code, output = run_agent([*agent_arguments(address, work)[:-1], "--serve-store", IDLE])
        assert code == 2, output
        assert output.startswith(
            f"resilient-jax: cannot listen on {address}: another process does. Choose"
        ), output


def test_an_agent_refuses_in_one_line(work: Path) -> None:
    code, output = run_agent([*agent_arguments("nowhere", work)[:-1], IDLE])
    assert code == 2, output
    assert output.startswith("resilient-jax: --store nowhere: found no address that can be reached ("), output
    assert "Traceback" not in output


def test_a_missing_or_wrong_token_is_refused(work: Path) -> None:
    with served_store() as address:
        code, output = run_agent(agent_arguments(address, work), token="")
        assert code == 83
        assert f"environment variable {TOKEN_VARIABLE}: found nothing, expected the job's token" in output
        code, output = run_agent(agent_arguments(address, work), token="a-guess")
        assert code == 83, output
        assert "token" in output
        assert address in output
        assert "a-guess" not in output, "a token is never printed"
        assert "Traceback" not in output


def test_a_host_name_belongs_to_one_agent(work: Path) -> None:
    with served_store() as address, HandStartedAgent(agent_arguments(address, work), work / "first") as first:
        wait_until("the first's registration", lambda: read_status(address, "host-a") is not None)
        code, output = run_agent(agent_arguments(address, work))
        assert code == 83, output
        assert output.rstrip().splitlines()[-1] == (
            f"resilient-jax: host name host-a is taken by another living agent (agent process {first.process.pid} "
            "at 127.0.0.1); every host needs a name of its own: choose another with --host-name"
        )
        assert first.process.poll() is None
        assert first.interrupt() == 130


def test_an_agent_that_was_stopped_while_it_waited_for_its_name_resumes_waiting(work: Path) -> None:
    async def take_name(address: str) -> LeaseId:
        async with await RemoteStore.connect(address, Credentials(TOKEN), 5.0) as store:
            status = HostStatus(
                host=HostName("host-a"), agent=AgentStatus(id="", pid=1, address="", versions=read_versions())
            )
            lease = await store.grant(100.0)
            await store.put(make_host_key(JOB, HostName("host-a")), msgspec.msgpack.encode(status), lease)
            return lease

    async def free_name(address: str, lease: LeaseId) -> None:
        async with await RemoteStore.connect(address, Credentials(TOKEN), 5.0) as store:
            await store.revoke(lease)

    async def has_come(address: str) -> bool:
        async with await RemoteStore.connect(address, Credentials(TOKEN), 5.0) as store:
            return await store.get(make_job_key(JOB)) is not None

    with served_store() as address:
        lease = asyncio.run(take_name(address))
        arguments = agent_arguments(address, work)
        (work / "job.toml").write_text("lease_ttl_s = 0.5\n")
        with HandStartedAgent(arguments, work / "out") as agent:
            wait_until("the agent registers", lambda: asyncio.run(has_come(address)))
            time.sleep(0.3)
            agent.process.send_signal(signal.SIGSTOP)
            time.sleep(1.0)  # two leases
            agent.process.send_signal(signal.SIGCONT)
            asyncio.run(free_name(address, lease))
            pid = agent.process.pid
            wait_until(
                "its registration", lambda: (s := read_status(address, "host-a")) and s.agent.pid == pid
            )
            assert agent.interrupt() == 130, agent.output()


@pytest.mark.parametrize("name", ["resilient_jax", "jax", "jaxlib"])
def test_a_host_with_other_versions_is_refused(name: str, work: Path) -> None:
    ours = getattr(read_versions(), name)
    with served_store() as address:
        others = msgspec.structs.replace(read_versions(), **{name: "0.0.7"})
        put_job(address, JobRecord(versions=others, first_host=HostName("host-z")))
        code, output = run_agent(agent_arguments(address, work))
    assert code == 83, output
    assert (
        f"host host-a has {name} {ours}, but job {JOB} (host host-z) runs {name} 0.0.7; all hosts of a job need "
        f"the same version: install {name} 0.0.7 on host-a"
    ) in output


def read_status(address: str, host: str) -> HostStatus | None:
    async def read() -> HostStatus | None:
        async with RemoteStore(address, Credentials(TOKEN)) as store:
            found = await store.get(make_host_key(JOB, HostName(host)))
            return msgspec.msgpack.decode(found.value, type=HostStatus) if found else None

    return asyncio.run(read())


def put_job(address: str, record: JobRecord) -> None:
    async def put() -> None:
        async with RemoteStore(address, Credentials(TOKEN)) as store:
            await store.put(make_job_key(JOB), msgspec.msgpack.encode(record))

    asyncio.run(put())


# The machine lacks what was requested.


def test_more_devices_than_exist_are_refused(tmp_path: Path) -> None:
    ended = run_launch(
        [str(JOBS / "faulty.py"), "nothing"],
        tmp_path,
        hosts=1,
        options=["--devices-per-host", "4"],
        environment={"JAX_NUM_CPU_DEVICES": "2"},
    )
    assert ended.code == 1
    assert (
        "host host-0 has 2 devices, but --devices-per-host asks for 4; ask for fewer, or start it where there "
        "are more"
    ) in ended.last_words, ended.output


needs_no_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


@needs_no_gpu
def test_launch_refuses_to_train_on_gpus_that_nobody_lists(work: Path) -> None:
    code, output = run_command(["launch", "--platform", "gpu", IDLE])
    assert code == 2, output
    assert output.startswith("resilient-jax: --platform gpu: found no GPU (nvidia-smi is not installed)"), (
        output
    )


def test_launch_refuses_more_gpus_for_a_host_than_there_are(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, output = run_command(["launch", "--platform", "gpu", "--devices-per-host", "3", IDLE])
    assert code == 2, output
    words = (
        "resilient-jax: --devices-per-host: found 3 GPUs for each host, expected 1 to 2, as many as there are"
    )
    assert output.startswith(words), output


@needs_no_gpu
def test_gpus_that_do_not_exist_are_not_replaced_by_the_cpu(tmp_path: Path) -> None:
    ended = run_launch(
        [str(JOBS / "faulty.py"), "nothing"],
        tmp_path,
        hosts=1,
        options=["--platform", "gpu"],
        environment={"CUDA_VISIBLE_DEVICES": "0"},
    )
    assert ended.code == 1
    assert "--platform gpu: found CPU devices alone on host host-0, expected GPUs" in ended.last_words, (
        ended.output
    )


@pytest.mark.parametrize(("options", "found"), [(["--devices-per-host", "1"], 1), ([], 3)])
def test_requested_devices_take_precedence_over_xla_flags(options: list[str], found: int, work: Path) -> None:
    (work / "count.py").write_text("import jax\nprint(f'{jax.local_device_count()} devices')\n")
    arguments = ["launch", "--hosts", "1", *options, "--run-dir", "run", "count.py"]
    _, output = run_command(arguments, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"})
    assert f"[host-0] {found} devices" in output, output


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a file system of two mebibytes at `path`."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"may not mount a small file system: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    """Write to the disk until no byte is free."""
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)


def test_training_continues_when_the_disk_of_the_logs_is_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk") as disk,
        TinyJob(tmp_path, 2, options=[*ONE_DEVICE, "--run-dir", str(disk)]) as tiny,
    ):
        wait_until("first steps", lambda: tiny.step() > 3)
        fill(disk)
        # After a worker's death every log grows: events, and the output of the worker's successor.
        full_at = tiny.step()
        kill_a_worker(tiny)
        wait_until("a step by another worker", lambda: len(tiny.logs()) >= 3 and tiny.step() > full_at + 5)
        (tmp_path / "stop").write_text(str(tiny.step() + 10))
        assert tiny.job.wait(patience(6)) == 0, tiny.job.read_tail()
        output = tiny.job.read_output()
        tiny.check_steps()
    said = [line for line in output.splitlines() if "cannot write the log file" in line]
    assert said, output
    assert len(said) == len(set(said)), "of each log once"
    assert all(
        ": No space left on device; expected a writable disk with free space; training continues without this log"
        in line
        for line in said
    )


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>/dev/null"], ids=["full", "closed"])
def test_training_continues_when_its_output_cannot_be_written(redirection: str, tmp_path: Path) -> None:
    launch = ["launch", "--hosts", "1", "--run-dir", str(tmp_path), str(JOBS / "faulty.py"), "chatty"]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *launch]
    process = subprocess.Popen(bind_to_this_process(shell), stdin=subprocess.DEVNULL)
    assert process.wait(patience(6)) == 0
    assert (tmp_path / "host-0.log").stat().st_size > 2**20, "the log has every line"


def kill_a_worker(tiny: TinyJob) -> None:
    pid = int(next(iter(tiny.logs())).rpartition("-")[2])
    os.kill(pid, 9)
