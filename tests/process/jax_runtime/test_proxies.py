"""JAX's coordination client reaches its own host whatever proxy the environment names."""

import os
import socket
import subprocess
import sys

import pytest

from resilient_jax.jax_runtime.worker_environment import PROXY_VARIABLES, make_worker_environment
from tests.support.patience import patience

CONNECT = """
import sys
from jax._src.lib import _jax
address = f"127.0.0.3:{sys.argv[1]}"
service = _jax.get_distributed_runtime_service(address, 1)
client = _jax.get_distributed_runtime_client(address, 0, init_timeout=3)
client.connect()
client.shutdown()
service.shutdown()
"""


@pytest.mark.parametrize("variable", PROXY_VARIABLES)
def test_jax_forms_a_world_although_a_proxy_is_set_that_does_not_answer(variable: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        base = {**os.environ, variable: f"http://127.0.0.1:{nobody.getsockname()[1]}"}
        ours = make_worker_environment(
            platform="cpu", devices_per_host=1, cache_dir=None, collective_timeout_s=3.0, base=base
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.3", 0))
            port = probe.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", CONNECT, str(port)],
            env=base | ours,
            capture_output=True,
            text=True,
            timeout=patience(6),
        )
    assert done.returncode == 0, done.stderr
