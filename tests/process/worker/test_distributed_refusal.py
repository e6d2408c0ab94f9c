"""`jax.distributed.initialize` in a script is refused with what to do, not reported as a bug or waited for."""

import os
import subprocess
import sys
import textwrap

import pytest

from resilient_jax.protocol.worker_messages import AGENT_CONNECTION_VARIABLE
from tests.support.patience import patience

REMEDY = "rj.run or fit connects them, again after every change. Remove the call"


def run_script(script: str, **environment: str) -> str:
    """Return what the script wrote to standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patience(10),
        check=False,
    )
    assert ended.returncode == 1, ended
    return ended.stderr


@pytest.mark.parametrize("call", ["initialize()", "initialize('h:1', 2, process_id=0)"])
def test_a_call_under_an_agent_is_refused_before_it_waits(call: str) -> None:
    script = f"""
        import jax
        import resilient_jax as rj
        jax.distributed.shutdown()
        jax.distributed.{call}
    """
    error = run_script(script, **{AGENT_CONNECTION_VARIABLE: "3"})
    assert "CallerError: jax.distributed.initialize: found a call under an agent, expected none" in error
    assert REMEDY in error
    assert "jax.distributed.shutdown: does nothing under an agent" in error


def test_run_refuses_a_script_that_has_connected_jax_itself() -> None:
    script = """
        import socket
        import jax
        import resilient_jax as rj
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
        rj.run(lambda world: None)
    """
    error = run_script(script)
    assert "CallerError: run: found that this script has called jax.distributed.initialize" in error
    assert REMEDY in error
