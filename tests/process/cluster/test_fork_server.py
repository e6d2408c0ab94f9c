"""A fork server forks workers that run a script as `python SCRIPT` does, and that end with it and with their agent."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from resilient_jax.cluster import fork_server_connection
from resilient_jax.cluster.child_process import ChildProcess
from resilient_jax.cluster.fork_server_connection import ForkedProcess, ForkServerConnection
from resilient_jax.cluster.fork_server_process import SERVER_MODULE, ForkServerProcess
from resilient_jax.cluster.worker_process import WorkerDescriptors, launch_script
from resilient_jax.ids import HostName
from resilient_jax.protocol.connection import encode_message
from resilient_jax.protocol.fork_messages import WorkerEnded, WorkerForked
from resilient_jax.protocol.worker_messages import WorkerSettings
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
SETTINGS = WorkerSettings(job="job", host=HostName("host-0"), address="127.0.0.1", token="token")


class Machine:
    """A launcher's fork server, one agent's connection to it, and what a worker is given."""

    def __init__(self, folder: Path, log: EventLog) -> None:
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        # As the launcher's: what Python adds to it at its start would be a difference.
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        self.server = ForkServerProcess(str(self.script), self.environment, log, folder / "fork_server.log")
        self.agent = self.connect()
        self.sockets = [*socket.socketpair(), *socket.socketpair()]
        self.pipe = os.pipe()

    def connect(self) -> ForkServerConnection:
        connection = self.server.connect_agent()
        assert connection is not None
        return ForkServerConnection(connection)

    @property
    def server_pid(self) -> int:
        (server,) = [child for child in psutil.Process().children() if SERVER_MODULE in child.cmdline()]
        return server.pid

    @property
    def descriptors(self) -> WorkerDescriptors:
        return WorkerDescriptors(self.sockets[0].fileno(), self.sockets[2].fileno(), self.pipe[1])

    async def fork(self, *words: str, environment: Mapping[str, str] | None = None) -> ForkedProcess | None:
        return await self.agent.fork(
            (str(self.script), *words), environment or self.environment, SETTINGS, self.descriptors
        )

    async def close(self) -> None:
        self.agent.close()
        await self.server.close()
        for connected in self.sockets:
            connected.close()
        for end in self.pipe:
            os.close(end)


def on_machine(tmp_path: Path, check: Callable[[Machine], Awaitable[None]]) -> list[str]:
    """Run `check` with a fork server; return the kinds of events that the launcher has recorded."""
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

    assert on_machine(tmp_path, check) == ["fork_server.started"]


def test_workers_draw_different_random_numbers(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        drawn = []
        for _ in range(2):
            worker = await fork(machine, "draw")
            drawn.append(json.loads((await read(worker))[0]))
            await worker.wait_exited()
        assert drawn[0][0] != drawn[1][0]
        assert drawn[0][1] != drawn[1][1]

    on_machine(tmp_path, check)


def test_a_worker_that_is_killed_is_reported_and_takes_its_group_with_it(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "child")
        child = int((await read(worker))[0])
        assert worker.exit_code is None
        os.kill(worker.pid, signal.SIGKILL)
        assert await worker.wait_exited() == -signal.SIGKILL
        await asyncio.to_thread(wait_gone, child)

    on_machine(tmp_path, check)


def test_the_group_of_a_worker_that_dies_with_its_agent_is_ended(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "child")
        child = int((await read(worker))[0])
        os.kill(machine.server_pid, signal.SIGSTOP)  # it hears of both at once
        os.kill(worker.pid, signal.SIGKILL)
        machine.agent.close()
        os.kill(child, 0)
        os.kill(machine.server_pid, signal.SIGCONT)
        await asyncio.to_thread(wait_gone, child)

    on_machine(tmp_path, check)


def test_a_module_beside_the_script_with_the_name_of_an_imported_one_is_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("")

    async def check(machine: Machine) -> None:
        assert await machine.fork() is None
        assert machine.agent.refusal.startswith(f"{tmp_path / 'msgspec.py'} has the name of a module that is")

    on_machine(tmp_path, check)


def test_a_worker_whose_end_comes_with_the_answer_has_ended() -> None:
    async def check(connection: ForkServerConnection, server: socket.socket) -> None:
        starting = asyncio.create_task(order(connection))
        await receive_order(server)
        with running_process() as process:
            forked = encode_message(WorkerForked(pid=process.pid, num_modules=1))
            server.sendall(forked + encode_message(WorkerEnded(pid=process.pid, exit_code=3)))
            worker = await starting
            assert worker is not None
            assert await worker.wait_exited() == 3
            worker.close_pipes()

    with_scripted_server(check)


def test_a_worker_whose_server_ends_with_the_answer_has_ended() -> None:
    async def check(connection: ForkServerConnection, server: socket.socket) -> None:
        starting = asyncio.create_task(order(connection))
        await receive_order(server)
        with running_process() as process:
            server.sendall(encode_message(WorkerForked(pid=process.pid, num_modules=1)))
            server.close()
            worker = await starting
            assert worker is not None
            assert await worker.wait_exited() == -signal.SIGKILL
            worker.close_pipes()

    with_scripted_server(check)


def test_a_server_that_does_not_answer_costs_no_worker_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(connection: ForkServerConnection, server: socket.socket) -> None:
        with running_process() as process, running_process() as late:
            starting = asyncio.create_task(order(connection))
            await receive_order(server)
            server.sendall(encode_message(WorkerForked(pid=process.pid, num_modules=1)))
            worker = await starting
            assert worker is not None
            monkeypatch.setattr(fork_server_connection, "ANSWER_TIMEOUT_S", 0.05)
            assert await order(connection) is None
            assert connection.refusal == "the fork server did not answer within 0.05 s"
            assert worker.exit_code is None
            assert process.poll() is None
            server.sendall(encode_message(WorkerForked(pid=late.pid, num_modules=1)))
            await asyncio.to_thread(late.wait, 20)  # a worker that nothing waits for is killed
            assert process.poll() is None
            worker.close_pipes()

    with_scripted_server(check)


def with_scripted_server(check: Callable[[ForkServerConnection, socket.socket], Awaitable[None]]) -> None:
    """Run `check` with an agent's connection, and the other end in place of a server."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = ForkServerConnection(ours)
            try:
                async with asyncio.timeout(patience(6)):
                    await check(connection, theirs)
            finally:
                connection.close()

    asyncio.run(run())


async def order(connection: ForkServerConnection) -> ForkedProcess | None:
    return await connection.fork(("script.py",), {}, SETTINGS, (0, 0, 0))


async def receive_order(server: socket.socket) -> None:
    _, descriptors, *_ = await asyncio.to_thread(socket.recv_fds, server, 65536, 5)
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def running_process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_workers_end_with_their_agent_and_not_with_another(tmp_path: Path) -> None:
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
        await asyncio.to_thread(wait_gone, worker.pid)
        assert theirs.exit_code is None
        os.kill(theirs.pid, 0)
        other.close()
        await asyncio.to_thread(wait_gone, theirs.pid)

    on_machine(tmp_path, check)


def test_workers_end_with_the_server_and_the_next_ones_are_not_forked(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "wait")
        await read(worker)
        os.kill(machine.server_pid, signal.SIGKILL)
        assert await worker.wait_exited() == -signal.SIGKILL
        await asyncio.to_thread(wait_gone, worker.pid)
        assert await machine.fork() is None
        assert machine.agent.refusal == "the fork server: it has ended"
        assert not machine.agent.is_open
        await asyncio.to_thread(
            wait_until, "its end", lambda: "fork_server.exited" in (tmp_path / "events.jsonl").read_text()
        )
        assert machine.server.connect_agent() is None

    assert on_machine(tmp_path, check) == ["fork_server.started", "fork_server.exited"]


def test_a_server_that_is_stopped_goes_on_and_its_workers_live(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "wait")
        await read(worker)
        for _ in range(2):
            os.kill(machine.server_pid, signal.SIGSTOP)
            other = await fork(machine, "--steps", "3")
            await read(other)
            assert await other.wait_exited() == 7
        assert worker.exit_code is None
        worker.kill()
        await worker.wait_exited()

    kinds = on_machine(tmp_path, check)
    assert kinds == ["fork_server.started", "fork_server.continued", "fork_server.continued"]


def test_another_environment_is_refused_by_the_names_of_the_variables(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        assert await machine.fork(environment={**machine.environment, "XLA_FLAGS": "", "B": "1"}) is None
        assert machine.agent.refusal == (
            "found other environment variables than this process was started with: B, XLA_FLAGS"
        )
        worker = await fork(machine)  # a refusal does not count for the next
        await read(worker)
        await worker.wait_exited()

    on_machine(tmp_path, check)


def test_a_script_that_sets_environment_variables_is_refused(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        assert await machine.fork() is None
        assert f"{machine.script}, line 2: sets an environment variable" in machine.agent.refusal

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SCRIPT", "import os\nos.environ['JAX_ENABLE_X64'] = '1'\nimport jax\n")
        on_machine(tmp_path, check)


def test_a_start_that_is_cancelled_leaves_no_worker(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        starting = asyncio.create_task(machine.fork("wait"))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        worker = await fork(machine, "wait")  # answered after the one that was cancelled
        children = list_children(machine.server_pid)
        await read(worker)
        worker.kill()
        await worker.wait_exited()
        for pid in children:
            await asyncio.to_thread(wait_gone, pid)

    on_machine(tmp_path, check)


def test_the_processes_are_named_after_the_script(tmp_path: Path) -> None:
    async def check(machine: Machine) -> None:
        worker = await fork(machine, "wait")
        await read(worker)
        assert read_name(worker.pid) == "script.py"
        worker.kill()
        await worker.wait_exited()

    on_machine(tmp_path, check)
