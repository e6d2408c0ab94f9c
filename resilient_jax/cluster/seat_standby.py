"""The standby: a complete second worker in a spare seat of the world, without work.

It has run the script up to `rj.run`, and then what a worker that returns does before it joins: it has connected to the
world, loaded its programs and rehearsed a step. `standby_orders` says what it is ordered, and when it takes over. Then
nothing is started: its process, its connection and its output are the worker's. Until then it runs at the lowest
priority, its output is held, and no snapshot server knows it.
"""

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from typing import Protocol

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.child_process import KILLING_SIGNALS, read_resident_mib
from resilient_jax.cluster.held_output import HeldOutput
from resilient_jax.cluster.standby_schedule import StandbySchedule
from resilient_jax.cluster.worker_exit import describe_exit
from resilient_jax.cluster.worker_output import WorkerOutput
from resilient_jax.cluster.worker_process import WorkerProcess
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.host_status import StandbyState, StandbyStatus, WorkerStatus
from resilient_jax.protocol.worker_messages import AgentRequest, WorkerOrder
from resilient_jax.protocol.worker_report import WorkerState


class StartStandby(Protocol):
    """Starts a worker that is a standby; `WorkerStarter.start_standby` is one."""

    async def __call__(self) -> tuple[WorkerProcess, socket.socket]:
        """Return the worker, and the other end of its connection to the snapshot server."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class SeatedStandby:
    """A standby that runs.

    Attributes:
        snapshots: end of the standby's connection to the snapshot server, which the server gets when the standby
            becomes the worker.
        output: output that is held until the standby is the worker.
        watching: task that receives the standby's messages and waits for its end.
    """

    process: WorkerProcess
    snapshots: socket.socket
    output: HeldOutput
    watching: "asyncio.Task[int]"


class SeatStandby:
    """At most one standby, whichever process it is.

    Attributes:
        status: status of the standby in the store; None while there is no standby.
        is_possible: whether the job is configured for standbys, and none has failed by itself.
    """

    def __init__(
        self,
        context: AgentContext,
        start: StartStandby,
        output: WorkerOutput,
        *,
        on_change: Callable[[], None],
        on_message: Callable[[WorkerProcess, AgentRequest], None],
        on_worker_change: Callable[[WorkerProcess], None],
    ) -> None:
        """Prepare to start standbys.

        Args:
            on_change: called after every change of `status`.
            on_message: called with each message of the process, also when the process is the worker.
            on_worker_change: called after every change of the process when the process is the worker.
        """
        self._devices = context.devices
        self._log = context.log
        self._clock = context.clock
        self._heartbeat_timeout_s = context.settings.config.heartbeat_timeout_s
        self._start_process = start
        self._host_output = output
        self._on_change = on_change
        self._on_message = on_message
        self._on_worker_change = on_worker_change
        self._schedule = StandbySchedule()
        self._starting: asyncio.Task[None] | None = None
        self._standby: SeatedStandby | None = None
        self._started_s = 0.0
        self._tasks: set[asyncio.Task[int]] = set()
        """Of standbys that run, are ending, or are the worker now."""
        self.status: StandbyStatus | None = None
        self.is_possible = context.settings.config.standby == "seat"

    @property
    def process(self) -> WorkerProcess | None:
        """The standby's process; None if there is none."""
        return self._standby.process if self._standby is not None else None

    def commit(self, generation: GenerationNumber) -> None:
        """Start a standby if one is due at this commit of the worker."""
        now_s = self._clock.monotonic_s()
        self._schedule = self._schedule.commit(generation, now_s)
        is_there = self._standby is not None or self._starting is not None
        if self.is_possible and not is_there and self._schedule.is_due(now_s):
            self._starting = asyncio.create_task(self._start())

    def send_order(self, order: WorkerOrder) -> None:
        """Send the standby an order, if there is one."""
        if self._standby is not None:
            self._standby.process.send_order(order)

    def take_over(self) -> SeatedStandby | None:
        """Return the standby, which is the host's worker from now on; None if there is none."""
        standby = self._standby
        if standby is not None:
            self._forget()
            self._schedule = self._schedule.replace_worker(is_promoted=True)
            standby.process.child.restore_priority()
            standby.process.expect_messages()
        return standby

    def fail(self, why: str, *, is_retried: bool) -> None:
        """End the standby, which cannot replace the worker; start another later if `is_retried`."""
        if (standby := self._standby) is not None:
            self._forget()
            self._record_failure(standby.process.child.pid, why, is_killed=is_retried)
            self._kill(standby)

    def dismiss(self) -> None:
        """End the standby, and start no other."""
        self.is_possible = False
        if (standby := self._standby) is not None:
            self._forget()
            self._kill(standby)

    def replace_worker(self) -> None:
        """End a standby that could not take over from a worker in whose place a process is started now.

        It would take processor time from that one.
        """
        self._schedule = self._schedule.replace_worker(is_promoted=False)
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if (standby := self._standby) is not None:
            self._forget()
            self._kill(standby)

    async def close(self) -> None:
        """End the standby, and what belongs to one that is the worker now, which has ended."""
        if (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        self.dismiss()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self) -> None:
        self._started_s = self._clock.monotonic_s()
        try:
            process, snapshots = await self._start_process()
        except OSError as error:  # no descriptor, process or memory left: perhaps later
            self._record_failure(0, f"could not be started: {error}", is_killed=True)
            return
        finally:
            self._starting = None
        output = HeldOutput(self._host_output)
        watching = process.watch_until_exit(
            output,
            self._heartbeat_timeout_s,
            lambda: self._on_process_changed(process),
            lambda message: self._on_message(process, message),
        )
        standby = SeatedStandby(process=process, snapshots=snapshots, output=output, watching=watching)
        self._tasks.add(watching)
        watching.add_done_callback(lambda _: self._on_end(standby))
        self._standby = standby
        self._log.record(EventKind.STANDBY_STARTED, pid=process.child.pid)
        self._update_status(standby)
        if process.started_with is not None and process.started_with != self._devices.settings:
            self.fail("its host's devices changed while it was started", is_retried=True)

    def _on_process_changed(self, process: WorkerProcess) -> None:
        if self._standby is not None and process is self._standby.process:
            self._update_status(self._standby)
        else:
            self._on_worker_change(process)

    def _on_end(self, standby: SeatedStandby) -> None:
        self._tasks.discard(standby.watching)
        if standby is not self._standby:
            return  # it was the worker, or was killed
        self._forget()
        standby.snapshots.close()
        code = standby.process.child.exit_code
        if code is None:
            return  # the agent ends
        reason = f"it {describe_exit(code)}" + (
            f": {e}" if code >= 0 and (e := standby.process.error) else ""
        )
        self._record_failure(standby.process.child.pid, reason, is_killed=-code in KILLING_SIGNALS)

    def _kill(self, standby: SeatedStandby) -> None:
        """Kill a standby without a wait for its end."""
        standby.snapshots.close()
        standby.process.child.kill()

    def _record_failure(self, pid: int, reason: str, *, is_killed: bool) -> None:
        self._schedule = self._schedule.lose_standby(self._clock.monotonic_s(), is_killed=is_killed)
        self.is_possible = self.is_possible and is_killed
        self._log.record(EventKind.STANDBY_FAILED, pid=pid, reason=reason, retried=is_killed)

    def _forget(self) -> None:
        self._standby = None
        self._set_status(None)

    def _update_status(self, standby: SeatedStandby) -> None:
        process, before = standby.process, self.status
        report, pid = process.report, process.child.pid
        is_ready = report.state is WorkerState.IDLE and report.place.world is not None
        memory_mib = before.memory_mib if before is not None else 0
        if is_ready and (before is None or before.state is not StandbyState.READY):
            memory_mib = read_resident_mib(pid)
            seconds = self._clock.monotonic_s() - self._started_s
            self._log.record(EventKind.STANDBY_READY, pid=pid, seconds=seconds, memory_mib=memory_mib)
        self._set_status(
            StandbyStatus(
                state=StandbyState.READY if is_ready else StandbyState.STARTING,
                pid=pid,
                memory_mib=memory_mib,
                worker=WorkerStatus(
                    incarnation=process.incarnation,
                    pid=pid,
                    report=report,
                    is_unresponsive=process.is_unresponsive,
                    is_dying=process.is_dying,
                    exit_code=process.child.exit_code,
                ),
            )
        )

    def _set_status(self, status: StandbyStatus | None) -> None:
        if status != self.status:
            self.status = status
            self._on_change()
