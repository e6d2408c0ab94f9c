"""What an agent forks its workers from: the first zygote, and one that has imported what the worker has."""

import asyncio
import contextlib
import os
import signal
import site
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.child_process import ChildProcess
from resilient_jax.cluster.host_zygote import HostZygote
from resilient_jax.cluster.run_directory import HostLog, make_log_path
from resilient_jax.cluster.standby_schedule import MAX_RETRY_S, SETTLING_S
from resilient_jax.cluster.worker_process import WorkerDescriptors
from resilient_jax.config import JobConfig
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.worker_messages import ImportsReported, WorkerSettings
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog, read_events
from tests.support.agent_parts import HOST, make_agent_settings, wait_until
from tests.support.manual_clock import ManualClock
from tests.support.open_descriptors import count_descriptors, wait_for_descriptors

GENERATION = GenerationNumber(1)
WORKER_SETTINGS = WorkerSettings(job="job", host=HOST, address="127.0.0.1", token="token")
NUM_MISSING = 4000
"""Names of modules: with so many, a worker has imported far more than the first zygote."""
SCRIPT = "import os, sys; print('script:', os.environ.get('SET_BY_THE_SCRIPT'), 'reads' in sys.modules)"
REFUSED_SCRIPT = f"import os; os.environ['SET_LATER'] = '1'\n{SCRIPT}"
"""One whose first worker is not forked: to its libraries, it sets a variable before."""


class Agent:
    """What an agent has of its zygotes, with a clock that stands still."""

    def __init__(self, work: Path, store: MemoryStore, script: str) -> None:
        self.clock = ManualClock(1000.0)
        self._log_path = work / "events.jsonl"
        self.log = EventLog(self._log_path, HOST)
        (work / "script.py").write_text(script)
        self.settings = make_agent_settings(
            work / "script.py", JobConfig(), forks_workers=True, run_directory=work
        )
        context = AgentContext(
            settings=self.settings, store=store, clock=self.clock, log=self.log, print_line=print
        )
        self.zygote = HostZygote(context)

    def train(self) -> None:
        """Commit in a world that has trained for long enough, and long after the last failure."""
        self.clock.advance(MAX_RETRY_S)
        self.zygote.commit(GENERATION)
        self.clock.advance(SETTLING_S)
        self.zygote.commit(GENERATION)

    async def fork(self) -> ChildProcess | None:
        with descriptors() as given:
            return await self.zygote.fork(self.settings, WORKER_SETTINGS, given, is_urgent=True)

    async def read_fork(self) -> bytes:
        """Fork a worker, and return what it prints."""
        worker = await self.fork()
        assert worker is not None, self.list_events(EventKind.WORKER_NOT_FORKED)
        assert await worker.wait_exited() == 0
        assert worker.stdout is not None
        printed = worker.stdout.read()
        worker.close_pipes()
        return printed

    async def replace(self) -> None:
        """Have another zygote started, and wait until it is asked in the place of the first."""
        before = asyncio.all_tasks()
        self.train()
        (replacing,) = asyncio.all_tasks() - before
        await wait_until(replacing.done)  # the event that it is ready comes before it is asked
        assert len(self.list_events(EventKind.ZYGOTE_READY)) == 2
        assert len(list_children()) == 1

    async def wait_event(self, kind: EventKind, count: int) -> Event:
        """Wait for the event of this number and kind; return it."""
        await wait_until(lambda: len(self.list_events(kind)) >= count)
        return self.list_events(kind)[count - 1]

    def list_events(self, kind: EventKind) -> list[Event]:
        return [event for event in read_events(self._log_path) if event.kind is kind]


def list_children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@contextlib.asynccontextmanager
async def agent(
    work: Path, modules: dict[str, str] | None = None, script: str = SCRIPT
) -> AsyncIterator[Agent]:
    """Yield an agent whose worker has imported these modules; check that it leaves no descriptor and no child."""
    async with MemoryStore() as store:
        before = count_descriptors()
        found = Agent(work, store, script)
        if modules is not None:
            path = (site.getusersitepackages(), *sys.path)
            environment = {**os.environb, b"SET_BY_THE_SCRIPT": b"1"}
            found.zygote.remember_imports(
                ImportsReported(modules=modules, search_path=path, environment=environment)
            )
        try:
            yield found
        finally:
            await found.zygote.close()
            found.log.close()
        await wait_for_descriptors(before)
        assert list_children() == []


@contextlib.contextmanager
def descriptors() -> Iterator[WorkerDescriptors]:
    with open(os.devnull) as file:
        yield WorkerDescriptors(file.fileno(), file.fileno(), file.fileno())


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of installed packages: for this process, and those that it starts, the user's."""
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "base"))
    monkeypatch.setattr(site, "USER_BASE", None)
    monkeypatch.setattr(site, "USER_SITE", None)
    folder = Path(site.getusersitepackages())
    folder.mkdir(parents=True)
    return folder


def test_the_first_worker_is_forked_from_a_zygote_of_the_agent(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent(tmp_path) as host:
            assert await host.read_fork() == b"script: None False\n"
            ready = host.list_events(EventKind.ZYGOTE_READY)[0].detail
            assert (ready["failed_imports"], ready["obstacle"]) == (0, "")
            host.zygote.remember_imports(ImportsReported(modules={}, search_path=(), environment={}))
            host.train()
            await asyncio.sleep(0)
            assert len(host.list_events(EventKind.ZYGOTE_STARTED)) == 1, "it has all that the worker imports"

    asyncio.run(main())


def test_a_worker_is_forked_with_the_libraries_that_the_one_before_had_imported(
    tmp_path: Path, libraries: Path
) -> None:
    """The libraries have seen the variables that the script had set before; the script sets them again."""
    library = libraries / "reads.py"
    library.write_text("import os; print('library:', os.environ.get('SET_BY_THE_SCRIPT'))")

    async def main() -> None:
        async with agent(tmp_path, {"reads": str(library)}, REFUSED_SCRIPT) as host:
            assert await host.fork() is None
            assert list_children() == [], "of no use any more"
            assert "sets an environment variable" in str(
                host.list_events(EventKind.WORKER_NOT_FORKED)[0].detail["why"]
            )
            await host.replace()
            for _ in range(2):  # a zygote stays
                assert await host.read_fork() == b"script: None True\n"
            host.train()
            await asyncio.sleep(0)
            assert len(host.list_events(EventKind.ZYGOTE_STARTED)) == 2
            printed = make_log_path(tmp_path, HOST, HostLog.ZYGOTE).read_text()
            assert printed.splitlines() == ["library: 1"]

    asyncio.run(main())


def test_the_zygote_is_asked_until_another_is_ready(tmp_path: Path, libraries: Path) -> None:
    slow = libraries / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    modules = {f"module_{number}": str(slow) for number in range(NUM_MISSING)} | {"slow": str(slow)}

    async def main() -> None:
        async with agent(tmp_path, modules) as host:
            assert await host.read_fork() == b"script: None False\n"
            host.train()
            await host.wait_event(EventKind.ZYGOTE_STARTED, count=2)
            assert await host.read_fork() == b"script: None False\n"

    asyncio.run(main())


def test_a_zygote_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with agent(tmp_path, {}) as host:
            started = host.list_events(EventKind.ZYGOTE_STARTED)[0].detail["pid"]
            assert await host.read_fork() == b"script: None False\n"
            os.kill(int(started), signal.SIGKILL)
            await host.wait_event(EventKind.ZYGOTE_EXITED, 1)
            assert await host.fork() is None
            await host.replace()
            assert await host.read_fork() == b"script: None False\n"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os; os._exit(3)", "it exited with code 3"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True, name='t').start()",
         "the imports have started threads: t"),
        ("file = open(__file__)", "the imports have opened files, which a worker would share with others"),
    ],
    ids=["exit", "thread", "file"],
)  # fmt: skip
def test_a_zygote_that_fails_by_itself_is_ended_and_none_is_tried_again(
    source: str, reason: str, tmp_path: Path, libraries: Path
) -> None:
    (libraries / "fails.py").write_text(source)
    modules = {f"module_{number}": "" for number in range(NUM_MISSING)}

    async def main() -> None:
        async with agent(tmp_path, {"fails": str(libraries / "fails.py"), **modules}) as host:
            assert await host.read_fork() == b"script: None False\n"
            host.train()
            failed = await host.wait_event(EventKind.ZYGOTE_FAILED, 1)
            assert failed.detail == {"reason": reason, "retried": False}
            host.train()
            await asyncio.sleep(0)
            assert len(host.list_events(EventKind.ZYGOTE_STARTED)) == 2
            assert await host.read_fork() == b"script: None False\n", "the one before is asked"

    asyncio.run(main())


def test_modules_that_cannot_be_imported_are_left_to_the_script(tmp_path: Path, libraries: Path) -> None:
    sources = {"bad": "raise RuntimeError('no')", "ends": "import sys; sys.exit(3)", "reads": ""}
    for name, source in sources.items():
        (libraries / f"{name}.py").write_text(source)
    modules = {name: str(libraries / f"{name}.py") for name in sources}

    async def main() -> None:
        async with agent(tmp_path, modules, REFUSED_SCRIPT) as host:
            assert await host.fork() is None
            await host.replace()
            assert host.list_events(EventKind.ZYGOTE_READY)[1].detail["failed_imports"] == 2
            assert await host.read_fork() == b"script: None True\n"

    asyncio.run(main())


def test_a_zygote_with_other_modules_than_the_worker_is_of_no_use(tmp_path: Path, libraries: Path) -> None:
    (libraries / "reads.py").write_text("")

    async def main() -> None:
        async with agent(tmp_path, {"reads": "/elsewhere/reads.py"}, REFUSED_SCRIPT) as host:
            assert await host.fork() is None
            host.train()
            failed = await host.wait_event(EventKind.ZYGOTE_FAILED, 1)
            assert str(libraries / "reads.py") in str(failed.detail["reason"])
            assert "/elsewhere/reads.py" in str(failed.detail["reason"])

    asyncio.run(main())


def test_a_library_that_was_changed_is_not_what_a_worker_is_forked_with(
    tmp_path: Path, libraries: Path
) -> None:
    library = libraries / "reads.py"
    library.write_text("found = 1")

    async def main() -> None:
        async with agent(tmp_path, {"reads": str(library)}, REFUSED_SCRIPT) as host:
            assert await host.fork() is None
            await host.replace()
            library.write_text("found = 2")
            assert await host.fork() is None
            refused = host.list_events(EventKind.WORKER_NOT_FORKED)[-1]
            assert str(refused.detail["why"]).startswith(f"{library} was changed")

    asyncio.run(main())
