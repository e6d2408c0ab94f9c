"""Commands and agents as processes, started one by one as on a pod, with their output."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.transport.credentials import TOKEN_VARIABLE
from tests.support.paths import SCRIPTS
from tests.support.patience import patience, wait_until

TOKEN = "test-token"
"""The token that `tests/support/scripts/serve_store.py` expects."""
STORE_SCRIPT = SCRIPTS / "serve_store.py"
COMMAND = [sys.executable, "-m", "resilient_jax.cli.main"]
SOON_S = patience(6)
"""Timeout of operations that take a second or two on an idle machine."""


def run_command(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run `resilient-jax ARGUMENTS...` to its end; return the exit code and the output of both streams."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    return done.returncode, done.stdout


_ports = itertools.cycle(range(10_000 + os.getpid() % 200 * 100, 10_000 + (os.getpid() % 200 + 1) * 100))
"""Of this process, and below those that the kernel gives to connections: nobody else comes to listen there."""


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no process listens."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("cycles have no end")


@contextlib.contextmanager
def served_store(address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve a store in a process of its own; yield its address."""
    process = subprocess.Popen(
        [sys.executable, str(STORE_SCRIPT), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class HandStartedAgent:
    """`resilient-jax agent` as a process, with its output in a file; killed at the end of the `with`."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start the agent; `prefix` goes before the command, such as `ip netns exec NAME`."""
        self._output = output
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                bind_to_this_process([*prefix, *command, "agent", *arguments]),
                env={**os.environ, "OMP_NUM_THREADS": "1", TOKEN_VARIABLE: TOKEN, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "HandStartedAgent":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_said(self, text: str, deadline_s: float = SOON_S) -> None:
        """Wait until the agent has printed `text`; fail if the agent ends before."""
        wait_until(f"{text!r} in the output", lambda: text in self.output() or self._ended(text), deadline_s)

    def wait(self, deadline_s: float = SOON_S) -> int:
        """Wait for the agent's end; return the exit code."""
        return self.process.wait(deadline_s)

    def interrupt(self) -> int:
        """Interrupt the agent as Ctrl-C does; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def _ended(self, text: str) -> bool:
        assert self.process.poll() is None, f"ended before it said {text!r}:\n{self.output()}"
        return False


def start_agents(
    work: Path, command: Sequence[str], *, config: str, devices: Sequence[int] = (1, 1)
) -> list[HandStartedAgent]:
    """Start the agents of one job, with so many devices each; the first serves the store."""
    (work / "job.toml").write_text(config)
    store, agents = f"127.0.0.1:{free_port()}", []
    for index, count in enumerate(devices):
        options = {
            "--store": store,
            "--job": "by-hand",
            "--host-name": f"host-{index}",
            "--address": f"127.0.0.{index + 2}",
            "--num-hosts": str(len(devices)),
            "--run-dir": str(work / f"run-{index}"),
            "--config": str(work / "job.toml"),
            "--platform": "cpu",
            "--devices-per-host": str(count),
        }
        words = [word for pair in options.items() for word in pair]
        words += ["--serve-store"] if index == 0 else []
        agents.append(HandStartedAgent([*words, "--", *command], work / f"host-{index}.out"))
    return agents
