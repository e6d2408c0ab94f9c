"""A job on this machine as a process of its own, to be watched and broken: for demo, benchmark and tests."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.cluster.job_report import JobComponent, JobReport, find_pids, read_job_report
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.errors import InternalError, ResilientJaxError
from resilient_jax.events import Event
from resilient_jax.protocol.failpoints import (
    ANY_INDEX,
    ANY_STEP,
    FAILPOINTS_VARIABLE,
    FailPoint,
    FailPointController,
    FailPointOrder,
)
from resilient_jax.telemetry.event_log import read_events

MARK_VARIABLE = "RESILIENT_JAX_LOCAL_JOB"
"""Every process of the job inherits it: so what it leaves behind can be found."""
POLL_INTERVAL_S = 0.02


class LocalJob:
    """Runs `resilient-jax launch` and gives hold of its parts.

    On exit of the `with` block everything that is left of the job is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_hosts: int,
        run_directory: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run_directory = run_directory
        self.output_path = run_directory / "launch.out"
        self._mark = uuid.uuid4().hex
        run_directory.mkdir(parents=True, exist_ok=True)
        self._points = FailPointController(run_directory / "fault-points")
        launch = [sys.executable, "-m", "resilient_jax.cli.main", "launch", "--hosts", str(num_hosts)]
        launch += ["--run-dir", str(run_directory), *options, "--", *command]
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                bind_to_this_process(launch),
                env={
                    **(environment or os.environ),
                    MARK_VARIABLE: self._mark,
                    FAILPOINTS_VARIABLE: str(self._points.directory.absolute()),
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
        self.process.kill()
        self.process.wait()
        for pid in self.find_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def read_report(self) -> JobReport | None:
        """What the store knows of the job; None while it starts or when it is over."""
        try:
            return asyncio.run(read_job_report(read_contact(self.run_directory)))
        except ResilientJaxError:
            return None

    def kill(self, component: JobComponent, host: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal to a part of the job; gives the monotonic time just before.

        Raises:
            InternalError: there is no such part now.
        """
        report = self.read_report()
        pids = list(find_pids(report, component, host)) if report is not None else []
        if not pids:
            raise InternalError(
                f"{host} runs no {component} now, so it cannot be killed:\n{self.read_tail()}"
            )
        now_s = time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return now_s

    def hold(
        self, failpoint: FailPoint, hosts: Sequence[str], step: int = ANY_STEP, index: int = ANY_INDEX
    ) -> None:
        """Has these hosts wait at `place` of `step` until `release`; with `index`, of that microbatch only."""
        self._points.hold(failpoint, hosts, step, index)

    def wait_held(self, hosts: Sequence[str], timeout_s: float = 60.0) -> None:
        """Waits until these hosts have come where they are held.

        Raises:
            InternalError: not within `deadline_s`, or the job ended before; with the end of its output.
        """
        end_s = time.monotonic() + timeout_s
        while not self._points.list_held_hosts() >= set(hosts):
            if time.monotonic() > end_s or self.process.poll() is not None:
                missing = sorted(set(hosts) - self._points.list_held_hosts())
                raise InternalError(
                    f"{missing} did not come to where they are to be held:\n{self.read_tail()}"
                )
            time.sleep(POLL_INTERVAL_S)

    def release(self) -> None:
        """Lets held hosts go on."""
        self._points.release()

    def set_order(self, order: FailPointOrder) -> None:
        """Has hosts wait or fail at a place, until `release_order`."""
        self._points.set_order(order)

    def came(self, name: str) -> frozenset[str]:
        """The hosts that have come to the place of the order of that name."""
        return self._points.list_held_hosts(name)

    def release_order(self, name: str) -> None:
        """Ends an order; who is held goes on."""
        self._points.release(name)

    @property
    def launcher_pid(self) -> int:
        """The process that serves the store and starts the agents."""
        return self.process.pid

    def wait_report(
        self, what: str, holds: Callable[[JobReport], bool], timeout_s: float = 60.0
    ) -> JobReport:
        """Waits until `holds` of what the store knows.

        Raises:
            InternalError: not within `deadline_s`, or the job ended before; with the end of its output.
        """
        end_s = time.monotonic() + timeout_s
        report = None
        while time.monotonic() < end_s:
            report = self.read_report() or report
            if report is not None and holds(report):
                return report
            if self.process.poll() is not None:
                raise InternalError(f"the job ended before {what}:\n{self.read_tail()}")
            time.sleep(POLL_INTERVAL_S)
        state = msgspec.json.format(msgspec.json.encode(report)).decode()
        raise InternalError(f"{what} did not happen within {timeout_s:g} s:\n{self.read_tail()}\n{state}")

    def wait_event(self, what: str, holds: Callable[[Event], bool], timeout_s: float = 60.0) -> Event:
        """Waits for an event of any host; gives the first.

        Raises:
            InternalError: not within `deadline_s`, or the job ended before; with the end of its output.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            found = next((event for event in self.read_events() if holds(event)), None)
            if found is not None:
                return found
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise InternalError(f"{what} did not happen within {timeout_s:g} s:\n{self.read_tail()}")
            time.sleep(POLL_INTERVAL_S)

    def wait(self, timeout_s: float) -> int:
        """Waits for the job's end; gives the exit code.

        Raises:
            InternalError: it goes on after `deadline_s`.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise InternalError(f"the job did not end within {timeout_s:g} s:\n{self.read_tail()}") from error

    def read_events(self) -> list[Event]:
        """What all hosts have written, in order of time."""
        logs = self.run_directory.glob("*.events.jsonl")
        return sorted((e for log in logs for e in read_events(log)), key=lambda event: event.monotonic_s)

    def read_output(self) -> str:
        """What `launch` printed."""
        return self.output_path.read_text(errors="replace")

    def read_tail(self, lines: int = 60) -> str:
        """The end of what `launch` printed, and the last events."""
        said = "\n".join(self.read_output().splitlines()[-lines:])
        return said + "\n" + "\n".join(format_event(event) for event in self.read_events()[-lines:])

    def find_processes(self) -> list[int]:
        """Every living process of the job, whoever its parent is by now."""
        mark = f"{MARK_VARIABLE}={self._mark}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found


def format_event(event: Event) -> str:
    """An event as one line for people."""
    detail = " ".join(f"{name}={value}" for name, value in event.detail.items())
    where = f"g{event.generation}" if event.generation is not None else ""
    return f"{event.monotonic_s:.3f} {event.host} {event.kind} {where} {detail}"
