"""A job on this machine as a child process, which the demo, benchmarks, campaigns and tests observe and break."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids, read_job_report
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.errors import InternalError, ResilientJaxError
from resilient_jax.local_job.observed_job import JobObserver, JobTimeout, ObservedJob, describe_event
from resilient_jax.protocol.failpoints import (
    ANY_INDEX,
    ANY_STEP,
    FAILPOINTS_VARIABLE,
    FailPoint,
    FailPointController,
)
from resilient_jax.transport.event_loop_thread import share_event_loop

MARK_VARIABLE = "RESILIENT_JAX_LOCAL_JOB"
"""Every process of the job inherits this variable, by which processes that the job leaves behind are found."""


class LocalJob(ObservedJob):
    """`resilient-jax launch` as a child process, whose components can be killed and whose workers can be held.

    The end of the `with` block kills all remaining processes of the job.

    Attributes:
        process: the launcher, which serves the store and starts the agents.
        failpoints: orders to workers.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_hosts: int,
        run_directory: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
        observer: JobObserver | None = None,
    ) -> None:
        """Start the launcher of the job.

        Args:
            command: the script and its arguments.
            num_hosts: the number of hosts of the job.
            run_directory: the folder for logs and events.
            options: options of `launch`.
            environment: the launcher's environment; default: that of this process.
            output: the descriptor that gets what the launcher prints; default: that of the file `launch.out`.
            observer: see `ObservedJob`.
        """
        super().__init__(run_directory, observer)
        self.output_path = run_directory / "launch.out"
        self._mark = uuid.uuid4().hex
        run_directory.mkdir(parents=True, exist_ok=True)
        self.failpoints = FailPointController(run_directory / "failpoints")
        launch = [sys.executable, "-m", "resilient_jax.cli.main", "launch", "--hosts", str(num_hosts)]
        launch += ["--run-dir", str(run_directory), *options, "--", *command]
        with contextlib.ExitStack() as stack:
            if output is None:
                output = stack.enter_context(self.output_path.open("wb")).fileno()
            self.process = subprocess.Popen(
                bind_to_this_process(launch),
                env={
                    **(environment or os.environ),
                    MARK_VARIABLE: self._mark,
                    FAILPOINTS_VARIABLE: str(self.failpoints.directory.absolute()),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The launcher first, or it would start killed agents again.
        self.process.kill()
        self.process.wait()
        send_signal(self.find_processes(), signal.SIGKILL)

    def exit_code(self) -> int | None:
        """Return the launcher's exit code; None while it runs."""
        return self.process.poll()

    def read_report(self) -> JobReport | None:
        """Return the store's records of the job; None while the job starts, and after its end."""
        try:
            # Not `asyncio.run`, which a signal may leave while gRPC starts or stops for this poll alone.
            return share_event_loop().run(read_job_report(read_contact(self.run_directory)))
        except ResilientJaxError:
            return None

    def read_output(self) -> str:
        """Return the output of `launch` so far."""
        return self.output_path.read_text(errors="replace")

    def read_tail(self, lines: int = 60) -> str:
        """Return the last lines that `launch` printed, and the last events."""
        # Not `read_events`, which refuses the torn lines that a full disk leaves.
        self.poll_events()
        newest = sorted(self.events.records, key=lambda event: event.monotonic_s)[-lines:]
        printed = self.read_output().splitlines()[-lines:]
        return "\n".join([*printed, *(f"{e.monotonic_s:.3f} {describe_event(e)}" for e in newest)])

    def find_processes(self) -> list[int]:
        """Return the pids of all live processes of the job, including orphans."""
        mark = f"{MARK_VARIABLE}={self._mark}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def kill(self, component: JobComponent, host: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to a component of the job, and return the monotonic time just before.

        Raises:
            InternalError: the host does not run this component now.
        """
        report = self.read_report()
        pids = list(find_pids(report, component, host)) if report is not None else []
        if not pids:
            raise InternalError(
                f"{host} runs no {component} now, so it cannot be killed:\n{self.read_tail()}"
            )
        now_s = time.monotonic()
        send_signal(pids, number)
        return now_s

    def hold(
        self, failpoint: FailPoint, hosts: Sequence[str], step: int = ANY_STEP, index: int = ANY_INDEX
    ) -> None:
        """Order hosts to wait at a failpoint of `step` (with `index`: of that microbatch) until `release`."""
        self.failpoints.hold(failpoint, hosts, step, index)

    def wait_held(self, hosts: Sequence[str], timeout_s: float = 60.0, name: str = "hold") -> None:
        """Wait until all of these hosts have reached the failpoint where the order of this name holds them.

        Raises:
            JobTimeout: a host has not arrived within `timeout_s`; with the end of the job's output.
            JobEnded: the job ended before.
        """
        what = f"the arrival of {', '.join(hosts)} at the failpoint"
        self.wait_for(what, lambda: self.failpoints.list_held_hosts(name) >= set(hosts) or None, timeout_s)

    def release(self) -> None:
        """Let all held hosts continue from their failpoints."""
        self.failpoints.release()

    @contextlib.contextmanager
    def holding(
        self, failpoint: FailPoint, hosts: Sequence[str], step: int = ANY_STEP, timeout_s: float = 60.0
    ) -> Iterator[None]:
        """Hold hosts at a failpoint during the `with` block, which begins when all of them have arrived.

        Raises:
            JobTimeout: the hosts have not arrived within `timeout_s`.
            JobEnded: the job ended before.
        """
        self.hold(failpoint, hosts, step)
        try:
            self.wait_held(hosts, timeout_s)
            yield
        finally:
            self.release()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the job, and return its exit code.

        Raises:
            JobTimeout: the job still runs after `timeout_s`; with the end of its output.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise JobTimeout(f"the job did not end within {timeout_s:g} s:\n{self.read_tail()}") from error


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
