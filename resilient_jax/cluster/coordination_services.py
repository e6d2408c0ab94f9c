"""JAX's coordination services, one process for each world, on the loopback of the leader's host (see `relay`).

Importing jaxlib takes 0.4 s, far too long inside a stall. So the leader keeps a standby process that has imported it
and waits for an address; taking the standby into service takes milliseconds.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence

from resilient_jax.cluster.child_process import SpawnedProcess, open_line_reader
from resilient_jax.errors import InternalError
from resilient_jax.events import EventKind
from resilient_jax.ids import Seat, WorldId
from resilient_jax.protocol.host_status import CoordinationServiceStatus
from resilient_jax.protocol.service_address import LOOPBACK, format_service_address
from resilient_jax.telemetry.event_log import EventLog

SERVICE_MODULE = "resilient_jax.jax_runtime.coordination_service"
MAX_PORT_TRIES = 5
"""Another process may take a free port between finding it and serving on it."""
START_TIMEOUT_S = 30.0
START_RETRY_INTERVAL_S = 1.0
"""How long after a failed start the next is tried."""


class CoordinationServices:
    """Starts, watches and ends the services that this host runs for the job.

    Attributes:
        running: services that run, for the host's status.
    """

    def __init__(self, get_agent: Callable[[], str], log: EventLog, on_change: Callable[[], None]) -> None:
        """Begin without a service.

        Args:
            get_agent: returns the address of this host's agent, once the agent listens: others reach the services
                through it.
            on_change: called when `running` has changed.
        """
        self._get_agent = get_agent
        self._log = log
        self._on_change = on_change
        self._standby: asyncio.Task[_Standby] | None = None
        self._children: dict[CoordinationServiceStatus, SpawnedProcess] = {}
        self._starting: set[tuple[WorldId, int]] = set()
        self._used = WorldId(0), ""
        """The newest world that has formed, and the address of its service."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> tuple[CoordinationServiceStatus, ...]:
        """The services that run, in the order of their start."""
        return tuple(self._children)

    def start_standby(self) -> None:
        """Start a standby process unless there is one."""
        if self._standby is None:
            self._standby = asyncio.get_running_loop().create_task(_start_standby_process())
            self._spawn(self._replace_lost(self._standby))

    def start(self, world: WorldId, num_processes: int, num_seats: int) -> None:
        """Start a service for a world that `num_processes` form, in the background. Idempotent.

        Args:
            num_processes: processes that form the world.
            num_seats: seats of the world, spare ones included.
        """
        wanted = (world, num_processes)
        if wanted in self._starting or any((s.world, s.num_processes) == wanted for s in self._children):
            return
        self._starting.add(wanted)
        self._spawn(self._serve(world, num_processes, num_seats))

    def report_lost(self, address: str, seats: Sequence[Seat]) -> None:
        """Tell the service at `address`, if it runs here, that the processes of these seats were given up.

        A seat that another process has taken since must not be among them. The answers are events.
        """
        child = next((child for status, child in self._children.items() if status.address == address), None)
        if child is None:
            return
        assert child.stdin is not None, "started with a pipe"
        with contextlib.suppress(OSError, ValueError):  # it is dead, and answers nothing
            child.stdin.write("".join(f"lost {seat}\n" for seat in seats).encode())
            child.stdin.flush()

    def stop_others(self, world: WorldId, address: str) -> None:
        """End the services of worlds older than `world`, and those of `world` itself that its members do not use.

        Of these there are some if it formed of more or fewer hosts than were ready when a service was first asked for.

        Args:
            world: world that has formed.
            address: address of the service that the members use; empty: that service has ended, or is not known, and no
                service of `world` ends.
        """
        self._used = world, address
        for status, child in list(self._children.items()):
            if self._is_unused(status):
                child.kill()

    def _is_unused(self, status: CoordinationServiceStatus) -> bool:
        world, address = self._used
        return status.world < world or (bool(address) and status.world == world and status.address != address)

    async def close(self) -> None:
        """End all services and the standby."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._standby is not None:
            # A start that is done cannot be cancelled: its process is there, and is ended below.
            self._standby.cancel()
            with contextlib.suppress(asyncio.CancelledError, InternalError, OSError, TimeoutError):
                standby = await self._standby
                await standby.child.kill_and_wait()
        for child in list(self._children.values()):
            await child.kill_and_wait()

    async def _serve(self, world: WorldId, num_processes: int, num_seats: int) -> None:
        try:
            for _ in range(MAX_PORT_TRIES):
                if await self._try_to_serve(world, num_processes, num_seats):
                    return
            raise InternalError(f"no free port for a coordination service on {LOOPBACK}")
        except (InternalError, OSError, TimeoutError) as error:
            self._log.record(
                EventKind.COORDINATION_SERVICE_START_FAILED,
                world=world,
                error=str(error) or "timeout",
            )
            await asyncio.sleep(START_RETRY_INTERVAL_S)  # then the leader asks again
        finally:
            self._starting.discard((world, num_processes))
            self._on_change()
            self.start_standby()

    async def _try_to_serve(self, world: WorldId, num_processes: int, num_seats: int) -> bool:
        """Take the standby into service; return False if its port was taken."""
        self.start_standby()
        assert self._standby is not None, "just warmed up"
        starting, self._standby = self._standby, None  # one that could not be started is not tried again
        standby = await starting
        # Whatever fails below: a process that does not serve is ended, and not kept.
        is_serving = False
        try:
            port = _free_port(LOOPBACK)
            is_serving = await standby.serve(f"{LOOPBACK}:{port}", num_processes, num_seats)
        finally:
            if not is_serving:
                await standby.child.kill_and_wait()
        if is_serving:
            address = format_service_address(self._get_agent(), port)
            status = CoordinationServiceStatus(
                world=world,
                num_processes=num_processes,
                num_seats=num_seats,
                address=address,
                pid=standby.child.pid,
            )
            self._children[status] = standby.child
            self._log.record(
                EventKind.COORDINATION_SERVICE_STARTED, world=world, address=address, pid=status.pid
            )
            self._spawn(self._watch(status, standby.child))
            self._spawn(self._record_answers(status, standby.lines))
            if self._is_unused(status):  # the world has formed meanwhile
                standby.child.kill()
        return is_serving

    async def _replace_lost(self, starting: "asyncio.Task[_Standby]") -> None:
        """Start another standby as soon as this one ends or is stopped, unless it has been taken into service."""
        await asyncio.wait((starting,))
        if starting.cancelled() or starting.exception() is not None:
            return  # whoever needs it finds out, and why
        child = starting.result().child
        await child.wait_exited_or_stopped()
        if self._standby is starting:
            self._standby = None
            self._log.record(EventKind.COORDINATION_SERVICE_STANDBY_LOST, pid=child.pid)
            await child.kill_and_wait()
            self.start_standby()

    async def _watch(self, status: CoordinationServiceStatus, child: SpawnedProcess) -> None:
        code = await child.wait_exited_or_stopped()
        self._children.pop(status, None)
        self._log.record(EventKind.COORDINATION_SERVICE_EXITED, world=status.world, exit_code=code)
        self._on_change()

    async def _record_answers(self, status: CoordinationServiceStatus, lines: asyncio.StreamReader) -> None:
        """Record what the service answers to the orders of `report_lost`, until it ends."""
        async for line in lines:
            self._log.record(
                EventKind.COORDINATION_SERVICE_SEAT_LOST, world=status.world, answer=line.decode().strip()
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Standby:
    """A standby process that has imported jaxlib and waits for an address."""

    def __init__(self, child: SpawnedProcess, lines: asyncio.StreamReader) -> None:
        self.child = child
        self.lines = lines

    async def serve(self, address: str, num_processes: int, num_seats: int) -> bool:
        """Take the process into service; return False if the port is taken."""
        assert self.child.stdin is not None, "started with a pipe"
        try:
            self.child.stdin.write(f"{address} {num_processes} {num_seats}\n".encode())
            self.child.stdin.flush()
        except OSError:
            return False
        async with asyncio.timeout(START_TIMEOUT_S):
            answer = await self.lines.readline()
        return answer.startswith(b"serving")


async def _start_standby_process() -> _Standby:
    child = SpawnedProcess(
        [sys.executable, "-m", SERVICE_MODULE],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert child.stdout is not None, "started with a pipe"
        lines, _ = await open_line_reader(child.stdout.fileno())
        child.stdout.close()
        async with asyncio.timeout(START_TIMEOUT_S):
            answer = await lines.readline()
        if answer.strip() != b"ready":
            raise InternalError(
                f"the coordination service: found {answer!r} on its standard output, expected ready"
            )
    # Also if this is cancelled: nothing else knows of the process yet.
    except BaseException:
        await child.kill_and_wait()
        raise
    return _Standby(child, lines)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
