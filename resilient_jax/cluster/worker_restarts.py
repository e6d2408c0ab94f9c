"""The budget of a host's restarts, as its agent spends it, and which errors may be tried again."""

import asyncio
import sys

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.restart_budget import RestartBudget
from resilient_jax.config.job_config import RESTART_WINDOW_S
from resilient_jax.errors import ExitCode
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, Incarnation
from resilient_jax.protocol.generation import Generation, JobOutcome, JobOutcomeKind


class NotedErrors:
    """The newest worker of this host whose error the leader has noted, and decided about."""

    def __init__(self, host: HostName) -> None:
        self._host = host
        self._noted = Incarnation(0)
        self._changed = asyncio.Event()

    def read(self, generation: Generation) -> None:
        """Take in what a generation says."""
        noted = max(
            (one.incarnation for one in generation.failures.raised if one.host == self._host),
            default=self._noted,
        )
        if noted > self._noted:
            self._noted = noted
            self._changed.set()

    async def wait_noted(self, incarnation: Incarnation) -> None:
        """Wait until the leader has noted this worker's error; for ever if the job ends with it."""
        while self._noted < incarnation:
            self._changed.clear()
            await self._changed.wait()


FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""Before a start is tried again for which there was no descriptor, process or memory: the first and the longest."""
SHORTAGE_WINDOW_S = 120.0
"""After which a shortage does not make the pauses of the next one longer."""


class WorkerRestarts:
    """Spends a budget, and says how a host ends whose budget is spent."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        config = context.settings.config
        self._budget = RestartBudget(
            max_restarts=config.max_restarts,
            window_s=RESTART_WINDOW_S,
            backoff_s=config.restart_backoff_s,
        )
        # It has no end: a shortage is not the worker's fault, and says nothing about the next one.
        self._shortages = RestartBudget(
            max_restarts=sys.maxsize,
            window_s=SHORTAGE_WINDOW_S,
            backoff_s=FIRST_PAUSE_S,
            max_backoff_s=MAX_PAUSE_S,
        )

    def spend_shortage(self, process: str, error: OSError) -> float:
        """Say that a process could not be started; return the seconds to wait before that is tried again."""
        self._shortages, delay_s = self._shortages.spend(self._context.clock.monotonic_s())
        pause_s = max(delay_s or 0.0, FIRST_PAUSE_S)
        why = f"no {process} could be started: {error}; trying again in {pause_s:g} s"
        self._context.print_line(f"{self._context.settings.host}: {why}")
        return pause_s

    async def wait_for_resources(self, error: OSError) -> None:
        """Wait before a worker's start is tried again that the machine has refused."""
        self._context.log.record(EventKind.WORKER_START_FAILED, error=str(error))
        await asyncio.sleep(self.spend_shortage("worker", error))

    def spend(self) -> float | None:
        """Return the seconds to wait before the next start; None if the budget is spent."""
        self._budget, delay_s = self._budget.spend(self._context.clock.monotonic_s())
        if delay_s:
            self._context.log.record(EventKind.RESTART_BACKOFF, seconds=delay_s)
        return delay_s

    def make_outcome(self, last_errors: str) -> JobOutcome:
        """Return the outcome of a host whose worker died too often.

        Args:
            last_errors: end of what the worker wrote to standard error.
        """
        config, host = self._context.settings.config, self._context.settings.host
        self._context.log.record(EventKind.RESTART_BUDGET_EXHAUSTED, limit=config.max_restarts)
        return JobOutcome(
            kind=JobOutcomeKind.TOO_FEW_HOSTS,
            exit_code=int(ExitCode.RESTART_BUDGET_EXHAUSTED),
            host=host,
            message=f"the worker on {host} died {config.max_restarts + 1} times within "
            f"{RESTART_WINDOW_S:g} s, more often than max_restarts = {config.max_restarts} allows; "
            f"the end of its standard error:\n{last_errors}",
        )
