"""The worker's line to its storage process.

Why a process, and not a thread with Orbax in it: Orbax takes the worker's JAX world for its own, dead hosts included.
There, NumPy arrays are written by process 0 alone, without a word on the others; arrays of JAX must lie on several
processes; threads of a save meet through JAX's coordination service; and caches keep devices of a world that was left,
while the main thread clears the backends under them. In a process where JAX has one CPU and no world, plain Orbax does
as it is documented. It costs 1.3 s of processor time at the first save or load, beside the training.
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
from resilient_jax.protocol.connection import Connection

MODULE: Final = "resilient_jax.checkpoint.storage_process"
FOREIGN_PREFIXES: Final = ("JAX_", "XLA_", "TPU_", "RESILIENT_JAX_")
"""Of environment variables that are about the worker's devices and world."""
EXIT_TIMEOUT_S: Final = 10.0
"""Between the end of a process's socket and its own."""


class StorageConnection:
    """A storage process and the socket to it; whoever made it ends it, on the same thread: then it dies."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                env=_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the worker's to answer
            )
        self._link = Connection[Request, Reply](mine.detach(), REPLY_DECODER)

    @property
    def pid(self) -> int:
        """The process id of the storage process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; an answer may still be there to be read."""
        return self._process.poll() is not None

    def send(self, order: Request, descriptor: int | None = None) -> None:
        """Gives an order; does not wait for it, nor for the process to be up.

        Raises:
            CheckpointFailed: the process is gone.
        """
        try:
            self._link.send(order, [descriptor] if descriptor is not None else [])
        except OSError as error:
            raise CheckpointFailed(self._why_gone()) from error

    def receive(self, timeout_s: float) -> Reply | None:
        """The next answer; None: not within the time.

        Raises:
            CheckpointFailed: the process is gone.
        """
        try:
            replies = self._link.receive(timeout_s)
        except EOFError as error:
            raise CheckpointFailed(self._why_gone()) from error
        return replies[0].message if replies else None  # one request at a time, one reply

    def close(self) -> None:
        """Ends the process, whatever it does. A save that was not answered yet then leaves nothing that counts."""
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _why_gone(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        return (
            f"the storage process {self.pid} ended with code {self._process.returncode}; see what it printed"
        )


def _environment(mine: Mapping[str, str]) -> dict[str, str]:
    """For a process with one CPU device, and no other process in its world."""
    kept = {name: value for name, value in mine.items() if not name.startswith(FOREIGN_PREFIXES)}
    return {**kept, "JAX_PLATFORMS": "cpu"}
