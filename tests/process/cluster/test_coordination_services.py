"""The leader's coordination services: real processes, restarted after a failed start."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from resilient_jax.cluster import coordination_services
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.events import EventKind
from resilient_jax.ids import Seat, WorldId
from resilient_jax.telemetry.event_log import EventLog, read_events
from tests.support.patience import patience

DEADLINE_S = patience(12)


def test_a_service_that_fails_to_start_is_reported_and_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host-0")
    monkeypatch.setattr(coordination_services, "START_RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(coordination_services, "SERVICE_MODULE", "resilient_jax.no_such_module")

    async def wait(services: CoordinationServices, kind: EventKind) -> None:
        while kind not in {event.kind for event in read_events(tmp_path / "events.jsonl")}:
            services.start(WorldId(1), 2, 4)
            await asyncio.sleep(0.05)

    async def main() -> None:
        services = CoordinationServices(lambda: "127.0.0.1:1", log, lambda: None)
        async with asyncio.timeout(DEADLINE_S):
            await wait(services, EventKind.COORDINATION_SERVICE_START_FAILED)
            assert services.running == ()
            monkeypatch.setattr(
                coordination_services, "SERVICE_MODULE", "resilient_jax.jax_runtime.coordination_service"
            )
            await wait(services, EventKind.COORDINATION_SERVICE_STARTED)
            (status,) = services.running
            assert (status.world, status.num_processes) == (1, 2)
            await services.close()

    asyncio.run(main())
    log.close()


def test_services_can_be_closed_although_one_failed_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination_services, "SERVICE_MODULE", "resilient_jax.no_such_module")

    async def main() -> None:
        services = CoordinationServices(lambda: "127.0.0.1:1", EventLog(None, "host-0"), lambda: None)
        services.start_standby()
        assert services._standby is not None
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait((services._standby,))
            await services.close()

    asyncio.run(main())


def test_a_service_is_told_of_a_lost_seat_and_its_answer_is_an_event(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host-0")

    def read_answers() -> list[str]:
        kind = EventKind.COORDINATION_SERVICE_SEAT_LOST
        return [str(e.detail["answer"]) for e in read_events(tmp_path / "events.jsonl") if e.kind is kind]

    async def main() -> None:
        services = CoordinationServices(lambda: "127.0.0.1:1", log, lambda: None)
        async with asyncio.timeout(DEADLINE_S):
            services.start(WorldId(1), 1, 1)
            while not services.running:  # noqa: ASYNC110 - a deadline and two conditions, no event for them
                await asyncio.sleep(0.01)
            (status,) = services.running
            services.report_lost("127.0.0.1:2/1", [Seat(0)])  # of another host
            services.report_lost(status.address, [Seat(0), Seat(7)])
            while len(read_answers()) < 2:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            os.kill(status.pid, signal.SIGKILL)
            services.report_lost(status.address, [Seat(0)])  # harmless, whether it is dead already or not
            await services.close()
            services.report_lost(status.address, [Seat(0)])

    asyncio.run(main())
    log.close()
    lost, refused = sorted(read_answers())
    assert lost.startswith("lost 0 ")
    assert refused.startswith("not lost - found 'lost 7'")


def test_of_the_services_of_a_world_only_the_one_that_its_members_use_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "host-0")

    async def main() -> None:
        services = CoordinationServices(lambda: "127.0.0.1:1", log, lambda: None)
        async with asyncio.timeout(DEADLINE_S):
            for number, (world, num_processes) in enumerate([(1, 1), (2, 1), (2, 2), (3, 2)], 1):
                services.start(WorldId(world), num_processes, 4)
                while len(services.running) < number:  # noqa: ASYNC110 - a deadline and a condition, no event
                    await asyncio.sleep(0.01)
            _, _, used, next_one = services.running
            services.stop_others(WorldId(2), used.address)
            while len(services.running) > 2:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            assert services.running == (used, next_one)
            # One that was asked for before the world had formed, and is ready only now, ends, too.
            services.start(WorldId(2), 3, 4)
            kind = EventKind.COORDINATION_SERVICE_EXITED
            while sum(event.kind is kind for event in read_events(path)) < 3:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            services.stop_others(WorldId(3), "")
            while len(services.running) > 1:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            assert services.running == (next_one,), "whatever its address is"
            await services.close()

    asyncio.run(main())
    log.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_standby_that_is_lost_is_replaced_before_it_is_needed(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host-0")

    async def main() -> None:
        services = CoordinationServices(lambda: "127.0.0.1:1", log, lambda: None)
        services.start_standby()
        assert services._standby is not None
        async with asyncio.timeout(DEADLINE_S):
            lost = (await services._standby).child
            os.kill(lost.pid, number)
            while services._standby is None or (await services._standby).child is lost:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            services.start(WorldId(1), 2, 4)
            while not services.running:  # noqa: ASYNC110 - a deadline and two conditions, no event for them
                await asyncio.sleep(0.01)
            await services.close()
        assert lost.exit_code == -signal.SIGKILL, "and nothing of it is left"

    asyncio.run(main())
    log.close()
    kinds = [event.kind for event in read_events(tmp_path / "events.jsonl")]
    assert kinds.count(EventKind.COORDINATION_SERVICE_STANDBY_LOST) == 1
    assert EventKind.COORDINATION_SERVICE_START_FAILED not in kinds
