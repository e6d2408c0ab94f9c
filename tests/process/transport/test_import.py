"""Importing the transport and the store has no side effects on the process."""

import os
import subprocess
import sys

import pytest

from tests.support.patience import patience

PROBE = """
import os, sys, threading
import resilient_jax.store.interface, resilient_jax.store.memory
assert "grpc" not in sys.modules
import resilient_jax.transport, resilient_jax.store.service, resilient_jax.store.remote
assert not {"jax", "numpy"} & set(sys.modules)
assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
print(os.environ["GRPC_VERBOSITY"])
"""


@pytest.mark.parametrize(("given", "expected"), [(None, "NONE"), ("ERROR", "ERROR")])
def test_importing_starts_no_thread_and_keeps_the_users_settings(given, expected):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    if given is not None:
        environment["GRPC_VERBOSITY"] = given
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=patience(6)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


FORK = """
import asyncio, subprocess, sys
from resilient_jax.transport import Channel, Credentials, Server

async def main():
    credentials = Credentials("test-token")
    async with Server(credentials=credentials) as server, Channel(server.address, credentials) as channel:
        channel._connector.get().get_state(try_to_connect=True)
        for _ in range(20):
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "", preexec_fn=lambda: None)
            assert await asyncio.wait_for(child.wait(), 30) == 0

asyncio.run(main())
"""


def test_a_process_with_a_running_server_can_fork():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=patience(12))
    assert (done.returncode, done.stderr) == (0, "")
