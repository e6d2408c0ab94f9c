"""A host whose devices come and go: when its worker is started again, and when the host itself takes no part."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.device_quarantine import clear_device_quarantine, write_device_quarantine
from resilient_jax.cluster.device_watch import DeviceWatch
from resilient_jax.cluster.quarantine import read_quarantine
from resilient_jax.cluster.snapshot_server_process import SnapshotServerProcess
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.cluster.worker_replacement import (
    WorkerReplacement,
    end_if_outdated,
    is_only_holder,
    is_outdated,
    may_replace,
)
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.config import JobConfig
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, Seat
from resilient_jax.protocol.generation import Generation, GenerationPhase, LeaderNotes, Member, Membership
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord, QuarantineRecord
from resilient_jax.protocol.store_keys import make_generation_key, make_replacement_key
from resilient_jax.protocol.worker_report import HeldState, WorkerReport
from resilient_jax.store.memory import MemoryStore
from resilient_jax.telemetry.event_log import EventLog
from tests.support.agent_parts import HOST, JOB, make_agent_settings, wait_until
from tests.support.patience import patience

OTHER = HostName("host-1")
FLAG = "--xla_force_host_platform_device_count"


def make_record(device: int, seconds: float = 600.0) -> DeviceQuarantineRecord:
    now_s = time.time()
    return DeviceQuarantineRecord(
        host=HOST, device=device, reason="a test", since_wall_s=now_s, until_wall_s=now_s + seconds
    )


def make_generation(phase: GenerationPhase, losses_left: int | None, *hosts: HostName) -> Generation:
    members = tuple(
        Member(host=host, incarnation=Incarnation(1), seat=Seat(i)) for i, host in enumerate(hosts)
    )
    return Generation(
        number=GenerationNumber(1),
        phase=phase,
        membership=Membership(members=members),
        record=LeaderNotes(losses_left=losses_left),
    )


class Host:
    """The parts of an agent that keep a worker with four devices, which never comes to `rj.run`."""

    def __init__(self, work: Path, store: MemoryStore) -> None:
        script = work / "script.py"
        script.write_text("import time; time.sleep(600)")
        self.store = store
        config = JobConfig(restart_backoff_s=0.0, standby="off", max_restarts=0)
        settings = make_agent_settings(script, config, num_hosts=2)
        settings.environment.update({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAG}=4"})
        log = EventLog(None, HOST)
        self.context = AgentContext(
            settings=settings, store=store, clock=SystemClock(), log=log, print_line=print
        )
        self.snapshots = SnapshotServerProcess(settings, log, on_change=lambda: None, on_end=lambda: None)
        self.on_start: Callable[[], None] = lambda: None
        self.supervisor = WorkerSupervisor(
            self.context,
            snapshots=self.snapshots,
            on_change=lambda: None,
            is_start_urgent=self._start_urgently,
            is_over=lambda: False,
        )
        self.watch = DeviceWatch(self.context, self.supervisor)

    def _start_urgently(self) -> bool:
        """Return whether a process that was just made is urgent; called before the supervisor has it."""
        self.on_start()
        return True

    async def publish(self, generation: Generation) -> None:
        await self.store.put(make_generation_key(JOB), ENCODER.encode(generation))

    async def quarantine(self) -> QuarantineRecord | None:
        return next(iter(await read_quarantine(self.store, JOB)), None)

    def num_seen(self) -> int:
        """Return how many devices the worker sees; 0: none runs."""
        worker = self.supervisor.worker
        if worker is None or worker.child.exit_code is not None:
            return 0
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{worker.child.pid}/environ").read_text().split(f"{FLAG}=")
            return int(words[1][0]) if len(words) > 1 else 0
        return 0


@contextlib.asynccontextmanager
async def running_host(
    work: Path, prepare: Callable[[Host], Awaitable[None]] | None = None
) -> AsyncIterator[Host]:
    async with MemoryStore() as store:
        host = Host(work, store)
        if prepare is not None:
            await prepare(host)
        tasks = [
            asyncio.create_task(host.supervisor.supervise()),
            asyncio.create_task(host.watch.run()),
        ]
        try:
            yield host
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await host.supervisor.close()
            await host.snapshots.close()


def test_a_worker_that_is_started_while_a_device_is_taken_out_does_not_keep_it(tmp_path: Path) -> None:
    async def prepare(host: Host) -> None:
        await host.publish(make_generation(GenerationPhase.ACTIVE, 0, HOST, OTHER))

        def lose_device() -> None:
            host.on_start = lambda: None
            host.watch.leave_out(make_record(0), at_once=True)

        host.on_start = lose_device

    async def run() -> None:
        async with running_host(tmp_path, prepare) as host:
            await wait_until(lambda: host.num_seen() == 2)

    asyncio.run(run())


def test_a_drained_device_does_not_end_a_worker_that_others_need(tmp_path: Path) -> None:
    """Neither while it has the last copy of the state, nor while another host's worker is started again."""

    async def run() -> None:
        async with running_host(tmp_path) as host:
            await wait_until(lambda: host.num_seen() == 4)
            await host.publish(make_generation(GenerationPhase.ACTIVE, 0, HOST, OTHER))
            await write_device_quarantine(host.store, JOB, make_record(0))
            await wait_until(lambda: is_outdated(host.context, host.supervisor))
            replacement = WorkerReplacement(host.context, host.supervisor)
            await replacement.check()
            assert host.num_seen() == 4, "it has the last copy"
            await host.store.put(make_replacement_key(JOB), OTHER.encode())
            await host.publish(make_generation(GenerationPhase.ACTIVE, 1, HOST, OTHER))
            await replacement.check()
            assert host.num_seen() == 4, "it is another host's turn"
            await host.store.delete(make_replacement_key(JOB))
            await wait_until(lambda: host.num_seen() == 2)
            assert await host.store.get(make_replacement_key(JOB)) is not None, "until this host trains again"

    asyncio.run(run())


def test_which_worker_was_ended_because_a_device_is_back_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_host(tmp_path) as host:
            devices = host.context.devices
            await wait_until(lambda: host.num_seen() == 4)
            assert devices.num_standby == 0
            await write_device_quarantine(host.store, JOB, make_record(0))
            await wait_until(lambda: host.num_seen() == 2)
            assert devices.ended_for_return == 0, "a device was taken out"
            assert devices.num_standby == 1, "of the three that are left an even number is used"
            worker = host.supervisor.worker
            assert worker is not None
            await clear_device_quarantine(host.store, JOB, HOST, 0)
            await wait_until(lambda: host.num_seen() == 4)
            assert devices.ended_for_return == worker.incarnation
            assert devices.num_standby == 0

    asyncio.run(run())


def test_a_device_that_is_back_does_not_end_a_worker_that_has_as_many_without_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_host(tmp_path) as host:
            devices = host.context.devices
            await wait_until(lambda: host.num_seen() == 4)
            for device, used in [(2, (0, 1)), (0, (1, 3))]:
                await write_device_quarantine(host.store, JOB, make_record(device))
                await wait_until(lambda used=used: devices.used == used)
                await wait_until(lambda: not is_outdated(host.context, host.supervisor))
                await wait_until(lambda: host.num_seen() == 2)
            await clear_device_quarantine(host.store, JOB, HOST, 0)
            await wait_until(lambda: devices.num_standby == 1)
            assert devices.used == (1, 3)
            assert not is_outdated(host.context, host.supervisor)

    asyncio.run(run())


def test_a_worker_that_is_ended_though_its_devices_are_sound_is_no_failure(tmp_path: Path) -> None:
    """A device of it was taken out, and is back before it was this host's turn to do without."""

    async def run() -> None:
        async with running_host(tmp_path) as host:
            devices = host.context.devices
            await wait_until(lambda: host.num_seen() == 4)
            await write_device_quarantine(host.store, JOB, make_record(2))
            await wait_until(lambda: host.num_seen() == 2)
            await host.publish(make_generation(GenerationPhase.ACTIVE, 0, HOST, OTHER))
            await write_device_quarantine(host.store, JOB, make_record(0))
            await wait_until(lambda: devices.used == (1, 3))
            await clear_device_quarantine(host.store, JOB, HOST, 0)
            await wait_until(lambda: 0 not in devices.records)
            worker = host.supervisor.worker
            assert worker is not None
            end_if_outdated(host.context, host.supervisor, "a device is back")
            assert devices.ended_for_return == worker.incarnation

    asyncio.run(run())


def test_a_device_that_fails_ends_the_worker_at_once_also_after_it_was_drained(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_host(tmp_path) as host:
            await wait_until(lambda: host.num_seen() == 4)
            await host.publish(make_generation(GenerationPhase.ACTIVE, 0, HOST, OTHER))
            host.watch.leave_out(make_record(0), at_once=False)
            assert is_outdated(host.context, host.supervisor)
            host.watch.leave_out(make_record(0), at_once=True)
            await wait_until(lambda: host.num_seen() == 2)

    asyncio.run(run())


def test_a_host_that_needs_all_devices_is_out_as_long_as_its_device(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_host(tmp_path) as host:
            await wait_until(lambda: host.num_seen() == 4)
            host.context.devices.requires_all = True
            record = make_record(1, seconds=5000.0)
            await write_device_quarantine(host.store, JOB, record)
            await wait_for_quarantine(host, is_there=True)
            found = await host.quarantine()
            assert found is not None
            assert found.until_wall_s >= record.until_wall_s
            assert "device 1 of 4 is out" in found.reason
            assert host.num_seen() == 4
            await clear_device_quarantine(host.store, JOB, HOST, 1)
            await wait_for_quarantine(host, is_there=False)

    asyncio.run(run())


def test_a_stage_that_lacks_a_device_takes_no_part_until_it_is_back_with_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_host(tmp_path) as host:
            await wait_until(lambda: host.num_seen() == 4)
            await write_device_quarantine(host.store, JOB, make_record(1))
            await wait_until(lambda: host.num_seen() == 2)
            assert await host.quarantine() is None, "nobody knows that it is a stage"
            assert host.supervisor.on_event(make_refusal("found 2 devices, expected 4")) is None
            await wait_for_quarantine(host, is_there=True)
            await clear_device_quarantine(host.store, JOB, HOST, 1)
            await wait_for_quarantine(host, is_there=False)
            assert not is_outdated(host.context, host.supervisor), "it joins with all devices"
            await wait_until(lambda: host.num_seen() == 4)

    asyncio.run(run())


def test_a_host_of_a_pipeline_that_has_no_more_devices_leaves(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_host(tmp_path) as host:
            await wait_until(lambda: host.num_seen() == 4)
            assert host.supervisor.on_event(make_refusal("")) is None, "it has as many as the others"
            refused = host.supervisor.on_event(make_refusal("found 4 devices, expected 8"))
            assert "host-0 leaves the job. found 4 devices" in str(refused)

    asyncio.run(run())


def make_refusal(why: str) -> Event:
    """Return what the worker of a stage records; `why` it leaves."""
    return Event(
        kind=EventKind.DEVICES_REQUIRED,
        host=HOST,
        monotonic_s=0.0,
        wall_s=0.0,
        generation=GenerationNumber(1),
        detail={"found": 4, "expected": 4, "why": why},
    )


def test_a_host_comes_back_with_the_first_device_without_which_it_cannot_do(tmp_path: Path) -> None:
    async def run() -> None:
        async with MemoryStore() as store:
            host = Host(tmp_path, store)
            records = {device: make_record(device, seconds=100.0 * (1 + device)) for device in range(4)}
            assert host.context.devices.find_return_s(records) == records[0].until_wall_s
            host.context.devices.requires_all = True
            assert host.context.devices.find_return_s(records) == records[3].until_wall_s

    asyncio.run(run())


async def wait_for_quarantine(host: Host, *, is_there: bool) -> None:
    async with asyncio.timeout(patience(2)):
        while (await host.quarantine() is not None) is not is_there:  # noqa: ASYNC110 - of the store
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, True),
        (make_generation(GenerationPhase.ACTIVE, 1, HOST, OTHER), True),
        (make_generation(GenerationPhase.ACTIVE, None, HOST), True),
        (make_generation(GenerationPhase.ACTIVE, 0, OTHER), True),
        (make_generation(GenerationPhase.ACTIVE, 0, HOST, OTHER), False),
        (make_generation(GenerationPhase.ACTIVE, 1, HOST), False),
        (make_generation(GenerationPhase.FORM, 1, HOST, OTHER), False),
        (make_generation(GenerationPhase.FORM, 1, OTHER), False),
    ],
)
def test_a_worker_is_ended_only_where_others_have_all_of_the_state(
    generation: Generation | None, expected: bool
) -> None:
    assert may_replace(generation, HOST) is expected


@pytest.mark.parametrize(
    ("generation", "holds_state", "expected"),
    [
        (make_generation(GenerationPhase.ACTIVE, 0, HOST), True, True),
        (make_generation(GenerationPhase.QUIESCE, 0, HOST), True, True),
        (make_generation(GenerationPhase.ACTIVE, 0, HOST), False, False),  # a snapshot has it, or nobody
        (make_generation(GenerationPhase.ACTIVE, 0, HOST, OTHER), True, False),
        (make_generation(GenerationPhase.ACTIVE, 0, OTHER), True, False),
        (None, True, False),
    ],
)
def test_a_worker_whose_snapshot_server_ends_outlives_it_as_the_only_one_with_the_state(
    generation: Generation | None, holds_state: bool, expected: bool
) -> None:
    assert is_only_holder(generation, HOST, WorkerReport(held=HeldState(holds_state=holds_state))) is expected
