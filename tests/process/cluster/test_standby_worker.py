"""An agent's standby: promoted, or ended without a trace when it cannot be."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.standby_schedule import MAX_RETRY_S, SETTLING_S
from resilient_jax.cluster.standby_worker import StandbyWorker
from resilient_jax.cluster.worker_process import WorkerDescriptors
from resilient_jax.config import JobConfig
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.host_status import StandbyState
from resilient_jax.protocol.worker_messages import ImportsReported, WorkerSettings
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog, read_events
from tests.support.agent_parts import HOST, make_agent_settings
from tests.support.manual_clock import ManualClock
from tests.support.open_descriptors import count_descriptors, wait_for_descriptors
from tests.support.patience import patience

WAIT_S = patience(3)
GENERATION = GenerationNumber(1)
WORKER_SETTINGS = WorkerSettings(job="job", host=HOST, address="127.0.0.1", token="token")


class Agent:
    """What an agent has of its standby, with a clock that stands still."""

    def __init__(self, work: Path, store: MemoryStore) -> None:
        self.clock = ManualClock(1000.0)
        self.changed = asyncio.Event()
        self._log_path = work / "events.jsonl"
        self.log = EventLog(self._log_path, HOST)
        (work / "script.py").write_text("import os; print('script:', os.environ.get('SET_BY_THE_SCRIPT'))")
        settings = make_agent_settings(work / "script.py", JobConfig())
        context = AgentContext(
            settings=settings, store=store, clock=self.clock, log=self.log, print_line=print
        )
        self.standby = StandbyWorker(context, self.changed.set)

    def train(self) -> None:
        """Commit in a world that has trained for long enough, and long after the last failure."""
        self.clock.advance(MAX_RETRY_S)
        self.standby.commit(GENERATION)
        self.clock.advance(SETTLING_S)
        self.standby.commit(GENERATION)

    async def wait_status(self, holds: Callable[[StandbyState | None], bool]) -> None:
        while True:
            self.changed.clear()
            if holds(self.standby.status.state if self.standby.status is not None else None):
                return
            await asyncio.wait_for(self.changed.wait(), WAIT_S)

    def list_events(self, kind: EventKind) -> list[Event]:
        return [event for event in read_events(self._log_path) if event.kind is kind]


def list_children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@contextlib.asynccontextmanager
async def agent(work: Path, modules: dict[str, str]) -> AsyncIterator[Agent]:
    """Yield an agent whose worker has imported these modules; check that it leaves no descriptor and no child."""
    async with MemoryStore() as store:
        found = Agent(work, store)
        before = count_descriptors()
        path = (str(work), str(work / "libraries"), *sys.path)
        environment = {**os.environb, b"SET_BY_THE_SCRIPT": b"1"}
        imports = ImportsReported(modules=modules, search_path=path, environment=environment)
        found.standby.remember_imports(imports)
        yield found
        await found.standby.close()
        await wait_for_descriptors(before)
        assert list_children() == []
        found.log.close()


@contextlib.contextmanager
def descriptors():
    with open(os.devnull) as file:
        yield WorkerDescriptors(file.fileno(), file.fileno(), file.fileno())


def test_a_promoted_standby_runs_the_script_with_the_libraries_that_the_worker_imported(
    tmp_path: Path,
) -> None:
    """The libraries have seen the variables that the script had set before; the script sets them again."""
    (tmp_path / "libraries").mkdir()
    library = tmp_path / "libraries" / "reads.py"
    library.write_text("import os; print('library:', os.environ.get('SET_BY_THE_SCRIPT'))")

    async def main() -> None:
        async with agent(tmp_path, {"reads": str(library)}) as waiting:
            waiting.train()
            await waiting.wait_status(lambda state: state is StandbyState.READY)
            assert waiting.standby.status is not None
            with descriptors() as given:
                child = await waiting.standby.promote(given, WORKER_SETTINGS)
            assert child is not None
            assert waiting.list_events(EventKind.STANDBY_READY)[0].detail["pid"] == child.pid
            assert waiting.standby.status is None
            assert await child.wait_exited() == 0
            assert child.stdout is not None
            assert child.stdout.read() == b"library: 1\nscript: None\n"
            child.close_pipes()

    asyncio.run(main())


def test_a_standby_that_is_not_ready_is_ended_when_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")

    async def main() -> None:
        async with agent(tmp_path, {"slow": str(tmp_path / "slow.py")}) as waiting:
            waiting.train()
            with descriptors() as given:
                assert await waiting.standby.promote(given, WORKER_SETTINGS) is None
            assert waiting.list_events(EventKind.STANDBY_FAILED) == []
            waiting.train()
            assert waiting.standby.status is not None, "the next is started"

    asyncio.run(main())


def test_a_standby_whose_import_ends_the_process_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os, sys; print('no licence', file=sys.stderr); os._exit(3)")

    async def main() -> None:
        async with agent(tmp_path, {"ends": str(tmp_path / "ends.py")}) as waiting:
            waiting.train()
            await waiting.wait_status(lambda state: state is None)
            (failed,) = waiting.list_events(EventKind.STANDBY_FAILED)
            assert failed.detail["reason"] == "it exited with code 3: no licence"
            assert failed.detail["retried"] is False
            waiting.train()
            assert waiting.standby.status is None

    asyncio.run(main())
