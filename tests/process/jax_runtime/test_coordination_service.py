"""The process of the coordination service: its protocol, and that it ends with its parent."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilient_jax.jax_runtime import TESTED_VERSIONS
from tests.support.paths import ROOT
from tests.support.patience import patience, wait_until

MODULE = "resilient_jax.jax_runtime.coordination_service"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


@contextmanager
def service() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def order(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_the_service_serves_on_a_free_port_and_ends_with_its_input() -> None:
    with service() as process:
        words = order(process, "127.0.0.1:0 2 4").split()
        assert words[0] == "serving"
        host, port = words[1].split(":")
        socket.create_connection((host, int(port)), timeout=patience(1)).close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(patience(1)) == 0


def test_a_standby_that_is_never_used_ends_with_its_input() -> None:
    with service() as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(patience(1)) == 0


def test_a_port_in_use_is_refused_although_grpc_would_share_it() -> None:
    with service() as first, service() as second:
        address = order(first, "127.0.0.1:0 1 1").split()[1]
        assert order(second, f"{address} 1 1") == f"failed cannot bind {address}: Address already in use"
        assert second.wait(patience(1)) == 1


def test_an_invalid_order_is_refused_with_what_was_expected() -> None:
    with service() as process:
        assert "expected '<host:port> <members> <seats>'" in order(process, "127.0.0.1:0 3 2")


def test_the_service_dies_with_a_parent_that_is_killed() -> None:
    script = (
        "import subprocess, sys\n"
        "pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        f"p = subprocess.Popen([sys.executable, '-m', '{MODULE}'], **pipes)\n"
        "p.stdout.readline(); print(p.pid, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=ENVIRONMENT,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait(patience(1))
    wait_until("the end of the service", lambda: not lives(pid))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_service_loads_jaxlib_and_not_jax() -> None:
    code = f"import sys, {MODULE}; print('jax' in sys.modules, 'jaxlib' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=patience(6),
        check=True,
    )
    assert found.stdout.split() == ["False", "True"]


def test_the_tested_versions_are_stated() -> None:
    assert TESTED_VERSIONS
