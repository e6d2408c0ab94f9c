"""The leader's coordination services: real processes, restarted after a failed start."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from resilient_jax.cluster import coordination_services
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.events import EventKind
from resilient_jax.ids import WorldId
from resilient_jax.telemetry.event_log import EventLog, read_events

DEADLINE_S = 120.0


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
        services = CoordinationServices("127.0.0.1", log, lambda: None)
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
        services = CoordinationServices("127.0.0.1", EventLog(None, "host-0"), lambda: None)
        services.start_standby()
        assert services._standby is not None
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait((services._standby,))
            await services.close()

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_standby_that_is_lost_is_replaced_before_it_is_needed(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host-0")

    async def main() -> None:
        services = CoordinationServices("127.0.0.1", log, lambda: None)
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
