"""A zygote forks workers that run a script as `python SCRIPT` does, live without it, and end with their agent."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster import zygote_connection
from resilient_jax.cluster.child_process import ChildProcess
from resilient_jax.cluster.kept_program import KeptProgram
from resilient_jax.cluster.worker_process import WorkerDescriptors, launch_script
from resilient_jax.cluster.zygote_connection import ForkedProcess, ZygoteConnection, encode_environment
from resilient_jax.cluster.zygote_process import ZygoteProcess
from resilient_jax.ids import HostName
from resilient_jax.protocol.connection import encode_message
from resilient_jax.protocol.worker_messages import WorkerSettings
from resilient_jax.protocol.zygote_messages import PrepareZygote, WorkerEnded, WorkerForked
from resilient_jax.telemetry.event_log import EventLog
from tests.support.patience import patience, wait_until
from tests.support.process_ends import list_children, read_name, wait_gone

SCRIPT = """
import json, os, random, signal, subprocess, sys, numpy
import jax
found = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "cwd": os.getcwd(),
    "main": "json" in vars(sys.modules["__main__"]), "umask": os.umask(0o22),
    "signals": [str(signal.pthread_sigmask(signal.SIG_BLOCK, [])), signal.getsignal(signal.SIGINT).__name__,
                str(signal.getsignal(signal.SIGCHLD)), str(signal.getsignal(signal.SIGPIPE))],
    "environment": {k: v for k, v in os.environ.items() if "CONNECTION" not in k and "PIPE" not in k},
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{d}").split(":")[0] for d in os.listdir("/proc/self/fd")
                          if os.path.exists(f"/proc/self/fd/{d}")),
}
if "draw" in sys.argv:
    found = [random.random(), float(numpy.random.rand())]
if "child" in sys.argv:
    found = subprocess.Popen(["sleep", "600"]).pid
print(json.dumps(found), flush=True)
print("to the other", file=sys.stderr, flush=True)
if "wait" in sys.argv or "child" in sys.argv:
    sys.stdin.read()
    import time; time.sleep(600)
raise SystemExit(7)
"""
SPAWNING_SCRIPT = """
import json, multiprocessing, pickle, sys
class Thing:
    pass
def double(value):
    return 2 * value
if __name__ == "__main__":
    found = [type(pickle.loads(pickle.dumps(Thing()))) is Thing]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found += pool.map(double, [21])
    print(json.dumps(found), flush=True)
    print("the end", file=sys.stderr, flush=True)
"""
SETTINGS = WorkerSettings(job="job", host=HostName("host-0"), address="127.0.0.1", token="token")


class Machine:
    """A launcher's zygote, one agent's connection to it, and what a worker is given."""

    def __init__(self, folder: Path, log: EventLog) -> None:
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        # As the launcher's: what Python adds to it at its start would be a difference.
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        order = PrepareZygote(script=str(self.script), environment=encode_environment(self.environment))
        self.zygote = ZygoteProcess(order, self.environment, log, SystemClock(), folder / "zygote.txt")
        self.connections: list[ZygoteConnection] = []
        self.agent = self.connect()
        self.sockets = [*socket.socketpair(), *socket.socketpair()]
        self.pipe = os.pipe()

    def connect(self) -> ZygoteConnection:
        connected = self.zygote.connect_agent()
        assert connected is not None
        self.connections.append(ZygoteConnection(connected))
        return self.connections[-1]

    @property
    def zygote_pid(self) -> int:
        return self.zygote._child.pid

    @property
    def descriptors(self) -> WorkerDescriptors:
        return WorkerDescriptors(self.sockets[0].fileno(), self.sockets[2].fileno(), self.pipe[1])

    async def fork(self, *words: str, environment: Mapping[str, str] | None = None) -> ForkedProcess | None:
        return await self.agent.fork(
            (str(self.script), *words), environment or self.environment, SETTINGS, self.descriptors
        )

    async def close(self) -> None:
        for connection in self.connections:
            connection.close()
        await self.zygote.close()
        for connected in self.sockets:
            connected.close()
        for end in self.pipe:
            os.close(end)


def on_machine(tmp_path: Path, check: Callable[[Machine], Awaitable[None]]) -> list[str]:
    """Run `check` with a zygote; return the kinds of events that the launcher has recorded."""
    log = EventLog(tmp_path / "events.jsonl", "launcher")

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Machine]:
        machine = Machine(tmp_path, log)
        try:
            yield machine
        finally:
            await machine.close()

    async def run() -> None:
        async with asyncio.timeout(patience(10)), running() as machine:
            await check(machine)

    asyncio.run(run())
    log.close()
    return [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]


class SharedMachine:
    """A machine of several tests, each with a connection of its own; its event loop runs while one of them does."""

    def __init__(self, folder: Path) -> None:
        self._log = EventLog(folder / "events.jsonl", "launcher")
        self._runner = asyncio.Runner()
        self._machine = self._runner.run(self._start(folder))

    async def _start(self, folder: Path) -> Machine:
        return Machine(folder, self._log)

    def run(self, check: Callable[[Machine], Awaitable[None]]) -> None:
        async def run() -> None:
            self._machine.agent = self._machine.connect()
            async with asyncio.timeout(patience(10)):
                await check(self._machine)

        self._runner.run(run())

    def close(self) -> None:
        self._runner.run(self._machine.close())
        self._runner.close()
        self._log.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedMachine]:
    """Return a zygote for tests that leave it as it is: it imports JAX."""
    machine = SharedMachine(tmp_path_factory.mktemp("machine"))
    yield machine
    machine.close()


async def read(worker: ChildProcess) -> tuple[str, str]:
    """Return the first line of a worker's output, and of its standard error, and close both."""
    assert worker.stdout is not None
    assert worker.stderr is not None
    with worker.stdout, worker.stderr:
        lines = [
            (await asyncio.to_thread(pipe.readline)).decode().strip()
            for pipe in (worker.stdout, worker.stderr)
        ]
    return lines[0], lines[1]


async def fork(machine: Machine, *words: str) -> ForkedProcess:
    worker = await machine.fork(*words)
    assert worker is not None, machine.agent.refusal
    return worker


def test_a_script_finds_the_same_as_in_a_process_of_its_own(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "--steps", "3")
        forked = await read(worker)
        assert await worker.wait_exited() == 7
        spawned = launch_script(
            [str(machine.script), "--steps", "3"], machine.environment, SETTINGS, machine.descriptors
        )
        expected = await read(spawned)
        assert await spawned.wait_exited() == 7
        found, wanted = json.loads(forked[0]), json.loads(expected[0])
        # Libraries that are not in this script, but in every worker, have set the rest at their import.
        found["environment"] = {name: found["environment"].get(name) for name in wanted["environment"]}
        assert found == wanted
        assert forked[1] == expected[1] == "to the other"

    assert on_machine(tmp_path, check) == ["zygote.started", "zygote.ready"]


def test_a_forked_script_pickles_its_own_classes_and_spawns_processes(tmp_path: Path) -> None:
    """`multiprocessing` starts them from the script's file, and finds what it pickled in their `__main__`."""

    async def check(machine: Machine) -> None:
        machine.script = tmp_path / "spawning.py"
        machine.script.write_text(SPAWNING_SCRIPT)
        worker = await fork(machine)
        assert await read(worker) == ("[true, 42]", "the end")
        assert await worker.wait_exited() == 0

    on_machine(tmp_path, check)


def test_workers_draw_different_random_numbers(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        drawn = []
        for _ in range(2):
            worker = await fork(machine, "draw")
            drawn.append(json.loads((await read(worker))[0]))
            await worker.wait_exited()
        assert drawn[0][0] != drawn[1][0]
        assert drawn[0][1] != drawn[1][1]

    shared.run(check)


def test_a_worker_that_is_killed_is_reported_and_takes_its_group_with_it(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "child")
        child = int((await read(worker))[0])
        assert worker.exit_code is None
        os.kill(worker.pid, signal.SIGKILL)
        assert await worker.wait_exited() == -signal.SIGKILL
        await asyncio.to_thread(wait_gone, child)

    shared.run(check)


def test_the_group_of_a_worker_that_dies_with_its_agent_is_ended(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "child")
        child = int((await read(worker))[0])
        parent = psutil.Process(worker.pid).ppid()
        os.kill(parent, signal.SIGSTOP)  # it hears of both at once
        os.kill(worker.pid, signal.SIGKILL)
        await cut(worker)
        os.kill(child, 0)
        os.kill(parent, signal.SIGCONT)
        await asyncio.to_thread(wait_gone, child)

    shared.run(check)


async def cut(worker: ForkedProcess) -> None:
    """Close the connection of an agent to a worker's parent, as the agent's death does."""
    worker._listening.cancel()
    await asyncio.gather(worker._listening, return_exceptions=True)


def test_a_module_beside_the_script_with_the_name_of_an_imported_one_is_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("")

    async def check(machine: Machine) -> None:
        assert await machine.fork() is None
        assert machine.agent.refusal.startswith(f"{tmp_path / 'msgspec.py'} has the name of a module that is")

    on_machine(tmp_path, check)


def test_a_worker_whose_end_comes_with_the_answer_has_ended() -> None:
    async def check(connection: ZygoteConnection, zygote: socket.socket) -> None:
        starting = asyncio.create_task(order(connection))
        with await receive_order(zygote) as parent, running_process() as process:
            forked = encode_message(WorkerForked(pid=process.pid, parent=os.getpid(), num_modules=1))
            parent.sendall(forked + encode_message(WorkerEnded(exit_code=3)))
            worker = await starting
            assert worker is not None
            assert await worker.wait_exited() == 3
            worker.close_pipes()

    with_scripted_zygote(check)


def test_a_worker_whose_parent_ends_with_the_answer_has_ended() -> None:
    async def check(connection: ZygoteConnection, zygote: socket.socket) -> None:
        starting = asyncio.create_task(order(connection))
        parent = await receive_order(zygote)
        with running_process() as process:
            parent.sendall(encode_message(WorkerForked(pid=process.pid, parent=os.getpid(), num_modules=1)))
            parent.close()
            worker = await starting
            assert worker is not None
            assert await worker.wait_exited() == -signal.SIGKILL
            worker.close_pipes()

    with_scripted_zygote(check)


def test_a_zygote_that_does_not_answer_costs_no_worker_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(connection: ZygoteConnection, zygote: socket.socket) -> None:
        with running_process() as process:
            starting = asyncio.create_task(order(connection))
            with await receive_order(zygote) as parent:
                parent.sendall(
                    encode_message(WorkerForked(pid=process.pid, parent=os.getpid(), num_modules=1))
                )
                worker = await starting
                assert worker is not None
                monkeypatch.setattr(zygote_connection, "ANSWER_TIMEOUT_S", 0.05)
                assert await order(connection) is None
                assert connection.refusal == "the zygote did not answer within 0.05 s"
                assert worker.exit_code is None
                assert process.poll() is None
                with await receive_order(zygote) as late:
                    assert late.recv(1) == b"", "the parent of a worker that comes late is to end it"
                worker.close_pipes()

    with_scripted_zygote(check)


def with_scripted_zygote(check: Callable[[ZygoteConnection, socket.socket], Awaitable[None]]) -> None:
    """Run `check` with an agent's connection, and the other end in place of a zygote."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = ZygoteConnection(ours)
            try:
                async with asyncio.timeout(patience(6)):
                    await check(connection, theirs)
            finally:
                connection.close()

    asyncio.run(run())


async def order(connection: ZygoteConnection) -> ForkedProcess | None:
    return await connection.fork(("script.py",), {}, SETTINGS, (0, 0, 0))


async def receive_order(zygote: socket.socket) -> socket.socket:
    """Return the socket for the answers to an order."""
    _, descriptors, *_ = await asyncio.to_thread(socket.recv_fds, zygote, 65536, 6)
    answers, *others = descriptors
    for descriptor in others:
        os.close(descriptor)
    return socket.socket(fileno=answers)


@contextlib.contextmanager
def running_process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_worker_ends_with_its_agent_and_not_with_another(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        other = machine.connect()
        worker = await fork(machine, "wait")
        await read(worker)
        theirs = await other.fork(
            (str(machine.script), "wait"), machine.environment, SETTINGS, machine.descriptors
        )
        assert theirs is not None
        await read(theirs)
        machine.agent.close()
        await cut(worker)
        await asyncio.to_thread(wait_gone, worker.pid)
        assert theirs.exit_code is None
        os.kill(theirs.pid, 0)
        await cut(theirs)
        await asyncio.to_thread(wait_gone, theirs.pid)

    shared.run(check)


def test_workers_end_with_their_parents(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "wait")
        await read(worker)
        os.kill(psutil.Process(worker.pid).ppid(), signal.SIGKILL)
        assert await worker.wait_exited() == -signal.SIGKILL
        await asyncio.to_thread(wait_gone, worker.pid)

    shared.run(check)


def test_a_worker_whose_parent_is_stopped_has_an_end(shared: SharedMachine) -> None:
    """Nobody reports it: the agent sees a process that has ended, takes it for a stopped one, and ends the parent."""

    async def check(machine: Machine) -> None:
        worker = await fork(machine, "wait")
        await read(worker)
        parent = psutil.Process(worker.pid).ppid()
        os.kill(parent, signal.SIGSTOP)
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, "an end that nobody reports", worker.is_stopped)
        assert worker.exit_code is None
        assert await worker.kill_and_wait() == -signal.SIGKILL
        await asyncio.to_thread(wait_gone, parent)

    shared.run(check)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_live_on_without_the_zygote_and_the_next_ones_are_not_forked(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A zygote that is stopped would fork none, and is ended."""

    async def check(machine: Machine) -> None:
        worker = await fork(machine, "wait")
        await read(worker)
        os.kill(machine.zygote_pid, number)
        await asyncio.to_thread(
            wait_until, "its end", lambda: "zygote.exited" in (tmp_path / "events.jsonl").read_text()
        )
        assert await machine.fork() is None
        assert machine.agent.refusal == "the zygote has ended"
        assert not machine.agent.is_open
        assert machine.zygote.connect_agent() is None
        assert worker.exit_code is None
        os.kill(worker.pid, signal.SIGALRM)
        assert await worker.wait_exited() == -signal.SIGALRM, "its end is reported as ever"

    assert on_machine(tmp_path, check) == ["zygote.started", "zygote.ready", "zygote.exited"]


def test_another_environment_is_refused_by_the_names_of_the_variables(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        assert await machine.fork(environment={**machine.environment, "A": "", "B": "1"}) is None
        assert machine.agent.refusal == (
            "found other environment variables than the imports were made with: A, B"
        )
        worker = await fork(machine)  # a refusal does not count for the next
        await read(worker)
        await worker.wait_exited()

    shared.run(check)


def test_a_worker_has_the_devices_of_its_own_environment(tmp_path: Path) -> None:
    """Which devices it has is read when JAX makes a backend, in the worker."""

    async def check(machine: Machine) -> None:
        flags = "--xla_force_host_platform_device_count=3"
        worker = await machine.fork(environment={**machine.environment, "XLA_FLAGS": flags})
        assert worker is not None, machine.agent.refusal
        assert (await read(worker))[0] == "3"
        await worker.wait_exited()

    with pytest.MonkeyPatch.context() as patch:
        source = (
            "import jax, sys; print(jax.device_count(), flush=True); print('', file=sys.stderr, flush=True)"
        )
        patch.setitem(globals(), "SCRIPT", source)
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
        on_machine(tmp_path, check)


def test_a_script_that_sets_environment_variables_is_refused(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        assert await machine.fork() is None
        assert f"{machine.script}, line 2: sets an environment variable" in machine.agent.refusal

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SCRIPT", "import os\nos.environ['JAX_ENABLE_X64'] = '1'\nimport jax\n")
        on_machine(tmp_path, check)


def test_a_worker_runs_the_program_that_is_kept_whatever_has_changed(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        program = KeptProgram(tmp_path / "run")
        program.create()
        for module, file in {"__main__": machine.script, "own": tmp_path / "own.py"}.items():
            program.keep(module, str(file))
        (tmp_path / "own.py").write_text("FOUND = 2")
        machine.script.write_text(SCRIPT.replace("script", "edited"))
        settings = msgspec.structs.replace(SETTINGS, program=str(program.folder))
        worker = await machine.agent.fork(
            (str(machine.script),), machine.environment, settings, machine.descriptors
        )
        assert worker is not None, machine.agent.refusal
        assert (await read(worker))[0] == "script 1"
        await worker.wait_exited()

    with pytest.MonkeyPatch.context() as patch:
        source = (
            "import own, sys; print('script', own.FOUND, flush=True); print('', file=sys.stderr, flush=True)"
        )
        patch.setitem(globals(), "SCRIPT", source)
        (tmp_path / "own.py").write_text("FOUND = 1")
        on_machine(tmp_path, check)


def test_a_start_that_is_cancelled_leaves_no_worker(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        starting = asyncio.create_task(machine.fork("wait"))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        worker = await fork(machine, "wait")  # answered after the one that was cancelled
        parents = list_children(machine.zygote_pid)
        await read(worker)
        worker.kill()
        await worker.wait_exited()
        for pid in parents:
            await asyncio.to_thread(wait_gone, pid)

    shared.run(check)


def test_the_processes_are_named_after_the_script_and_after_their_task(shared: SharedMachine) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "wait")
        await read(worker)
        assert read_name(worker.pid) == "script.py"
        assert read_name(psutil.Process(worker.pid).ppid()) == "worker-parent"
        worker.kill()
        await worker.wait_exited()

    shared.run(check)
