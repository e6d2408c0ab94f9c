"""Processes that execute a test's orders with `jax_runtime`, and the coordination services of their worlds."""

import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import time
from pathlib import Path

from resilient_jax.jax_runtime.worker_environment import make_worker_environment
from tests.support.forge import Forge, ForgedProcess
from tests.support.patience import patience, wait_until

WORKER = "tests.process.jax_runtime.jax_runtime_worker"
SERVICE = "resilient_jax.jax_runtime.coordination_service"
DEADLINE_S = patience(6)
COLLECTIVE_TIMEOUT_S = 1e5
"""No wait may end by gloo's own time-out: what is awaited must come by itself."""


class Lines:
    """The lines that a child prints, each read with a timeout."""

    def __init__(self, process: ForgedProcess) -> None:
        assert process.stdout is not None
        self._file = process.stdout
        self._rest = b""

    def next(self, timeout_s: float = DEADLINE_S) -> str:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._file, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no line within {timeout_s} s")
                data = os.read(self._file.fileno(), 65536)
                if not data:
                    raise EOFError("the child has ended")
                self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()


class Child:
    """A process that ends with its test at the latest."""

    def __init__(self, process: ForgedProcess) -> None:
        self.process = process
        self.lines = Lines(process)

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@functools.cache
def find_forge(number: int = 0) -> Forge:
    """Return what workers, and the services of their worlds, are forked from.

    Args:
        number: of one of several forges. Each hashes strings in its own way, as hosts do: the order of its sets is its
            own.
    """
    # Not the cache of the suite, which would find what an earlier run compiled.
    base = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    ours = make_worker_environment(
        platform="cpu",
        devices_per_host=2,
        cache_dir=None,
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        base=base,
    )
    forge = Forge(WORKER, SERVICE, environment=base | ours | {"TF_CPP_MIN_LOG_LEVEL": "3"})
    atexit.register(forge.end)
    return forge


class Worker(Child):
    """One `jax_runtime_worker.py`."""

    def __init__(self, cache_dir: str | None = None, forge: Forge | None = None) -> None:
        super().__init__((forge or find_forge()).start(f"{WORKER}:main", cache_dir or "", is_silent=True))
        self._has_started = False

    def wait_started(self) -> None:
        """Wait until the process answers."""
        if not self._has_started:
            self._has_started = True
            self.answer()

    def tell(self, do: str, **words: object) -> None:
        self.write(json.dumps({"do": do, **words}))

    def answer(self, timeout_s: float = DEADLINE_S) -> dict:
        while not (line := self.lines.next(timeout_s)).startswith("{"):
            pass  # gloo prints to stdout, too
        return json.loads(line)


class Service(Child):
    """A coordination service process."""

    def __init__(self) -> None:
        super().__init__(find_forge().start(f"{SERVICE}:main", is_silent=True))
        assert self.lines.next() == "ready"

    def serve(self, nodes: int, address: str = "127.0.0.1:0", seats: int | None = None) -> str:
        self.write(f"{address} {nodes} {seats or nodes}")
        return self.lines.next()

    def lose(self, seat: int) -> str:
        """Have the service count the process of a seat as gone; return its answer."""
        self.write(f"lost {seat}")
        return self.lines.next()


class Pool:
    """Workers that are reused from test to test, since they can join new worlds."""

    def __init__(self, cache_dir: str | None = None) -> None:
        self._cache_dir = cache_dir
        self._workers: list[Worker] = []
        self._services: list[Service] = []
        self.address = ""
        """Of the newest service."""

    def take(self, count: int) -> list[Worker]:
        """Return `count` living workers that are in no world."""
        for worker in [w for w in self._workers if w.process.poll() is not None]:
            self.drop(worker)
        for _ in range(count - len(self._workers)):
            self.start(is_waited_for=False)
        for worker in self._workers[:count]:
            worker.wait_started()
        return self._workers[:count]

    def start(self, *, is_waited_for: bool = True) -> Worker:
        """Return a new worker."""
        worker = Worker(self._cache_dir)
        self._workers.append(worker)
        if is_waited_for:
            worker.wait_started()
        return worker

    def drop(self, worker: Worker) -> None:
        worker.end()
        self._workers.remove(worker)

    def drop_all(self) -> None:
        for worker in list(self._workers):
            self.drop(worker)

    def serve(self, nodes: int, seats: int | None = None) -> str:
        service = Service()
        self._services.append(service)
        found, address = service.serve(nodes, seats=seats).split()
        assert found == "serving"
        return address

    @property
    def newest_service(self) -> Service:
        return self._services[-1]

    def join(self, workers: list[Worker], seats: int | None = None) -> list[dict]:
        self.address = self.serve(len(workers), seats)
        for index, worker in enumerate(workers):
            worker.tell("connect", address=self.address, index=index, count=len(workers), seats=seats)
        return [worker.answer() for worker in workers]

    def leave(self, workers: list[Worker]) -> list[dict]:
        return everyone(workers, "disconnect")

    def end_services(self) -> None:
        for service in self._services:
            service.end()
        self._services.clear()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self.end_services()


def everyone(workers: list[Worker], do: str, **words: object) -> list[dict]:
    for worker in workers:
        worker.tell(do, **words)
    return [worker.answer() for worker in workers]


def interrupt(workers: list[Worker]) -> list[dict]:
    """Interrupt all workers; return the answers."""
    for worker in workers:
        worker.tell("interrupt")
    return [worker.answer() for worker in workers]


def sum_to(count: int) -> float:
    return count * (count + 1) / 2


def strike(pool: Pool, victim: Child, number: int) -> None:
    """Kill or stop `victim`, and return when it is dead or stopped."""
    victim.process.send_signal(number)
    await_struck(victim, number)


def await_struck(victim: Child, number: int) -> None:
    def is_struck() -> bool:
        if number == signal.SIGKILL:
            return victim.process.poll() is not None
        stat = Path(f"/proc/{victim.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    wait_until("the victim is dead, or stands still", is_struck, DEADLINE_S)
