"""Where threads are, whether a debugger holds a process, and a process seen from outside."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient_jax.cluster.stacks_file import StacksFile, describe_process, make_stacks_path
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.worker_report import WorkerReport
from resilient_jax.worker.thread_stacks import describe_place, find_barrier, format_stacks, is_debugged

PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
ASK = """
import sys
from resilient_jax.worker.thread_stacks import is_debugged
for _ in sys.stdin:
    print(is_debugged(), flush=True)
"""
IN_PDB = """
import sys, threading, pdb
from resilient_jax.worker.thread_stacks import is_debugged
main = threading.main_thread()
def look():
    while not is_debugged():
        pass
    print("debugged", flush=True)
threading.Thread(target=look, daemon=True).start()
pdb.Pdb(nosigint=True).set_trace()
"""


def test_a_place_is_the_innermost_line_of_the_users_own() -> None:
    waits, ends = threading.Event(), threading.Event()

    def load_batch() -> None:
        waits.set()
        ends.wait()  # deeper frames are of a library

    thread = threading.Thread(target=load_batch, name="reads")
    thread.start()
    try:
        waits.wait()
        line = load_batch.__code__.co_firstlineno + 2
        assert thread.ident is not None
        assert describe_place(thread.ident) == f"`load_batch`, line {line} of {Path(__file__).name}"
        assert "thread reads:\n" in format_stacks()
        assert "ends.wait()" in format_stacks()
    finally:
        ends.set()
        thread.join()
    assert describe_place(thread.ident) == "a thread that has ended"


@pytest.mark.parametrize(
    ("path", "function", "library"),
    [
        ("/x/orbax/checkpoint/_src/multihost/multihost.py", "sync_global_processes", "Orbax"),
        ("/x/jax/experimental/multihost_utils.py", "sync_global_devices", "JAX"),
        ("/x/orbax/checkpoint/_src/multihost/multihost.py", "save", None),
    ],
)
def test_a_wait_for_all_hosts_in_a_library_is_known_as_one(
    path: str, function: str, library: str | None
) -> None:
    waits, ends = threading.Event(), threading.Event()
    names: dict[str, Callable[[], None]] = {}
    source = f"def {function}():\n    waits.set()\n    ends.wait()\n"
    exec(compile(source, path, "exec"), {"waits": waits, "ends": ends}, names)

    def save() -> None:
        names[function]()

    thread = threading.Thread(target=save)
    thread.start()
    try:
        waits.wait()
        assert thread.ident is not None
        place, barrier = describe_place(thread.ident), find_barrier(thread.ident)
        told = f"{library}'s `{function}`, which returns when all hosts have called it"
        assert barrier == (told if library else None)
        assert place.endswith(f", in {told}") is (library is not None)
    finally:
        ends.set()
        thread.join()


def test_a_debugger_that_traces_a_process_is_noticed() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with subprocess.Popen(
        [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def ask() -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            return child.stdout.readline()

        assert ask() == "False\n"
        if libc.ptrace(PTRACE_SEIZE, child.pid, None, None) != 0:
            child.kill()
            pytest.skip(f"ptrace is not permitted here: {os.strerror(ctypes.get_errno())}")
        assert ask() == "True\n"
        child.kill()


def test_a_debugger_within_the_process_is_noticed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", IN_PDB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert any("debugged" in line for line in child.stdout)
        child.kill()
    assert not is_debugged()


def test_stacks_of_a_host_are_appended_and_call_what_waits_for_them(tmp_path: Path) -> None:
    file, report = StacksFile(tmp_path, "host-1"), WorkerReport(generation=GenerationNumber(3))
    file.append(report, "no progress", "thread MainThread:\n  f")
    file.append(report, "it does not respond", describe_process(os.getpid()))
    text = make_stacks_path(tmp_path, "host-1").read_text()
    assert "UTC, generation 3: no progress\nthread MainThread:\n  f\n" in text
    assert f"thread {os.getpid()}: Name: " in text
    assert "State: R (running)" in text
    StacksFile(None, "host-1").append(report, "without a run folder", "nothing is kept")


def test_a_process_that_has_ended_is_described_as_such() -> None:
    with subprocess.Popen(["true"]) as child:
        pid = child.pid
    assert describe_process(pid) == "the process has ended"
