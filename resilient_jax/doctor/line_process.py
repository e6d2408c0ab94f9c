"""A child process that answers orders, both in lines, each answer awaited with a deadline."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Final

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.errors import PeerError

EXIT_TIMEOUT_S: Final = 30.0
"""After SIGKILL: the kernel may have to free a GPU first."""
TAIL_BYTES: Final = 4096


class ExperimentFailed(PeerError):
    """A process of an experiment ended, or did not answer in time."""


class LineProcess:
    """A child process; the kernel kills it when this process dies, and `end` does so before.

    Attributes:
        num_read: number of the process's lines that were read.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.num_read = 0
        self._rest = b""
        self._module = module
        self.process = subprocess.Popen(
            bind_to_this_process([sys.executable, "-m", module]),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # So that Ctrl-C reaches this process alone, which ends the others in order.
            start_new_session=True,
        )

    def send_line(self, line: str) -> None:
        """Send a line; a process that is dead is noticed by the next `read_line`."""
        assert self.process.stdin is not None, "started with a pipe"
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def read_line(self, timeout_s: float) -> str:
        """Return the next line.

        Raises:
            TimeoutError: no line came in time.
            ExperimentFailed: the process has ended.
        """
        assert self.process.stdout is not None, "started with a pipe"
        descriptor, deadline_s = self.process.stdout.fileno(), time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise TimeoutError(
                        f"{self._module} (process {self.process.pid}): no answer in {timeout_s:g} s"
                    )
                data = os.read(descriptor, 65536)
                if not data:
                    raise ExperimentFailed(self._describe_end())
                self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        self.num_read += 1
        return line.decode()

    def order(self, do: str, **words: object) -> None:
        """Send an order as JSON."""
        self.send_line(json.dumps({"do": do, **words}))

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; raise as `read_line`."""
        return json.loads(self.read_line(timeout_s))

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(EXIT_TIMEOUT_S)

    def end(self) -> None:
        """Kill the process and close its pipes. Idempotent."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._errors.close()

    def _describe_end(self) -> str:
        code = self.process.wait(EXIT_TIMEOUT_S)
        size = os.fstat(self._errors.fileno()).st_size
        tail = os.pread(self._errors.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        lines = [line for line in tail.splitlines() if line.strip()]
        return f"{self._module} ended with exit code {code}: {lines[-1] if lines else 'without a word'}"
