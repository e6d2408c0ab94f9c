"""The worker's connection to its storage process.

Orbax runs in a process, not in a thread of the worker, because it takes the worker's JAX world for its own, dead hosts
included: in the worker, NumPy arrays are written by process 0 alone, silently; JAX arrays must be on several processes;
the threads of a save meet through JAX's coordination service; and caches keep devices of a world that was left, while
the main thread clears the backends under them. In a process where JAX has one CPU and no world, plain Orbax works as
documented. The process costs 1.3 s of CPU time at the first save or load, in parallel to training.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from resilient_jax.checkpoint.messages import REPLY_DECODER, Reply, Request
from resilient_jax.errors import CheckpointFailed
from resilient_jax.notices import blocked_notices
from resilient_jax.protocol.connection import Connection

MODULE: Final = "resilient_jax.checkpoint.storage_process"
FOREIGN_PREFIXES: Final = ("JAX_", "XLA_", "TPU_", "RESILIENT_JAX_")
"""Prefixes of environment variables for the worker's devices and world."""
EXIT_TIMEOUT_S: Final = 10.0
"""How long the process may continue after its socket has closed."""


class StorageConnection:
    """A storage process and the socket to it. Close it on the thread that made it, with which it dies."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs, blocked_notices():
            command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                env=_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the worker
            )
        self._connection = Connection[Request, Reply](mine.detach(), REPLY_DECODER)

    @property
    def pid(self) -> int:
        """The process id of the storage process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; a reply may still be there to be received."""
        return self._process.poll() is not None

    def send(self, request: Request, descriptor: int | None = None) -> None:
        """Send a request; do not wait for its reply, nor for the process to start.

        Raises:
            CheckpointFailed: the process has ended.
        """
        try:
            self._connection.send(request, [descriptor] if descriptor is not None else [])
        except OSError as error:
            raise CheckpointFailed(self._describe_exit()) from error

    def receive(self, timeout_s: float) -> Reply | None:
        """Return the next reply; None: none within the timeout.

        Raises:
            CheckpointFailed: the process has ended.
        """
        try:
            replies = self._connection.receive(timeout_s)
        except EOFError as error:
            raise CheckpointFailed(self._describe_exit()) from error
        return replies[0].message if replies else None  # one request at a time, one reply

    def close(self) -> None:
        """Kill the process. A save without a reply then leaves only an unfinished folder."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _describe_exit(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        return (
            f"the storage process {self.pid} ended with code {self._process.returncode}; see what it printed"
        )


def _environment(mine: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process with one CPU device, and no other process in its world."""
    kept = {name: value for name, value in mine.items() if not name.startswith(FOREIGN_PREFIXES)}
    return {**kept, "JAX_PLATFORMS": "cpu"}
