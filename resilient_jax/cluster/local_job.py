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

from resilient_jax.cluster.child_process import bound_to_this_process
from resilient_jax.cluster.job_report import JobReport, Part, pids_of, read_report
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.errors import InternalError, ResilientJaxError
from resilient_jax.events import Event
from resilient_jax.protocol.failpoints import (
    ANY_INDEX,
    ANY_STEP,
    DIRECTORY_VARIABLE,
    FaultOrder,
    FaultPointController,
    Place,
)
from resilient_jax.telemetry.event_log import read_events

MARK_VARIABLE = "RESILIENT_JAX_LOCAL_JOB"
"""Every process of the job inherits it: so what it leaves behind can be found."""
POLL_S = 0.02


class LocalJob:
    """Runs `resilient-jax launch` and gives hold of its parts.

    On exit of the `with` block everything that is left of the job is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        hosts: int,
        run_directory: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run_directory = run_directory
        self.output_path = run_directory / "launch.out"
        self._mark = uuid.uuid4().hex
        run_directory.mkdir(parents=True, exist_ok=True)
        self._points = FaultPointController(run_directory / "fault-points")
        launch = [sys.executable, "-m", "resilient_jax.cli.main", "launch", "--hosts", str(hosts)]
        launch += ["--run-dir", str(run_directory), *options, "--", *command]
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                bound_to_this_process(launch),
                env={
                    **(environment or os.environ),
                    MARK_VARIABLE: self._mark,
                    DIRECTORY_VARIABLE: str(self._points.directory.absolute()),
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
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def report(self) -> JobReport | None:
        """What the store knows of the job; None while it starts or when it is over."""
        try:
            return asyncio.run(read_report(read_contact(self.run_directory)))
        except ResilientJaxError:
            return None

    def kill(self, part: Part, host: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends a signal to a part of the job; gives the monotonic time just before.

        Raises:
            InternalError: there is no such part now.
        """
        report = self.report()
        pids = list(pids_of(report, part, host)) if report is not None else []
        if not pids:
            raise InternalError(f"{host} runs no {part} now, so it cannot be killed:\n{self.tail()}")
        now_s = time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return now_s

    def hold(self, place: Place, hosts: Sequence[str], step: int = ANY_STEP, index: int = ANY_INDEX) -> None:
        """Has these hosts wait at `place` of `step` until `release`; with `index`, of that microbatch only."""
        self._points.hold(place, hosts, step, index)

    def wait_held(self, hosts: Sequence[str], deadline_s: float = 60.0) -> None:
        """Waits until these hosts have come where they are held.

        Raises:
            InternalError: not within `deadline_s`, or the job ended before; with the end of its output.
        """
        end_s = time.monotonic() + deadline_s
        while not self._points.held() >= set(hosts):
            if time.monotonic() > end_s or self.process.poll() is not None:
                missing = sorted(set(hosts) - self._points.held())
                raise InternalError(f"{missing} did not come to where they are to be held:\n{self.tail()}")
            time.sleep(POLL_S)

    def release(self) -> None:
        """Lets held hosts go on."""
        self._points.release()

    def order(self, order: FaultOrder) -> None:
        """Has hosts wait or fail at a place, until `release_order`."""
        self._points.order(order)

    def came(self, name: str) -> frozenset[str]:
        """The hosts that have come to the place of the order of that name."""
        return self._points.held(name)

    def release_order(self, name: str) -> None:
        """Ends an order; who is held goes on."""
        self._points.release(name)

    @property
    def launcher_pid(self) -> int:
        """The process that serves the store and starts the agents."""
        return self.process.pid

    def wait_report(
        self, what: str, holds: Callable[[JobReport], bool], deadline_s: float = 60.0
    ) -> JobReport:
        """Waits until `holds` of what the store knows.

        Raises:
            InternalError: not within `deadline_s`, or the job ended before; with the end of its output.
        """
        end_s = time.monotonic() + deadline_s
        report = None
        while time.monotonic() < end_s:
            report = self.report() or report
            if report is not None and holds(report):
                return report
            if self.process.poll() is not None:
                raise InternalError(f"the job ended before {what}:\n{self.tail()}")
            time.sleep(POLL_S)
        state = msgspec.json.format(msgspec.json.encode(report)).decode()
        raise InternalError(f"{what} did not happen within {deadline_s:g} s:\n{self.tail()}\n{state}")

    def wait_event(self, what: str, holds: Callable[[Event], bool], deadline_s: float = 60.0) -> Event:
        """Waits for an event of any host; gives the first.

        Raises:
            InternalError: not within `deadline_s`, or the job ended before; with the end of its output.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            found = next((event for event in self.events() if holds(event)), None)
            if found is not None:
                return found
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise InternalError(f"{what} did not happen within {deadline_s:g} s:\n{self.tail()}")
            time.sleep(POLL_S)

    def wait(self, deadline_s: float) -> int:
        """Waits for the job's end; gives the exit code.

        Raises:
            InternalError: it goes on after `deadline_s`.
        """
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise InternalError(f"the job did not end within {deadline_s:g} s:\n{self.tail()}") from error

    def events(self) -> list[Event]:
        """What all hosts have written, in order of time."""
        logs = self.run_directory.glob("*.events.jsonl")
        return sorted((e for log in logs for e in read_events(log)), key=lambda event: event.monotonic_s)

    def output(self) -> str:
        """What `launch` printed."""
        return self.output_path.read_text(errors="replace")

    def tail(self, lines: int = 60) -> str:
        """The end of what `launch` printed, and the last events."""
        said = "\n".join(self.output().splitlines()[-lines:])
        return said + "\n" + "\n".join(describe(event) for event in self.events()[-lines:])

    def processes(self) -> list[int]:
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


def describe(event: Event) -> str:
    """An event as one line for people."""
    detail = " ".join(f"{name}={value}" for name, value in event.detail.items())
    where = f"g{event.generation}" if event.generation is not None else ""
    return f"{event.monotonic_s:.3f} {event.host} {event.kind} {where} {detail}"
