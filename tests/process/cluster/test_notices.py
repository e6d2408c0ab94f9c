"""A notice that reaches every process of a host ends none but those that answer it; scripts are not affected."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilient_jax.checkpoint.storage_connection import StorageConnection
from resilient_jax.cluster.child_process import SpawnedProcess, open_line_reader
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.cluster.worker_process import RUN_SCRIPT
from resilient_jax.notices import NOTICE_SIGNALS
from resilient_jax.telemetry.event_log import EventLog
from tests.support.patience import patience, wait_until

WAIT_S = patience(6)
SAYS_SO = "import time; print('up', flush=True); time.sleep(600)"
SCRIPT = """
import json, os, signal, subprocess, sys, time
NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
print("ready", flush=True)
sys.stdin.readline()
code = "import signal; print([str(signal.getsignal(n)) for n in (15, 1, 12)], signal.getsignal(2).__name__)"
started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
ends = []
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGINT):
    here, there = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(there, b".")
            while True:  # one long sleep would miss a signal that comes just before it
                time.sleep(0.1)
        except KeyboardInterrupt:
            os._exit(7)
    os.read(here, 1)
    os.kill(pid, number)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps({"got": got, "started": started, "ends": ends}), flush=True)
"""


def start_script(folder: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    ignored = [f"signal.signal({int(n)}, signal.SIG_IGN)" for n in NOTICE_SIGNALS]
    # As an agent's child begins: all are ignored from its first instruction on.
    begin = "import signal\n" + "\n".join(ignored) + "\n" + RUN_SCRIPT
    return subprocess.Popen(
        [sys.executable, "-u", "-c", begin, "", str(folder / "script.py")],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_script_gets_the_signals_that_it_handles_and_what_it_starts_does_not_ignore_them(
    tmp_path: Path,
) -> None:
    with start_script(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            for number in NOTICE_SIGNALS:
                process.send_signal(number)
            output, _ = process.communicate("go\n", WAIT_S)
        finally:
            process.kill()
        assert process.returncode == 0, output
    found = json.loads(output)
    assert found["got"] == [signal.SIGUSR1]
    assert found["started"] == (f"{[str(signal.SIG_DFL)] * 3} default_int_handler"), (
        "a program that the script starts"
    )
    assert found["ends"] == [-signal.SIGTERM, -signal.SIGHUP, -signal.SIGUSR2, 7], "children that it forks"


@pytest.mark.parametrize("moment", ["at once", "when it runs"])
def test_a_child_of_an_agent_outlives_every_notice_from_its_first_instruction_on(moment: str) -> None:
    async def run() -> None:
        child = SpawnedProcess([sys.executable, "-c", SAYS_SO], stderr=None)
        try:
            assert child.stdout is not None
            lines, _ = await open_line_reader(child.stdout.fileno())
            child.stdout.close()
            if moment == "at once":
                send_all(child.pid)
            assert await asyncio.wait_for(lines.readline(), WAIT_S) == b"up\n", child.exit_code
            send_all(child.pid)
            await asyncio.sleep(0)
            assert child.exit_code is None
            blocked = read_status(child.pid)["SigBlk"]
            assert not blocked & sum(1 << (n - 1) for n in NOTICE_SIGNALS), "ignored, and not pending"
        finally:
            await child.kill_and_wait()

    asyncio.run(run())


def test_the_coordination_service_and_the_storage_process_outlive_every_notice(tmp_path: Path) -> None:
    storage = StorageConnection()
    try:
        send_all(storage.pid)  # at once: it imports for a second
        check_ignored(storage.pid)
        assert not storage.has_ended
    finally:
        storage.close()

    async def run() -> None:
        log = EventLog(tmp_path / "events.jsonl", "host-0")
        services = CoordinationServices(lambda: "127.0.0.1:1", log, lambda: None)
        try:
            services.start_standby()
            (pid,) = await wait_children()
            send_all(pid)
            await asyncio.to_thread(check_ignored, pid)
        finally:
            await services.close()
            log.close()

    asyncio.run(run())


async def wait_children() -> list[int]:
    async with asyncio.timeout(WAIT_S):
        while not (found := list_children()):  # noqa: ASYNC110 - the kernel sets no event
            await asyncio.sleep(0.01)
        return found


def list_children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def send_all(pid: int) -> None:
    for number in NOTICE_SIGNALS:
        os.kill(pid, number)


def read_status(pid: int) -> dict[str, int]:
    """Return the masks of signals in /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1], 16)
        for line in lines
        if line.startswith(("SigBlk", "SigIgn"))
    }


def check_ignored(pid: int) -> None:
    """Wait until the process ignores all, and has none left that waits."""
    wanted = sum(1 << (number - 1) for number in NOTICE_SIGNALS)
    wait_until("the process ignores notices", lambda: read_status(pid)["SigIgn"] & wanted == wanted, WAIT_S)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_end_of_a_terminal_is_no_notice_where_it_was_ignored_from_the_start(is_ignored: bool) -> None:
    code = (
        "import signal\n"
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if is_ignored else 'SIG_DFL'})\n"
        "from resilient_jax.notices import list_handled_notices\n"
        "print(*(number.name for number in list_handled_notices()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    hangup = [] if is_ignored else ["SIGHUP"]
    assert done.stdout.split() == ["SIGTERM", *hangup, "SIGUSR1", "SIGUSR2"]
