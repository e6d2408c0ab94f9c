"""Keeps the agent of one host of a job on this machine running: starts it, tries it again, says why."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from resilient_jax.cluster.agent_end import AgentEnd, describe_agent_end, judge_end
from resilient_jax.cluster.child_process import LineReader, SpawnedProcess, get_signal_name, open_line_reader
from resilient_jax.cluster.job_view import JobView
from resilient_jax.cluster.restart_budget import RestartBudget
from resilient_jax.errors import EXHAUSTION_ERRNOS, ExitCode
from resilient_jax.ids import HostName

RESTART_WINDOW_S = 600.0
"""Within which the restarts of a host are counted."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""Between two tries of an agent that is refused: the first and the longest; each is twice the one before."""
GIVE_UP_S = 30.0
"""So long agents are tried again that are refused while no host of the job has a lease: nobody trains then."""
LAST_LINES_TIMEOUT_S = 0.5
"""For what an agent printed last; a process that inherited its pipe must not delay the end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCare:
    """How a launcher cares for each of its hosts.

    Attributes:
        over: set when the job is over, or was told to end: no agent is started any more.
        restart_delay_s: seconds for which a host that went down stays away; None: no host is started again.
        max_restarts: restarts of one host within `RESTART_WINDOW_S`.
    """

    view: JobView
    over: asyncio.Event
    end_job: Callable[[], None]
    on_line: Callable[[bytes], None]
    restart_delay_s: float | None
    max_restarts: int


class HostKeeper:
    """Runs the agents of one host, one after the other.

    Attributes:
        agent: the running agent; None between two agents.
        exit_code: exit code of the last agent; None: no agent has ended.
        is_out: whether the last agent had failed before the job ended, and no agent came after it.
    """

    def __init__(self, name: HostName, start: Callable[[], SpawnedProcess], care: HostCare) -> None:
        """Keep the host with agents that `start` starts."""
        self.agent: SpawnedProcess | None = None
        self.exit_code: int | None = None
        self.is_out = False
        self._name = name
        self._start = start
        self._care = care
        self._downs = RestartBudget(max_restarts=care.max_restarts, window_s=RESTART_WINDOW_S, backoff_s=0.0)
        self._refusals = dataclasses.replace(self._downs, backoff_s=FIRST_PAUSE_S, max_backoff_s=MAX_PAUSE_S)
        self._alone_since_s: float | None = None
        """Since when, as far as was seen, no host of the job has had a lease."""

    async def run(self) -> None:
        """Keep an agent running until one ends for good, or the job is over."""
        while not self._care.over.is_set():
            self.is_out = False
            try:
                self.exit_code = await self._run_agent()
            except OSError as error:
                if error.errno not in EXHAUSTION_ERRNOS:
                    raise
                self.exit_code, end = int(ExitCode.OUT_OF_RESOURCES), AgentEnd.REFUSED
                why = f"its agent could not be started: {error}"
            else:
                end = judge_end(self.exit_code, was_let_in=self._name in self._care.view.let_in)
                why = f"its agent {describe_agent_end(self.exit_code)}; its output is above"
            if self._care.over.is_set() or not await self._wait_next(end, self.exit_code, why):
                return

    async def _run_agent(self) -> int:
        """Run one agent to its end, and print what it prints; return its exit code.

        Raises:
            OSError: there is no descriptor, process or memory left for the agent.
        """
        child = self.agent = self._start()
        try:
            assert child.stdout is not None, "started with a pipe"
            with child.stdout:
                lines, transport = await open_line_reader(child.stdout.fileno())
            with contextlib.closing(transport):
                printing = asyncio.create_task(self._print(lines))
                try:
                    code = await child.wait_exited()
                    await asyncio.wait((printing,), timeout=LAST_LINES_TIMEOUT_S)
                finally:
                    printing.cancel()
        finally:
            child.kill()
            self.agent = None
        return code

    async def _print(self, lines: LineReader) -> None:
        while line := await lines.readline():
            self._care.on_line(line.rstrip(b"\n"))

    async def _wait_next(self, end: AgentEnd, code: int, why: str) -> bool:
        """Wait until the next agent may start; return False if there is to be none."""
        if end is AgentEnd.ENDS_JOB:
            self._care.end_job()
        delay_s = self._care.restart_delay_s
        if end in (AgentEnd.ENDS_JOB, AgentEnd.LEFT) or delay_s is None:
            return False
        self.is_out = end is AgentEnd.REFUSED
        now = asyncio.get_running_loop().time()
        if end is AgentEnd.DOWN:
            self._downs, backoff_s = self._downs.spend(now)
            signal_name = get_signal_name(-code) if code < 0 else ExitCode(code).name
            said = f"the host is down ({signal_name})"
        else:
            self._refusals, backoff_s = self._refusals.spend(now)
            pause_s = delay_s + (backoff_s or 0.0)
            goes_on = " The job goes on;" if self._care.view.hosts else ""
            said = f"{why}.{goes_on} trying again in {pause_s:g} s"
            if self._is_nobody_left(now):
                return False
        if backoff_s is None:
            self._say(
                f"{why}. It is not started again: that was done {self._care.max_restarts} times in ten minutes"
            )
            return False
        self._say(said)
        await self._pause(delay_s + backoff_s)
        return True

    def _is_nobody_left(self, now: float) -> bool:
        """Return whether no host of the job has had a lease for `GIVE_UP_S`."""
        if self._care.view.hosts:
            self._alone_since_s = None
            return False
        if self._alone_since_s is None:
            self._alone_since_s = now
        return now - self._alone_since_s > GIVE_UP_S

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until the job is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._care.over.wait()

    def _say(self, text: str) -> None:
        self._care.on_line(f"[{self._name}] {text}".encode())
