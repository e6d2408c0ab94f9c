"""The pipe that closes as soon as a worker is killed, before the kernel has freed its memory."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import patience

DEADLINE_S = patience(3)
SCRIPT = """
import os, sys
from resilient_jax.worker.death_pipe import isolate_death_pipe
death_pipe, other = map(int, sys.argv[1:])
print(isolate_death_pipe(death_pipe), flush=True)
os.close(other)
sys.stdin.read()
"""


def closes(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0]) and os.read(descriptor, 1) == b""


def test_a_thread_of_its_own_holds_the_pipe_and_no_other_descriptor() -> None:
    death_pipe, held = os.pipe()
    other, others_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(held), str(others_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(held, others_end),
    )
    os.close(held)
    os.close(others_end)
    try:
        assert process.stdout is not None
        answer = process.stdout.readline().decode().strip()
        if "Operation not permitted" in answer:
            pytest.skip(f"this sandbox forbids it: {answer}")
        assert answer == "None"
        assert closes(other, DEADLINE_S), "the thread holds a copy of a descriptor that was closed"
        assert not closes(death_pipe, 0.0)
        tables = [set(os.listdir(task / "fd")) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        assert [table for table in tables if str(held) in table] == [{str(held)}]
        process.send_signal(signal.SIGKILL)
        assert closes(death_pipe, DEADLINE_S)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        os.close(death_pipe)
        os.close(other)


def test_where_unshare_is_forbidden_the_reason_is_returned_and_the_descriptor_stays_open() -> None:
    script = (
        "import os, sys\n"
        "from resilient_jax.worker import death_pipe\n"
        "class Libc:\n"
        "    def unshare(self, flags): import ctypes; ctypes.set_errno(1); return -1\n"
        "death_pipe._libc = Libc()\n"
        "read, write = os.pipe()\n"
        "print(death_pipe.isolate_death_pipe(write)); os.fstat(write)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert found.stdout.strip() == "unshare(CLONE_FILES): Operation not permitted", found.stderr
