"""The output of a process that ends in native code."""

import subprocess
import sys

import pytest

from resilient_jax.cluster import worker_output
from resilient_jax.cluster.worker_output import WorkerOutput
from tests.support.patience import patience


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shown: list[str] = []
    monkeypatch.setattr(worker_output, "print_bytes", lambda text: shown.append(text.decode()))
    return shown


def test_the_crash_of_a_process_that_cpp_ends_is_in_the_log_alone(screen):
    script = (
        "import ctypes, faulthandler; faulthandler.enable(); ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()"
    )
    crashed = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=patience(6))
    assert crashed.returncode < 0
    assert b"Fatal Python error: Aborted" in crashed.stderr
    output = WorkerOutput("host-0", None)
    for line in crashed.stderr.splitlines():
        output.write(line, is_error=True)
    assert screen == []
    assert "Fatal Python error" in output.read_last_errors(), "lost where a job's end quotes it"
