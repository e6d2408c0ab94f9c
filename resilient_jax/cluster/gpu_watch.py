"""Watches the GPUs of a host: before it joins, and while it trains.

A thread of its own waits for XIDs and reads the GPUs, because NVML takes as long as the driver does; the agent's loop
is told what came. What that means is decided in `health.gpu_monitor`. A GPU that must not train is taken out, and its
host trains on the others (`device_watch`). A host that cannot do without it is kept out: it does not register, or, if
it trains, is quarantined as `resilient-jax hosts drain` does it; the worker is ended at once where its work is lost.
Either stays out for as long as the readings say so, and at least for `quarantine_s`.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.device_selection import list_named_gpus
from resilient_jax.cluster.device_watch import DeviceWatch
from resilient_jax.cluster.nvml_reader import VISIBLE, NvmlReader, parse_visible_devices, uses_gpus
from resilient_jax.cluster.quarantine import quarantine_host
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.errors import GpusUnreadable, GpuUnfit, PeerError
from resilient_jax.events import EventKind
from resilient_jax.health.gpu_exclusion import NO_EXCLUSION, Exclusion, judge_exclusion
from resilient_jax.health.gpu_health import GpuFinding, GpuSeverity
from resilient_jax.health.gpu_monitor import GpuChange, GpuMonitor, ThrottlingBegan, ThrottlingEnded
from resilient_jax.health.gpu_reading import GpuReading, GpuXid
from resilient_jax.membership.severities import Action, Evidence, choose_action
from resilient_jax.protocol.worker_report import WorkerState

READ_INTERVAL_S: Final = 5.0
"""A reading takes some ms of the driver; what must be quick comes as an XID."""
XID_WAIT_S: Final = 0.5
"""How long one call waits for XIDs, and so about how long the thread takes to end."""
FIRST_READING_TIMEOUT_S: Final = 30.0
"""As of `doctor` for nvidia-smi: seconds where the driver is not kept in memory, and for ever where a GPU hangs it."""
GpuKey = int | str
"""See `_find_key`."""
STORE_TIMEOUT_S: Final = 3.0
"""For the record of a quarantine. The worker is ended then in any case, and the record is tried again."""


class _Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the thread has to tell: readings (maybe none), XIDs, and why XIDs are not heard, once."""

    readings: tuple[GpuReading, ...] = ()
    xids: tuple[GpuXid, ...] = ()
    xid_problem: str = ""


class GpuWatch:
    """The watch of one host's GPUs; does nothing, and loads nothing, where workers use none.

    Args:
        devices: watch that takes devices out.
        on_change: called when `notes` have changed.
    """

    def __init__(
        self,
        context: AgentContext,
        supervisor: WorkerSupervisor,
        devices: DeviceWatch,
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._supervisor = supervisor
        self._devices = devices
        self._on_change = on_change
        self._monitor = GpuMonitor()
        self._acts = context.settings.config.gpu_health == "act"
        self._stop = threading.Event()
        self._is_suspected = threading.Event()
        """Set to have the thread read the GPUs now: an error of the worker's is one that a device causes."""
        supervisor.on_suspicion = self._is_suspected.set
        self._first: asyncio.Future[_Observation] | None = None
        """The first reading; as long as it is awaited, the host has not joined."""
        self._ended: asyncio.Future[None] | None = None
        self._exclusions: dict[GpuKey, Exclusion] = {}
        """The last one of each GPU."""
        self._numbers: dict[GpuKey, int] = {}
        """The number of each GPU among the devices of a worker."""
        self._new: list[GpuKey] = []
        """GPUs whose exclusion is new, and not carried out yet."""
        self._excluded = asyncio.Event()
        """Set when there are such."""
        self._answered_s = math.inf
        """When the driver last answered the thread; infinite: nothing is awaited of it."""
        self._is_silence_told = False
        self._worker_ended_for: Exclusion = NO_EXCLUSION
        """That for which the worker was ended: the one that follows waits."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with GPUs now, for `status`."""
        return self._monitor.notes

    async def begin(self) -> None:
        """Read the GPUs for the first time, before the host joins, and go on reading them.

        Raises:
            GpuUnfit: a GPU must not train.
        """
        settings = self._context.settings
        if settings.config.gpu_health == "off" or not uses_gpus(settings.environment):
            return
        loop = asyncio.get_running_loop()
        self._first, self._ended = loop.create_future(), loop.create_future()
        visible = settings.environment.get(VISIBLE)
        # A daemon: a call that the driver never answers must not keep the agent from its end.
        threading.Thread(
            target=self._watch, args=(loop, visible), name="resilient-jax-gpus", daemon=True
        ).start()
        try:
            # Cancels the future at its timeout: what is read later is judged as while the host trains.
            first = await asyncio.wait_for(self._first, FIRST_READING_TIMEOUT_S)
        except GpusUnreadable as error:
            self._tell_unwatched(f"GPUs are not watched: {error}")
            return
        except TimeoutError:
            self._tell_unwatched(
                f"GPUs are not watched: NVML did not answer within {FIRST_READING_TIMEOUT_S:g} s"
            )
            return
        self._take_in(first)
        self._number_gpus(first.readings, visible)
        if self._monitor.unfit and self._acts:
            self._join_without(self._monitor.unfit)

    def _number_gpus(self, readings: Sequence[GpuReading], visible: str | None) -> None:
        """Note which devices of a worker the GPUs are; nothing if parts of GPUs are devices."""
        words = parse_visible_devices(visible)
        if words is not None and (
            len(words) != len(readings) or not list_named_gpus({VISIBLE: visible or ""})
        ):
            return
        self._numbers = {_find_key(reading): number for number, reading in enumerate(readings)}
        # By UUID: without a GPU that has fallen off the bus, others have other indexes.
        self._context.devices.gpu_names = tuple(
            reading.uuid or (words[number] if words is not None else str(reading.index))
            for number, reading in enumerate(readings)
        )

    def _join_without(self, unfit: Sequence[GpuFinding]) -> None:
        """Leave out what must not train before the host joins.

        Raises:
            GpuUnfit: the host cannot do without these GPUs.
        """
        host = self._context.settings.host
        self._act(())
        for key in self._new:
            number, exclusion = self._numbers.get(key), self._exclusions[key]
            if number is None or not self._devices.can_spare(number):
                raise GpuUnfit(
                    f"host {host} does not join: {'; '.join(finding.why for finding in unfit)}. Expected GPUs without "
                    "such errors: end what uses them, reset them (nvidia-smi --gpu-reset) or restart the machine, and "
                    'start the agent again. gpu_health = "report" in the configuration joins with them'
                )
            self._devices.leave_out(self._devices.make_record(number, exclusion.reason), at_once=True)
        self._new.clear()
        self._excluded.clear()

    async def run(self) -> None:
        """Take out whatever GPU must not train, until cancelled."""
        while True:
            if not await self._wait_excluded():
                continue
            self._excluded.clear()
            new, self._new = self._new, []
            # All that can be left out first: what follows waits for the store.
            for exclusion in [self._exclusions[key] for key in new if not self._try_leave_out(key)]:
                await self._take_host_out(exclusion)

    def _try_leave_out(self, key: GpuKey) -> bool:
        """Leave a GPU out; return False if its host cannot do without it."""
        number, exclusion = self._numbers.get(key), self._exclusions[key]
        num_tried = 0 if number is not None and self._devices.can_spare(number) else 1
        if number is None or choose_action(Evidence.GPU_FAILED, num_tried, {}) is not Action.TAKE_DEVICE_OUT:
            return False
        record = self._devices.make_record(number, exclusion.reason)
        self._devices.leave_out(record, at_once=exclusion.ends_worker)
        return True

    async def _take_host_out(self, exclusion: Exclusion) -> None:
        """Quarantine the host, which cannot do without a GPU, and end its worker where its work is lost."""
        is_written = await self._try_quarantine(exclusion)
        self._end_worker(
            exclusion
        )  # after the record, or the worker that follows might join before it is there
        while not is_written:
            await asyncio.sleep(STORE_TIMEOUT_S)
            is_written = await self._try_quarantine(exclusion)

    async def _wait_excluded(self) -> bool:
        """Wait for an exclusion; return False after a while without one, and report a driver that does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_INTERVAL_S):
                await self._excluded.wait()
                return True
        silent_s = self._context.clock.monotonic_s() - self._answered_s
        if silent_s > FIRST_READING_TIMEOUT_S and not self._is_silence_told:
            self._is_silence_told = True
            self._tell_unwatched(f"GPUs are no longer watched: NVML has not answered for {silent_s:.0f} s")
        return False

    async def _try_quarantine(self, exclusion: Exclusion) -> bool:
        """Write why this host takes no part; return whether the store has it."""
        with contextlib.suppress(PeerError, TimeoutError):
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await quarantine_host(self._context, self._context.settings.host, exclusion.reason)
                return True
        return False

    def _end_worker(self, exclusion: Exclusion) -> None:
        status, last = self._supervisor.status, self._worker_ended_for
        if not exclusion.ends_worker or last.since_s == exclusion.since_s:
            return
        self._worker_ended_for = exclusion
        if status is None or status.report.state is not WorkerState.IDLE:  # one that waits uses no GPU
            self._supervisor.kill(exclusion.reason)

    async def close(self) -> None:
        """End the thread; one that waits for the driver is left behind."""
        self._stop.set()
        if self._ended is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(4 * XID_WAIT_S):
                    await asyncio.shield(self._ended)

    # In the thread.

    def _watch(self, loop: asyncio.AbstractEventLoop, visible: str | None) -> None:
        """Read until the watch is closed; the loop is told what came, and the end."""
        try:
            reader = NvmlReader(visible)
            try:
                self._read(loop, reader)
            finally:
                reader.close()
        except GpusUnreadable as error:
            _call(loop, self._fail, error)
        except Exception as error:
            # Of the binding, of which there are many versions. Training does not need it.
            _call(loop, self._fail, GpusUnreadable(f"{type(error).__name__}: {error}"))
        finally:
            self._answered_s = math.inf
            _call(loop, _finish, self._ended)

    def _read(self, loop: asyncio.AbstractEventLoop, reader: NvmlReader) -> None:
        _call(loop, self._observe, _Observation(readings=reader.read(), xid_problem=reader.xid_problem))
        clock, told = self._context.clock, reader.xid_problem
        next_s = clock.monotonic_s() + READ_INTERVAL_S
        while not self._stop.is_set():
            self._answered_s = clock.monotonic_s()
            xids = reader.wait_xids(XID_WAIT_S)
            if xids is None:
                self._stop.wait(XID_WAIT_S)
            readings: tuple[GpuReading, ...] = ()
            if clock.monotonic_s() >= next_s or self._is_suspected.is_set():
                self._is_suspected.clear()
                readings, next_s = reader.read(), clock.monotonic_s() + READ_INTERVAL_S
            problem = "" if reader.xid_problem == told else reader.xid_problem
            told = reader.xid_problem
            if readings or xids or problem:
                _call(
                    loop, self._observe, _Observation(readings=readings, xids=xids or (), xid_problem=problem)
                )

    # In the agent's loop.

    def _observe(self, observation: _Observation) -> None:
        if self._stop.is_set():
            return
        if self._first is not None and not self._first.done():
            self._first.set_result(observation)
            return
        notes = self._monitor.notes
        changes = self._take_in(observation)
        if self._acts:
            self._act([change for change in changes if isinstance(change, GpuFinding)])
        if self._monitor.notes != notes:
            self._on_change()

    def _fail(self, error: GpusUnreadable) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        elif not self._stop.is_set():
            self._tell_unwatched(f"GPUs are no longer watched: {error}")

    def _tell_unwatched(self, why: str) -> None:
        self._context.log.record(EventKind.GPU_UNWATCHED, why=why)
        self._context.print_line(f"{self._context.settings.host}: {why}")

    def _take_in(self, observation: _Observation) -> tuple[GpuChange, ...]:
        """Judge and record an observation; return what it changes."""
        if observation.xid_problem:
            self._tell_unwatched(f"XIDs of GPUs are not heard: {observation.xid_problem}")
        changes = self._monitor.observe(observation.readings, observation.xids)
        for change in changes:
            self._record(change)
        return changes

    def _act(self, new: Sequence[GpuFinding]) -> None:
        """Have GPUs taken out for what is new, or for what still stands when their quarantine ends."""
        unfit = self._monitor.unfit
        for key in dict.fromkeys(_find_key(finding) for finding in (*new, *unfit)):
            last = self._exclusions.get(key, NO_EXCLUSION)
            exclusion = judge_exclusion(
                last,
                [finding for finding in new if _find_key(finding) == key],
                [finding for finding in unfit if _find_key(finding) == key],
                now_s=self._context.clock.monotonic_s(),
                quarantine_s=self._context.settings.config.quarantine_s,
            )
            if exclusion is not last:
                self._exclusions[key] = exclusion
                self._new.append(key)
                self._excluded.set()

    def _record(self, change: GpuChange) -> None:
        log = self._context.log
        match change:
            case GpuFinding(severity=GpuSeverity.UNFIT | GpuSeverity.FAILED):
                log.record(
                    EventKind.GPU_FAILED,
                    gpu=change.gpu,
                    what=change.what,
                    why=change.why,
                    is_worker_ended=change.severity is GpuSeverity.FAILED,
                )
                self._context.print_line(f"{self._context.settings.host}: {change.why}")
            case GpuFinding():
                log.record(EventKind.GPU_NOTED, gpu=change.gpu, what=change.what, why=change.why)
            case ThrottlingBegan():
                log.record(EventKind.GPU_THROTTLED, gpu=change.reading.label, why=change.why)
            case ThrottlingEnded():
                log.record(
                    EventKind.GPU_THROTTLED_ENDED, gpu=change.reading.label, readings=change.num_readings
                )


def _find_key(known: GpuFinding | GpuReading) -> GpuKey:
    """Return what distinguishes a GPU from others: NVML's index, or the name of one that NVML does not list."""
    if known.index >= 0:
        return known.index
    return known.gpu if isinstance(known, GpuFinding) else known.label


def _finish(ended: asyncio.Future[None] | None) -> None:
    if ended is not None and not ended.done():
        ended.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # the agent has ended, and did not wait for the driver
        loop.call_soon_threadsafe(function, *arguments)
